"""adopt() and restore(): every attention layer of a model replaced by ours, and back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from ..compat import MultiheadAttention, keep_from_torchs_fast_path
from ..layer import MultiHeadAttention
from . import AdoptionError, Model
from .adapter import Adopted, RefusedError, adapter
from .affine import named
from .build import write_back
from .reading import Reading, differing, read

TOLERANCE = 1e-3  # of the largest value, between a model before and after in float32: layers add up; in halves 50 times as much
PARTS = re.compile(r"(^|[^a-z])(q|query|queries|to_q)([^a-z]|$)|wq$|w_?q$|q_?(proj|linear|lin)")
FUSED = re.compile(r"qkv|c_attn|in_proj|query_key_value|attn_proj|kqv")


@dataclass(frozen=True)
class Row:
    """One place in a model: its path, the class there, whether it was replaced, and what was found or why not."""

    path: str
    kind: str
    replaced: bool
    said: str


@dataclass
class Adoption:
    """What adopt() did to a model; print it. `difference` is that of an example's results, over the largest value."""

    rows: list[Row] = field(default_factory=list[Row])
    difference: float | None = None

    @property
    def replaced(self) -> list[str]:
        """The paths of all that was replaced."""
        return [row.path for row in self.rows if row.replaced]

    def __str__(self) -> str:
        wide = max([len(row.path) for row in self.rows] or [0])
        kind = max([len(row.kind) for row in self.rows] or [0])
        lines = [
            f"{'✓' if r.replaced else '✗'} {r.path or '(the model)':<{wide}}  {r.kind:<{kind}}  {r.said}" for r in self.rows
        ]
        done, left = len(self.replaced), len(self.rows) - len(self.replaced)
        lines.append(f"{done} replaced, {left} left" if self.rows else "nothing in the model looks like attention")
        if self.difference is not None:
            lines.append(f"the example's results differ by {self.difference:.1e} of the largest value")
        return "\n".join(lines)


def replace_all(model: Model, example: Any = None) -> Model:
    """adopt()."""
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"adopt: needs an nn.Module; got a {type(model).__name__}")
    _refuse_nested(model)
    try:
        before = None if example is None else _results(model, example)
    except Exception:
        put_back(model)
        raise
    adoption, made = Adoption(), dict[int, nn.Module]()
    for path, module in list(candidates(model)):
        if id(module) not in made:
            try:
                made[id(module)], said = _replacement(model, module)
            except Exception as error:  # one odd layer leaves the others
                why = str(error).partition("cannot be adopted: ")[2] or str(error)
                why = why if isinstance(error, AdoptionError | RefusedError) else f"{type(error).__name__}: {why}"
                adoption.rows.append(Row(path, type(module).__name__, False, why))
                continue
        else:
            said = "the same module as above"
        model = _put(model, path, made[id(module)])
        adoption.rows.append(Row(path, type(module).__name__, True, said))
    model.__dict__["adoption"] = adoption
    if before is not None:
        try:
            adoption.difference = differing(before, _with_what_fits(model, example, adoption))
        except Exception:
            put_back(model)
            raise
        wide = TOLERANCE if next(model.parameters()).dtype.itemsize >= 4 else 50 * TOLERANCE
        if adoption.difference > wide:
            put_back(model)
            raise AdoptionError(
                f"adopt: the example's results differ by {adoption.difference:.2g} of the largest value, where {wide:.2g} is "
                f"rounding, so the model is as it was; what had been replaced: {', '.join(adoption.replaced)}"
            )
    return model


def _with_what_fits(model: nn.Module, example: Any, adoption: Adoption) -> Any:
    """The example's results; a module that is called in a way that was not proven goes back to its place."""
    adapters = [module for _, module in named(model) if isinstance(module, Adopted)]
    try:
        for module in adapters:
            module.__dict__["trial"] = True
        while True:
            try:
                return _results(model, example)
            except RefusedError as refused:
                _give_back(model, refused, adoption)
    finally:
        for module in adapters:
            module.__dict__["trial"] = False


def _give_back(model: nn.Module, refused: RefusedError, adoption: Adoption) -> None:
    for path, module in named(model, repeated=True):
        if module is refused.module:
            _put(model, path, _back(refused.module))
            row = next(r for r in adoption.rows if r.path == path)
            adoption.rows[adoption.rows.index(row)] = Row(path, row.kind, False, f"in the example {refused.said}")


def put_back(model: Model) -> Model:
    """restore()."""
    for path, module in named(model, repeated=True):
        if isinstance(module, Adopted):
            model = _put(model, path, _back(module))
        elif isinstance(module, AdoptedTorch):
            if module.training != module.original.training:
                module.original.train(module.training)
            model = _put(model, path, module.original)
        elif isinstance(module, nn.TransformerEncoder) and NESTED in vars(module):
            module.use_nested_tensor = vars(module).pop(NESTED)
    model.__dict__.pop("adoption", None)
    return model


def _back(module: Adopted) -> nn.Module:
    """The module that stood there, with the weights of today, on the device and in the dtype of today."""
    original: nn.Module = module.original
    like = next(module.parameters(), None)
    if like is not None:
        if like.dtype != module.dtype:
            original.to(like.dtype)
        original.to(like.device)
    write_back(original, module.layer, module.copied)
    if module.training != original.training:
        original.train(module.training)
    return original


