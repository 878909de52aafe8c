"""How a call is cut into tiles: by the intervals that its mask leaves each query, and by what products are expected to cost.

lower(spec)   for each batch entry (or for all alike) the tiles, and how many entries and heads share a product
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ..masks.blocks import Spans, split
from . import products
from .memo import Memo
from .spec import Spec, cpu_frame
from .tiles import Range, Tile, Unsure, Work

GAP = 16  # columns between two intervals that cost less than another product
MOST = 2**24  # bytes of scores a tile may hold
BATCHED = {torch.bfloat16: 2**18, torch.float32: 2**15, torch.float64: 2**15}  # elements up to which products go in batches
BATCH_BYTES = 2**22  # what such a batch of scores may hold
CALL = 50e-6  # seconds of Python and of threads meeting, a tile

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
    breaks = _breaks(said, spec.q_len)
    option = min(_options(spec, said, breaks, runs=rest is None and spec.bias is None), key=lambda o: o.seconds)
    tiles = _tiles(said, _cut(said, option.rows, spec.q_len, breaks))
    if option.run > 1:
        tiles = [_runs(some, option.run) for some in tiles]
    area = sum(tile.count * tile.rows * tile.width for some in tiles for tile in some)
    pairs = area * spec.heads * spec.batch // len(tiles)
    return Work(tiles, rest, option.rows, option.together, option.seconds, pairs)


class _Option(NamedTuple):
    """One way to cut a call: expected seconds, queries a tile, batch of its products over units, or over a run of tiles."""

    seconds: float
    rows: int
    together: tuple[int, int]
    run: int


def _options(spec: Spec, said: Spans, breaks: Tensor | None, runs: bool) -> Iterator[_Option]:
    dtype = products.computed_in(spec.dtype)
    speed, D, R = products.speed(dtype), spec.head_dim + spec.v_dim, spec.heads // spec.kv_heads
    entries = said.start.shape[0]
    units = spec.batch * spec.kv_heads // entries
    for rows in _candidates(said, spec.q_len):
        some = _cut(said, rows, spec.q_len, breaks).some
        wide = (some.end - some.start).clamp(min=0).sum(-1)  # [entries | 1, tiles]
        tiles, area, widest = int((wide > 0).sum()), int(wide.sum()), int(wide.max())
        high = min(rows, spec.q_len) * R
        if high * widest * dtype.itemsize > MOST and rows > 16:
            continue
        size = high * widest * dtype.itemsize
        rest = units * area * high * speed.softmax
        products_of = units * area * D * (high + products.PACKING)
        yield _Option(units * tiles * CALL + products_of * speed.nt + rest, rows, (1, 1), 1)
        if high * widest > BATCHED[dtype]:
            continue
        together = _together(spec, entries, size)
        if together != (1, 1):
            calls = tiles * -(-units // (together[0] * together[1]))
            yield _Option(calls * CALL + products_of * speed.bmm + rest, rows, together, 1)
        if runs and some.start.shape[-1] == 1:
            run = max(1, BATCH_BYTES // max(size, 1))
            steady = (some.start.diff(dim=1) == rows) & (some.end.diff(dim=1) == rows)
            calls = units * (tiles - int(steady.sum()) + tiles / run)
            yield _Option(calls * CALL + products_of * speed.bmm + rest, rows, (1, 1), run)


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


class _Cut(NamedTuple):
    """Where the tiles of each batch entry begin, and what some and all queries of each see."""

    edges: list[list[int]]
    some: Spans
    every: Spans


def _cut(said: Spans, rows: int, q_len: int, breaks: Tensor | None) -> _Cut:
    """Tiles of `rows` queries, the last of a call or before a break being shorter."""
    if breaks is None:
        blocks = said.blocks(rows, q_len)
        edges = [*range(0, q_len, rows), q_len]
        return _Cut([edges] * said.start.shape[0], blocks.some, blocks.every)
    row = torch.arange(q_len)
    marks = (row - torch.where(breaks, row, 0).cummax(1).values) % rows == 0
    index = (marks.cumsum(1) - 1).unsqueeze(-1).expand_as(said.start)
    count, hidden = int(index.max()) + 1, said.end <= said.start

    def fold(x: Tensor, how: str, begin: int) -> Tensor:
        return x.new_full((x.shape[0], count, x.shape[2]), begin).scatter_reduce(1, index, x, how)

    last = said.kv_len
    some = Spans(
        fold(said.start.masked_fill(hidden, last), "amin", last), fold(said.end.masked_fill(hidden, 0), "amax", 0), last
    )  # fmt: skip
    every = Spans(fold(said.start, "amax", 0), fold(said.end, "amin", last), last)
    return _Cut([[*mark.nonzero().flatten().tolist(), q_len] for mark in marks], some, every)


def _breaks(said: Spans, q_len: int) -> Tensor | None:
    """bool [entries, q_len], True where what a query sees has little to do with what the one before it sees: a document begins.

    None where there are none, or so many that tiles would be cut too small.
    """
    if said.start.shape[1] < 2:
        return None
    jumps = ((said.start.diff(dim=1).abs() > 1) | (said.end.diff(dim=1).abs() > 1)).any(-1)
    most = int(jumps.sum(1).max())
    if not 0 < most <= q_len // 64 + 4:
        return None
    return torch.cat([jumps.new_ones(jumps.shape[0], 1), jumps], 1)


def _tiles(said: Spans, cut: _Cut) -> list[list[Tile]]:
    lists: list[list[Tile]] = []
    for entry, (edges, some, every) in enumerate(zip(cut.edges, _ranges(cut.some), _ranges(cut.every), strict=True)):
        tiles: list[Tile] = []
        for first, last, seen, sure in zip(edges, edges[1:], some, every, strict=False):
            columns, sure = _merged(seen, GAP), _merged(sure, 0)
            tile = Tile(first, last, columns)
            if sum(b - a for a, b in sure) != tile.width:
                _hide(tile, said, entry, _without(columns, sure))
            tiles.append(tile)
        lists.append(tiles)
    return lists


def _ranges(spans: Spans) -> list[list[list[Range]]]:
    """For each batch entry and tile its intervals."""
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
