"""A call for the kernel "blocked": what its tiles share, and the batch entries and kv heads whose products go together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor

from . import dropping, products
from .spec import Spec
from .tiles import Looker, Tile, Work


def unflatten(x: Tensor, axis: int, *sizes: int) -> Tensor:
    """One axis as several."""
    return cast(Tensor, x.unflatten(axis, sizes))


class Call:
    """What the tiles of a call share."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, spec: Spec, work: Work) -> None:
        self.spec, self.work, self.frame = spec, work, spec.frame
        self.dtype = products.computed_in(spec.dtype)
        self.groups, self.R = spec.kv_heads, spec.heads // spec.kv_heads
        self.q, self.k, self.v = self.heads(q), k, v
        self.bias = None if spec.bias is None else self.by_group(spec.bias.detach())
        self.sinks = None if spec.sinks is None else spec.sinks.detach().to(self.exact).view(1, self.groups, self.R, 1, 1)
        self.keep_scale = 0.0 if spec.dropout == 1.0 else 1.0 / (1.0 - spec.dropout)
        if spec.dropout and spec.seed is not None:
            frame = self.frame
            rows = dropping.rows(spec.seed, frame.b, frame.h, frame.q).expand(spec.batch, spec.heads, spec.q_len, 1)
            self.rows, self.columns = self.heads(rows), dropping.columns(frame.k)

    @property
    def exact(self) -> torch.dtype:
        """Where sums over many numbers are kept."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def heads(self, x: Tensor) -> Tensor:
        """[batch, heads, …] → [batch, kv_heads, heads a group, …], a view."""
        return unflatten(x, 1, self.groups, self.R)

    def by_group(self, x: Tensor) -> Tensor:
        """[·, heads | 1, ·, ·] → [·, kv_heads | 1, heads a group | 1, ·, ·]"""
        return x.unsqueeze(1) if x.shape[1] == 1 else self.heads(x)

    def parts(self) -> Iterator[tuple[Part, Tile]]:
        """Each group with each of its tiles; where tiles must be looked at, all groups in turn use what was seen."""
        work, looker = self.work, Looker(self.spec, self.work)
        groups = [Part(self, b, g) for b, g in work.groups(self.spec.batch, self.groups)]
        if not work.careful:
            for group in groups:
                yield from ((group, tile) for tile in work.tiles[group.entry])
                group.release()
            return
        for entry, tiles in enumerate(work.tiles):
            mine = [group for group in groups if group.entry == entry]
            for tile in map(looker, tiles):
                yield from ((group, tile) for group in mine)
            for group in mine:
                group.release()


class Part:
    """Some batch entries and kv heads, the units, whose products are computed together.

    Their tensors are [units, rows, columns]; of a single unit they are matrices, for which oneDNN is there, or, where a tile
    counts several of one shape, [tiles, rows, columns].
    """

    def __init__(self, call: Call, b: slice, g: slice) -> None:
        self.call, self.b, self.g = call, b, g
        self.units = (b.stop - b.start) * (g.stop - g.start)
        self.entry = b.start if len(call.work.tiles) > 1 else 0
        self.simple = self.units == call.R == 1
        self._kv: tuple[Tensor, Tensor] | None = None
        self._own: dict[int, Tensor] = {}

    def kv(self) -> tuple[Tensor, Tensor]:
        """scale · k [units, kv_len, head_dim] and v, scaled for what dropout drops; dense, in the dtype of the computation."""
        if self._kv is None:
            call = self.call
            self._kv = self._dense(call.k, call.spec.scale), self._dense(call.v, call.keep_scale)
        return self._kv

    def release(self) -> None:
        self._kv = None

    def _dense(self, x: Tensor, scale: float) -> Tensor:
        x = x[self.b, self.g].flatten(0, 1) if self.units > 1 else x[self.b.start, self.g.start]
        x = x.to(self.call.dtype).contiguous()
        return x if scale == 1.0 else x * scale

    def rows(self, x: Tensor, tile: Tile) -> Tensor:
        """Of [batch, kv_heads, heads a group, q_len, d] the tile's rows, [units, heads a group · rows, d]."""
        if self.simple and tile.count == 1:
            rows = self._mine(x).narrow(0, tile.first, tile.rows).to(self.call.dtype)
        else:
            rows = self.place(x, tile).to(self.call.dtype)
            rows = rows.reshape(*((max(self.units, tile.count),) if self.units * tile.count > 1 else ()), -1, x.shape[-1])
        if tile.empty is None:
            return rows
        return self.wide(rows).masked_fill(self.of(tile.empty), 0.0).view_as(rows)

    def write(self, x: Tensor, tile: Tile, found: Tensor) -> None:
        """found [units, heads a group · rows, d] into the tile's rows of [batch, kv_heads, heads a group, q_len, d]."""
        if self.simple and tile.count == 1:
            self._mine(x).narrow(0, tile.first, tile.rows).copy_(found)
        else:
            self.place(x, tile).copy_(self.wide(found))

    def _mine(self, x: Tensor) -> Tensor:
        """The [q_len, d] of a part that is one head; a view made once a call, since there may be many tiles."""
        if id(x) not in self._own:
            self._own[id(x)] = x[self.b.start, self.g.start, 0]
        return self._own[id(x)]

    def place(self, x: Tensor, tile: Tile) -> Tensor:
        """The tile's rows of [batch | 1, kv_heads | 1, heads a group | 1, q_len, d], as wide() has them: a view."""
        x = self.slice(x)[..., tile.queries, :]
        return x if tile.count == 1 else unflatten(x, 3, tile.count, tile.rows)[:, 0].permute(0, 2, 1, 3, 4)

    def of(self, mask: Tensor) -> Tensor:
        """[batch | 1, heads | 1, …] → this group's part of it, [·, ·, ·, rows | 1, columns | 1]."""
        return self.slice(self.call.by_group(mask))

    def slice(self, x: Tensor) -> Tensor:
        return x[self.b if x.shape[0] > 1 else slice(None), self.g if x.shape[1] > 1 else slice(None)]

    def wide(self, x: Tensor) -> Tensor:
        """[units, heads a group · rows, n] → [batch entries, kv heads or tiles, heads a group, rows, n]"""
        nb, R = self.b.stop - self.b.start, self.call.R
        return x.view(nb, -1 if x.dim() == 3 else 1, R, x.shape[-2] // R, x.shape[-1])


def multiply(x: Tensor, w: Tensor) -> Tensor:
    """x [units, m, k] · wᵀ → [units, m, n]; w dense by rows or by columns."""
    return products.nt(x, w) if x.dim() == 2 else torch.bmm(x, w.mT)


def take(x: Tensor, tile: Tile) -> Tensor:
    """The tile's columns of [units, kv_len, d]; of several tiles [tiles, columns, d], which overlap in memory."""
    a, b = tile.columns[0]
    if tile.count > 1:
        D = x.shape[1]
        return x.as_strided((tile.count, b - a, D), (tile.rows * D, D, 1), x.storage_offset() + a * D)
    if len(tile.columns) == 1:
        return x if b - a == x.shape[-2] else x.narrow(-2, a, b - a)
    return torch.cat([x.narrow(-2, a, b - a) for a, b in tile.columns], -2)


def pick(x: Tensor, tile: Tile) -> Tensor:
    """The tile's columns of [batch | 1, kv_heads | 1, ·, ·, kv_len | 1], as wide() has them."""
    if x.shape[-1] == 1:
        return x
    a, b = tile.columns[0]
    if tile.count > 1:
        return x[..., a : b + (tile.count - 1) * tile.rows].unfold(-1, b - a, tile.rows).movedim(-2, 1).flatten(1, 2)
    return x[..., a:b] if len(tile.columns) == 1 else torch.cat([x[..., a:b] for a, b in tile.columns], -1)
