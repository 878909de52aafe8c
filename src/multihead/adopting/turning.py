"""Rotations that a caller hands to a module: the forms they come in, made for the proof and read at run time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..positions import RoPE


@dataclass(frozen=True)
class Form:
    """One way to hand rotations over.

    make  (cos, sin), each [1, tokens, pairs] → the module's argument
    read  the module's argument → (cos, sin), each [batch|1, tokens, pairs]
    """

    name: str
    make: Callable[[Tensor, Tensor], Any]
    read: Callable[[Any], tuple[Tensor, Tensor]]

    def __reduce__(self) -> Any:  # functions without a name cannot be pickled
        return _form, (FORMS.index(self),)


def _pairs(x: Tensor) -> Tensor:
    return x if x.ndim == 3 else x[None] if x.ndim == 2 else x.squeeze(1)


FORMS = (
    Form(
        "(cos, sin), the two halves alike",  # Llama, GPT-NeoX and most of Hugging Face
        lambda cos, sin: (torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)),
        lambda given: (_pairs(given[0].chunk(2, -1)[0]), _pairs(given[1].chunk(2, -1)[0])),
    ),
    Form(
        "(cos, sin), neighbours alike",
        lambda cos, sin: (cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)),
        lambda given: (_pairs(given[0][..., ::2]), _pairs(given[1][..., ::2])),
    ),
    Form(
        "(cos, sin) of pairs",
        lambda cos, sin: (cos, sin),
        lambda given: (_pairs(given[0]), _pairs(given[1])),
    ),
    Form(
        "complex numbers",  # Meta's Llama
        lambda cos, sin: torch.complex(cos, sin)[0],
        lambda given: (_pairs(given.real), _pairs(given.imag)),
    ),
    Form(
        "(angles, scale), neighbours alike",  # x-transformers
        lambda cos, sin: (torch.atan2(sin, cos).repeat_interleave(2, -1), 1.0),
        lambda given: (_pairs(given[0][..., ::2].cos()), _pairs(given[0][..., ::2].sin())),
    ),
    Form(
        "(angles, scale), the two halves alike",
        lambda cos, sin: (torch.atan2(sin, cos).repeat(1, 1, 2), 1.0),
        lambda given: (_pairs(given[0].chunk(2, -1)[0].cos()), _pairs(given[0].chunk(2, -1)[0].sin())),
    ),
)


def _form(index: int) -> Form:
    return FORMS[index]


def angles(head_dim: int, positions: Tensor, theta: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """cos and sin [1, tokens, head_dim / 2] in float64."""
    rope = RoPE(theta, dim=head_dim)
    cos, sin = rope.angles(positions, torch.empty((), dtype=torch.float64))
    return cos[0], sin[0]
