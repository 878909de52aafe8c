"""Attention written by hand – product, scale, mask, softmax, product – followed from the first product to the last.

A product's result is remembered by its identity, not kept: only the functions below can carry it on, so that everything else a
model computes costs one look into a dictionary. What was read is compared with a few rows of the model's own softmax before
anything is recorded; what cannot be read is named with the reason.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..masks.readers import VERY_NEGATIVE

Hide = tuple[Tensor, float]


@dataclass(frozen=True)
class Scores:
    """scores = cap(scale · q kᵀ) + biases where nothing hides, or why that is not known."""

    q: Tensor  # [*lead, q_len, dim]
    k: Tensor  # [*lead, kv_len, dim]
    lead: tuple[int, ...]  # the scores' own
    scale: float = 1.0
    capped: float | None = None  # set by tanh: the scale inside of it
    softcap: float | None = None
    biases: tuple[tuple[Tensor, float], ...] = ()
    hidden: tuple[Hide, ...] = ()
    sinks: Tensor | None = None
    why: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.lead, self.q.shape[-2], self.k.shape[-2])


@dataclass(frozen=True)
class Weights:
    """What softmax made of scores, and some of its rows to compare with."""

    scores: Scores
    rows: list[int] = field(default_factory=list[int])
    sample: Tensor | None = None


class Follower:
    """Remembers products by identity and carries them through the functions that hand-written attention is made of."""

    def __init__(self, found: Callable[[Scores, Weights, Tensor | None], None]) -> None:
        self.known: dict[int, tuple[weakref.ref[Tensor], Scores | Weights]] = {}
        self.found = found

    # ---- remembering --------------------------------------------------------------------------------------------------

    def get(self, x: object) -> Scores | Weights | None:
        entry = self.known.get(id(x))
        return None if entry is None or entry[0]() is not x else entry[1]

    def put(self, x: Tensor, what: Scores | Weights) -> None:
        key, known = id(x), self.known

        def forget(ref: object) -> None:
            if key in known and known[key][0] is ref:
                del known[key]

        known[key] = weakref.ref(x, forget), what

    def which(self, args: Sequence[Any]) -> tuple[int, Scores | Weights] | None:
        for i, x in enumerate(args[:3]):
            what = self.get(x)
            if what is not None:
                return i, what
        return None

    # ---- products -----------------------------------------------------------------------------------------------------

    def product(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """matmul, bmm, baddbmm and einsum: the first product of an attention, or its last."""
        result = func(*args, **kwargs)
        args = _positional(args, kwargs)
        begun = self.which(args if not _listed(args) else args[1]) if self.known else None
        if not isinstance(result, Tensor):
            return result
        name = func.__name__
        operands = _einsum(args) if name == "einsum" else _plain(name, args, kwargs)
        if begun is not None and isinstance(begun[1], Weights):
            values = None if operands is None else operands[1].mT  # weights [.., q, k] · values [.., k, e]
            self.found(begun[1].scores, begun[1], values)
        elif operands is not None:
            self._begin(result, name, operands, args, kwargs)
        return result

    def _begin(
        self, result: Tensor, name: str, operands: tuple[Tensor, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        q, k = operands
        if result.shape[-2:] != (q.shape[-2], k.shape[-2]) or q.ndim < 2 or q.ndim != k.ndim:
            return
        scores = Scores(q, k, tuple(result.shape[:-2]))
        if name in ("baddbmm", "baddbmm_"):
            scores = replace(scores, scale=float(kwargs.get("alpha", 1.0)))
            if kwargs.get("beta", 1.0):
                scores = replace(scores, biases=((args[0], float(kwargs.get("beta", 1.0))),))
        self.put(result, scores)

    # ---- between the products -----------------------------------------------------------------------------------------

    def carry(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function that may stand between the products."""
        at = self.which(_positional(args, kwargs)) if self.known else None
        if at is None:
            return func(*args, **kwargs)
        given, args = args, _positional(args, kwargs)
        name = func.__name__.strip("_")
        before = args[at[0]].shape
        result = func(*given, **kwargs)
        into = args[0] if name == "setitem" else result
        if isinstance(into, Tensor):
            self.put(
                into, at[1] if isinstance(at[1], Weights) else self._stepped(name, at[0], at[1], into, args, kwargs, before)
            )
        return result

    def _stepped(
        self, name: str, i: int, scores: Scores, into: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], before: torch.Size
    ) -> Scores | Weights:  # fmt: skip
        """What the function made of the scores; whatever goes wrong in reading must not reach the model."""
        try:
            if name == "softmax":
                return _softmaxed(scores, into, args, kwargs)
            return self._step(name, i, scores, args, kwargs, before)
        except (TypeError, ValueError, IndexError, RuntimeError) as error:
            return replace(scores, why=scores.why or f"{name} is called in a way that is not read: {error}")

    def _step(
        self, name: str, i: int, scores: Scores, args: tuple[Any, ...], kwargs: dict[str, Any], shape: torch.Size
    ) -> Scores:
        other = args[1 - i] if len(args) > 1 and i < 2 else kwargs.get("other", kwargs.get("value"))
        if name in ("mul", "multiply", "imul", "div", "divide", "true_divide", "truediv", "itruediv"):
            return _scaled(scores, other, divide="div" in name or "true" in name, second=i == 1)
        if name in ("add", "iadd", "sub", "subtract", "isub"):
            return _added(scores, other, -1.0 if "sub" in name else 1.0, i, float(kwargs.get("alpha", 1.0)), shape)
        if name in ("rtruediv", "rdiv", "reciprocal"):
            return replace(scores, why="something is divided by the scores")
        if name == "rsub":
            return replace(scores, why="scores are subtracted from something")
        if name == "tanh":
            if scores.biases or scores.hidden:
                return replace(scores, why="tanh comes after a mask or bias")
            return replace(scores, capped=scores.scale, scale=1.0)
        if name == "masked_fill":
            mask = args[1] if len(args) > 1 else kwargs.get("mask")
            value = args[2] if len(args) > 2 else kwargs.get("value")
            return _filled(scores, mask, value, shape)
        if name == "where":
            if i == 0 or len(args) < 3:
                return replace(scores, why="scores decide in a where()")
            chosen, *sides = args[:3]
            return _filled(scores, ~chosen if i == 1 else chosen, sides[2 - i], shape)
        if name == "setitem":
            index, value = list(args)[1:3]
            return _filled(scores, index, value, shape)
        return scores  # a change of dtype or shape

    def cat(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Scores with one more column: a sink."""
        result = func(*args, **kwargs)
        given: Any = args[0] if args else kwargs.get("tensors")
        parts: list[Tensor] = list(given) if self.known and isinstance(given, list | tuple) else []  # pyright: ignore[reportUnknownArgumentType]
        what = self.get(parts[0]) if parts else None
        if isinstance(what, Scores) and len(parts) == 2 and parts[1].shape[-1] == 1:
            sink = parts[1]
            same = (
                sink.ndim == 4 and (sink.stride(0) == 0 or sink.shape[0] == 1) and (sink.stride(2) == 0 or sink.shape[2] == 1)
            )
            self.put(
                result,
                replace(what, sinks=sink[0, :, 0, 0], why=what.why or ("" if same else "a column is added to the scores")),
            )
        return result


def _scaled(scores: Scores, by: Any, *, divide: bool, second: bool) -> Scores:
    if divide and second:
        return replace(scores, why="something is divided by the scores")
    if isinstance(by, Tensor) and by.numel() > 1:
        if by.ndim >= 2 and by.shape[-1] == 1 and not (scores.biases or scores.hidden or scores.capped):
            return replace(scores, q=scores.q / by if divide else scores.q * by)  # a temperature a head or a query
        return replace(scores, why="scores are multiplied by a tensor after a mask or bias, or one that varies over keys")
    c = float(by)
    c = 1 / c if divide else c
    if scores.capped is not None and scores.softcap is None:
        return replace(scores, scale=scores.capped * c, softcap=c)
    if scores.softcap is not None:
        return replace(scores, why="scores are scaled after the softcap")
    biases = tuple((b, f * c) for b, f in scores.biases)
    return replace(scores, scale=scores.scale * c, biases=biases)


def _added(scores: Scores, other: Any, sign: float, i: int, alpha: float, shape: torch.Size) -> Scores:
    if sign < 0 and i == 1:
        return replace(scores, why="scores are subtracted from something")
    if not isinstance(other, Tensor) or other.numel() == 1 or other.shape[-1] == 1:
        return scores  # the same for every key: softmax does not see it
    other = _shaped(other, shape, scores)
    if isinstance(other, str):
        return replace(scores, why=other)
    return replace(scores, biases=(*scores.biases, (other, sign * alpha)))


def _filled(scores: Scores, mask: Any, value: Any, shape: torch.Size) -> Scores:
    if isinstance(value, Tensor):
        value = float(value.flatten()[0]) if value.numel() == 1 else float(value.max())
    if not isinstance(mask, Tensor) or mask.dtype not in (torch.bool, torch.uint8):
        return replace(scores, why="a part of the scores is overwritten by its place, not by a mask")
    if not isinstance(value, int | float) or value > VERY_NEGATIVE:
        return replace(scores, why=f"a mask writes {value!r} into the scores, which hides nothing")
    found = _shaped(mask.bool(), shape, scores)
    if isinstance(found, str):
        return replace(scores, why=found)
    return replace(scores, hidden=(*scores.hidden, (found, float(value))))


def _shaped(x: Tensor, shape: torch.Size, scores: Scores) -> Tensor | str:
    """Something that broadcasts to the scores in the shape they have now, in the shape they began with."""
    if tuple(shape) == scores.shape:
        return x
    try:
        return x.expand(shape).reshape(scores.shape)
    except RuntimeError:
        return "a mask or bias comes while the scores have another shape"


def _softmaxed(scores: Scores, weights: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Weights:
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    S = scores.k.shape[-2] + (scores.sinks is not None)
    if not isinstance(dim, int) or weights.shape[-1] != S or dim % weights.ndim != weights.ndim - 1:
        return Weights(replace(scores, why=scores.why or f"softmax runs over axis {dim} instead of the keys"))
    T = scores.q.shape[-2]
    rows = sorted({0, T // 2, T - 1})
    whole = weights.detach().reshape(*scores.lead, T, S)[..., : scores.k.shape[-2]]
    return Weights(scores, rows, whole[..., rows, :].clone())


def _positional(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments with the first of them, which torch calls input, in its place."""
    return (kwargs["input"], *args) if "input" in kwargs else args


def _listed(args: tuple[Any, ...]) -> bool:
    return len(args) == 2 and isinstance(args[1], list | tuple)


def _plain(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """The operands a [.., m, d], b [.., d, n] as a and bᵀ."""
    found = args[1:3] if name.startswith("baddbmm") else args[:2]
    found = (*found, *(kwargs[n] for n in ("tensor2", "other", "mat2", "batch2") if n in kwargs))[:2]
    if len(found) < 2 or not all(isinstance(x, Tensor) for x in found) or found[1].ndim < 2 or found[0].ndim != found[1].ndim:
        return None
    return found[0], found[1].mT


def _einsum(args: tuple[Any, ...]) -> tuple[Tensor, Tensor] | None:
    """Two operands whose result is [.., q, k] over the letters they share, as [.., q, d] and [.., k, d]."""
    if not isinstance(args[0], str):
        return None
    tensors: list[Tensor] = list(args[1] if _listed(args) else args[1:])
    left, arrow, out = args[0].replace(" ", "").partition("->")
    names = left.split(",")
    if not arrow or len(tensors) != 2 or len(names) != 2 or "." in left or len(out) < 2:
        return None
    summed = [c for c in names[0] if c in names[1] and c not in out]
    rows = [c for c in out if c in names[0] and c not in names[1]]
    columns = [c for c in out if c in names[1] and c not in names[0]]
    if not (len(summed) == len(rows) == len(columns) == 1):
        return None
    lead = [c for c in out if c not in (rows[0], columns[0])]
    found: list[Tensor] = []
    for x, letters, one in ((tensors[0], names[0], rows[0]), (tensors[1], names[1], columns[0])):
        if sorted(letters) != sorted([*(c for c in lead if c in letters), one, summed[0]]):
            return None
        missing = [c for c in lead if c not in letters]
        order = [letters.index(c) for c in [*lead, one, summed[0]] if c in letters]
        x = x.permute(order)
        for c in missing:
            x = x.unsqueeze(lead.index(c))
        found.append(x)
    if out[-2:] == columns[0] + rows[0]:  # written with keys first
        return found[1], found[0]
    return (found[0], found[1]) if out[-2:] == rows[0] + columns[0] else _values(found)


def _values(found: list[Tensor]) -> tuple[Tensor, Tensor]:
    """An output with other axes last, as the product with the values may have it: rows are not looked at."""
    return found[0], found[1]


def _functions(names: str) -> list[Any]:
    spaces = (torch, Tensor, F, torch.special)
    found = [getattr(space, name) for name in names.split() for space in spaces if hasattr(space, name)]
    return list(dict.fromkeys(found))


PRODUCTS = _functions("matmul bmm einsum baddbmm __matmul__")
CAT = _functions("cat concat concatenate")
CARRIED = _functions(
    "mul mul_ multiply __mul__ __rmul__ __imul__ div div_ divide true_divide __truediv__ __itruediv__ "
    "add add_ __add__ __radd__ __iadd__ "
    "sub sub_ subtract __sub__ __isub__ tanh tanh_ masked_fill masked_fill_ where __setitem__ softmax softmax_ "
    "float half double bfloat16 to type type_as view reshape contiguous clone flatten unflatten unsqueeze squeeze "
    "__rtruediv__ __rdiv__ reciprocal __rsub__ rsub dropout dropout_ nan_to_num nan_to_num_ __getitem__"
)
