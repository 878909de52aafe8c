"""torch's own layers: q and k computed beside the very call that an unrecorded run would make, fast path or not.

An active mode switches torch's native encoder path off, and a padded TransformerEncoder then returns values where it returned
zeros. So while one of these layers runs nothing is intercepted; what it attended to follows from its input and its weights.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..masks import Causal, Lengths, Mask
from .tensors import Memory, additive, compact


class Read(NamedTuple):
    """What a layer attended with, by the names of Call."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask | None
    bias: Tensor | None
    flat: Tensor | None
    kind: str
    out_proj: Tensor | None


FUNCTION = """query key value embed_dim num_heads in_proj_weight in_proj_bias bias_k bias_v add_zero_attn dropout_p
out_proj_weight out_proj_bias training key_padding_mask need_weights attn_mask use_separate_proj_weight q_proj_weight
k_proj_weight v_proj_weight static_k static_v average_attn_weights is_causal"""  # what F.multi_head_attention_forward takes


def opaque(module: nn.Module) -> bool:
    """Whether the module is one of torch's own whose inside is read here, not watched."""
    forward = type(module).forward
    return forward in (nn.MultiheadAttention.forward, nn.TransformerEncoderLayer.forward, nn.TransformerEncoder.forward)


def attends(module: nn.Module, inner: bool) -> bool:
    """Whether the module has attended itself: not where one that ran inside of it has (inner)."""
    forward = type(module).forward
    return forward is nn.MultiheadAttention.forward or (forward is nn.TransformerEncoderLayer.forward and not inner)


def read(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], memory: Memory) -> Read:
    """What a layer that has just run attended with."""
    if isinstance(module, nn.MultiheadAttention):
        names = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask", "average", "is_causal")
        return attended(module, _bind(names, args, kwargs), memory)
    layer = cast(nn.TransformerEncoderLayer, module)  # torch's native path, which calls no module
    given = _bind(("src", "src_mask", "src_key_padding_mask", "is_causal"), args, kwargs)
    src: Tensor = given["src"]
    x = layer.norm1(src) if layer.norm_first else src
    return attended(layer.self_attn, {
        "query": x, "key": x, "value": x, "attn_mask": given.get("src_mask"),
        "key_padding_mask": given.get("src_key_padding_mask"), "is_causal": given.get("is_causal", False),
    }, memory)  # fmt: skip


def of_function(args: tuple[Any, ...], kwargs: dict[str, Any], memory: Memory) -> Read:
    """What F.multi_head_attention_forward attended with."""
    names = FUNCTION.split()
    given = _bind(tuple(names), args, kwargs)
    layer = SimpleNamespace(batch_first=False, out_proj=SimpleNamespace(weight=given["out_proj_weight"]), **{
        name: given.get(name) for name in (*names[3:6], *names[6:10], "q_proj_weight", "k_proj_weight", "v_proj_weight")
    })  # fmt: skip
    if given.get("use_separate_proj_weight"):
        layer.in_proj_weight = None
    return attended(cast(nn.MultiheadAttention, layer), given, memory)


def attended(layer: nn.MultiheadAttention, given: dict[str, Any], memory: Memory) -> Read:
    """q, k, v as nn.MultiheadAttention makes them, and its masks."""
    query, key, value = given["query"], given["key"], given["value"]
    kind = "self" if key is query else "cross"
    lengths = _lengths(query)
    if lengths is not None:  # a nested tensor: padding that was taken out
        key = query = value = query.to_padded_tensor(0.0)
    elif query.ndim == 2:
        query, key, value = query[None], key[None], value[None]
        if given.get("key_padding_mask") is not None:
            given = {**given, "key_padding_mask": given["key_padding_mask"][None]}
    elif not layer.batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    q, k, v = _projected(layer, query, key, value)
    extra = 0
    if layer.bias_k is not None and layer.bias_v is not None:
        k, v = (
            torch.cat([x, b.view(1, x.shape[1], 1, -1).expand(len(x), -1, -1, -1)], 2)
            for x, b in ((k, layer.bias_k), (v, layer.bias_v))
        )
        extra += 1
    if layer.add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        extra += 1
    mask, bias, flat = _masks(given, (q.shape[0], q.shape[1], q.shape[2], k.shape[2]), extra, memory)
    if lengths is not None:
        mask = Lengths(lengths, lengths) if mask is None else mask & Lengths(lengths, lengths)
    return Read(q, k, v, mask, bias, flat, kind, layer.out_proj.weight)


def _bind(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _lengths(x: Tensor) -> list[int] | None:
    return [len(part) for part in x.unbind()] if x.is_nested else None


def _projected(layer: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Each of the three through its own part of the weights, [batch, heads, tokens, head_dim]."""
    E = cast(int, layer.embed_dim)
    packed, bias = cast("Tensor | None", layer.in_proj_weight), cast("Tensor | None", layer.in_proj_bias)
    own = cast("list[Tensor]", [layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight])
    made: list[Tensor] = []
    for i, x in enumerate((query, key, value)):
        part = slice(i * E, (i + 1) * E)
        x = F.linear(x, own[i] if packed is None else packed[part], None if bias is None else bias[part])
        made.append(x.view(*x.shape[:2], cast(int, layer.num_heads), -1).transpose(1, 2))
    return tuple(made)


def _masks(
    given: dict[str, Any], sizes: tuple[int, int, int, int], extra: int, memory: Memory
) -> tuple[Mask | None, Tensor | None, Tensor | None]:
    """torch's two masks; what is_causal promises is read where there is no mask to read."""
    _, H, T, _ = sizes
    mask: Mask | None = None
    bias: Tensor | None = None
    flat: Tensor | None = None
    whole, padding = given.get("attn_mask"), given.get("key_padding_mask")
    if whole is None and given.get("is_causal"):
        return Causal(align="start"), None, None
    for x, four in ((whole, _square), (padding, _row)):
        if x is None:
            continue
        more, added, level = memory.of(x, lambda x, four=four: _one(F.pad(four(x, H), (0, extra))), f"torch {H} {extra}")
        mask = more if mask is None else mask if more is None else mask & more
        bias = added if bias is None else bias if added is None else bias + added
        flat = level if flat is None else flat if level is None else flat | level
    return mask, bias, None if flat is None else flat.expand(-1, -1, T)


def _one(x: Tensor) -> tuple[Mask | None, Tensor | None, Tensor | None]:
    if x.dtype == torch.bool:
        return compact(~x), None, None
    return additive(x)


def _square(x: Tensor, H: int) -> Tensor:
    return x[None, None] if x.ndim == 2 else x.view(-1, H, *x.shape[1:])


def _row(x: Tensor, _: int) -> Tensor:
    return x[:, None, None]
