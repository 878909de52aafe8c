"""What models hand over, read into what a Call holds: axes, repeated heads, masks and biases."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ..masks import Allowed, Frame, Keys, Mask
from ..masks.algebra import Lang, register
from ..masks.arguments import check_batch
from ..masks.blocks import Spans, _spans  # pyright: ignore[reportPrivateUsage]
from ..masks.readers import VERY_NEGATIVE

MOST = 4  # intervals of columns that a row of a dense mask may have and still be kept as intervals
T = TypeVar("T")


@register
class Intervals(Mask):
    """A dense mask, kept without loss in memory that grows with q_len: query i sees the columns start[b,i,n] ≤ j < end[b,i,n].

    start, end  integer [batch | 1, q_len | 1, n], ascending; empty ones have start == end
    """

    tensors = ("start", "end")

    def __init__(self, start: Tensor, end: Tensor) -> None:
        self.start, self.end = start, end

    def predicate(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, frame: Frame) -> Tensor:
        del h
        row = frame.rows_of(q)
        column = k - (frame.k_start.to(k.device).view(-1, 1, 1, 1) if isinstance(frame.k_start, Tensor) else frame.k_start)
        at = (x.clamp(0, n - 1) if n > 1 else torch.zeros_like(x) for x, n in zip((b, row), self.start.shape, strict=False))
        b, row = cast(tuple[Tensor, Tensor], torch.broadcast_tensors(*at))
        start, end = self.start[b, row], self.end[b, row]  # [b, 1, q, 1, n]
        return ((column.unsqueeze(-1) >= start) & (column.unsqueeze(-1) < end)).any(-1)

    def check(self, frame: Frame) -> None:
        check_batch(self, self.start.shape[0], frame)

    @property
    def batch(self) -> int:
        return self.start.shape[0]

    def describe(self, lang: Lang = "en") -> str:
        return "each query sees the keys of its own intervals" if lang == "en" else "每个查询看到自己区间内的键"


@_spans.register
def _(mask: Intervals, frame: Frame) -> Spans | None:
    return Spans(mask.start.to(frame.device), mask.end.to(frame.device), frame.kv_len)


def compact(allowed: Tensor) -> Mask | None:
    """bool [batch | 1, heads | 1, q_len | 1, kv_len] as a mask that holds what it must; None where nothing is hidden."""
    if bool(allowed.all()):
        return None
    for axis in (0, 1):  # what is the same for all heads, or for all entries, is kept once
        if allowed.shape[axis] > 1 and bool((allowed == allowed.narrow(axis, 0, 1)).all()):
            allowed = allowed.narrow(axis, 0, 1)
    if allowed.shape[1] == 1 and allowed.shape[3] > 1:
        B, _, rows, S = allowed.shape
        found = intervals(allowed[:, 0].reshape(B * rows, S))
        if found is not None:
            start, end = (x.view(B, rows, -1) for x in found)
            return Intervals(start, end)
        if rows == 1:
            return Keys(allowed[:, 0, 0].clone())
    return Allowed(allowed.clone())


def intervals(rows: Tensor) -> tuple[Tensor, Tensor] | None:
    """bool [rows, columns] → start, end [rows, n]; None where a row has more than MOST runs. Looks at a part at a time."""
    parts: list[tuple[Tensor, Tensor]] = []
    size = max(1, 2**24 // max(rows.shape[1], 1))
    for part in cast(tuple[Tensor, ...], rows.split(size)):
        edge = torch.nn.functional.pad(part.to(torch.int8), (1, 1)).diff(dim=-1)
        runs = (edge > 0).sum(-1)
        if int(runs.max()) > MOST:
            return None
        both: list[Tensor] = []
        for side in (1, -1):
            row, column = (edge == side).nonzero(as_tuple=True)
            rank = torch.arange(row.numel(), device=row.device) - (runs.cumsum(0) - runs)[row]
            both.append(column.new_zeros(part.shape[0], MOST).index_put((row, rank), column))
        parts.append((both[0], both[1]))
    start, end = (torch.cat(x) for x in zip(*parts, strict=True))
    n = max(1, int((end > start).sum(-1).max()))
    return start[:, :n].contiguous(), end[:, :n].contiguous()


def additive(bias: Tensor) -> tuple[Mask | None, Tensor | None, Tensor | None]:
    """A float tensor that is added to the scores, 4-D → the mask that its "−inf" make, the rest of it, and the levelled rows.

    Numbers below −1e4 hide: no other weight survives beside a 0. A row that holds nothing else is not hidden where they are
    finite: the constant cancels in softmax, and where it swallows the scores the row attends to all alike.
    """
    hidden = bias <= VERY_NEGATIVE
    if not bool(hidden.any()):
        return None, (None if not bool(bias.any()) else bias.detach().clone()), None
    mask, flat = hide(hidden, bias)
    rest = bias.masked_fill(hidden, 0.0)
    return mask, (rest if bool(rest.any()) else None), flat


def hide(hidden: Tensor, value: Tensor | float, replaced: bool = False) -> tuple[Mask | None, Tensor | None]:
    """What is hidden, 4-D, by which value → the mask, and the rows that a finite value levels instead of hiding them."""
    dead = hidden.all(-1)
    if not bool(dead.any()):
        return compact(~hidden), None
    least = value.amax(-1) if isinstance(value, Tensor) else torch.full_like(dead, value, dtype=torch.float64)
    open_ = dead & least.isfinite()
    eps = torch.finfo(value.dtype).eps if isinstance(value, Tensor) else 1e-7
    flat = open_ if replaced else open_ & (least.abs() * eps >= 1)
    mask = compact(~hidden | open_.unsqueeze(-1))
    return mask, (flat.clone() if bool(flat.any()) else None)


class Memory:
    """What was made of a tensor, as long as that is there and unchanged: layers share their masks."""

    def __init__(self) -> None:
        self.known: dict[tuple[Any, ...], tuple[weakref.ref[Tensor], Any]] = {}

    def of(self, x: Tensor, make: Callable[[Tensor], T], why: str = "") -> T:
        whole = x if x._base is None else x._base
        version = 0 if x.is_inference() else x._version
        key = (why, x.data_ptr(), tuple(x.shape), x.stride(), x.dtype, version)
        found = self.known.get(key)
        if found is not None and found[0]() is whole:
            return found[1]
        made = make(x)
        self.known[key] = weakref.ref(whole), made
        return made


def grouped(k: Tensor) -> int:
    """How many times each kv head stands in k [batch, heads, tokens, dim], as models repeat them for kernels without GQA."""
    B, H, S, _ = k.shape
    if not (B and S) or H == 1:
        return 1
    first = k[0, :, 0]
    changes = (first[1:] != first[:-1]).any(-1).nonzero()
    most = int(changes[0]) + 1 if len(changes) else H
    repeats = (n for n in range(most, 1, -1) if H % n == 0)
    return next((n for n in repeats if all(torch.equal(k[:, i::n], k[:, ::n]) for i in range(1, n))), 1)


def heads_of(modules: list[Any], count: int) -> int:
    """How many heads the modules that are running say they have, innermost first, where it divides `count`; else 1."""
    for module in reversed(modules):
        for name in ("num_heads", "n_heads", "num_attention_heads", "n_head", "nhead", "heads", "n_local_heads", "h"):
            heads = getattr(module, name, None)
            if isinstance(heads, int) and not isinstance(heads, bool) and heads > 0 and count % heads == 0:
                return heads
    return 1


def packs(modules: list[Any], q: Tensor, k: Tensor) -> int:
    """How many heads transformers has laid into the query axis of a single token, to save itself repeating keys; 0 if none."""
    module = modules[-1] if modules else None
    groups = getattr(module, "num_key_value_groups", 0)
    heads = getattr(getattr(module, "config", None), "num_attention_heads", 0)
    fits = q.ndim == 4 and groups and groups > 1 and q.shape[2] == groups and q.shape[1] == k.shape[1]
    return groups if fits and q.shape[1] * groups == heads else 0


def four(x: Tensor, heads: int) -> Tensor:
    """[tokens, dim], [batch · heads, tokens, dim] or [batch, heads, …, tokens, dim] as [batch, heads, tokens, dim]."""
    if x.ndim == 2:
        return x[None, None]
    if x.ndim == 3:
        return x.reshape(-1, heads, *x.shape[1:])
    return x if x.ndim == 4 else x.flatten(1, -3)


def four_mask(x: Tensor, lead: tuple[int, ...], heads: int) -> Tensor:
    """A mask or bias that broadcasts to scores [*lead, q_len, kv_len], with the four axes of a call."""
    x = x[(None,) * (len(lead) + 2 - x.ndim)]
    if len(lead) == 0:
        return x[None, None]
    if len(lead) == 1:
        return x[None] if x.shape[0] == 1 else x.reshape(-1, heads, *x.shape[1:])
    if len(lead) == 2:
        return x
    inner = x.shape[1:-2]
    return x.flatten(1, -3) if math.prod(inner) in (1, math.prod(lead[1:])) else x.expand(-1, *lead[1:], -1, -1).flatten(1, -3)
