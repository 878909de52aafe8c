"""A hypothesis that holds, made into a layer of ours."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..attend import attention
from ..cache import KVCache
from ..layer import MultiHeadAttention
from ..masks import Allowed, Mask
from . import AdoptionError
from .affine import Affine, Place
from .core import Core, learned_places
from .dropouts import Dropouts
from .layouts import Layout, Rows


@dataclass(frozen=True)
class Copied:
    """A parameter of the layer that holds entries of one of the module's: places are flat indices into that one.

    shared  whether it is that one itself
    """

    name: str
    source: str
    places: Tensor
    shared: bool = False


def build(module: nn.Module, layout: Layout, core: Core, dropouts: Dropouts) -> tuple[MultiHeadAttention, list[Copied]]:
    """The layer, with the module's own submodules and parameters wherever they can be taken over whole."""
    like = next(p for p in module.parameters() if p.is_floating_point())
    kind = MultiHeadAttention if core.learned is None else WithLearnedKeys
    layer = kind(
        layout.q.affine.in_features, layout.heads, dropouts.weights, kv_heads=layout.kv_heads, head_dim=layout.head_dim,
        value_head_dim=layout.v_dim, key_dim=layout.k.affine.in_features, value_dim=layout.v.affine.in_features,
        out_dim=layout.heads * layout.v_dim if layout.out is None else layout.out.out_features, out_dropout=dropouts.out,
        softcap=core.softcap, scale=core.scale, mask=core.mask, device="meta",
    )  # fmt: skip
    copied: list[Copied] = []
    parts = {name: _projection(module, name, rows, copied) for name, rows in _rows(layout, core).items()}
    parts["out"] = _output(module, layout, copied)
    if core.norms is not None:
        parts["query_norm"], parts["key_norm"] = (module.get_submodule(name) for name in core.norms)
    for name, part in parts.items():
        setattr(layer, name, part)
    if core.sinks == "zero":
        layer.sinks = nn.Parameter(torch.zeros(layout.heads, device=like.device, dtype=like.dtype), requires_grad=False)
    elif core.sinks is not None:
        layer.sinks = _parameter(module, "sinks", (core.sinks, torch.arange(layout.heads)), copied)
    if core.learned is not None:
        _learn(layer, module, core.learned, layout, copied)
    positions = core.turn or core.bias
    if positions is not None:
        positions = copy.deepcopy(positions).to(like.device)
        if core.bias_name is not None:
            positions.weight = module.get_parameter(core.bias_name)
        elif like.dtype != torch.float64:
            positions.float()
        layer.positions = positions
    layer.training = module.training  # not train(): what is shared keeps its own mode
    return layer, copied


def _rows(layout: Layout, core: Core) -> dict[str, Rows]:
    rows = {"query": layout.q, "key": layout.k, "value": layout.v}
    return rows if core.gate is None else {**rows, "gate": Rows(core.gate)}


def write_back(module: nn.Module, layer: nn.Module, copied: list[Copied]) -> None:
    """What the layer's parameters have become goes back to where they came from."""
    learns: dict[str, bool] = {}
    with torch.no_grad():
        for one in copied:
            there, here = module.get_parameter(one.source), layer.get_parameter(one.name)
            if here is there:
                continue
            values = there.detach().clone(memory_format=torch.contiguous_format)
            values.view(-1)[one.places.to(values.device).flatten()] = here.detach().to(values).flatten()
            there.data.copy_(values)
            learns[one.source] = learns.get(one.source, False) or here.requires_grad
    for source, learning in learns.items():
        module.get_parameter(source).requires_grad_(learning)


def _projection(module: nn.Module, name: str, rows: Rows, copied: list[Copied]) -> nn.Module:
    affine, index = rows.affine, rows.index
    if affine.whole and index is None:
        return module.get_submodule(affine.name)
    return _linear(module, name, affine, slice(None) if index is None else index, slice(None), copied)


def _output(module: nn.Module, layout: Layout, copied: list[Copied]) -> nn.Module:
    affine, columns = layout.out, layout.columns
    if affine is None:
        if columns is not None:
            raise AdoptionError("it orders its heads by kv head h % kv_heads and has no output projection that could undo that")
        return nn.Identity()
    if affine.whole and columns is None:
        return module.get_submodule(affine.name)
    return _linear(module, "out", affine, slice(None), slice(None) if columns is None else columns.argsort(), copied)


