"""An error in plain words where the gradient of a kernel is differentiated again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor


def once(kernel: str, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The gradients; where they are recorded, differentiating them says which kernel could."""
    if not torch.is_grad_enabled():
        return tuple(grads)
    refuse = cast(Callable[[Tensor, str], Tensor], _Refuse.apply)
    return tuple(None if g is None else refuse(g, kernel) for g in grads)


class _Refuse(torch.autograd.Function):
    """The identity; differentiating it is the error."""

    generate_vmap_rule = True

    @staticmethod
    def forward(grad: Tensor, kernel: str) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        del kernel
        return grad.view_as(grad)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        del output
        ctx.kernel = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise NotImplementedError(
            f'attention: kernel="{ctx.kernel}" can be differentiated once; for second derivatives write kernel="reference"'
        )
