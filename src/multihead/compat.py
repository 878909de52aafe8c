"""nn.MultiheadAttention with torch's exact signature, parameters and masks, on our kernels and with one meaning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attend import attention
from .masks import Blocked, Causal, Keys, Mask


class MultiheadAttention(nn.MultiheadAttention):
    """Drop-in for nn.MultiheadAttention: constructor, state_dict, masks (True = blocked, floats added) and results are torch's.

    What differs, always for the better: a query that may attend to nothing gets zeros (torch: NaN in two of its three
    paths); train(), eval() and no_grad() agree; the output comes from a fused kernel even where weights are returned;
    is_causal holds together with key_padding_mask, weights and bias_k; the weights returned are those before dropout;
    out_proj is called, so that adapters on it work.
    """

    def _reset_parameters(self) -> None:
        self._qkv_same_embed_dim = self.in_proj_weight is not None  # pyright: ignore[reportUnnecessaryComparison]
        super()._reset_parameters()
        keep_from_torchs_fast_path(self)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As in torch: query [L, N, E] (batch_first: [N, L, E], unbatched: [L, E]); key and value likewise with S tokens.

        attn_mask         [L, S] or [N · num_heads, L, S]: bool, True = blocked; float, added to the scores
        key_padding_mask  [N, S]: bool, True = blocked; float, added
        is_causal         a promise that attn_mask is the causal mask, which is then not read
        Returns out like query, and the weights [N, L, S] (per head: [N, num_heads, L, S]) or None
        """
        batched = _check(self, query, key, value)
        if not batched:
            query, key, value = _thrice(_unsqueezed, query, key, value)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = _thrice(_transposed, query, key, value)
        B, T, H = query.shape[0], query.shape[1], cast(int, self.num_heads)
        q, k, v = (x.view(*x.shape[:2], H, x.shape[2] // H).transpose(1, 2) for x in _project(self, query, key, value))
        k, v = _extended(self, k, v)
        mask, bias = _masks(attn_mask, key_padding_mask, is_causal, (B, H, T, key.shape[1]), k.shape[2] - key.shape[1])
        found = attention(
            q, k, v, mask=mask, bias=bias, dropout=self.dropout if self.training else 0.0, return_weights=need_weights
        )  # fmt: skip
        out, weights = (found, None) if isinstance(found, Tensor) else found
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return out[0], None if weights is None else weights[0]
        return out if self.batch_first else out.transpose(0, 1), weights


def keep_from_torchs_fast_path(module: nn.MultiheadAttention) -> None:
    """nn.TransformerEncoderLayer bypasses self_attn.forward where this attribute allows it."""
    module._qkv_same_embed_dim = False  # pyright: ignore[reportPrivateUsage]


def _unsqueezed(x: Tensor) -> Tensor:
    return x.unsqueeze(0)


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(0, 1)


def _thrice(change: Callable[[Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Self-attention is known by its one tensor, which must stay one."""
    new = change(q)
    return new, new if k is q else change(k), new if v is q else change(v)


def _project(module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
    packed, E = cast("Tensor | None", module.in_proj_weight), cast(int, module.embed_dim)
    bias = cast("Tensor | None", module.in_proj_bias)
    if packed is not None and query is key is value:
        return F.linear(query, packed, bias).chunk(3, 2)
    weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight) if packed is None else packed.chunk(3)
    biases = (None, None, None) if bias is None else (bias[:E], bias[E : 2 * E], bias[2 * E :])
    return [F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True)]


def _extended(module: nn.MultiheadAttention, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v with bias_k, bias_v and a key of zeros behind them, where the module has these."""
    B, H, _, D = k.shape
    if module.bias_k is not None and module.bias_v is not None:
        k, v = (
            torch.cat([x, b.to(x.dtype).view(1, H, 1, D).expand(B, -1, -1, -1)], 2)
            for x, b in ((k, module.bias_k), (v, module.bias_v))
        )
    if module.add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    return k, v


def _masks(
    attn_mask: Tensor | None, padding: Tensor | None, is_causal: bool, sizes: tuple[int, int, int, int], extra: int
) -> tuple[Mask | None, Tensor | None]:
    """Torch's two masks as one of ours and a bias; every query sees the `extra` keys at the end."""
    B, H, T, S = sizes
    if is_causal and attn_mask is None:
        raise ValueError(
            "MultiheadAttention: is_causal promises that attn_mask is the causal mask, but there is no attn_mask; "
            "pass both, as nn.MultiheadAttention wants it"
        )
    mask: Mask | None = None
    bias: Tensor | None = None
    if is_causal and not extra:
        mask = Causal(align="start")
    elif attn_mask is not None:
        if attn_mask.shape not in ((T, S), (B * H, T, S)):
            raise ValueError(
                f"MultiheadAttention: attn_mask must be [L, S] = {[T, S]} or [N · num_heads, L, S] = {[B * H, T, S]}; "
                f"its shape is {list(attn_mask.shape)}"
            )
        four = F.pad(attn_mask, (0, extra)) if extra else attn_mask
        four = four[None, None] if four.ndim == 2 else four.view(B, H, T, S + extra)
        mask, bias = (Blocked(four), None) if _blocks("attn_mask", four) else (None, four)
    if padding is not None:
        if padding.shape != (B, S):
            raise ValueError(
                f"MultiheadAttention: key_padding_mask must be [N, S] = {[B, S]}; its shape is {list(padding.shape)}"
            )
        row = F.pad(padding, (0, extra)) if extra else padding
        if _blocks("key_padding_mask", row):
            mask = Keys(~row) if mask is None else mask & Keys(~row)
        else:
            bias = row[:, None, None] if bias is None else bias + row[:, None, None]
    return mask, bias


def _blocks(name: str, mask: Tensor) -> bool:
    if mask.dtype == torch.bool:
        return True
    if not mask.dtype.is_floating_point:
        raise TypeError(
            f"MultiheadAttention: {name} must be bool (True = blocked) or float (added to the scores); it is {mask.dtype}"
        )
    return False


def _check(module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the call is batched; raises where the three do not fit together or the module."""
    dims = cast("tuple[int, int, int]", (module.embed_dim, module.kdim, module.vdim))
    named = {"query": (query, dims[0]), "key": (key, dims[1]), "value": (value, dims[2])}
    if any(x.is_nested for x, _ in named.values()):
        raise TypeError(
            "MultiheadAttention: nested tensors are not taken; pad them (x.to_padded_tensor(0)) and pass key_padding_mask. "
            "nn.TransformerEncoder makes them: build it with enable_nested_tensor=False"
        )
    batch = 0 if module.batch_first else 1
    fits = query.ndim == key.ndim == value.ndim in (2, 3) and all(x.shape[-1] == dim for x, dim in named.values())
    if fits and query.ndim == 3:
        fits = query.shape[batch] == key.shape[batch] == value.shape[batch]
    if not fits or key.shape[:-1] != value.shape[:-1]:
        axes = "N, L, {}" if module.batch_first else "L, N, {}"
        said = "; ".join(f"{n} [{axes.format(dim)}] has shape {list(x.shape)}" for n, (x, dim) in named.items())
        raise ValueError(
            "MultiheadAttention: query, key and value must all have 3 axes (or 2: no batch), one batch N, and key and value "
            f"one length; {said}"
        )
    return query.ndim == 3


__all__ = ["MultiheadAttention"]
