"""The pass over a call's weights, a block of queries at a time: scores, softmax, and whatever asks looks on.

Nothing L×L is ever stored: a block holds at most MOST numbers. It is made of tensor operations alone, so that it runs on every
device; the sizes are chosen for a CPU, where 256 rows of one head at a time are fastest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from ..kernels.products import nt as faster
from .call import Call
from .sight import LOW, Sight

ROWS, MOST, FEW = 256, 2**21, 32  # rows of a block; numbers in it; rows it has even where that makes more numbers
SMALL = 2**20  # blocks of fewer numbers take several heads at once
LARGE = 2**14  # from so many numbers on a head's product goes through nt()
TILE = 1024  # columns of one product


class Block:
    """Some queries of some heads of one batch entry, and every column that any of them may see.

    w      [heads, rows, columns]: the weights, zero where hidden
    s      the scores before softmax, LOW where hidden; only where somebody needs them, and until `expected` is asked for
    most   [heads, rows]: the largest score;   peak  the largest weight
    lse    [heads, rows]: the log-sum-exp, sinks included;   mass  the sum of a row's weights;   live  whether it sees anything
    """

    def __init__(
        self, s: Tensor, w: Tensor | None, sinks: Tensor | None, at: tuple[int, slice, slice, slice], shift: int
    ) -> None:  # fmt: skip
        self.b, self.h, self.i, self.j = at
        self.shift = shift  # the column of query 0's own position
        self.most = s.amax(-1)
        self.live = self.most > LOW / 2
        self.s = None if w is None else s
        self.w = torch.softmax(s, -1, out=s if w is None else w)
        self.peak = self.parts.amax(-1)
        self.lse = self.most - self.peak.log()
        self.mass = self.live.to(s.dtype)
        if sinks is not None:
            with_sink = torch.logaddexp(self.lse, sinks)
            share = (self.lse - with_sink).exp()
            self.w.mul_(share.unsqueeze(-1))
            self.peak, self.mass, self.lse = self.peak * share, self.mass * share, with_sink
        if not bool(self.live.all()):
            dead = ~self.live
            self.w.masked_fill_(dead.unsqueeze(-1), 0.0)
            self.peak.masked_fill_(dead, 0.0)
            self.most.masked_fill_(dead, -math.inf)
            self.lse.masked_fill_(dead, -math.inf)
        self._bands: dict[tuple[int, str], Tensor] = {}

    @cached_property
    def expected(self) -> Tensor:
        """[heads, rows]: Σ w · s, made where s was: nobody can look at the scores afterwards."""
        if self.s is None:
            raise RuntimeError("the scores of this block are not kept")
        s, self.s = self.s, None
        return s.mul_(self.w).sum(-1)

    @cached_property
    def parts(self) -> Tensor:
        """[heads, rows, columns / n]: the largest weight of the columns c, c + columns / n, …, as CPUs can do fast."""
        C = self.w.shape[2]
        n = next((n for n in (64, 32, 16, 8, 4) if C % n == 0 and C // n >= 128), 1)
        return self.w if n == 1 or not self.w.is_cpu else self.w.view(*self.w.shape[:2], n, -1).amax(2)

    @property
    def strongest(self) -> Tensor:
        """[heads, rows]: the column, counted from the block's first, of the largest weight; of equal ones any."""
        best = self.parts.argmax(-1, keepdim=True)
        n = self.w.shape[2] // max(self.parts.shape[2], 1)
        if n == 1:
            return best.squeeze(-1)
        inside = self.w.view(*self.w.shape[:2], n, -1).gather(3, best.unsqueeze(2).expand(-1, -1, n, 1)).squeeze(3).argmax(-1)
        return inside * self.parts.shape[2] + best.squeeze(-1)

    @property
    def rows(self) -> tuple[int, slice, slice]:
        """Where a result [batch, heads, q_len] takes this block."""
        return self.b, self.h, self.i

    @property
    def columns(self) -> tuple[int, slice, slice]:
        """Where a result [batch, heads, kv_len] takes this block."""
        return self.b, self.h, self.j

    @cached_property
    def received(self) -> Tensor:
        """[heads, columns]: each column's sum; of bands' sums, where there are any."""
        known = next((x for (_, how), x in self._bands.items() if how == "sum"), self.w)
        return known.sum(1)

    def bands(self, size: int, how: str) -> Tensor:
        """[heads, bands, columns]: rows reduced by "sum" or "amax" over the bands of `size` queries that lie in the block."""
        if (size, how) not in self._bands:
            n, R, C = self.w.shape
            if self.i.start % size == 0 and R % size == 0:
                found = getattr(self.w.view(n, R // size, size, C), how)(2)
            else:
                first = self.i.start
                edges = [0, *range(size - first % size, R, size), R]
                parts = [getattr(self.w[:, a:b], how)(1) for a, b in pairwise(edges)]
                found = torch.stack(parts, 1)
            self._bands[size, how] = found
        return self._bands[size, how]


def blocks(
    call: Call, scores: bool = False, stop: int | None = None, tick: Callable[[float], None] | None = None
) -> Iterator[Block]:
    """Every block of a call; `stop` leaves out the queries from there on, `tick` hears the share that is done."""
    B, H, G, T, S = call.sizes
    T = T if stop is None else min(stop, T)
    if not (B and H and T and S):
        return
    dtype = _wide(call)
    sight = Sight(call, min(ROWS, T))
    R = min(max(min(ROWS, MOST // sight.widest), FEW), T)
    sight = sight if sight.rows == R else Sight(call, R)
    wide, shifts = sight.widest, call.shift
    at_once = max(1, min(H, SMALL // (R * wide)))
    at_once = at_once if G == H or at_once == 1 else max(1, at_once // (H // G)) * (H // G)
    room = [torch.empty(at_once * R * wide, dtype=dtype, device=call.q.device) for _ in range(1 + scores)]
    sinks = None if call.sinks is None else call.sinks.to(dtype)
    for b in range(B):
        for h0 in range(0, H, at_once):
            h = slice(h0, min(h0 + at_once, H))
            g = slice(h0 * G // H, -(-h.stop * G // H))
            q, k = call.q[b, h].to(dtype) * call.scale, call.k[b, g].to(dtype).contiguous()
            for i0 in reversed(range(0, T, R)):  # the widest first: what it frees, the others fit into
                i = slice(i0, min(i0 + R, T))
                j = slice(*sight.columns(b, i))
                sizes = (h.stop - h.start, i.stop - i0, j.stop - j.start)
                views = [x[: math.prod(sizes)].view(sizes) for x in room]
                s = sight.finish(products(q[:, i], k[:, j], views[0]), b, h, i, j)
                w = views[1] if scores else None
                yield Block(s, w, None if sinks is None else sinks[h, None], (b, h, i, j), shifts[b])
                if tick is not None:
                    tick((b * H * T + h0 * T + (T - i0) * (h.stop - h0)) / (B * H * T))


def rows(call: Call, sight: Sight, b: int, h: int, i: slice) -> Tensor:
    """[rows, kv_len]: some queries' weights of one head, differentiable where q and k are."""
    g, all_, dtype = h * call.sizes[2] // call.sizes[1], slice(0, call.sizes[4]), _wide(call)
    s = (call.q[b, h, i].to(dtype) * call.scale) @ call.k[b, g].to(dtype).mT
    s = sight.finish(s.unsqueeze(0), b, slice(h, h + 1), i, all_)[0]
    live = s.detach().amax(-1, keepdim=True) > LOW / 2
    w = s.softmax(-1)
    if call.sinks is not None:
        lse = s.logsumexp(-1, keepdim=True)
        w = w * (lse - torch.logaddexp(lse, call.sinks[h].to(dtype))).exp()
    return torch.where(live, w, 0.0)


def _wide(call: Call) -> torch.dtype:
    return torch.float64 if call.q.dtype == torch.float64 else torch.float32


def products(q: Tensor, k: Tensor, out: Tensor) -> Tensor:
    """q [heads, rows, D] · k [heads | fewer, columns, D] → out [heads, rows, columns]

    A new tensor of many megabytes costs more than what is computed into it, so that one is used again and again.
    """
    n, R, D = q.shape
    if n == 1 and TILE <= k.shape[1] <= 4 * TILE:
        return nt(q[0].contiguous(), k[0]).unsqueeze(0)
    if R * k.shape[1] >= LARGE:
        share = n // k.shape[0]
        for h in range(n):
            x = q[h].contiguous()
            for c in range(0, k.shape[1], TILE):
                out[h, :, c : c + TILE] = nt(x, k[h // share, c : c + TILE])
        return out
    if k.shape[0] == n:
        return torch.bmm(q, k.mT, out=out)
    torch.bmm(q.reshape(k.shape[0], -1, D), k.mT, out=out.view(k.shape[0], -1, out.shape[2]))
    return out


def nt(x: Tensor, w: Tensor) -> Tensor:
    """x @ w.T for dense x [M, K], w [N, K]; in float32 on a CPU by the library that is faster there."""
    if x.is_cpu and x.dtype == torch.float32 and x.shape[0] >= 16 and w.shape[0] >= 64:
        return faster(x, w)
    return x @ w.T
