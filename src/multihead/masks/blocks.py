"""A mask as intervals of columns: for every query, and for every block of queries, by arithmetic alone.

    spans(mask, frame)      the columns that each query may see, as a few half-open intervals; memory grows with q_len
    spans.blocks(size)      for each block of queries what some of them see, and what all of them see

Only Where, Allowed, Blocked, documents that are torn apart and keys in more than MOST runs have no intervals; `split` keeps
them apart, for whoever computes to look at inside the blocks that the others leave.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from .algebra import And, Frame, Mask, Not, Or
from .arguments import lookup, per_batch
from .kinds import Causal, Documents, Keys, Lengths, Prefix, ValidLens, Window

MOST = 64  # intervals a query; beyond it a dense look costs less


@dataclass(frozen=True, eq=False)
class Spans:
    """Half-open intervals of columns, ascending and disjoint; empty ones, start == end, stand at the end of a row.

    start, end  integer [batch | 1, q_len | 1, n];  kv_len  the number of columns
    """

    start: Tensor
    end: Tensor
    kv_len: int

    def __and__(self, other: Spans) -> Spans:
        start = torch.maximum(self.start.unsqueeze(-1), other.start.unsqueeze(-2)).flatten(-2)
        end = torch.minimum(self.end.unsqueeze(-1), other.end.unsqueeze(-2)).flatten(-2)
        return Spans(start, torch.maximum(end, start), self.kv_len).compact()

    def __or__(self, other: Spans) -> Spans:
        return ~(~self & ~other)

    def __invert__(self) -> Spans:
        first, last = torch.zeros_like(self.start[..., :1]), torch.full_like(self.end[..., :1], self.kv_len)
        start, end = torch.cat([first, self.end], -1), torch.cat([self.start, last], -1)
        return Spans(start, torch.maximum(end, start), self.kv_len).compact()

    def compact(self) -> Spans:
        """Empty intervals moved behind the others, and cut off where no row needs them."""
        if self.start.shape[-1] == 1:
            return self
        empty = self.end <= self.start
        most = max(1, int((~empty).sum(-1).max())) if empty.numel() else 1
        order = empty.to(torch.int8).argsort(dim=-1, stable=True)[..., :most]
        start, end = (x.masked_fill(empty, self.kv_len).gather(-1, order) for x in (self.start, self.end))
        return Spans(start, end, self.kv_len)

    def dense(self, q_len: int) -> Tensor:
        """bool [batch | 1, 1, q_len, kv_len], for looking."""
        k = torch.arange(self.kv_len, device=self.start.device)
        seen = (k >= self.start.unsqueeze(-1)) & (k < self.end.unsqueeze(-1))
        return seen.any(2).unsqueeze(1).expand(-1, 1, q_len, -1)

    def pairs(self, q_len: int) -> Tensor:
        """[batch | 1]: how many pairs each batch entry has."""
        rows = (self.end - self.start).clamp(min=0).sum(-1)
        return rows.sum(-1) if rows.shape[1] == q_len else rows[:, 0] * q_len

    def blocks(self, size: int, q_len: int) -> Blocks:
        """The same for blocks of `size` queries, the last of which may be shorter."""
        start, end = (x.expand(-1, q_len, -1) for x in (self.start, self.end))
        missing = -q_len % size
        if missing:  # the last row stands in for those that are not there
            start, end = (torch.cat([x, x[:, -1:].expand(-1, missing, -1)], 1) for x in (start, end))
        start, end = (x.reshape(x.shape[0], x.shape[1] // size, size, x.shape[2]) for x in (start, end))
        hidden = end <= start
        some = Spans(start.masked_fill(hidden, self.kv_len).amin(2), end.masked_fill(hidden, 0).amax(2), self.kv_len)
        every = Spans(start.amax(2), end.amin(2), self.kv_len)
        return Blocks(_ordered(some), _ordered(every), size)


@dataclass(frozen=True, eq=False)
class Blocks:
    """Per block of queries: `some`, columns that hold whatever any of its queries sees; `every`, columns that all of them see.

    some, every  intervals [batch | 1, blocks, n]; what lies in `some` and not in `every` is partial and must be looked at
    """

    some: Spans
    every: Spans
    size: int


def _ordered(spans: Spans) -> Spans:
    return Spans(spans.start, torch.maximum(spans.start, spans.end), spans.kv_len)


# ---- masks ------------------------------------------------------------------------------------------------------------


def split(mask: Mask | None, frame: Frame) -> tuple[Spans | None, Mask | None]:
    """The part of a mask that intervals say, and the part that must be looked at; both hold. (None, None): all is seen."""
    said: Spans | None = _there(frame)
    rest: Mask | None = None
    for part in mask.parts if isinstance(mask, And) else [] if mask is None else [mask]:
        found = spans(part, frame)
        if found is None:
            rest = part if rest is None else rest & part
        else:
            said = found if said is None else said & found
    return said, rest


def spans(mask: Mask, frame: Frame) -> Spans | None:
    """The columns that each query of the frame may see; None where intervals do not say it."""
    mask.check(frame)
    return _spans(mask, frame)


@functools.singledispatch
def _spans(mask: Mask, frame: Frame) -> Spans | None:
    del mask, frame
    return None


@_spans.register(And)
@_spans.register(Or)
def _(mask: And | Or, frame: Frame) -> Spans | None:
    found = [_spans(part, frame) for part in mask.parts]
    known = [x for x in found if x is not None]
    return functools.reduce(type(mask).join, known) if len(known) == len(found) else None


@_spans.register
def _(mask: Not, frame: Frame) -> Spans | None:
    found = _spans(mask.mask, frame)
    return None if found is None else ~found


@_spans.register
def _(mask: Causal, frame: Frame) -> Spans | None:
    q = frame.q if mask.align == "end" else frame.row
    return _between(frame, None, q + 1)


@_spans.register
def _(mask: Window, frame: Frame) -> Spans | None:
    return _between(frame, frame.q - mask.width + 1, frame.q + mask.ahead + 1)


@_spans.register
def _(mask: Lengths, frame: Frame) -> Spans | None:
    end = per_batch(mask.keys, frame)
    if mask.queries is not None:
        end = torch.where(frame.row < per_batch(mask.queries, frame), end, _least(frame))
    return _between(frame, None, end)


@_spans.register
def _(mask: Prefix, frame: Frame) -> Spans | None:
    return _between(frame, None, per_batch(mask.n, frame))


@_spans.register
def _(mask: ValidLens, frame: Frame) -> Spans | None:
    if mask.lens.ndim == 1:
        return _between(frame, None, per_batch(mask.lens, frame))
    return _between(frame, None, lookup(mask.lens.to(frame.device), torch.arange(frame.batch).view(-1, 1, 1, 1), frame.row))


@_spans.register
def _(mask: Keys, frame: Frame) -> Spans | None:
    allowed = mask.evaluate(frame).expand(-1, -1, -1, frame.kv_len).flatten(0, 2)  # [batch, kv_len]
    edge = torch.nn.functional.pad(allowed.to(torch.int8), (1, 1)).diff(dim=-1)
    most = int((edge > 0).sum(-1).max()) if edge.numel() else 0
    if most > MOST:
        return None
    at = torch.arange(frame.kv_len + 1, device=allowed.device).expand_as(edge)
    start, end = (torch.where(edge == side, at, frame.kv_len).sort(-1).values[:, : max(most, 1)] for side in (1, -1))
    return Spans(start.unsqueeze(1), end.unsqueeze(1), frame.kv_len)


@_spans.register
def _(mask: Documents, frame: Frame) -> Spans | None:
    ids = mask.ids.to(frame.device)
    first = torch.ones_like(ids, dtype=torch.bool)
    first[:, 1:] = ids[:, 1:] != ids[:, :-1]
    index = first.to(torch.int32).cumsum(1, dtype=torch.int32) - 1  # the run of each token
    if _torn(ids, first):
        return None
    tokens = ids.shape[1]
    at = torch.arange(tokens + 1, dtype=torch.int32, device=ids.device)
    runs = int(index[:, -1].max()) + 1 if tokens else 0
    edges = at.new_full((ids.shape[0], runs + 1), tokens)  # where each run begins, and one past the last
    edges.scatter_(1, torch.where(first, index, runs).long(), torch.where(first, at[:-1], tokens))
    if mask.queries is not None:
        return _of_queries(mask.queries.to(frame.device), ids, first, index, edges, frame)
    q = frame.q.flatten(1, 2).squeeze(-1).clamp(0, max(tokens - 1, 0)).expand(ids.shape[0] if frame.q.shape[0] == 1 else -1, -1)
    whose = ids.expand(q.shape[0], -1)
    mine = index.expand(q.shape[0], -1).gather(1, q)
    edges = edges.expand(q.shape[0], -1)
    start, end = (edges.gather(1, (mine + i).long()).view(q.shape[0], 1, -1, 1) for i in (0, 1))
    hidden = (whose.gather(1, q) < 0).view(q.shape[0], 1, -1, 1)
    return _between(frame, start, end.masked_fill(hidden, -1))


def _of_queries(queries: Tensor, ids: Tensor, first: Tensor, index: Tensor, edges: Tensor, frame: Frame) -> Spans | None:
    """Queries with ids of their own: each looks for the run of its id."""
    B = max(ids.shape[0], queries.shape[0])
    names = torch.full_like(edges, -2, dtype=ids.dtype)
    names.scatter_(1, torch.where(first, index, edges.shape[1] - 1).long(), torch.where(first, ids, -2))
    order = names.argsort(dim=1)
    place = torch.searchsorted(names.gather(1, order).expand(B, -1).contiguous(), queries.expand(B, -1).contiguous())
    place = order.expand(B, -1).gather(1, place.clamp(max=edges.shape[1] - 1))
    found = (names.expand(B, -1).gather(1, place) == queries) & (queries >= 0)
    start, end = (edges.expand(B, -1).gather(1, (place + i).clamp(max=edges.shape[1] - 1)).view(B, 1, -1, 1) for i in (0, 1))
    return _between(frame, start, end.masked_fill(~found.view(B, 1, -1, 1), -1))


def _torn(ids: Tensor, first: Tensor) -> bool:
    """Whether a document's tokens lie apart."""
    heads = torch.where(first & (ids >= 0), ids, -1).sort(1).values
    return bool(((heads[:, 1:] == heads[:, :-1]) & (heads[:, 1:] >= 0)).any())


def _between(frame: Frame, start: Tensor | None, end: Tensor) -> Spans:
    """Absolute positions start ≤ k < end as columns; positions are [batch | 1, 1, q_len | 1, 1]."""
    last = _columns(frame, end)
    first = torch.zeros_like(last) if start is None else _columns(frame, start)
    last = torch.maximum(last, first)
    return Spans(torch.minimum(first, last), last, frame.kv_len)


def _columns(frame: Frame, position: Tensor) -> Tensor:
    """[batch | 1, q_len | 1, 1]"""
    k = frame.k_start
    column = position - (k.to(frame.device).view(-1, 1, 1, 1) if isinstance(k, Tensor) else k)
    return column.squeeze(1).clamp(0, frame.kv_len)


def _least(frame: Frame) -> Tensor:
    return torch.full((1, 1, 1, 1), -(2**31), device=frame.device)


def _there(frame: Frame) -> Spans | None:
    """The columns that hold a key at all, where a ragged cache leaves some empty."""
    if not isinstance(frame.k_start, Tensor):
        return None
    return _between(
        frame,
        torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=frame.device),
        torch.full((1, 1, 1, 1), 2**62, device=frame.device),
    )
