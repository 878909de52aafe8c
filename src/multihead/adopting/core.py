"""What an attention module may do between its projections, and what a hypothesis of it predicts."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from ..attend import attention
from ..masks import Mask
from ..positions import Positions, RoPE
from .affine import Affine
from .drive import sources
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


def compute(module: nn.Module, layout: Layout, core: Core, given: dict[str, Tensor]) -> Tensor:
    """The output that a hypothesis predicts, by the reference kernel."""
    query, key, value = sources(given)
    q, k, v = layout.project(query, key, value)
    if core.norms is not None:
        q, k = (module.get_submodule(n)(x) for n, x in zip(core.norms, (q, k), strict=True))
    if core.turn is not None:
        q, k = core.turn.turn(q, k, torch.arange(q.shape[2]), torch.arange(k.shape[2]))
    bias = None
    if core.bias is not None:
        bias = core.bias.bias(torch.arange(q.shape[2]) + k.shape[2] - q.shape[2], torch.arange(k.shape[2]))
    sinks = None if core.sinks is None else sink_logits(module, core.sinks, layout.heads)
    if core.learned is not None:
        if core.mask is not None or bias is not None:  # the search tries learned keys alone
            return torch.full((q.shape[0], q.shape[2], 1), math.nan, dtype=q.dtype)
        k, v = (torch.cat([x, _learned(module, name, layout, x)], 2) for x, name in zip((k, v), core.learned, strict=True))
    out = attention(
        q, k, v, mask=core.mask, bias=bias, scale=core.scale, softcap=core.softcap, sinks=sinks, kernel="reference"
    )  # fmt: skip
    if core.gate is not None:
        out = out * layout.split(torch.sigmoid(core.gate(query)), layout.heads)
    return layout.merge(out)


def _learned(module: nn.Module, name: str, layout: Layout, x: Tensor) -> Tensor:
    """A parameter of learned keys or values as [batch, kv_heads, n, size], behind x."""
    p = module.get_parameter(name)
    return p.flatten()[learned_places(p, layout, x.shape[3])].expand(x.shape[0], -1, -1, -1)


def learned_places(p: Tensor, layout: Layout, size: int) -> Tensor:
    """[kv_heads, n, size]: where in the parameter each number of the learned keys or values stands."""
    index = torch.arange(p.numel()).view(p.shape)
    if p.ndim == 3 and p.shape[0] == layout.kv_heads and p.shape[2] == size:
        return index
    return index.reshape(-1, layout.kv_heads, size).transpose(0, 1)


def sink_logits(module: nn.Module, name: str, heads: int) -> Tensor:
    return torch.zeros(heads, dtype=torch.float64) if name == "zero" else module.get_parameter(name).flatten()