# ---- which modules --------------------------------------------------------------------------------------------------


OURS = (Adopted, MultiHeadAttention, MultiheadAttention)


def candidates(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The innermost modules that look like attention by their names, or by what they hold; in the model's order."""
    found: dict[str, nn.Module] = {}
    places = dict(named(model, repeated=True))
    for path, module in reversed(places.items()):
        if any(not path or inner.startswith(f"{path}.") for inner in found):
            continue
        within_ours = any(isinstance(places[p], OURS) for p in _parents(path))
        if not within_ours and (isinstance(module, OURS) or looks_like_attention(module)):
            found[path] = module
    return [(path, module) for path, module in reversed(found.items()) if not isinstance(module, OURS)]


def _parents(path: str) -> Iterator[str]:
    while path:
        path = path.rpartition(".")[0]
        yield path


def looks_like_attention(module: nn.Module) -> bool:
    """Whether it holds a projection of queries or a fused one within reach, or says so and holds projections."""
    if isinstance(module, nn.MultiheadAttention):
        return True
    names = [n for n, p in module.named_parameters() if p.ndim in (2, 3)] + [n for n, _ in named(module)]
    near = [n.removesuffix(".weight").lower() for n in names if n.count(".") <= 2]
    if any(PARTS.search(n) or FUSED.search(n) for n in near):
        return True
    return len(near) >= 2 and bool(re.search(r"attn|attention|mha", type(module).__name__.lower()))


def _replacement(model: nn.Module, module: nn.Module) -> tuple[nn.Module, str]:
    if type(module) is nn.MultiheadAttention:
        return AdoptedTorch.around(module), "multihead.compat.MultiheadAttention, on the same parameters"
    reading = read(module)
    _check_what_is_lost(model, module, reading)
    made = adapter(module, reading)
    said = reading.origin.projections
    said += "" if reading.origin.between == "nothing unusual" else f"; {reading.origin.between}"
    said += f"; left out, since they change nothing: {', '.join(reading.left_out)}" if reading.left_out else ""
    said += f"; not in train(): {', '.join(reading.dropouts.unknown)}" if reading.dropouts.unknown else ""
    return made, f"{said}; proven to {reading.origin.error:.0e}"


def _check_what_is_lost(model: nn.Module, module: nn.Module, reading: Reading) -> None:
    """A parameter that is split up must not be used elsewhere, nor must anything that is not called any more have hooks."""
    split = {c.source: module.get_parameter(c.source) for c in reading.copied if not c.shared}
    inside = next(path for path, sub in named(model) if sub is module)
    for source, p in split.items():
        for name, other in model.named_parameters(remove_duplicate=False):
            if other is p and inside and not name.startswith(f"{inside}."):
                raise AdoptionError(
                    f"its {source} holds several projections and is tied to {name.rpartition('.')[0]}, so it cannot be split up"
                )
    kept = {id(sub) for _, sub in named(reading.layer)}
    for name, sub in named(module):
        if sub is not module and id(sub) not in kept and any(getattr(sub, hooks) for hooks in HOOKS):
            raise AdoptionError(f"its {name} has hooks and would not be called any more; remove them first")


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _put(model: nn.Module, path: str, module: nn.Module) -> Any:
    if not path:
        return module
    parent, _, name = path.rpartition(".")
    model.get_submodule(parent)._modules[name] = module  # pyright: ignore[reportPrivateUsage]
    return model


def _results(model: nn.Module, example: Any) -> Any:
    modes = {module: module.training for _, module in named(model)}
    model.eval()
    try:
        with torch.no_grad():
            if isinstance(example, Mapping):
                return _plain(model(**example))
            return _plain(model(*example) if isinstance(example, tuple | list) else model(example))
    finally:
        for module, mode in modes.items():
            module.training = mode


def _plain(result: Any) -> Any:
    """Tensors only: Hugging Face's outputs hold caches, which are not compared."""
    if isinstance(result, Mapping):
        return [_plain(x) for x in cast("Mapping[str, Any]", result).values()]
    if isinstance(result, tuple | list):
        return [_plain(x) for x in cast("list[Any]", result)]
    return result if isinstance(result, torch.Tensor) else None


# ---- torch's own layer ----------------------------------------------------------------------------------------------


NESTED = "use_nested_tensor_before_adoption"


def _refuse_nested(model: nn.Module) -> None:
    """nn.TransformerEncoder would hand nested tensors to its layers where it believes in torch's native fast path.

    Those leave zeros at padded positions, where without them there are values.
    """
    for _, module in named(model):
        if isinstance(module, nn.TransformerEncoder):
            vars(module).setdefault(NESTED, module.use_nested_tensor)
            module.use_nested_tensor = False


class AdoptedTorch(MultiheadAttention):
    """compat.MultiheadAttention over the parameters, buffers and hooks of an nn.MultiheadAttention, kept in `original`."""

    original: nn.MultiheadAttention

    @classmethod
    def around(cls, original: nn.MultiheadAttention) -> AdoptedTorch:
        made = cls.__new__(cls)
        made.__dict__.update(original.__dict__)
        made.__dict__["original"] = original
        keep_from_torchs_fast_path(made)
        return made
