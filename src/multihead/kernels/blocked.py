"""Ours for CPU: forward and backward over the tiles that a mask leaves, each of them a few large matrix products.

    S = scale · Q Kᵀ (+ bias, softcap)     P = softmax(S) over whole rows     out = P V
    dP = dout Vᵀ     dS = P ∘ (dP − rowsum(P ∘ dP))     dQ += scale · dS K     dK += scale · dSᵀ Q     dV += Pᵀ dout

Nothing L×L is kept: backward computes P again. Query heads that share a kv head are rows of one product, so that no key is
repeated. bfloat16 is multiplied as bfloat16 where the processor does that faster, with scores rounded to it as by hand; float16
is computed in float32.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import dropping, products
from .cutting import lower
from .exactly import backward_exactly, forward_exactly, harmless
from .once import mark
from .spec import Spec, transformed
from .sums import Sums
from .tiles import Tile
from .units import Call, Part, multiply, pick, take


def refuses(spec: Spec) -> str | None:
    """Why this kernel cannot do the call, or None."""
    if spec.device.type not in ("cpu", "meta"):
        return f"it is for CPU, and the call is on {spec.device.type}"
    if not (spec.q_len and spec.kv_len and spec.v_dim and spec.batch):
        return "there is an axis of size 0"
    if forward_ad._current_level >= 0:  # pyright: ignore[reportPrivateUsage]
        return "it has no forward-mode derivative"
    if not torch.compiler.is_compiling() and transformed():
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


def route(spec: Spec) -> str:
    """The library that multiplies matrices, and why."""
    return products.describe(spec.dtype)


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
        out, lse = cast(tuple[Tensor, Tensor], _Blocked.apply(q, k, v, spec.bias, spec.sinks, spec))  # pyright: ignore[reportGeneralTypeIssues]
        mark(out, "blocked")
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
        dout = cast(Tensor, q.new_zeros(*q.shape[:3], v.shape[3])) if dout is None else dout
        with torch.no_grad():
            found = backward(dout, dlse, q, k, v, spec, ctx.needs_input_grad[3], ctx.needs_input_grad[4])
        return (*found, None)


# ---- one tile ---------------------------------------------------------------------------------------------------------


def _scores(part: Part, tile: Tile, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """S [units, m, n] of a tile; which rows see nothing, [·, ·, ·, rows, 1], where there may be such; tanh of a softcap."""
    call, spec = part.call, part.call.spec
    s, tanh = multiply(q, k), None
    if spec.softcap is not None:
        tanh = s.div_(spec.softcap).tanh_()
        s = tanh * spec.softcap
    wide, empty = part.wide(s), None if tile.empty is None else part.of(tile.empty)
    if call.bias is not None:
        bias = part.slice(call.bias) if call.bias.shape[3] == 1 else part.place(call.bias, tile)
        wide.add_(pick(bias, tile))
    for hidden in tile.hidden:
        these = wide[..., hidden.first : hidden.last]
        torch.minimum(these, part.of(hidden.cap), out=these)
    if call.bias is not None:  # it may hide, too
        blocked = wide.amax(-1, keepdim=True) == -math.inf
        empty = blocked if empty is None else blocked | empty
    if empty is not None:
        wide.masked_fill_(empty, 0.0)
    return s, empty, tanh


def _softmax(part: Part, s: Tensor, empty: Tensor | None, want_lse: bool) -> tuple[Tensor, Tensor | None]:
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


def _keep(part: Part, tile: Tile, like: Tensor) -> Tensor | None:
    """Ones where dropout keeps a weight and zeros where it does not, or None where nothing is dropped."""
    call, dropout = part.call, part.call.spec.dropout
    if not dropout:
        return None
    x = part.place(call.rows, tile) ^ pick(part.slice(call.columns.unsqueeze(1)), tile)
    return dropping.keep_(x, dropout).to(like.dtype).reshape(like.shape)


def forward(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """out, whose memory is [batch, q_len, heads, v_dim] as the layer wants it; lse, empty unless wanted."""
    work = lower(spec)
    clean = harmless(q, k, v, spec, work)
    if clean is None:
        return forward_exactly(q, k, v, spec, work)
    k, v = clean
    call = Call(q, k, v, spec, work)
    B, H, T, E = spec.batch, spec.heads, spec.q_len, spec.v_dim
    out = torch.empty(B, T, H, E, dtype=spec.dtype).transpose(1, 2)
    lse = torch.empty((B, H, T, 1) if spec.want_lse else 0, dtype=call.exact)
    by_group = call.heads(out)
    lse_by_group = call.heads(lse) if spec.want_lse else lse
    for part, tile in call.parts():
        if not tile.columns:
            part.place(by_group, tile).zero_()
            if spec.want_lse:
                part.place(lse_by_group, tile).fill_(-math.inf)
            continue
        k_all, v_all = part.kv()
        s, empty, _ = _scores(part, tile, part.rows(call.q, tile), take(k_all, tile))
        p, sums = _softmax(part, s, empty, spec.want_lse)
        keep = _keep(part, tile, p)
        p = p if keep is None else p.mul_(keep)
        part.write(by_group, tile, multiply(p, take(v_all, tile).mT))
        if sums is not None and spec.want_lse:
            part.write(lse_by_group, tile, sums)
        del s, p  # else they live on while the next tile's are made
    return out, lse.squeeze(-1) if spec.want_lse else lse


def backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, spec: Spec, need_bias: bool, need_sinks: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """dq, dk, dv, and where asked for the gradients of bias and sinks."""
    work = lower(spec)
    clean = harmless(q, k, v, spec, work)
    if clean is None:
        return backward_exactly(dout, dlse, q, k, v, spec, work, need_bias, need_sinks)
    k, v = clean
    call, sums = Call(q, k, v, spec, work), Sums(q, k, v, spec, work, need_bias, need_sinks)
    dout = call.heads(dout)
    dlse = None if dlse is None else call.heads(dlse.unsqueeze(-1))
    for part, tile in call.parts():
        if not tile.columns:
            part.place(sums.dq, tile).zero_()
            continue
        kv = [take(x, tile) for x in part.kv()]
        rows, back = part.rows(call.q, tile), part.rows(dout, tile)
        s, empty, tanh = _scores(part, tile, rows, kv[0])
        p, lse = _softmax(part, s, empty, want_lse=False)
        keep, dp = _keep(part, tile, p), multiply(back, kv[1])
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
