"""Gradients that can be taken once: what a fused kernel says to whoever differentiates its gradient again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

Hook = Callable[[tuple[Tensor | None, ...], tuple[Tensor, ...]], tuple[Tensor | None, ...] | None]


@functools.cache
def first_order_only(kernel: str) -> Hook:
    """A hook on a kernel's gradient node: where its gradient is recorded, it cannot be differentiated again, and says so."""

    def hook(grads: tuple[Tensor | None, ...], _: tuple[Tensor, ...]) -> tuple[Tensor | None, ...] | None:
        if not torch.is_grad_enabled():
            return None
        refuse = cast(Callable[[Tensor, str], Tensor], _Refuse.apply)
        return tuple(None if g is None else refuse(g, kernel) for g in grads)

    return hook


def mark(out: Tensor, kernel: str) -> Tensor:
    """out, its gradient marked as one that cannot be differentiated again."""
    if not torch.compiler.is_compiling() and out.requires_grad and out.grad_fn is not None:
        out.grad_fn.register_hook(first_order_only(kernel))
    return out


def refuse(out: Tensor, kernel: str) -> Tensor:
    """out, whose gradient cannot even be recorded: a compiled one overwrites what a second derivative would need."""

    def hook(_: tuple[Tensor, ...]) -> None:
        if torch.is_grad_enabled():
            raise NotImplementedError(_sentence(kernel))

    if out.requires_grad and out.grad_fn is not None:
        out.grad_fn.register_prehook(hook)
    return out


def _sentence(kernel: str) -> str:
    return f'attention: kernel="{kernel}" can be differentiated once; for second derivatives write kernel="reference"'


class _Refuse(torch.autograd.Function):
    """The identity; differentiating it is the error."""

    generate_vmap_rule = True

    @staticmethod
    def forward(grad: Tensor, kernel: str) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        del kernel
        return grad.view_as(grad)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004 - torch names its arguments
        ctx.kernel = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise NotImplementedError(_sentence(ctx.kernel))
