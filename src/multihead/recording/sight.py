"""What a call's queries see, lowered once for a pass: the columns that a block needs, and what in them is hidden."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from ..masks import And, Mask
from ..masks.blocks import split
from ..masks.tables import Table
from .call import Call

Numbers = list[list[list[int]]]  # [batch | 1, blocks, n]
Pair = tuple[Numbers, Numbers]  # where intervals start, and where they end
LOW = -1e30  # a hidden score: its weight is exactly 0, and 0 · LOW is no NaN
ALIGN = 64  # columns of a block begin and end at multiples: oneDNN prepares itself anew for each shape it has not seen


class Sight:
    """The mask of a call as intervals of columns for each block of `rows` queries, and what must be looked at inside of them.

    rows = 0: blocks may lie anywhere, and are looked at as a whole.
    """

    def __init__(self, call: Call, rows: int = 0) -> None:
        _, _, _, T, S = call.sizes
        self.call, self.rows, self.kv_len = call, rows, S
        self.frame = call.frame
        if call.mask is not None:
            call.mask.check(self.frame)
        self.spans, self.rest = split(call.mask, self.frame)
        if self.spans is not None and rows:
            found = self.spans.blocks(rows, T)
            self._some: Pair = _numbers(found.some.start), _numbers(found.some.end)
            self._every: Pair = _numbers(found.every.start), _numbers(found.every.end)
        self.q, self.k = self.frame.q, self.frame.k

    @property
    def widest(self) -> int:
        """The most columns that a block has."""
        T, blocks = self.call.q.shape[2], range(0, self.call.q.shape[2], self.rows)
        entries = range(1 if self.spans is None else max(len(x) for x in self._some))
        ends = (self.columns(b, slice(i, min(i + self.rows, T))) for b in entries for i in blocks)
        return max(hi - lo for lo, hi in ends) if self.spans is not None else self.kv_len

    def columns(self, b: int, i: slice) -> tuple[int, int]:
        """The first and one past the last column that any of the queries sees; never none."""
        if self.spans is None:
            return 0, self.kv_len
        starts, ends = self._block(self._some, b, i)
        there = [(s, e) for s, e in zip(starts, ends, strict=True) if e > s]
        if not there:
            return 0, min(ALIGN, self.kv_len)
        lo, hi = min(s for s, _ in there), max(e for _, e in there)
        return lo // ALIGN * ALIGN, min(-(-hi // ALIGN) * ALIGN, self.kv_len)

    def finish(self, s: Tensor, b: int, h: slice, i: slice, j: slice) -> Tensor:
        """Products → scores, in place: softcap, bias, FlexAttention's own, levelled rows, and LOW where hidden."""
        call = self.call
        if call.softcap is not None:
            s = (s / call.softcap).tanh() * call.softcap if s.requires_grad else s.div_(call.softcap).tanh_().mul_(call.softcap)
        if call.bias is not None:
            s.add_(_cut(call.bias, b, h, i, j)).clamp_(min=LOW)  # a bias of −inf hides
        if call.score is not None:
            s = call.score(s, *self._indices(b, h, i, j)).to(s.dtype).expand_as(s)
            s = s.contiguous()
        if call.flat is not None:
            s.masked_fill_(_cut(call.flat.unsqueeze(-1), b, h, i, j), 0.0)
        if self.spans is not None:
            self._hide(s, b, i, j)
        for part in self.rest.parts if isinstance(self.rest, And) else [] if self.rest is None else [self.rest]:
            s.masked_fill_(~self._look(part, b, h, i, j), LOW)
        return s

    def _hide(self, s: Tensor, b: int, i: slice, j: slice) -> None:
        """LOW outside of each query's intervals; where one interval is all, only its two ragged ends are looked at."""
        spans = self.spans
        if spans is None:
            return
        start, end = (x[b if x.shape[0] > 1 else 0] for x in (spans.start, spans.end))
        start, end = (x[i] if x.shape[0] > 1 else x for x in (start, end))  # [rows | 1, n]
        if start.shape[1] > 1:
            at = torch.arange(j.start, j.stop, device=s.device)
            seen = ((at >= start.unsqueeze(-1)) & (at < end.unsqueeze(-1))).any(1)
            s.masked_fill_(~seen, LOW)
            return
        first, last = (x[0] for x in self._block(self._every, b, i)) if self.rows else (0, 0)
        if last <= first:  # no column is seen by all
            first, last = j.stop, j.start
        for a, z, edge, below in ((j.start, min(first, j.stop), start, True), (max(last, j.start), j.stop, end, False)):
            if a < z:
                at = torch.arange(a, z, device=s.device)
                s[..., a - j.start : z - j.start].masked_fill_(at < edge if below else at >= edge, LOW)

    def _block(self, pair: Pair, b: int, i: slice) -> tuple[list[int], list[int]]:
        start, end = pair
        return start[b if len(start) > 1 else 0][int(i.start) // self.rows], end[b if len(end) > 1 else 0][
            int(i.start) // self.rows
        ]

    def _look(self, mask: Mask, b: int, h: slice, i: slice, j: slice) -> Tensor:
        """bool, broadcastable to [heads, rows, columns]: the part of a mask that no intervals say."""
        if isinstance(mask, Table) and not mask.absolute:
            return mask.allows(_cut(mask.table, b, h, i, j))
        found = mask.predicate(*self._indices(b, h, i, j), self.frame)
        return found[b] if found.shape[0] > 1 else found[0]

    def _indices(self, b: int, h: slice, i: slice, j: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        one = slice(b, b + 1)
        q, k = (x[one] if x.shape[0] > 1 else x for x in (self.q, self.k))
        return self.frame.b[one], self.frame.h[:, h], q[:, :, i], k[..., j]


def _numbers(x: Tensor) -> Numbers:
    return cast(Numbers, x.tolist())  # pyright: ignore[reportUnknownMemberType]


def _cut(x: Tensor, b: int, h: slice, i: slice, j: slice) -> Tensor:
    """The block's part of [batch | 1, heads | 1, q_len | 1, kv_len | 1]."""
    x = x[b if x.shape[0] > 1 else 0]
    x = x[h] if x.shape[0] > 1 else x
    x = x[:, i] if x.shape[1] > 1 else x
    return x[..., j] if x.shape[2] > 1 else x
