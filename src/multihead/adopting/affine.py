"""The affine maps of a module: each weight that could be a projection, wherever and however it is kept."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import AdoptionError

Place = tuple[str, Tensor]


@dataclass(frozen=True, eq=False)
class Affine:
    """x ↦ weight · x + bias, in float64.

    name     where it is: the path of a submodule ("q_proj"), or of a parameter ("in_proj_weight")
    weight   [out, in]      bias [out] or None
    whole    whether it is a submodule, which can be taken over as it is
    at       the parameter that holds the weight and, [out, in], where in it; None where the weight is computed
    bias_at  the same of the bias, [out]
    """

    name: str
    weight: Tensor
    bias: Tensor | None
    whole: bool = False
    at: Place | None = None
    bias_at: Place | None = None

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def named(module: nn.Module, repeated: bool = False) -> list[tuple[str, nn.Module]]:
    """All submodules by path; repeated: a module that stands in several places once for each."""
    return cast("list[tuple[str, nn.Module]]", list(cast(Any, module).named_modules(remove_duplicate=not repeated)))


def cut(x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """x cut along its first axis."""
    ends = list(itertools.accumulate(sizes))
    return [x[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def exact_copy(module: nn.Module) -> nn.Module:
    """A float64 copy on the CPU, in eval mode and without hooks: asking it leaves no trace in the module."""
    if any(p.is_meta for p in module.parameters()):
        raise AdoptionError("it is on the meta device and has no numbers to compare; load its weights first")
    memo = {id(t): t.detach().clone() for t in _tensors(module) if not t.is_leaf}
    try:
        double = copy.deepcopy(module, memo)
    except Exception as error:
        raise AdoptionError(f"it cannot be copied, which the proof needs: {type(error).__name__}: {error}") from error
    for sub in double.modules():
        for name, hooks in vars(sub).items():
            if name.endswith("_hooks") and isinstance(hooks, dict):
                hooks.clear()
    return double.to("cpu", torch.float64).eval().requires_grad_(False)


def perturbed(module: nn.Module) -> nn.Module:
    """The copy with every number moved: what is zero, one or alike by chance of its beginning shows itself then."""
    random = torch.Generator().manual_seed(17)
    for p in module.parameters():
        if p.is_floating_point():
            size = 0.5 * float(p.square().mean().sqrt()) + 0.02 if p.numel() else 0.0
            p.data = p + size * torch.randn(p.shape, generator=random, dtype=p.dtype)
    return module


def find(module: nn.Module) -> list[Affine]:
    """Every affine map in an exact copy: submodules first, in their order, then bare parameters, then wrappers of others."""
    found: dict[str, Affine] = {}
    wrappers: list[Affine] = []
    for name, sub in named(module):
        affine = as_affine(name, sub) if name else None
        if affine is not None:
            inner = any(
                child.startswith(f"{name}.") for child, _ in module.named_parameters() if child.count(".") > name.count(".") + 1
            )
            (wrappers.append(affine) if inner else found.setdefault(name, affine))
    bare = list(_bare(module, set(found) | {w.name for w in wrappers}))
    return [*found.values(), *bare, *wrappers]


def as_affine(name: str, sub: nn.Module) -> Affine | None:
    """The submodule as an affine map of its last axis, or None; found by asking it, not by its class."""
    if isinstance(sub, nn.Linear) and type(sub).forward is nn.Linear.forward:  # the same, without a product of its size
        weight, bias = sub.weight.detach(), None if sub.bias is None else sub.bias.detach()  # pyright: ignore[reportUnnecessaryComparison]
        return _placed(Affine(name, weight, bias, whole=True), sub)
    for size in dict.fromkeys(n for p in sub.parameters() if p.ndim == 2 for n in reversed(p.shape)):
        try:
            zero, ones = sub(torch.zeros(1, 1, size).double()), sub(torch.eye(size).double()[None])
            if not (isinstance(zero, Tensor) and zero.ndim == 3 and ones.shape[:2] == (1, size)):
                continue
            weight = (ones - zero)[0].mT.contiguous()
            x = torch.linspace(-1, 1, 3 * size).double().cos().view(1, 3, size)
            if not torch.allclose(sub(x), x @ weight.mT + zero, rtol=1e-9, atol=1e-9):
                continue
        except Exception:  # whatever it wants, it is not a map of its last axis of this size
            continue
        return _placed(Affine(name, weight, zero.flatten() if bool(zero.any()) else None, whole=True), sub)
    return None


def _placed(affine: Affine, sub: nn.Module) -> Affine:
    """With the parameters that hold it, where it is no more than these: nn.Linear, or a Conv1D that keeps [in, out]."""
    own = {f"{affine.name}.{n}": p.detach() for n, p in sub.named_parameters()}
    for n, p in own.items():
        if p.ndim == 2:
            for matrix, index in ((p, _index(p)), (p.mT, _index(p).mT)):
                if matrix.shape == affine.weight.shape and torch.allclose(matrix, affine.weight, rtol=1e-9, atol=1e-9):
                    biases = ((b, _index(v)) for b, v in own.items() if v.ndim == 1 and v.numel() == matrix.shape[0])
                    exact = affine.weight if len(own) > 2 else matrix
                    return replace(affine, weight=exact, at=(n, index), bias_at=next(biases, None))
    return affine


def _index(p: Tensor) -> Tensor:
    return torch.arange(p.numel()).view(p.shape)


def _bare(module: nn.Module, taken: set[str]) -> Iterator[Affine]:
    """Parameters that belong to no affine submodule, in both orientations."""
    for prefix, sub in named(module):
        if isinstance(sub, nn.Embedding) or any(prefix == t or prefix.startswith(f"{t}.") for t in taken):
            continue
        own = {name: p.detach() for name, p in sub.named_parameters(prefix, recurse=False)}
        long = _long_bias(own)
        for name, p in own.items():
            if p.ndim == 2 and min(p.shape) > 1:
                yield _biased(name, p, _index(p), own, long.get(name))
                yield _biased(name, p.mT, _index(p).mT, own)
            elif p.ndim == 3 and min(p.shape[1:]) > 1:  # [heads, in, head_dim], and [heads, head_dim, out]
                yield _biased(name, p.transpose(1, 2).flatten(0, 1), _index(p).transpose(1, 2).flatten(0, 1), own)
                yield _biased(name, p.flatten(0, 1).mT, _index(p).flatten(0, 1).mT, own)


def _long_bias(own: dict[str, Tensor]) -> dict[str, Place]:
    """Weights that share one long bias, as q_proj_weight, k_proj_weight and v_proj_weight of torch's layer do."""
    matrices = {n: p for n, p in own.items() if p.ndim == 2 and min(p.shape) > 1}
    rows, found = sum(p.shape[0] for p in matrices.values()), dict[str, Place]()
    shared = next((n for n, p in own.items() if p.ndim == 1 and p.numel() == rows), None)
    if shared is not None and len(matrices) > 1:
        split = cut(torch.arange(rows), [p.shape[0] for p in matrices.values()])
        found = {name: (shared, part) for name, part in zip(matrices, split, strict=True)}
    return found


def _biased(name: str, weight: Tensor, index: Tensor, own: dict[str, Tensor], bias: Place | None = None) -> Affine:
    """The weight with the bias that its name and size suggest: x_weight and x_bias, W_Q and b_Q, or a part of a long one."""
    if bias is None:
        alike = (n for n, p in own.items() if p.numel() == weight.shape[0] and n != name and _stem(n) == _stem(name))
        bias = next(((n, _index(own[n]).flatten()) for n in alike), None)
    return Affine(name, weight, None if bias is None else own[bias[0]].flatten()[bias[1]], False, (name, index), bias)


def _stem(name: str) -> str:
    """What a weight's and its bias' names share: W_Q and b_Q → q, in_proj_weight and in_proj_bias → in_proj."""
    last = name.rpartition(".")[2].lower()
    return re.sub(r"weight|bias|^[wb](?=_|$|[qkvo]$)", "", last).strip("_")


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    for sub in module.modules():
        yield from (x for x in vars(sub).values() if isinstance(x, Tensor))
