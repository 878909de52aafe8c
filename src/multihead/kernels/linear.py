"""nn.Linear by the library that is faster here; wherever a module is not just that, the module itself is called."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as modules

from . import products
from .spec import transformed

GLOBAL_HOOKS = tuple(
    f"_global_{when}" for when in ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
)
LEAST = 2**20  # multiplications below which a choice costs more than it gains


def linear(module: nn.Module, x: Tensor) -> Tensor:
    """module(x); of a plain nn.Linear in float32 on a CPU by oneDNN where that is faster, forward and backward."""
    if torch.compiler.is_compiling() or type(module) is not nn.Linear or x.numel() * module.out_features < LEAST:
        return module(x)  # said at once: decoding a token has no microsecond to spare
    if forward_ad._current_level >= 0 or not _plain(module, x):  # pyright: ignore[reportPrivateUsage]
        return module(x)
    weight, bias = module.weight, cast("Tensor | None", module.bias)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)):
        return cast(Tensor, _Linear.apply(x, weight, bias))
    return _product(x, weight, bias)


def _plain(module: nn.Linear, x: Tensor) -> bool:
    """Whether nothing is to happen but x · Wᵀ + b, with numbers that are there, and it is worth another library."""
    weight, bias = module.weight, cast("Tensor | None", module.bias)
    return (
        x.is_cpu
        and x.dtype == torch.float32
        and x.shape[-1] == weight.shape[1]
        and type(x) in (Tensor, nn.Parameter)
        and type(weight) is nn.Parameter
        and weight.dtype == torch.float32
        and weight.is_cpu
        and weight.is_contiguous()
        and (bias is None or (type(bias) is nn.Parameter and bias.dtype == torch.float32))
        and "forward" not in module.__dict__
        and not (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)  # pyright: ignore[reportPrivateUsage]
        and not any(getattr(modules, name) for name in GLOBAL_HOOKS)
        and not torch.is_autocast_enabled("cpu")
        and not transformed()
        and products.speed(torch.float32).library == "onednn"
    )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return products.affine(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], weight.shape[0])


class _Linear(torch.autograd.Function):
    """y = x Wᵀ + b     dx = dy W     dW = dyᵀ x     db = Σ dy"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        if torch.is_grad_enabled():  # to be differentiated again, by torch's own operators
            rows, back = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
            return F.linear(dy, weight.t()), back.t() @ rows, back.sum(0) if ctx.biased else None
        back = dy.reshape(-1, dy.shape[-1])
        dx = products.nt(back, weight.t()).view_as(x) if needs[0] else None
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        dw = products.nt(back.t().contiguous(), rows.t()) if needs[1] else None
        return dx, dw, back.sum(0) if ctx.biased and needs[2] else None
