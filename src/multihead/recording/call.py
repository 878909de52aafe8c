"""One attention call as it was made: all that is needed to say its weights again, and nothing that grows with L×L."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from ..masks import Frame, Mask
from ..masks.algebra import Position

Score = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(eq=False)
class Call:
    """weights[b,h,t,s] = softmax_s(cap(scale · q[b,h,t,:]·k[b,g,s,:]) + bias[b,h,t,s]) where the mask allows

    q, k, v  [batch, heads, q_len, head_dim], [batch, kv_heads, kv_len, head_dim | v_dim]; v where values are kept
    bias     4-D, size 1 where it does not vary
    flat     bool [batch | 1, heads | 1, q_len]: rows whose scores a finite "−inf" has levelled; they attend to all alike
    score    FlexAttention's score_mod, (score, b, h, q, k) → score
    heads    the numbers of the heads that were kept;  kind  "self" or "cross"
    """

    q: Tensor
    k: Tensor
    v: Tensor | None = None
    mask: Mask | None = None
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    sinks: Tensor | None = None
    flat: Tensor | None = None
    score: Score | None = None
    start: Position | None = None
    key_start: Position = 0
    name: str = ""
    kind: str = "self"
    order: int = 0
    step: int = 0
    heads: list[int] = field(default_factory=list[int])
    out_proj: Tensor | None = None
    found: dict[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        self.heads = self.heads or list(range(self.q.shape[1]))

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """batch, heads, kv_heads, q_len, kv_len"""
        B, H, T, _ = self.q.shape
        return B, H, self.k.shape[1], T, self.k.shape[2]

    @property
    def frame(self) -> Frame:
        B, H, _, T, S = self.sizes
        return Frame(B, H, T, S, q_start=self.start, k_start=self.key_start, device=self.q.device)

    @property
    def shift(self) -> list[int]:
        """Per batch entry, the column of the first query's own position."""
        frame, B = self.frame, self.q.shape[0]
        if frame.shift is not None:
            return [frame.shift] * B
        starts = torch.as_tensor(frame.q_start).cpu() - torch.as_tensor(frame.k_start).cpu()
        return [int(x) for x in starts.expand(B)]

    @property
    def nbytes(self) -> int:
        """What is kept for this call; masks, which calls share, are not counted."""
        held = (self.q, self.k, self.v, self.flat, *_tensors(self.found))
        return sum(x.untyped_storage().nbytes() for x in held if x is not None and not x.is_meta)

    @property
    def answered(self) -> bool:
        """q and k were dropped, what was asked for at once is there."""
        return self.q.is_meta

    def detached(self) -> Call:
        v = None if self.v is None else self.v.detach()
        return replace(self, q=self.q.detach(), k=self.k.detach(), v=v, bias=None if self.bias is None else self.bias.detach())

    def __repr__(self) -> str:
        B, H, G, T, S = self.sizes
        shared = "" if G == H else f", kv_heads {G}"
        return f"Call({self.name!r}, {self.kind}, batch {B}, heads {H}{shared}, q_len {T}, kv_len {S})"


def _tensors(found: dict[str, Any]) -> list[Tensor]:
    parts = (cast("tuple[Any, ...]", value) if isinstance(value, tuple) else (value,) for value in found.values())
    return [x for part in parts for x in part if isinstance(x, Tensor)]
