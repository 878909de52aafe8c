"""What is left of a call after its mask, cut into tiles: some queries, all the columns that any of them sees, and no others.

    lower(spec)   for each batch entry (or for all alike) the tiles, and how many entries and heads share a product

A tile holds whole rows of scores, so that softmax needs no second pass. Its columns are a few intervals, found by arithmetic
(masks.blocks); what must be hidden inside them is known by interval too, or looked at where a mask has none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ..masks import Mask
from ..masks.blocks import Spans, split
from . import products
from .memo import Memo
from .spec import Spec, cpu_frame

Range = tuple[int, int]
GAP = 16  # columns between two intervals that cost less than another product
MOST = 2**24  # bytes of scores a tile may hold
BATCHED = {torch.bfloat16: 2**18, torch.float32: 2**15, torch.float64: 2**15}  # elements up to which products go in batches
BATCH_BYTES = 2**22  # what such a batch of scores may hold
CALL = 40e-6  # seconds of Python and of threads meeting, a tile


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


# ---- lowering -----------------------------------------------------------------------------------------------------------

_memo: Memo[Work] = Memo(8, blind=True)


def lower(spec: Spec) -> Work:
    """The tiles of a call; those of the last few calls are remembered."""
    return _memo.get(spec, lambda: _lower(spec), (spec.kv_heads, spec.head_dim, spec.v_dim, spec.dtype, products.asked()))


def _lower(spec: Spec) -> Work:
    frame = cpu_frame(spec)
    said, rest = (None, None) if spec.mask is None and not spec.ragged else split(spec.mask, frame)
    if spec.mask is not None:
        spec.mask.check(frame)
    if said is None:
        zero = torch.zeros(1, 1, 1, dtype=torch.int64)
        said = Spans(zero, zero + spec.kv_len, spec.kv_len)
    option = min(_options(spec, said, runs=rest is None and spec.bias is None), key=lambda o: o.seconds)
    tiles = _tiles(said, option.rows, spec.q_len)
    if option.run > 1:
        tiles = [_runs(some, option.run) for some in tiles]
    return Work(tiles, rest, option.rows, option.together, option.seconds, option.pairs)


class _Option(NamedTuple):
    """One way to cut a call: expected seconds, queries a tile, batch of its products over units, or over a run of tiles."""

    seconds: float
    rows: int
    together: tuple[int, int]
    run: int
    pairs: int


def _options(spec: Spec, said: Spans, runs: bool) -> Iterator[_Option]:
    dtype = products.computed_in(spec.dtype)
    speed, D, R = products.speed(dtype), spec.head_dim + spec.v_dim, spec.heads // spec.kv_heads
    entries = said.start.shape[0]
    units = spec.batch * spec.kv_heads // entries
    for rows in _candidates(said, spec.q_len):
        some = said.blocks(rows, spec.q_len).some
        wide = (some.end - some.start).clamp(min=0).sum(-1)  # [entries | 1, tiles]
        tiles, area, widest = int((wide > 0).sum()), int(wide.sum()), int(wide.max())
        high = min(rows, spec.q_len) * R
        if high * widest * dtype.itemsize > MOST and rows > 16:
            continue
        pairs, size = units * area * high, high * widest * dtype.itemsize

        def option(
            product: float, calls: float, together: tuple[int, int], run: int, high: int = high, area: int = area,
            rows: int = rows, pairs: int = pairs,
        ) -> _Option:  # fmt: skip
            each = D * (high + products.PACKING) * product + high * speed.softmax
            return _Option(calls * CALL + units * area * each, rows, together, run, pairs)

        yield option(speed.nt, units * tiles, (1, 1), 1)
        if high * widest > BATCHED[dtype]:
            continue
        together = _together(spec, entries, size)
        if together != (1, 1):
            yield option(speed.bmm, tiles * -(-units // (together[0] * together[1])), together, 1)
        if runs and some.start.shape[-1] == 1:
            run = max(1, BATCH_BYTES // max(size, 1))
            steady = (some.start.diff(dim=1) == rows) & (some.end.diff(dim=1) == rows)
            yield option(speed.bmm, units * (tiles - int(steady.sum()) + tiles / run), (1, 1), run)


def _candidates(said: Spans, q_len: int) -> list[int]:
    """Heights of tiles worth a look; where every row sees the same, small ones are good for memory alone."""
    sizes = [n for n in (16, 32, 64, 128, 256, 512) if n < 2 * q_len] or [16]
    return sizes if q_len <= 2**16 or said.start.shape[1] == 1 else [64, 256]  # a look costs milliseconds by then


def _together(spec: Spec, entries: int, size: int) -> tuple[int, int]:
    """Batch entries and kv heads a product: whole batch entries where all have the same tiles, else heads of one."""
    most = max(1, BATCH_BYTES // max(size, 1))
    if entries > 1 or most < 2 * spec.kv_heads:
        return 1, max(2, min(most, spec.kv_heads)) if spec.kv_heads > 1 else 1
    return min(spec.batch, most // spec.kv_heads), spec.kv_heads


def _tiles(said: Spans, rows: int, q_len: int) -> list[list[Tile]]:
    blocks = said.blocks(rows, q_len)
    lists: list[list[Tile]] = []
    for entry, (some, every) in enumerate(zip(_ranges(blocks.some), _ranges(blocks.every), strict=True)):
        tiles: list[Tile] = []
        for i, (seen, sure) in enumerate(zip(some, every, strict=True)):
            columns, sure = _merged(seen, GAP), _merged(sure, 0)
            tile = Tile(i * rows, min((i + 1) * rows, q_len), columns)
            if sum(b - a for a, b in sure) != tile.width:
                _hide(tile, said, entry, _without(columns, sure))
            tiles.append(tile)
        lists.append(tiles)
    return lists


def _ranges(spans: Spans) -> list[list[list[Range]]]:
    """For each batch entry and block its intervals."""
    return cast("list[list[list[Range]]]", torch.stack([spans.start, spans.end], -1).tolist())


def _hide(tile: Tile, said: Spans, entry: int, unsure: list[Range]) -> None:
    """What the tile's queries do not see of the columns that some of them see."""
    at = slice(tile.first, tile.last) if said.start.shape[1] > 1 else slice(0, 1)
    tile.start, tile.end = said.start[entry, at], said.end[entry, at]
    for a, b in unsure:
        tile.unsure.append(Unsure(_offset(tile.columns, a), a, b))
    empty = (tile.end <= tile.start).all(-1, keepdim=True)
    if bool(empty.any()):
        tile.empty = empty[None, None]