def _linear(
    module: nn.Module, name: str, affine: Affine, rows: slice | Tensor, columns: slice | Tensor, copied: list[Copied]
) -> nn.Linear:
    """Rows and columns of an affine map as a Linear of its own."""
    if affine.at is None or (affine.bias is not None and affine.bias_at is None):
        raise AdoptionError(
            f"{affine.name} holds several projections and is computed from other parameters, as by an adapter; adopt it first, "
            "adapt it then"
        )
    weight = affine.at[0], affine.at[1][rows][:, columns]
    linear = nn.Linear(weight[1].shape[1], weight[1].shape[0], bias=affine.bias is not None, device="meta")
    linear.weight = _parameter(module, f"{name}.weight", weight, copied)
    if affine.bias_at is not None:
        linear.bias = _parameter(module, f"{name}.bias", (affine.bias_at[0], affine.bias_at[1][rows]), copied)
    return linear


def _parameter(module: nn.Module, name: str, place: Place, copied: list[Copied]) -> nn.Parameter:
    """The module's own parameter if all of it is meant, in its order; else a copy of the entries. Both are remembered."""
    source, index = module.get_parameter(place[0]), place[1]
    whole = source.shape == index.shape and torch.equal(index.flatten(), torch.arange(source.numel()))
    copied.append(Copied(name, place[0], index, whole))
    if whole:
        return source
    return nn.Parameter(source.detach().flatten()[index.to(source.device)].clone(), requires_grad=source.requires_grad)


# ---- learned keys ---------------------------------------------------------------------------------------------------


class WithLearnedKeys(MultiHeadAttention):
    """Every query also sees learned keys, as with add_bias_kv of nn.MultiheadAttention.

    learned_key, learned_value  [kv_heads, n, head_dim | value_head_dim]
    """

    learned_key: nn.Parameter
    learned_value: nn.Parameter

    def forward(self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, *, mask: Mask | None = None,
                bias: Tensor | None = None, cache: KVCache | None = None, return_weights: bool = False,
                seed: int | None = None, kernel: str = "auto", **more: object) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  # fmt: skip
        """As in MultiHeadAttention; weights are [batch, heads, q_len, kv_len + n], the learned keys' last."""
        if cache is not None or any(x is not None for x in more.values()):
            raise ValueError("WithLearnedKeys: takes neither a cache nor position_ids")
        q, k, v, own_keys = self.project(query, key, value)
        if self.positions is not None:
            q, k = self._turn(self.positions, q, k, own_keys, None, None, None)
        n, (B, H, T, _), S = self.learned_key.shape[1], q.shape, k.shape[2]
        own = self.mask if mask is None else mask if self.mask is None else self.mask & mask
        if own is not None:  # dense, with columns behind the keys that everybody sees
            seen = own.dense(T, S, batch=B, heads=H, device=q.device)
            own = Allowed(nn.functional.pad(seen, (0, n), value=True))
        if bias is not None:
            bias = nn.functional.pad(bias.expand(*bias.shape[:-1], S), (0, n))
        k, v = (
            torch.cat([x, y.to(x.dtype).expand(B, -1, -1, -1)], 2) for x, y in ((k, self.learned_key), (v, self.learned_value))
        )
        found = attention(
            q, k, v, mask=own, bias=bias, scale=self.scale, dropout=self.dropout if self.training else 0.0, seed=seed,
            softcap=self.softcap, sinks=self.sinks, return_weights=return_weights, kernel=kernel,
        )  # fmt: skip
        if isinstance(found, Tensor):
            return self.merge(found, query)
        return self.merge(found[0], query), found[1]


def _learn(layer: MultiHeadAttention, module: nn.Module, names: tuple[str, str], layout: Layout, copied: list[Copied]) -> None:
    for attribute, name, size in zip(("learned_key", "learned_value"), names, (layout.head_dim, layout.v_dim), strict=True):
        p = module.get_parameter(name)
        places = learned_places(p, layout, size)
        setattr(layer, attribute, _parameter(module, attribute, (name, places), copied))
