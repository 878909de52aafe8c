"""Ours for CPU: forward and backward over the tiles that a mask leaves, each of them a few large matrix products.

    S = scale · Q Kᵀ (+ bias, softcap)     P = softmax(S) over whole rows     out = P V
    dP = dout Vᵀ     dS = P ∘ (dP − rowsum(P ∘ dP))     dQ += scale · dS K     dK += scale · dSᵀ Q     dV += Pᵀ dout

Nothing L×L is kept: backward computes P again. Query heads that share a kv head are rows of one product, so that no key is
repeated. bfloat16 is multiplied as bfloat16 where the processor does that faster, with scores rounded to it as by hand; float16
is computed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue, reportUnknownVariableType]
from torch.autograd import forward_ad

from ..masks import Frame, Mask
from . import dropping, products, reference
from .once import once
from .spec import Spec
from .tiles import Looker, Tile, Work, lower


def refuses(spec: Spec) -> str | None:
    """Why this kernel cannot do the call, or None."""
    if spec.device.type not in ("cpu", "meta"):
        return f"it is for CPU, and the call is on {spec.device.type}"
    if not (spec.q_len and spec.kv_len and spec.v_dim and spec.batch):
        return "there is an axis of size 0"
    if forward_ad._current_level >= 0:  # pyright: ignore[reportPrivateUsage]
        return "it has no forward-mode derivative"
    if not torch.compiler.is_compiling() and functorch.peek_interpreter_stack() is not None:  # pyright: ignore[reportUnknownMemberType]
        return "torch.func's transforms cannot look into it"
    return None


def quadratic_bytes(spec: Spec) -> int:
    """None: tiles are as many rows as fit in 16 MiB."""
    del spec
    return 0


def seconds(spec: Spec) -> float:
    """What a forward is expected to take."""
    return lower(spec).seconds


def computed(spec: Spec) -> int:
    """How many pairs lie in the tiles."""
    return lower(spec).pairs


def peak_bytes(spec: Spec) -> int:
    """What a forward holds at once beside its arguments: the output, k and v as they are multiplied, the scores of a tile."""
    work, dtype = lower(spec), products.computed_in(spec.dtype)
    units = min(work.together[0], spec.batch) * min(work.together[1], spec.kv_heads)
    widest = max((tile.count * tile.rows * tile.width for tiles in work.tiles for tile in tiles), default=0)
    scores = units * (spec.heads // spec.kv_heads) * widest
    kv = spec.batch * spec.kv_heads if work.careful else units
    return spec.out_bytes + (scores + kv * spec.kv_len * (spec.head_dim + spec.v_dim)) * dtype.itemsize


def run(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> tuple[Tensor, Tensor | None]:
    """out [batch, heads, q_len, v_dim]; lse [batch, heads, q_len], if wanted."""
    if spec.dropout and spec.seed is None:
        spec.seed = torch.randint(2**63 - 1, (), device=q.device)
    if torch.compiler.is_compiling() or type(q) not in (Tensor, torch.nn.Parameter):
        from .operator import call  # defined where it is needed: declaring operators costs milliseconds of import

        return call(q, k, v, spec)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, spec.bias, spec.sinks)):
        out, lse = _Blocked.apply(q, k, v, spec.bias, spec.sinks, spec)  # pyright: ignore[reportGeneralTypeIssues]
    else:
        out, lse = forward(q, k, v, spec)
    return out, lse if spec.want_lse else None


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, spec: Spec) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(q, k, v, bias, sinks)
        ctx.spec = spec.with_tensors(None, None)
        ctx.set_materialize_grads(False)
        return forward(q, k, v, spec)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, bias, sinks = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * 6
        spec: Spec = ctx.spec.with_tensors(bias, sinks)
        dout = q.new_zeros(*q.shape[:3], v.shape[3]) if dout is None else dout
        with torch.no_grad():
            found = backward(dout, dlse, q, k, v, spec, ctx.needs_input_grad[3], ctx.needs_input_grad[4])
        return (*once("blocked", found), None)


# ---- a call and its groups --------------------------------------------------------------------------------------------


class _Call:
    """What the tiles of a call share."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, spec: Spec, work: Work) -> None:
        self.spec, self.work, self.frame = spec, work, spec.frame
        self.dtype = products.computed_in(spec.dtype)
        self.groups, self.R = spec.kv_heads, spec.heads // spec.kv_heads
        self.q, self.k, self.v = q.unflatten(1, (self.groups, self.R)), k, v
        self.bias = None if spec.bias is None else self.by_group(spec.bias.detach())
        self.sinks = None if spec.sinks is None else spec.sinks.detach().to(self.exact).view(1, self.groups, self.R, 1, 1)
        self.keep_scale = 0.0 if spec.dropout == 1.0 else 1.0 / (1.0 - spec.dropout)
        if spec.dropout and spec.seed is not None:
            frame = self.frame
            rows = dropping.rows(spec.seed, frame.b, frame.h, frame.q).expand(spec.batch, spec.heads, spec.q_len, 1)
            self.rows, self.columns = rows.unflatten(1, (self.groups, self.R)), dropping.columns(frame.k)

    @property
    def exact(self) -> torch.dtype:
        """Where sums over many numbers are kept."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def by_group(self, x: Tensor) -> Tensor:
        """[·, heads | 1, ·, ·] → [·, kv_heads | 1, heads a group | 1, ·, ·]"""
        return x.unsqueeze(1) if x.shape[1] == 1 else x.unflatten(1, (self.groups, self.R))

    def parts(self) -> Iterator[tuple[_Part, Tile]]:
        """Each group with each of its tiles; where tiles must be looked at, all groups in turn use what was seen."""
        work, looker = self.work, Looker(self.spec, self.work)
        groups = [_Part(self, b, g) for b, g in work.groups(self.spec.batch, self.groups)]
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


class _Part:
    """Some batch entries and kv heads, the units, whose products are computed together.

    Their tensors are [units, rows, columns]; of a single unit they are matrices, for which oneDNN is there, or, where a tile
    counts several of one shape, [tiles, rows, columns].
    """

    def __init__(self, call: _Call, b: slice, g: slice) -> None:
        self.call, self.b, self.g = call, b, g
        self.units = (b.stop - b.start) * (g.stop - g.start)
        self.entry = b.start if len(call.work.tiles) > 1 else 0
        self._kv: tuple[Tensor, Tensor] | None = None

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
        if self.units == tile.count == self.call.R == 1:
            rows = x[self.b.start, self.g.start, 0, tile.first : tile.last].to(self.call.dtype)
        else:
            rows = self.place(x, tile).to(self.call.dtype)
            rows = rows.reshape(*((max(self.units, tile.count),) if self.units * tile.count > 1 else ()), -1, x.shape[-1])
        if tile.empty is None:
            return rows
        return self.wide(rows).masked_fill(self.of(tile.empty), 0.0).view_as(rows)

    def place(self, x: Tensor, tile: Tile) -> Tensor:
        """The tile's rows of [batch | 1, kv_heads | 1, heads a group | 1, q_len, d], as wide() has them: a view."""
        x = self.slice(x)[..., tile.queries, :]
        return x if tile.count == 1 else x.unflatten(3, (tile.count, tile.rows))[:, 0].permute(0, 2, 1, 3, 4)

    def of(self, mask: Tensor) -> Tensor:
        """[batch | 1, heads | 1, …] → this group's part of it, [·, ·, ·, rows | 1, columns | 1]."""
        return self.slice(self.call.by_group(mask))

    def slice(self, x: Tensor) -> Tensor:
        return x[self.b if x.shape[0] > 1 else slice(None), self.g if x.shape[1] > 1 else slice(None)]

    def wide(self, x: Tensor) -> Tensor:
        """[units, heads a group · rows, n] → [batch entries, kv heads or tiles, heads a group, rows, n]"""
        nb, R = self.b.stop - self.b.start, self.call.R
        return x.view(nb, -1 if x.dim() == 3 else 1, R, x.shape[-2] // R, x.shape[-1])


def _nt(x: Tensor, w: Tensor) -> Tensor:
    """x [units, m, k] · wᵀ → [units, m, n]; w dense by rows or by columns."""
    return products.nt(x, w) if x.dim() == 2 else torch.bmm(x, w.mT)


def _take(x: Tensor, tile: Tile) -> Tensor:
    """The tile's columns of [units, kv_len, d]; of several tiles [tiles, columns, d], which overlap in memory."""
    a, b = tile.columns[0]
    if tile.count > 1:
        D = x.shape[1]
        return x.as_strided((tile.count, b - a, D), (tile.rows * D, D, 1), x.storage_offset() + a * D)
    if len(tile.columns) == 1:
        return x if b - a == x.shape[-2] else x.narrow(-2, a, b - a)
    return torch.cat([x.narrow(-2, a, b - a) for a, b in tile.columns], -2)


def _pick(x: Tensor, tile: Tile) -> Tensor:
    """The tile's columns of [batch | 1, kv_heads | 1, ·, ·, kv_len | 1], as wide() has them."""
    if x.shape[-1] == 1:
        return x
    a, b = tile.columns[0]
    if tile.count > 1:
        return x[..., a : b + (tile.count - 1) * tile.rows].unfold(-1, b - a, tile.rows).movedim(-2, 1).flatten(1, 2)
    return x[..., a:b] if len(tile.columns) == 1 else torch.cat([x[..., a:b] for a, b in tile.columns], -1)


# ---- one tile ---------------------------------------------------------------------------------------------------------


def _scores(part: _Part, tile: Tile, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """S [units, m, n] of a tile; which rows see nothing, [·, ·, ·, rows, 1], where there may be such; tanh of a softcap."""
    call, spec = part.call, part.call.spec
    s, tanh = _nt(q, k), None
    if spec.softcap is not None:
        tanh = s.div_(spec.softcap).tanh_()
        s = tanh * spec.softcap
    wide, empty = part.wide(s), None if tile.empty is None else part.of(tile.empty)
    if call.bias is not None:
        bias = part.slice(call.bias) if call.bias.shape[3] == 1 else part.place(call.bias, tile)
        wide.add_(_pick(bias, tile))
    for hidden in tile.hidden:
        these = wide[..., hidden.first : hidden.last]
        torch.minimum(these, part.of(hidden.cap), out=these)
    if call.bias is not None:  # it may hide, too
        blocked = wide.amax(-1, keepdim=True) == -math.inf
        empty = blocked if empty is None else blocked | empty
    if empty is not None:
        wide.masked_fill_(empty, 0.0)
    return s, empty, tanh


def _softmax(part: _Part, s: Tensor, empty: Tensor | None, want_lse: bool) -> tuple[Tensor, Tensor | None]:
    """P in place of S, and the log-sum-exp [units, m, 1] with the sinks in it, if it is wanted or needed."""
    call = part.call
    if not want_lse and call.sinks is None:
        p, lse = torch.softmax(s, -1, out=s), None
    else:
        most = s.amax(-1, keepdim=True).to(call.exact)
        p = torch.softmax(s, -1, out=s) if s.dtype == call.exact else torch.softmax(s, -1, dtype=call.exact)
        lse = most - p.amax(-1, keepdim=True).log_()  # the largest weight is exp(0) over the sum
        if call.sinks is not None:
            sinks = part.slice(call.sinks)
            whole = torch.logaddexp(part.wide(lse), sinks).view_as(lse)
            p.mul_((lse - whole).exp_())
            lse = whole
        p = p.to(s.dtype)
    if empty is not None:
        part.wide(p).masked_fill_(empty, 0.0)
        if lse is not None:
            part.wide(lse).masked_fill_(empty, -math.inf)
    return p, lse


def _keep(part: _Part, tile: Tile, like: Tensor) -> Tensor | None:
    """Ones where dropout keeps a weight and zeros where it does not, or None where nothing is dropped."""
    call, dropout = part.call, part.call.spec.dropout
    if not dropout:
        return None
    x = part.place(call.rows, tile) ^ _pick(part.slice(call.columns.unsqueeze(1)), tile)
    return dropping.keep_(x, dropout).to(like.dtype).reshape(like.shape)


def forward(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """out, whose memory is [batch, q_len, heads, v_dim] as the layer wants it; lse, empty unless wanted."""
    work = lower(spec)
    clean = _harmless(q, k, v, spec, work)
    if clean is None:
        return _forward_exactly(q, k, v, spec, work)
    k, v = clean
    call = _Call(q, k, v, spec, work)
    B, H, T, E = spec.batch, spec.heads, spec.q_len, spec.v_dim
    out = torch.empty(B, T, H, E, dtype=spec.dtype).transpose(1, 2)
    lse = torch.empty((B, H, T, 1) if spec.want_lse else 0, dtype=call.exact)
    by_group = out.unflatten(1, (call.groups, call.R))
    lse_by_group = lse.unflatten(1, (call.groups, call.R)) if spec.want_lse else lse
    for part, tile in call.parts():
        if not tile.columns:
            part.place(by_group, tile).zero_()
            if spec.want_lse:
                part.place(lse_by_group, tile).fill_(-math.inf)
            continue
        k_all, v_all = part.kv()
        s, empty, _ = _scores(part, tile, part.rows(call.q, tile), _take(k_all, tile))
        p, sums = _softmax(part, s, empty, spec.want_lse)
        keep = _keep(part, tile, p)
        p = p if keep is None else p.mul_(keep)
        part.place(by_group, tile).copy_(part.wide(_nt(p, _take(v_all, tile).mT)))
        if sums is not None and spec.want_lse:
            part.place(lse_by_group, tile).copy_(part.wide(sums))
    return out, lse.squeeze(-1) if spec.want_lse else lse


def backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, spec: Spec, need_bias: bool, need_sinks: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """dq, dk, dv, and where asked for the gradients of bias and sinks."""
    work = lower(spec)
    clean = _harmless(q, k, v, spec, work)
    if clean is None:
        return _backward_exactly(dout, dlse, q, k, v, spec, work, need_bias, need_sinks)
    k, v = clean
    call, sums = _Call(q, k, v, spec, work), _Sums(q, k, v, spec, work, need_bias, need_sinks)
    dout = dout.unflatten(1, (call.groups, call.R))
    dlse = None if dlse is None else dlse.unsqueeze(-1).unflatten(1, (call.groups, call.R))
    for part, tile in call.parts():
        if not tile.columns:
            part.place(sums.dq, tile).zero_()
            continue
        kv = [_take(x, tile) for x in part.kv()]
        rows, back = part.rows(call.q, tile), part.rows(dout, tile)
        s, empty, tanh = _scores(part, tile, rows, kv[0])
        p, lse = _softmax(part, s, empty, want_lse=False)
        keep, dp = _keep(part, tile, p), _nt(back, kv[1])
        sums.values(part, tile, p if keep is None else p * keep, back)
        dp = dp if keep is None else dp.mul_(keep)
        if need_sinks and lse is not None:
            sums.sinks(part, p, dp, lse, dlse, tile)
        torch.ops.aten._softmax_backward_data.out(dp, p, -1, p.dtype, grad_input=dp)
        if dlse is not None:
            ds = part.wide(dp).addcmul_(part.wide(p), part.place(dlse, tile).to(p.dtype))
            dp = dp if empty is None else ds.masked_fill_(empty, 0.0).view_as(dp)
        if need_bias:
            sums.bias_(part, tile, dp)
        if tanh is not None:
            dp.mul_(tanh.square_().neg_().add_(1.0))
        sums.queries_and_keys(part, tile, dp, rows, kv[0])
    return sums.result()


class _Sums:
    """The gradients as they grow, over the tiles of a call."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, spec: Spec, work: Work, need_bias: bool, need_sinks: bool
    ) -> None:  # fmt: skip
        G, R = spec.kv_heads, spec.heads // spec.kv_heads
        exact = torch.float64 if spec.dtype == torch.float64 else torch.float32
        self.spec, self.like = spec, (k, v)
        self.batched = work.together != (1, 1) or any(tile.count > 1 for tiles in work.tiles for tile in tiles)
        self.dq_whole = torch.empty_like(q)
        self.dq = self.dq_whole.unflatten(1, (G, R))
        self.dk, self.dv = (self._zeros(x, exact) for x in (k, v))
        self.dbias = torch.zeros_like(spec.bias, dtype=exact) if need_bias and spec.bias is not None else None
        self.dsinks = torch.zeros(G, R, dtype=exact) if need_sinks else None

    def _zeros(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[batch, kv_heads, kv_len, d], lying as the products come: those of two matrices transposed."""
        B, G, S, D = x.shape
        return torch.zeros(B, G, S, D, dtype=dtype) if self.batched else torch.zeros(B, G, D, S, dtype=dtype).mT

    def _add(self, total: Tensor, part: _Part, tile: Tile, left: Tensor, right: Tensor) -> None:
        """total[columns] += leftᵀ right, left [units, m, columns], right [units, m, d]."""
        if left.dim() == 2:
            wide = products.nt(right.t().contiguous(), left.t()).t()[None, None]
        else:
            wide = torch.bmm(left.mT, right).unflatten(0, (part.b.stop - part.b.start, -1))
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

    def values(self, part: _Part, tile: Tile, p: Tensor, back: Tensor) -> None:
        self._add(self.dv, part, tile, p, back)

    def queries_and_keys(self, part: _Part, tile: Tile, ds: Tensor, rows: Tensor, k: Tensor) -> None:
        self._add(self.dk, part, tile, ds, rows)
        part.place(self.dq, tile).copy_(part.wide(_nt(ds, k.mT)))

    def bias_(self, part: _Part, tile: Tile, ds: Tensor) -> None:
        if self.dbias is None:
            return
        total = part.slice(part.call.by_group(self.dbias))
        total = total if total.shape[3] == 1 else total[..., tile.queries, :]
        wide, at = part.wide(ds), 0
        for a, b in tile.columns:
            whole = total if total.shape[4] == 1 else total[..., a:b]
            whole += wide[..., at : at + b - a].to(whole.dtype).sum_to_size(whole.shape)
            at += b - a

    def sinks(self, part: _Part, p: Tensor, dp: Tensor, lse: Tensor, dlse: Tensor | None, tile: Tile) -> None:
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


# ---- numbers that are not finite ----------------------------------------------------------------------------------------


def _finite(*tensors: Tensor) -> bool:
    """True only where no number is NaN or infinite; costs less than a copy."""
    return all(math.isfinite(x.sum(dtype=torch.float32 if x.dtype == torch.float16 else None).item()) for x in tensors)


def _harmless(q: Tensor, k: Tensor, v: Tensor, spec: Spec, work: Work) -> tuple[Tensor, Tensor] | None:
    """k and v in which every number that is multiplied is finite, keys that no query sees being zero; None if there are others."""
    if not work.careful or _finite(q, k, v):
        return k, v
    if not _finite(q):
        return None
    seen, looker = torch.zeros(spec.batch, spec.kv_len, dtype=torch.bool), Looker(spec, work)
    for entry, tiles in enumerate(work.tiles):
        at = slice(None) if len(work.tiles) == 1 else slice(entry, entry + 1)
        for tile in tiles:
            _mark(seen[at], looker(tile), at)
    unseen = ~seen[:, None, :, None]
    k, v = k.masked_fill(unseen, 0.0), v.masked_fill(unseen, 0.0)
    return (k, v) if _finite(k, v) else None


def _mark(seen: Tensor, tile: Tile, entries: slice) -> None:
    """seen [batch entries, kv_len] becomes True for every column that a query of the tile sees."""
    found = torch.ones(seen.shape[0], tile.width, dtype=torch.bool)
    for hidden in tile.hidden:
        some = (hidden.cap > 0).any(2).any(1)  # [batch | 1, columns]
        found[:, hidden.first : hidden.last] &= some if some.shape[0] == 1 else some[entries]
    at = 0
    for a, b in tile.columns:
        seen[:, a:b] |= found[:, at : at + b - a]
        at += b - a


class _Said(Mask):
    """What may attend, as looked up already."""

    tensors = ("allowed",)

    def __init__(self, allowed: Tensor) -> None:
        self.allowed = allowed

    def evaluate(self, frame: Frame) -> Tensor:
        del frame
        return self.allowed


def _blocks(q: Tensor, k: Tensor, v: Tensor, spec: Spec, work: Work) -> Iterator[tuple[slice, Spec, Tensor]]:
    """The call, some queries at a time, as calls of their own: what they may see, said by a table."""
    frame, rows = spec.frame, max(1, min(work.rows, 2**22 // max(spec.batch * spec.heads * spec.kv_len, 1)))
    start = frame.q_start
    for first in range(0, spec.q_len, rows):
        at = slice(first, min(first + rows, spec.q_len))
        bias = spec.bias if spec.bias is None or spec.bias.shape[2] == 1 else spec.bias[:, :, at]
        mask: Mask | None = None
        if spec.mask is not None:
            mask = _Said(spec.mask.part(frame, at, slice(0, spec.kv_len)))
        yield at, Spec(
            q[:, :, at], k, v, mask, bias, spec.scale, spec.dropout, spec.seed, spec.softcap, spec.sinks, spec.want_lse,
            start + first, spec.key_start,
        ), q[:, :, at]  # fmt: skip


def _forward_exactly(q: Tensor, k: Tensor, v: Tensor, spec: Spec, work: Work) -> tuple[Tensor, Tensor]:
    """The definition, some queries at a time, where a NaN could pass from a product into rows that must not see it."""
    found = [reference.run(rows, k, v, part) for _, part, rows in _blocks(q, k, v, spec, work)]
    out = torch.cat([out for out, _ in found], 2)
    return out, torch.cat([lse for _, lse in found if lse is not None], 2) if spec.want_lse else out.new_empty(0)


def _backward_exactly(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, spec: Spec, work: Work, need_bias: bool, need_sinks: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    given = [("q", q), ("k", k), ("v", v)]
    given += [(n, x) for n, x, need in (("bias", spec.bias, need_bias), ("sinks", spec.sinks, need_sinks)) if need and x is not None]
    leaves = {n: x.detach().requires_grad_() for n, x in given}
    totals = {n: torch.zeros_like(x) for n, x in leaves.items()}
    whole = spec.with_tensors(leaves.get("bias", spec.bias), leaves.get("sinks", spec.sinks))
    whole.want_lse = dlse is not None
    with torch.enable_grad():
        for at, part, rows in _blocks(leaves["q"], leaves["k"], leaves["v"], whole, work):
            out, lse = reference.run(rows, leaves["k"], leaves["v"], part)
            results, back = [out], [dout[:, :, at]]
            if lse is not None and dlse is not None:
                results, back = [*results, lse], [*back, dlse[:, :, at].to(lse.dtype)]
            found = torch.autograd.grad(results, list(leaves.values()), back, allow_unused=True, materialize_grads=True)
            for total, grad in zip(totals.values(), found, strict=True):
                total += grad
    return totals["q"], totals["k"], totals["v"], totals.get("bias"), totals.get("sinks")
