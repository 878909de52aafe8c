"""The gradients of the kernel "blocked" as they grow, tile by tile."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import products
from .spec import Spec
from .tiles import Tile, Work
from .units import Part, multiply, unflatten


class Sums:
    """The gradients as they grow, over the tiles of a call."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, spec: Spec, work: Work, need_bias: bool, need_sinks: bool
    ) -> None:  # fmt: skip
        G, R = spec.kv_heads, spec.heads // spec.kv_heads
        exact = torch.float64 if spec.dtype == torch.float64 else torch.float32
        self.spec, self.like = spec, (k, v)
        self.batched = work.together != (1, 1) or any(tile.count > 1 for tiles in work.tiles for tile in tiles)
        self.dq_whole = torch.empty_like(q)
        self.dq = unflatten(self.dq_whole, 1, G, R)
        self.dk, self.dv = (self._zeros(x, exact) for x in (k, v))
        self.dbias = torch.zeros_like(spec.bias, dtype=exact) if need_bias and spec.bias is not None else None
        self.dsinks = torch.zeros(G, R, dtype=exact) if need_sinks else None

    def _zeros(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[batch, kv_heads, kv_len, d], lying as the products come: those of two matrices transposed."""
        B, G, S, D = x.shape
        return torch.zeros(B, G, S, D, dtype=dtype) if self.batched else torch.zeros(B, G, D, S, dtype=dtype).mT

    def _add(self, total: Tensor, part: Part, tile: Tile, left: Tensor, right: Tensor) -> None:
        """total[columns] += leftᵀ right, left [units, m, columns], right [units, m, d]."""
        if left.dim() == 2:
            wide = products.nt(right.t().contiguous(), left.t()).t()[None, None]
        else:
            wide = unflatten(torch.bmm(left.mT, right), 0, part.b.stop - part.b.start, -1)
        if tile.count > 1:
            self._fold(total[part.b.start, part.g.start], tile, wide[0])
            return
        at = 0
        for a, b in tile.columns:
            total[part.b, part.g, a:b] += wide[:, :, at : at + b - a]
            at += b - a

    @staticmethod
    def _fold(total: Tensor, tile: Tile, found: Tensor) -> None:
        """total [kv_len, d] += found [tiles, columns, d], whose columns overlap: as many at a time as a tile has rows."""
        (a, b), (down, across) = tile.columns[0], total.stride()
        for first in range(0, b - a, tile.rows):
            some = found[:, first : first + tile.rows]
            begin = total.storage_offset() + (a + first) * down
            total.as_strided(some.shape, (tile.rows * down, down, across), begin).add_(some)

    def values(self, part: Part, tile: Tile, p: Tensor, back: Tensor) -> None:
        self._add(self.dv, part, tile, p, back)

    def queries_and_keys(self, part: Part, tile: Tile, ds: Tensor, rows: Tensor, k: Tensor) -> None:
        self._add(self.dk, part, tile, ds, rows)
        part.write(self.dq, tile, multiply(ds, k.mT))

    def bias_(self, part: Part, tile: Tile, ds: Tensor) -> None:
        if self.dbias is None:
            return
        total = part.slice(part.call.by_group(self.dbias))
        total = total if total.shape[3] == 1 else total[..., tile.queries, :]
        wide, at = part.wide(ds), 0
        for a, b in tile.columns:
            whole = total if total.shape[4] == 1 else total[..., a:b]
            whole += wide[..., at : at + b - a].to(whole.dtype).sum_to_size(whole.shape)
            at += b - a

    def sinks(self, part: Part, p: Tensor, dp: Tensor, lse: Tensor, dlse: Tensor | None, tile: Tile) -> None:
        """A sink's weight has no value: its score falls by what the others' gradients sum to."""
        call = part.call
        if self.dsinks is None or call.sinks is None:
            return
        weight = (part.slice(call.sinks) - part.wide(lse)).exp_()
        weight = weight.masked_fill_(part.wide(lse) == -math.inf, 0.0)
        slope = -part.wide((p.to(lse.dtype) * dp).sum(-1, keepdim=True))
        if dlse is not None:
            slope = slope + part.place(dlse, tile)
        total = torch.where(weight != 0, weight * slope, 0.0).sum((0, 3, 4))  # [kv heads or tiles, heads a group]
        self.dsinks[part.g] += total if tile.count == 1 else total.sum(0, keepdim=True)

    def result(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        spec = self.spec
        scaled = self.dk.mul_(spec.scale), self.dv.mul_(1.0 / (1.0 - spec.dropout) if spec.dropout < 1.0 else 0.0)
        dk, dv = (torch.empty_like(x).copy_(total) for x, total in zip(self.like, scaled, strict=True))
        dbias = None if self.dbias is None or spec.bias is None else self.dbias.to(spec.bias.dtype)
        dsinks = None if self.dsinks is None or spec.sinks is None else self.dsinks.flatten().to(spec.sinks.dtype)
        return self.dq_whole, dk, dv, dbias, dsinks
