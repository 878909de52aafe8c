"""Our attention under a name in transformers' registry: whole model families without any surgery."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ..attend import attention
from ..masks import Allowed, Causal, Mask


class Registration:
    """What register_with_transformers() returns. `calls` counts the attention calls that have come here so far."""

    def __init__(self, name: str) -> None:
        self.name, self.calls = name, 0

    def use(self, model: Any) -> Any:
        """Switch a model to our attention; warns after its first forward if it never called it. Returns the model."""
        if not hasattr(model, "set_attn_implementation"):
            raise TypeError(
                f"Registration.use: needs a model of transformers, with set_attn_implementation; got a {type(model).__name__}. "
                "multihead.adopt(model) takes any"
            )
        model.set_attn_implementation(self.name)
        before = self.calls

        def look(watched: nn.Module, _args: Any, _result: Any) -> None:
            hook.remove()
            if self.calls == before:
                warnings.warn(
                    f"{type(watched).__name__} never called its attention through transformers' registry, so nothing of it ran "
                    "on multihead: its file bypasses the interface. multihead.adopt(model) replaces its layers instead",
                    UserWarning,
                    stacklevel=2,
                )

        hook = model.register_forward_hook(look)
        return model

    def __repr__(self) -> str:
        return f"Registration({self.name!r}, {self.calls} calls)"

    def forward(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        position_bias: Tensor | None = None,
        **more: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """transformers' interface: query [B, H, Q, D], key and value [B, G, K, D] → [B, Q, H, D], and weights or None."""
        self.calls += 1
        if more.get("cache") is not None:
            raise NotImplementedError(
                f'attention "{self.name}": continuous batching over a paged cache is not offered; use '
                'model.set_attn_implementation("sdpa") for it'
            )
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        mask, bias = _mask(attention_mask, causal, query.shape[2]), position_bias
        if attention_mask is not None and attention_mask.is_floating_point():
            bias = attention_mask if bias is None else bias + attention_mask
        if bias is not None and bias.shape[-1] > key.shape[2]:
            bias = bias[..., : key.shape[2]]
        prefill = isinstance(mask, Causal) and key.shape[2] > query.shape[2]  # of a static cache, whose other columns are empty
        found = attention(
            query, key, value, mask=mask, bias=bias, scale=scaling, dropout=dropout, softcap=softcap, sinks=s_aux,
            start=0 if prefill else None, return_weights=bool(more.get("output_attentions")),
        )  # fmt: skip
        out, weights = (found, None) if isinstance(found, Tensor) else found
        return out.transpose(1, 2).contiguous(), weights


def register(name: str) -> Registration:
    """register_with_transformers()."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask  # pyright: ignore[reportUnknownVariableType]
    except ImportError as error:
        raise ImportError(
            "register_with_transformers: transformers ≥ 5 must be installed: pip install 'transformers>=5'"
        ) from error
    if "flash" in name or "/" in name or not name:
        raise ValueError(
            'register_with_transformers: name must hold neither "flash" nor "/", which transformers takes for kernels of its '
            f"own; it is {name!r}"
        )
    registration = KNOWN.setdefault(name, Registration(name))

    def call(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **more: Any) -> Any:
        return registration.forward(module, query, key, value, attention_mask, **more)

    AttentionInterface.register(name, call)
    AttentionMaskInterface.register(name, sdpa_mask)
    return registration


KNOWN: dict[str, Registration] = {}


def _mask(given: Tensor | None, causal: bool, q_len: int) -> Mask | None:
    if given is None:
        return Causal() if causal and q_len > 1 else None
    if not isinstance(given, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"attention: transformers handed over a {type(given).__name__} as a mask; a tensor or None is understood"
        )
    return Allowed(given) if given.dtype == torch.bool else None
