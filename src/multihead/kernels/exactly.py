"""NaN and infinities in the kernel "blocked": a product of tiles would carry them into rows that must not see them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..masks import Frame, Mask
from . import reference
from .spec import Spec, finite
from .tiles import Looker, Tile, Work


def harmless(q: Tensor, k: Tensor, v: Tensor, spec: Spec, work: Work) -> tuple[Tensor, Tensor] | None:
    """k and v in which all that is multiplied is finite, keys that no query sees being zero; None where that cannot be."""
    if not work.careful or finite(q, k, v):
        return k, v
    if not finite(q):
        return None
    seen, looker = torch.zeros(spec.batch, spec.kv_len, dtype=torch.bool), Looker(spec, work)
    for entry, tiles in enumerate(work.tiles):
        at = slice(None) if len(work.tiles) == 1 else slice(entry, entry + 1)
        for tile in tiles:
            _mark(seen[at], looker(tile), at)
    unseen = ~seen[:, None, :, None]
    k, v = k.masked_fill(unseen, 0.0), v.masked_fill(unseen, 0.0)
    return (k, v) if finite(k, v) else None


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


def forward_exactly(q: Tensor, k: Tensor, v: Tensor, spec: Spec, work: Work) -> tuple[Tensor, Tensor]:
    """The definition, some queries at a time, where a NaN could pass from a product into rows that must not see it."""
    found = [reference.run(rows, k, v, part) for _, part, rows in _blocks(q, k, v, spec, work)]
    out = torch.cat([out for out, _ in found], 2)
    return out, torch.cat([lse for _, lse in found if lse is not None], 2) if spec.want_lse else out.new_empty(0)


def backward_exactly(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: Spec,
    work: Work,
    need_bias: bool,
    need_sinks: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    given = [("q", q), ("k", k), ("v", v)]
    given += [
        (n, x) for n, x, need in (("bias", spec.bias, need_bias), ("sinks", spec.sinks, need_sinks)) if need and x is not None
    ]
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
