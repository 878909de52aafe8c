"""The definition: dense, any dtype, differentiable as often as you like. Every other kernel is right when it agrees with this.

float16 and bfloat16 are computed in float32. What a mask hides has no influence whatever it holds: a NaN in a key that
query i may not see reaches neither row i nor any gradient through it.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from ..masks import evaluate
from .dropping import kept
from .spec import Spec, autocasts


def refuses(spec: Spec) -> str | None:
    """Never: the definition covers every call."""
    del spec
    return None


def quadratic_bytes(spec: Spec) -> int:
    """Scores, weights and what autograd keeps of them: about three L×L tensors."""
    return 3 * spec.pairs * _compute_dtype(spec.dtype).itemsize


def computed(spec: Spec) -> int:
    """All pairs, hidden ones included."""
    return spec.pairs


def peak_bytes(spec: Spec) -> int:
    """What a forward holds at once beside its arguments."""
    return spec.out_bytes + quadratic_bytes(spec)


def run(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> tuple[Tensor, Tensor | None]:
    """out [batch, heads, q_len, v_dim]; lse [batch, heads, q_len] in the dtype of the computation, if wanted."""
    with _exactly(q.device.type):
        w, lse, allowed = _softmax(q, k, spec)
        w = _dropout(w, spec)
        v = _repeat(v, spec).to(w.dtype)
        if allowed is None:
            return (w @ v).to(q.dtype), lse
        v, bad = _clean(v)
        seen = allowed.to(w.dtype).expand(*allowed.shape[:2], spec.q_len, spec.kv_len) @ bad.to(w.dtype) > 0
        return (w @ v + _nan_where(seen, v)).to(q.dtype), lse


def weights(q: Tensor, k: Tensor, spec: Spec) -> Tensor:
    """softmax of the scores before dropout, [batch, heads, q_len, kv_len]: the rows sum to one, or to zero where a query
    sees nothing (to less than one with sinks)."""
    with _exactly(q.device.type):
        return _softmax(q, k, spec)[0].to(q.dtype)


def _softmax(q: Tensor, k: Tensor, spec: Spec) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """weights, log-sum-exp if wanted, and what may attend (None where nothing is hidden)."""
    dtype = _compute_dtype(spec.dtype)
    q, k = q.to(dtype), _repeat(k, spec).to(dtype)
    allowed = None if spec.mask is None and not spec.ragged else _allowed(spec)
    poison = None
    if allowed is not None:
        (q, bad_q), (k, bad_k) = _clean(q), _clean(k)
        poison = _nan_where((bad_q.any(-1, keepdim=True) | bad_k.any(-1).unsqueeze(-2)) & allowed, q)
    s = (q * spec.scale) @ k.mT
    if spec.softcap is not None:
        s = spec.softcap * torch.tanh(s / spec.softcap)
    if spec.bias is not None:
        s = s + spec.bias.to(dtype)
    if allowed is not None and poison is not None:
        s = s + poison
    hidden = _hidden(allowed, spec)
    empty = None if hidden is None else hidden.all(-1, keepdim=True)
    if hidden is not None and empty is not None:
        s = s.masked_fill(hidden, -math.inf).masked_fill(empty, 0.0)  # no inf − inf; empty rows are zeroed below
    if spec.sinks is not None:
        s = torch.cat([s, spec.sinks.to(dtype).view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    w, lse = s.softmax(-1), s.logsumexp(-1) if spec.want_lse else None
    w = w if spec.sinks is None else w[..., :-1]
    if hidden is None or empty is None:
        return w, lse, allowed
    return w.masked_fill(hidden, 0.0), None if lse is None else lse.masked_fill(empty.squeeze(-1), -math.inf), allowed


def _hidden(allowed: Tensor | None, spec: Spec) -> Tensor | None:
    """What a mask, a bias of −inf or the lack of any key hides; a score that overflows to −inf is not hidden."""
    by_bias = None if spec.bias is None else spec.bias == -math.inf
    if allowed is None and by_bias is None:
        return None if spec.kv_len else torch.ones(1, 1, 1, 0, dtype=torch.bool, device=spec.device)
    return by_bias if allowed is None else ~allowed if by_bias is None else ~allowed | by_bias


def _allowed(spec: Spec) -> Tensor:
    frame = spec.frame
    if spec.mask is not None:
        return evaluate(spec.mask, frame)
    there = frame.there()
    return there if there is not None else torch.ones(1, 1, 1, 1, dtype=torch.bool, device=spec.device)


def _exactly(kind: str) -> AbstractContextManager[object]:
    """No autocast in here: the definition chooses its own precision."""
    return torch.autocast(kind, enabled=False) if autocasts(kind) else nullcontext()


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _repeat(x: Tensor, spec: Spec) -> Tensor:
    """Query head h is served by kv head h // (heads // kv_heads)."""
    groups = spec.heads // spec.kv_heads
    return x if groups == 1 else x.repeat_interleave(groups, 1)


def _clean(x: Tensor) -> tuple[Tensor, Tensor]:
    """x with zeros for NaN and infinities, and where they were."""
    bad = ~torch.isfinite(x)
    return x.masked_fill(bad, 0.0), bad


def _nan_where(where: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(where, dtype=like.dtype).masked_fill(where, math.nan)


def _dropout(w: Tensor, spec: Spec) -> Tensor:
    if not spec.dropout:
        return w
    if spec.seed is None:
        return F.dropout(w, spec.dropout)
    if spec.dropout == 1.0:
        return w * 0.0
    frame = spec.frame
    return w * kept(spec.seed, spec.dropout, frame.b, frame.h, frame.q, frame.k) / (1.0 - spec.dropout)
