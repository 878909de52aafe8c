"""mask_mod functions for FlexAttention: (batch, head, row, column) → may attend, from captured tensors alone.

A number captured as a tensor is an argument of the compiled kernel; captured as a number it would be part of its code, and a
new window or another start would compile again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..masks import And, Blocked, Documents, Frame, Keys, Mask, Not, Or, Where
from ..masks.blocks import Spans, spans
from ..masks.tables import Table

Mod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def inside(said: Spans, q_len: int, rows: int, device: torch.device) -> tuple[Mod, object]:
    """Whether a column lies in one of the intervals of its row, and what of the function is compiled.

    The bounds are filled up to `rows`, so that the rows missing in the last block read no memory of others and see nothing.
    """
    found = torch.stack([said.start, said.end]).mT  # [2, batch | 1, n, q_len | 1]
    bounds = found.new_zeros(*found.shape[:3], rows, dtype=torch.int32)  # contiguous() would leave odd strides: another kernel
    bounds[..., :q_len] = found
    bounds = bounds.pin_memory() if device.type == "cuda" and bounds.device.type == "cpu" else bounds
    start, end = bounds.to(device, non_blocking=True).unbind()
    n = start.shape[1]
    if start.shape[0] > 1:

        def of_each(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            del h
            found = (k >= start[b, 0, q]) & (k < end[b, 0, q])
            for i in range(1, n):
                found = found | ((k >= start[b, i, q]) & (k < end[b, i, q]))
            return found

        return of_each, ("intervals of each text", n)
    first, last = start[0], end[0]

    def of_all(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        del b, h
        found = (k >= first[0, q]) & (k < last[0, q])
        for i in range(1, n):
            found = found | ((k >= first[i, q]) & (k < last[i, q]))
        return found

    return of_all, ("intervals", n)


def lower(mask: Mask, frame: Frame, rows: int) -> tuple[Mod, object]:
    """The same for any mask; parts that intervals say are said by them. Rows and columns that are not there see nothing."""
    mod, kind = _lower(mask, frame, rows)
    first = frame.k_start if isinstance(frame.k_start, Tensor) else torch.zeros(1, dtype=torch.int64)
    first = (-first).clamp(0, frame.kv_len).to(frame.device).view(-1, 1, 1)
    there, its_kind = inside(Spans(first, torch.full_like(first, frame.kv_len), frame.kv_len), frame.q_len, rows, frame.device)

    def of_those_there(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return mod(b, h, q, k) & there(b, h, q, k)

    return of_those_there, (its_kind, kind)


def _lower(mask: Mask, frame: Frame, rows: int) -> tuple[Mod, object]:
    said = spans(mask, frame)
    if said is not None:
        return inside(said, frame.q_len, rows, frame.device)
    if isinstance(mask, And | Or):
        return _joined(mask, [_lower(part, frame, rows) for part in mask.parts])
    if isinstance(mask, Not):
        return _inverted(*_lower(mask.mask, frame, rows))
    if isinstance(mask, Where):
        return _asked(mask, frame)
    if isinstance(mask, Table):
        return _looked_up(mask, frame)
    if isinstance(mask, Keys):
        return _looked_up_key(mask, frame)
    if isinstance(mask, Documents):
        return _compared(mask, frame)
    raise NotImplementedError(f'attention: kernel="flex" does not know {type(mask).__name__}; write kernel="fused"')


def _joined(mask: And | Or, parts: list[tuple[Mod, object]]) -> tuple[Mod, object]:
    mods, kinds = [mod for mod, _ in parts], tuple(kind for _, kind in parts)
    if isinstance(mask, And):

        def both(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            found = mods[0](b, h, q, k)
            for mod in mods[1:]:
                found = found & mod(b, h, q, k)
            return found

        return both, ("and", kinds)

    def either(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        found = mods[0](b, h, q, k)
        for mod in mods[1:]:
            found = found | mod(b, h, q, k)
        return found

    return either, ("or", kinds)


def _inverted(mod: Mod, kind: object) -> tuple[Mod, object]:
    def inverted(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ~mod(b, h, q, k)

    return inverted, ("not", kind)


def _asked(mask: Where, frame: Frame) -> tuple[Mod, object]:
    allows, query, key = mask.allows, _starts(frame.q_start, frame), _starts(frame.k_start, frame)

    def asked(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return allows(b, h, q + query[b], k + key[b])

    return asked, ("where", getattr(allows, "__code__", allows))


def _looked_up(mask: Table, frame: Frame) -> tuple[Mod, object]:
    table, blocked = mask.table, isinstance(mask, Blocked)
    row, column = _starts(frame.q_start if mask.absolute else 0, frame), _starts(frame.k_start, frame)
    last = _last(table)

    def looked_up(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        at = _within(b, last[0]), _within(h, last[1]), _within(q + row[b], last[2]), _within(k + column[b], last[3])
        return ~table[at] if blocked else table[at]

    return looked_up, ("table", blocked)


def _looked_up_key(mask: Keys, frame: Frame) -> tuple[Mod, object]:
    allowed, column, last = mask.allowed, _starts(frame.k_start, frame), _last(mask.allowed)

    def key(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        del h, q
        return allowed[_within(b, last[0]), _within(k + column[b], last[1])]

    return key, "keys"


def _compared(mask: Documents, frame: Frame) -> tuple[Mod, object]:
    ids = mask.ids.to(frame.device)
    whose = ids if mask.queries is None else mask.queries.to(frame.device)
    row, column = _starts(frame.q_start if mask.queries is None else 0, frame), _starts(frame.k_start, frame)
    mine, others = _last(whose), _last(ids)

    def compared(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        del h
        theirs = ids[_within(b, others[0]), _within(k + column[b], others[1])]
        return (whose[_within(b, mine[0]), _within(q + row[b], mine[1])] == theirs) & (theirs >= 0)

    return compared, "documents"


def _last(table: Tensor) -> Tensor:
    """The last number of each axis of a table."""
    return torch.tensor([n - 1 for n in table.shape], dtype=torch.int32).to(table.device, non_blocking=True)


def _within(i: Tensor, last: Tensor) -> Tensor:
    """A position outside of a table reads its border, and every position of an axis of size 1 its only entry."""
    return torch.minimum(i.clamp(min=0), last)


def _starts(start: Any, frame: Frame) -> Tensor:
    """[batch], as a tensor even where it is one number."""
    if isinstance(start, Tensor):
        return start.to(frame.device, torch.int32)
    return torch.full((frame.batch,), start, dtype=torch.int32, device=frame.device)
