"""What is left of a call after its mask: tiles of some queries, all the columns that any of them sees, and no others.

A tile holds whole rows of scores, so that softmax needs no second pass. Its columns are a few intervals, found by arithmetic
(masks.blocks); what must be hidden inside them is known by interval too, or looked at where a mask has none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..masks import Mask
from . import products
from .spec import Spec, cpu_frame

Range = tuple[int, int]


class Hidden(NamedTuple):
    """Columns first … last of a tile's scores: +∞ where they may be seen and −∞ where not, for torch.minimum.

    cap  broadcasts to [batch, heads, rows, last − first]
    """

    first: int
    last: int
    cap: Tensor


class Unsure(NamedTuple):
    """Columns a … b that some of a tile's queries see and some do not; they are the tile's own from `first` on."""

    first: int
    a: int
    b: int


@dataclass
class Tile:
    """Queries first … last, and the columns that some of them see.

    count       so many tiles of one shape, each with its queries and its only interval of columns behind the one before
    unsure      what of these columns is hidden from some of the queries
    start, end  the columns of each query, [rows, n], where something is unsure
    empty       [·, ·, rows, 1], True for queries that see nothing, where there are any
    """

    first: int
    last: int
    columns: list[Range]
    count: int = 1
    unsure: list[Unsure] = field(default_factory=list[Unsure])
    start: Tensor | None = None
    end: Tensor | None = None
    empty: Tensor | None = None
    hidden: list[Hidden] = field(default_factory=list[Hidden])

    @property
    def width(self) -> int:
        return sum(b - a for a, b in self.columns)

    @property
    def rows(self) -> int:
        """Queries of one of the `count` tiles."""
        return self.last - self.first

    @property
    def queries(self) -> slice:
        """The queries of all of them."""
        return slice(self.first, self.first + self.count * self.rows)


@dataclass
class Work:
    """The tiles of a call.

    tiles     for each batch entry, or one list for all
    rest      the part of the mask that must be looked at inside the tiles
    rows      queries a tile
    together  (batch entries, kv heads) whose products are computed as one batch; (1, 1) for products of two matrices
    seconds   what a forward is expected to cost
    pairs     of rows and columns that are computed, over all batch entries and heads
    """

    tiles: list[list[Tile]]
    rest: Mask | None
    rows: int
    together: tuple[int, int]
    seconds: float
    pairs: int

    @property
    def careful(self) -> bool:
        """Whether something inside a tile is hidden, so that a NaN could reach what must not see it."""
        return self.rest is not None or any(tile.unsure for tiles in self.tiles for tile in tiles)

    def groups(self, batch: int, kv_heads: int) -> Iterator[tuple[slice, slice]]:
        """The batch entries and kv heads that are computed together."""
        b, g = self.together
        for first in range(0, batch, b):
            for head in range(0, kv_heads, g):
                yield slice(first, min(first + b, batch)), slice(head, min(head + g, kv_heads))


# ---- looking inside ---------------------------------------------------------------------------------------------------


class Looker:
    """Tiles with what they hide, one after the other; neighbours that hide the same share it."""

    def __init__(self, spec: Spec, work: Work) -> None:
        self.frame, self.rest, self.dtype = cpu_frame(spec), work.rest, products.computed_in(spec.dtype)
        self.before: tuple[Tensor, Tensor, list[tuple[int, ...]], list[Hidden]] | None = None

    def __call__(self, tile: Tile) -> Tile:
        if not tile.columns or (self.rest is None and not tile.unsure):
            return tile
        tile = replace(tile, hidden=self._known(tile)) if tile.unsure else tile
        return tile if self.rest is None else self._looked(tile, self.rest)

    def _known(self, tile: Tile) -> list[Hidden]:
        """By the intervals of each query."""
        if tile.start is None or tile.end is None:
            return []
        start, end = tile.start - tile.first, tile.end - tile.first
        where = [(u.first, u.a - tile.first, u.b - tile.first) for u in tile.unsure]
        if self.before and self.before[2] == where and torch.equal(self.before[0], start) and torch.equal(self.before[1], end):
            return self.before[3]
        found: list[Hidden] = []
        for first, a, b in where:
            k = torch.arange(a, b).unsqueeze(-1)
            seen = ((k >= start.unsqueeze(1)) & (k < end.unsqueeze(1))).any(-1)
            found.append(Hidden(first, first + b - a, self._cap(seen[None, None])))
        self.before = start, end, where, found
        return found

    def _cap(self, seen: Tensor) -> Tensor:
        return torch.where(seen, math.inf, -math.inf).to(self.dtype)

    def _looked(self, tile: Tile, rest: Mask) -> Tile:
        """The tile without the columns in which `rest` allows nothing, and with what else it hides.

        allowed may vary over batch entries and heads: [batch | 1, heads | 1, rows, columns]
        """
        spans = [rest.part(self.frame, slice(tile.first, tile.last), slice(a, b)) for a, b in tile.columns]
        batch, heads = (max(x.shape[i] for x in spans) for i in (0, 1))
        parts = [x.expand(batch, heads, tile.rows, b - a) for x, (a, b) in zip(spans, tile.columns, strict=True)]
        allowed = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        if tile.hidden:
            allowed = allowed.clone()
        for hidden in tile.hidden:
            allowed[..., hidden.first : hidden.last] &= hidden.cap > 0
        used = allowed.flatten(0, 2).any(0).nonzero()
        if not len(used):
            return Tile(tile.first, tile.last, [])
        columns = tile.columns
        if len(columns) == 1:  # no more than the first to the last that is used
            a, low, high = columns[0][0], int(used[0]), int(used[-1]) + 1
            allowed, columns = allowed[..., low:high], [(a + low, a + high)]
        if bool(allowed.all()):
            return Tile(tile.first, tile.last, columns)
        empty = ~allowed.any(-1, keepdim=True)
        hidden = [Hidden(0, allowed.shape[-1], self._cap(allowed))]
        return Tile(tile.first, tile.last, columns, hidden=hidden, empty=empty if bool(empty.any()) else None)