def _runs(tiles: list[Tile], most: int) -> list[Tile]:
    """Neighbours of one shape, each `rows` columns behind the one before, as one tile that counts them."""
    found: list[Tile] = []
    for tile in tiles:
        last = found[-1] if found else None
        if last is not None and last.count < most and _follows(last, tile):
            last.count += 1
        else:
            found.append(tile)
    return found


def _follows(run: Tile, tile: Tile) -> bool:
    by = tile.first - run.first
    if by != run.count * run.rows or tile.rows != run.rows or len(run.columns) != 1 or len(tile.columns) != 1:
        return False
    a, b = run.columns[0]
    if tile.columns[0] != (a + by, b + by) or run.empty is not None or tile.empty is not None:
        return False
    if [(u.first, u.a + by, u.b + by) for u in run.unsure] != [tuple(u) for u in tile.unsure]:
        return False
    if run.start is None or run.end is None or tile.start is None or tile.end is None:
        return run.start is tile.start
    return torch.equal(run.start + by, tile.start) and torch.equal(run.end + by, tile.end)


def _merged(ranges: list[Range], gap: int) -> list[Range]:
    """Ascending and disjoint; what is less than `gap` apart becomes one."""
    found: list[Range] = []
    for a, b in sorted((a, b) for a, b in ranges if a < b):
        if found and a <= found[-1][1] + gap:
            found[-1] = found[-1][0], max(b, found[-1][1])
        else:
            found.append((a, b))
    return found


def _without(ranges: list[Range], others: list[Range]) -> list[Range]:
    """What of `ranges` lies in none of `others`; both ascending and disjoint."""
    found: list[Range] = []
    for a, b in ranges:
        for x, y in others:
            if y <= a or x >= b:
                continue
            if x > a:
                found.append((a, x))
            a = max(a, y)
        if a < b:
            found.append((a, b))
    return found


def _offset(columns: list[Range], at: int) -> int:
    """Where column `at` stands among those of a tile."""
    before = 0
    for a, b in columns:
        if a <= at < b:
            return before + at - a
        before += b - a
    raise RuntimeError(f"multihead: column {at} is none of {columns}")


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
