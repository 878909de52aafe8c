"""attention(): check shapes once, ask the plan, run one kernel."""

from __future__ import annotations

import math
from typing import Literal, overload

from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import handle_torch_function, has_torch_function

from .kernels import reference
from .kernels.fused import brief, quick, step, suits, whole
from .kernels.linear import linear
from .kernels.spec import Spec, autocast, autocasts, unbatched
from .masks import Causal, Mask
from .masks.algebra import Position
from .plan import choose, listening


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Mask | None = ..., bias: Tensor | None = ..., scale: float | None = ...,
    dropout: float = ..., seed: int | None = ..., softcap: float | None = ..., sinks: Tensor | None = ...,
    start: Position | None = ..., key_start: Position = ..., return_lse: Literal[False] = ...,
    return_weights: Literal[False] = ..., kernel: str = ...,
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Mask | None = ..., bias: Tensor | None = ..., scale: float | None = ...,
    dropout: float = ..., seed: int | None = ..., softcap: float | None = ..., sinks: Tensor | None = ...,
    start: Position | None = ..., key_start: Position = ..., return_lse: bool = ...,
    return_weights: bool = ..., kernel: str = ...,
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    start: Position | None = None,
    key_start: Position = 0,
    return_lse: bool = False,
    return_weights: bool = False,
    kernel: str = "auto",
) -> Tensor | tuple[Tensor, ...]:
    """Softmax attention.

        out[b,h,t,e] = Σ_s softmax_s(cap(scale · q[b,h,t,:]·k[b,g,s,:]) + bias[b,h,t,s]) v[b,g,s,e]
        g = h // (heads / kv_heads)

    q        [batch, heads,    q_len,  head_dim]; or all three without batch
    k, v     [batch, kv_heads, kv_len, head_dim | v_dim]
    mask     what may attend: Causal(), Lengths(n), … and their & | ~; a query that may attend to nothing gets zeros
    bias     added to the scores, [q_len, kv_len], [batch, …] or [batch, heads, …], size 1 where it does not vary
    scale    1/√head_dim unless given
    dropout  the probability to drop a weight, applied as given; with seed, kept or dropped is a hash of (seed, b, h, q, k)
    softcap  cap(s) = softcap · tanh(s / softcap), before the bias
    sinks    [heads]: a logit that takes part in the softmax and has no value, so that weights may sum to less than one
    start    position of the first query, a number or [batch]; kv_len − q_len after the first key unless given
    key_start  position of the first key, a number or [batch]; columns with a position below 0 hold no key

    Returns out [batch, heads, q_len, v_dim]; with return_lse also the log-sum-exp of the scores (sinks included)
    [batch, heads, q_len], −inf where there is nothing to attend to; with return_weights also softmax's weights before
    dropout [batch, heads, q_len, kv_len], computed beside a kernel that does not need them.
    """
    if not is_compiling() and has_torch_function((q, k, v)):  # torch's modes see this function as they see torch's own
        return handle_torch_function(
            attention, (q, k, v), q, k, v, mask=mask, bias=bias, scale=scale, dropout=dropout, seed=seed, softcap=softcap,
            sinks=sinks, start=start, key_start=key_start, return_lse=return_lse, return_weights=return_weights, kernel=kernel,
        )  # fmt: skip
    without_batch = unbatched(q, k, v)
    if (
        (mask is None or (type(mask) is Causal and mask.align == "end"))
        and bias is None
        and kernel == "auto"
        and not (dropout or return_lse or return_weights)
        and softcap is None
        and sinks is None
        and (scale is None or (type(scale) is float and 0 < scale < math.inf))
        and not listening()
    ):
        out = quick(q, k, v, mask, scale, start, key_start)
        if out is not None:
            return out
    if without_batch:
        found = attention(
            *(x.unsqueeze(0) for x in (q, k, v)), mask=mask, bias=bias, scale=scale, dropout=dropout, seed=seed,
            softcap=softcap, sinks=sinks, start=start, key_start=key_start, return_lse=return_lse,
            return_weights=return_weights, kernel=kernel,
        )  # fmt: skip
        return found.squeeze(0) if isinstance(found, Tensor) else tuple(x.squeeze(0) for x in found)
    if autocasts(q.device.type):
        q, k, v = autocast(q, k, v)
    spec = Spec(q, k, v, mask, bias, scale, dropout, seed, softcap, sinks, return_lse, start, key_start)
    if not (return_lse or return_weights):
        return choose(spec, kernel).run(q, k, v, spec)[0]
    return run(q, k, v, spec, kernel, return_weights)


def run(q: Tensor, k: Tensor, v: Tensor, spec: Spec, kernel: str, return_weights: bool) -> tuple[Tensor, ...]:
    """A checked call: out, then the log-sum-exp and the weights if asked for."""
    out, lse = choose(spec, kernel).run(q, k, v, spec)
    found = (out, lse) if spec.want_lse else (out,)
    return (*found, reference.weights(q, k, spec)) if return_weights else found


__all__ = ["attention", "brief", "linear", "step", "suits", "whole"]
