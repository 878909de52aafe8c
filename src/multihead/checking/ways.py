"""Attention with a switch at every step: the right way, and each way in which people get it wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..adopting.core import Core, sink_logits
from ..adopting.drive import sources
from ..adopting.layouts import Layout
from ..masks import Frame, evaluate

AXES = {"k": 3, "q": 2, "heads": 1, "batch": 0}
OWN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # masks that a layer brings along, by where key k may be seen from q
    "causal": lambda q, k: k <= q,
    "without itself": lambda q, k: k < q,
    "one ahead": lambda q, k: k <= q + 1,
    "future": lambda q, k: k >= q,
    "future alone": lambda q, k: k > q,
}
How = str | float


@dataclass(frozen=True)
class Way:
    """How a layer computes attention; every default is the right one.

    by       which projection makes q, k, v;  source  what it is applied to: "q" for the query, and so on
    split    which of q, k, v are cut into heads by reshape alone, without transpose
    late     whether that happens after RoPE
    over     "tokens", or "heads": nobody moved the heads in front, so that the heads of one token attend to each other
    merge    "concat"; "reshape": put together without transpose; "mean" or "sum" of the heads
    crossed  keys ask queries: k qᵀ;  reshaped  kᵀ is a reshape instead of a transpose
    tiled    which of k, v repeat their heads as 0 1 0 1 instead of 0 0 1 1
    turned   what RoPE turns;  pairs  "own", "half" or "neighbours": how features pair although the table is the other's
    scale    of the scores; None is 1/√head_dim
    axis     which axis the softmax sums to one: k, q, heads or batch;  act  "softmax", "none" or "twice"
    own      a mask of its own, out of OWN; None leaves the core's
    how      what a mask does: "fill" with −inf, "after" the softmax, "renormed" after it, a number that is put in (adds: added)
    """

    by: str = "qkv"
    source: str = "qkv"
    split: str = ""
    late: bool = False
    over: str = "tokens"
    merge: str = "concat"
    crossed: bool = False
    reshaped: bool = False
    tiled: str = ""
    turned: str = "qk"
    pairs: str = "own"
    scale: float | None = None
    axis: str = "k"
    act: str = "softmax"
    own: str | None = None
    how: How = "fill"
    adds: bool = False
    dropped: str = ""  # "scores": every score is dropped, as dropout with p = 1 before the softmax does


RIGHT = Way()


@dataclass(eq=False)
class Parts:
    """A module's own weights, and what a call of it was given: everything but the way.

    blocked  [batch | 1, heads | 1, q_len, kv_len]: what a mask argument hides;  bias  is added to the scores
    """

    module: nn.Module
    layout: Layout
    core: Core
    given: dict[str, Tensor]
    blocked: Tensor | None = None
    bias: Tensor | None = None
    kept: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def projected(self, by: str, source: str) -> Tensor:
        """[batch, tokens, heads · dim] of a projection, computed once."""
        if by + source not in self.kept:
            rows = {"q": self.layout.q, "k": self.layout.k, "v": self.layout.v}[by]
            self.kept[by + source] = rows(dict(zip("qkv", sources(self.given), strict=True))[source])
        return self.kept[by + source]


def compute(parts: Parts, way: Way = RIGHT) -> Tensor:
    """The output, [batch, tokens, dim], that a layer of these weights has if it computes in this way.

    NaN stands where a softmax runs over nothing: what comes there depends on how a mask was written.
    """
    layout = parts.layout
    q, k, v = (
        _split(parts.projected(by, source), layout.heads if by == "q" else layout.kv_heads, _cut(way, name), way.over)
        for name, by, source in zip("qkv", way.by, way.source, strict=True)
    )
    if parts.core.norms is not None:
        q, k = (parts.module.get_submodule(n)(x) for n, x in zip(parts.core.norms, (q, k), strict=True))
    q, k, v = _turned(parts.core, way, q, k, v)
    if way.late:
        q, k, v = (x.transpose(1, 2).reshape(x.shape) if n in way.split else x for n, x in zip("qkv", (q, k, v), strict=True))
    k, v = (_repeat(x, layout, name in way.tiled) for name, x in (("k", k), ("v", v)))
    if way.crossed:
        q, k = k, q
    scores = q @ (k.reshape(k.mT.shape) if way.reshaped else k.mT) * (layout.head_dim**-0.5 if way.scale is None else way.scale)
    if parts.core.softcap is not None:
        scores = parts.core.softcap * torch.tanh(scores / parts.core.softcap)
    if way.dropped == "scores":
        scores = torch.zeros_like(scores)
    weights = _weights(parts, way, _biased(parts, scores))
    return _merge(parts, way, weights @ v)


def _cut(way: Way, name: str) -> bool:
    return name in way.split and not way.late


def _split(x: Tensor, heads: int, by_reshape: bool, over: str) -> Tensor:
    """[batch, tokens, heads · dim] → [batch, heads, tokens, dim]"""
    B, T, inner = x.shape
    if over == "heads":
        return x.reshape(B, T, heads, inner // heads)
    if by_reshape:
        return x.reshape(B, heads, T, inner // heads)
    return x.reshape(B, T, heads, inner // heads).transpose(1, 2)


def _turned(core: Core, way: Way, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rope = core.turn
    if rope is None:
        return q, k, v
    found: list[Tensor] = []
    for name, x in zip("qkv", (q, k, v), strict=True):
        if name in way.turned:
            at = torch.arange(x.shape[2])
            x = rope.turn(x, x, at, at)[0] if way.pairs == "own" else _mispaired(x, *rope.angles(at, x), way.pairs)
        found.append(x)
    return found[0], found[1], found[2]


def _mispaired(x: Tensor, cos: Tensor, sin: Tensor, pairs: str) -> Tensor:
    """Turned as "half" or "neighbours" by a table that is laid out for the other one."""
    dim = 2 * cos.shape[-1]
    y = x[..., :dim]
    if pairs == "half":
        cos, sin = (t.repeat_interleave(2, -1) for t in (cos, sin))
        first, second = y.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
    else:
        cos, sin = (torch.cat([t, t], -1) for t in (cos, sin))
        turned = torch.stack([-y[..., 1::2], y[..., ::2]], -1).flatten(-2)
    return torch.cat([y * cos + turned * sin, x[..., dim:]], -1)


def _repeat(x: Tensor, layout: Layout, tiled: bool) -> Tensor:
    share = layout.heads // layout.kv_heads
    if share == 1 or x.shape[1] != layout.kv_heads:
        return x
    return x.repeat(1, share, 1, 1) if tiled else x.repeat_interleave(share, 1)


def _biased(parts: Parts, scores: Tensor) -> Tensor:
    if parts.core.bias is not None:
        T, S = scores.shape[2:]
        scores = scores + parts.core.bias.bias(torch.arange(T) + S - T, torch.arange(S))
    return scores if parts.bias is None else scores + parts.bias


def _weights(parts: Parts, way: Way, scores: Tensor) -> Tensor:
    B, H, T, S = scores.shape
    blocked = parts.blocked
    if way.own is not None:
        own = ~OWN[way.own](torch.arange(T)[:, None] + S - T, torch.arange(S))
        blocked = own if blocked is None else blocked | own
    elif parts.core.mask is not None:
        own = ~evaluate(parts.core.mask, Frame(B, H, T, S))
        blocked = own if blocked is None else blocked | own
    late = way.how in ("after", "renormed")
    if blocked is not None and not late:
        value = -math.inf if way.how == "fill" else float(way.how)
        scores = scores + blocked * value if way.adds else scores.masked_fill(blocked, value)
    weights = _softmax(parts, way, scores)
    if blocked is not None and late:
        weights = weights.masked_fill(blocked, 0.0)
        if way.how == "renormed":
            weights = weights / weights.sum(-1, keepdim=True)
    return weights


def _softmax(parts: Parts, way: Way, scores: Tensor) -> Tensor:
    if way.act == "none":
        return scores.masked_fill(scores == -math.inf, 0.0)
    if parts.core.sinks is not None:
        sinks = sink_logits(parts.module, parts.core.sinks, parts.layout.heads)
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
        return scores.softmax(-1)[..., :-1]
    axis = AXES[way.axis]
    weights = scores.softmax(axis)
    return weights.softmax(axis) if way.act == "twice" else weights


def _merge(parts: Parts, way: Way, out: Tensor) -> Tensor:
    """[batch, heads, tokens, v_dim] → [batch, tokens, dim]"""
    layout = parts.layout
    if way.over == "heads":
        merged = out.flatten(2)
    elif way.merge == "concat":
        merged = out.transpose(1, 2).flatten(2)
    elif way.merge == "reshape":
        merged = out.reshape(out.shape[0], out.shape[2], -1)
    else:
        merged = out.mean(1) if way.merge == "mean" else out.sum(1)
    if parts.core.gate is not None:
        merged = merged * torch.sigmoid(parts.core.gate(parts.given["query"]))
    return merged if layout.out is None else layout.out(merged)


def far(guess: Tensor, truth: Tensor) -> float:
    """The largest difference over the largest true value, where the guess is a number; infinite where it says too little."""
    if guess.shape != truth.shape:
        return math.inf
    known = ~guess.isnan()
    few = 4 * int(known.sum()) < known.numel()
    if not bool(known.any()) or (few and not torch.equal(guess.isnan(), truth.isnan())):
        return math.inf
    a, b = guess[known], truth[known]
    found = float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))
    return found if math.isfinite(found) else math.inf
