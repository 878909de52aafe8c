"""What an attention module may do between its projections, and what a hypothesis of it predicts."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from ..attend import attention
from ..masks import Mask
from ..positions import Positions, RoPE
from .affine import Affine
from .layouts import Layout


@dataclass(frozen=True, eq=False)
class Core:
    """What happens between the projections. Every field's default is the usual thing."""

    scale: float | None = None
    mask: Mask | None = None
    norms: tuple[str, str] | None = None
    turn: RoPE | None = None
    bias: Positions | None = None
    bias_name: str | None = None
    softcap: float | None = None
    sinks: str | None = None  # a parameter, or "zero"
    learned: tuple[str, str] | None = None
    gate: Affine | None = None

    @property
    def opens(self) -> bool:
        """Whether a single key's weight may be less than one, so that the test of a single token says nothing."""
        return self.sinks is not None or self.learned is not None or self.gate is not None

    def __repr__(self) -> str:
        said: list[str] = []
        for f in fields(self):
            value = getattr(self, f.name)
            if value is not None and f.name != "bias_name":
                said.append(
                    f"{f.name}={value:.4g}" if isinstance(value, float) else f"{f.name}={getattr(value, 'name', value)}"
                )
        return ", ".join(said) or "nothing unusual"


def compute(
    module: nn.Module, layout: Layout, core: Core, given: dict[str, Tensor], mask: Mask | None = None, weights: bool = False
) -> Any:
    """The output (with weights: and these) that a hypothesis predicts, by the reference kernel."""
    query = given["query"]
    key = given.get("key", given.get("memory", query))
    value = given.get("value", given.get("memory", key))
    q, k, v = layout.project(query, key, value)
    if core.norms is not None:
        q, k = (module.get_submodule(n)(x) for n, x in zip(core.norms, (q, k), strict=True))
    if core.turn is not None:
        q, k = core.turn.turn(q, k, torch.arange(q.shape[2]), torch.arange(k.shape[2]))
    bias = None
    if core.bias is not None:
        bias = core.bias.bias(torch.arange(q.shape[2]) + k.shape[2] - q.shape[2], torch.arange(k.shape[2]))
    own = core.mask if mask is None else mask if core.mask is None else core.mask & mask
    sinks = None if core.sinks is None else sink_logits(module, core.sinks, layout.heads)
    if core.learned is not None:
        return _with_learned(module, layout, core, q, k, v, own, bias, sinks)
    found = attention(
        q,
        k,
        v,
        mask=own,
        bias=bias,
        scale=core.scale,
        softcap=core.softcap,
        sinks=sinks,
        return_weights=weights,
        kernel="reference",
    )
    out, w = (found, None) if isinstance(found, Tensor) else found
    out = _gated(layout, core, out, query)
    return (out, w) if weights else out


def _gated(layout: Layout, core: Core, out: Tensor, query: Tensor) -> Tensor:
    if core.gate is not None:
        out = out * layout.split(torch.sigmoid(core.gate(query)), layout.heads)
    return layout.merge(out)


def _with_learned(
    module: nn.Module, layout: Layout, core: Core, q: Tensor, k: Tensor, v: Tensor,
    mask: Mask | None, bias: Tensor | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    if mask is not None or bias is not None or core.learned is None:
        return torch.full((q.shape[0], q.shape[2], 1), math.nan, dtype=q.dtype)  # the search tries learned keys alone
    extra_k, extra_v = (
        learned(module, n, layout, size) for n, size in zip(core.learned, (layout.head_dim, layout.v_dim), strict=True)
    )
    k, v = (torch.cat([x, e.expand(x.shape[0], -1, -1, -1)], 2) for x, e in ((k, extra_k), (v, extra_v)))
    out = attention(q, k, v, scale=core.scale, softcap=core.softcap, sinks=sinks, kernel="reference")
    return layout.merge(out)


def learned(module: nn.Module, name: str, layout: Layout, size: int) -> Tensor:
    """A parameter of learned keys or values as [1, kv_heads, n, size]."""
    p = module.get_parameter(name)
    if p.ndim == 3 and p.shape[0] == layout.kv_heads and p.shape[2] == size:
        return p[None]
    return p.reshape(-1, layout.kv_heads, size).transpose(0, 1)[None]


def sink_logits(module: nn.Module, name: str, heads: int) -> Tensor:
    return torch.zeros(heads, dtype=torch.float64) if name == "zero" else module.get_parameter(name).flatten()
