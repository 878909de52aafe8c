"""Every statistic by its definition, from dense weights in float64: what the streaming passes are compared with."""

from __future__ import annotations

import math

import torch

from multihead.kernels import reference
from multihead.kernels.spec import Spec


def weights(q, k, **options):
    """w and lse [batch, heads, q_len, kv_len | ·], in float64."""
    q, k = q.double(), k.double()
    for name in ("bias", "sinks"):
        if options.get(name) is not None:
            options[name] = options[name].double()
    spec = Spec(q, k, k, want_lse=True, **options)
    return reference.weights(q, k, spec), reference.run(q, k, k, spec)[1]


def scores(q, k, *, scale=None, softcap=None, bias=None, mask=None, sinks=None, start=None, key_start=0):
    """The scores before softmax, −inf where hidden."""
    del sinks
    s = (
        q.double()
        @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT
        * (q.shape[3] ** -0.5 if scale is None else scale)
    )
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    s = s if bias is None else s + bias
    spec = Spec(q, k, k, mask=mask, start=start, key_start=key_start)
    allowed = reference._allowed(spec) if mask is not None or spec.ragged else torch.ones(1, 1, 1, 1) > 0
    return s.masked_fill(~allowed, -math.inf)


def positions(frame):
    """[batch | 1, 1, q_len, kv_len]: k − q"""
    return (frame.k - frame.q).double()


def statistics(w, lse, s, offset, numbers):
    """All of them; `offset` is k − q, `numbers` what top, first, within, offsets and map are asked for."""
    B, _, T, S = w.shape
    live = lse.isfinite()
    near = offset.expand(B, 1, T, S)
    first, within = numbers["first"], numbers["within"]
    k = min(numbers["top"], S)
    return {
        "lse": lse,
        "largest": s.amax(-1),
        "entropy": -torch.xlogy(w, w).sum(-1),
        "effective_keys": torch.where(live & (w.sum(-1) > 0), (-torch.xlogy(w, w).sum(-1)).exp(), 0.0),
        "received": w.sum(2),
        "distance": (w * near.abs()).sum(-1),
        "strongest": w.amax(-1),
        "top": w.topk(k, -1).values,
        "first": w[..., :first].sum(-1),
        "within": (w * (near.abs() <= within)).sum(-1),
        "offsets": profile(w, near, s),
        "map": pooled(w, numbers["map"]),
    }


def profile(w, offset, s):
    """{offset: [batch, heads]}, over the queries that see anything."""
    live = s.isfinite().any(-1).sum(-1).clamp(min=1)
    low, B, H = int(offset.min()), *w.shape[:2]
    at = (offset - low).long().expand_as(w).flatten(2)
    sums = torch.zeros(B, H, int(offset.max()) - low + 1, dtype=w.dtype).scatter_add_(2, at, w.flatten(2))
    return {low + i: x / live for i, x in enumerate(sums.unbind(-1))}


def pooled(w, n):
    T, S = w.shape[2:]
    r, c = max(1, -(-T // n)), max(1, -(-S // n))
    rows = [w[:, :, i : i + r] for i in range(0, T, r)]
    cells = [[x[..., j : j + c] for j in range(0, S, c)] for x in rows]
    return tuple(
        torch.stack([torch.stack([f(x) for x in row], -1) for row in cells], 2)
        for f in (lambda x: x.mean((-1, -2)), lambda x: x.amax((-1, -2)))
    )
