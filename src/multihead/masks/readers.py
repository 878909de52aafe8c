"""Readers: each convention in the wild, named, read into a mask.

A bool or 0/1 tensor means opposite things in different libraries; only its owner knows which. Each function here says
in its name which convention it reads. A float mask that holds more than 0 and −inf is not a mask but a bias, and is
refused with that advice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .algebra import Mask
from .kinds import Causal, Keys
from .tables import Allowed, Blocked

VERY_NEGATIVE = -1e4  # what people write for −inf: −1e4 in fp16, −1e9, finfo.min


def from_torch(
    attn_mask: Tensor | None = None, key_padding_mask: Tensor | None = None, *, num_heads: int | None = None
) -> Mask | None:
    """The two masks of nn.MultiheadAttention: bool, True = blocked; or float, added to the scores.

    attn_mask         [q, k], or [batch · num_heads, q, k] (num_heads is needed to take the two apart)
    key_padding_mask  [batch, k]
    """
    masks: list[Mask] = []
    if attn_mask is not None:
        attn_mask = _tensor("from_torch", attn_mask, 2)
        if attn_mask.ndim == 3:
            if not num_heads or attn_mask.shape[0] % num_heads:
                raise ValueError(
                    f"from_torch: a 3-D attn_mask is [batch · num_heads, q, k]; its shape is {list(attn_mask.shape)} "
                    f"and num_heads is {num_heads}; pass the layer's num_heads="
                )
            attn_mask = attn_mask.view(-1, num_heads, *attn_mask.shape[1:])
        masks.append(Blocked(attn_mask) if attn_mask.dtype == torch.bool else Allowed(_additive("from_torch", attn_mask)))
    if key_padding_mask is not None:
        key_padding_mask = _tensor("from_torch", key_padding_mask, 2)
        blocked = key_padding_mask if key_padding_mask.dtype == torch.bool else ~_additive("from_torch", key_padding_mask)
        masks.append(Keys(~blocked))
    return None if not masks else masks[0] if len(masks) == 1 else masks[0] & masks[1]


def from_sdpa(attn_mask: Tensor) -> Mask:
    """The attn_mask of F.scaled_dot_product_attention: bool, True = may attend; or float, added to the scores."""
    attn_mask = _tensor("from_sdpa", attn_mask, 2)
    if attn_mask.ndim == 3:
        raise ValueError(
            f"from_sdpa: SDPA broadcasts axis 0 of a 3-D mask over the heads when q is 4-D; its shape is "
            f"{list(attn_mask.shape)}. Write m[:, None] if that axis is the batch, m[None] if it is the heads"
        )
    return Allowed(attn_mask if attn_mask.dtype == torch.bool else _additive("from_sdpa", attn_mask))


def from_additive(mask: Tensor) -> Allowed:
    """A float mask that is added to the scores: 0 may attend; −inf, finfo.min or anything below −1e4 may not."""
    return Allowed(_additive("from_additive", _tensor("from_additive", mask, 2)))


def from_zeros(mask: Tensor) -> Allowed:
    """`scores.masked_fill(mask == 0, -1e9)`: 0 or False blocks, everything else may attend."""
    return Allowed(_tensor("from_zeros", mask, 2) != 0)


def from_ones(mask: Tensor) -> Blocked:
    """`scores += mask * -1e9`: 1 or True blocks, 0 may attend."""
    mask = _tensor("from_ones", mask, 2)
    if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(f"from_ones: every entry must be 0 or 1; there is {_other(mask, (mask == 0) | (mask == 1))}")
    return Blocked(mask.bool())


def from_triu(buffer: Tensor) -> Mask:
    """A buffer of −inf above the diagonal, made for the longest text: [.., max, max]. Read back as what it is: Causal().

    Other buffers of 0 and −inf become a table over absolute positions.
    """
    allowed = _additive("from_triu", _tensor("from_triu", buffer, 2))
    rows, columns = allowed.shape[-2:]
    if rows == columns and bool((allowed == torch.ones_like(allowed).tril()).all()):
        return Causal()
    return Allowed(allowed, absolute=True)


def from_huggingface(attention_mask: Tensor) -> Keys:
    """Hugging Face's attention_mask [batch, tokens]: 1 is a token, 0 is padding."""
    attention_mask = _tensor("from_huggingface", attention_mask, 1)
    if attention_mask.ndim != 2:
        raise ValueError(
            f"from_huggingface: needs the tokenizer's 2-D mask [batch, tokens]; its shape is {list(attention_mask.shape)}. "
            "A 4-D mask is from_additive (float) or Allowed (bool)"
        )
    return Keys(attention_mask != 0)


def _tensor(reader: str, mask: object, least: int) -> Tensor:
    if not isinstance(mask, Tensor):
        raise TypeError(f"{reader}: needs a tensor; got a {type(mask).__name__}")
    if mask.ndim < least:
        raise ValueError(
            f"{reader}: a mask has at least {least} axes, queries and keys the last; its shape is {list(mask.shape)}"
        )
    return mask


def _additive(reader: str, mask: Tensor) -> Tensor:
    if not mask.dtype.is_floating_point:
        raise TypeError(f"{reader}: an additive mask is a float tensor of 0 and −inf; its dtype is {mask.dtype}")
    allowed = mask == 0
    known = allowed | (mask <= VERY_NEGATIVE)
    if not bool(known.all()):
        raise ValueError(
            f"{reader}: a mask holds 0 and −inf only, but there is {_other(mask, known)}; "
            "values that change scores are a bias: pass them as bias="
        )
    return allowed


def _other(mask: Tensor, known: Tensor) -> str:
    index = [int(i) for i in (~known).nonzero()[0]]
    return f"{mask[tuple(index)].item():g} at {index}"


def parse(text: str) -> Mask:
    """The mask that a text names, such as "causal & window(1024)"; see masks/text.py."""
    from .text import parse as read  # with parsers that few need

    return read(text)
