"""A bare function attention(q, k, v, …) as a module: right projections and heads around it, so that only it can be wrong."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..adopting.drive import ROLE
from .build import SIZES, guess

Function = Callable[..., Any]
WEIGHT = re.compile(
    r"(?i)^(w|weight|proj|b|bias)_?([qkvo]|qkv|out|query|key|value|output)s?$|^([qkvo]|qkv|out)_?(proj|weight|w|bias)$"
)


def wrapped(function: Function) -> Iterator[nn.Module]:
    """Modules around the function, likeliest first."""
    parameters = {
        n: p for n, p in inspect.signature(function).parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    weights = [n for n in parameters if WEIGHT.search(n) and parameters[n].default is inspect.Parameter.empty]
    if weights:
        d, h, _ = SIZES[0]
        for transposed in (False, True) if any("qkv" in n.lower() for n in weights) else (False,):
            yield _with_weights(function, parameters, weights, d, h, transposed)
        return
    roles = [n for n in parameters if ROLE.get(n.lower()) in ("query", "key", "value")][:3] or list(parameters)[:3]
    if len(roles) < 3:
        return
    d, h, _ = SIZES[0]
    for four in (True, False):
        yield _with_heads(function, parameters, roles, d, h, four)


def _signature(parameters: dict[str, inspect.Parameter], dropped: list[str]) -> inspect.Signature:
    own = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    kept = [p.replace(kind=p.KEYWORD_ONLY) for n, p in parameters.items() if n not in dropped]
    return inspect.Signature([*own, *kept])


def _module(name: str, forward: Callable[..., Any], signature: inspect.Signature) -> nn.Module:
    forward.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
    return type(name, (nn.Module,), {"forward": forward})()


def _constants(parameters: dict[str, inspect.Parameter], known: list[str], d: int, h: int) -> dict[str, Any]:
    """Plain numbers that the function must be given: its heads, its sizes."""
    found: dict[str, Any] = {}
    for n, p in parameters.items():
        if n not in known and p.default is inspect.Parameter.empty and ROLE.get(n.lower()) is None:
            value = guess(n, (d, h, h))
            if value is not inspect.Parameter.empty:
                found[n] = value
    return found


def _with_heads(
    function: Function, parameters: dict[str, inspect.Parameter], roles: list[str], d: int, h: int, four: bool
) -> nn.Module:
    """q, k, v as [batch, heads, tokens, dim] where four, else [batch, tokens, dim] of one head."""
    heads = h if four else 1
    constants = _constants(parameters, roles, d, h)

    def forward(self: Any, **given: Any) -> Any:
        made = [getattr(self, f"W_{r}")(given.pop(n)) for r, n in zip("qkv", roles, strict=True)]
        if four:
            made = [x.unflatten(2, (heads, -1)).transpose(1, 2) for x in made]
        found = function(**dict(zip(roles, made, strict=True)), **constants, **given)
        several = cast("tuple[Any, ...]", found) if isinstance(found, tuple) else (found,)
        out, rest = several[0], several[1:]
        merged = self.W_o(out.transpose(1, 2).flatten(2) if four else out)
        return (merged, *rest) if rest else merged

    module = _module(function.__name__, forward, _signature(parameters, list(constants)))
    for r in "qkvo":
        setattr(module, f"W_{r}", nn.Linear(d, d))
    vars(module)["num_heads"] = heads
    return module


def _with_weights(
    function: Function, parameters: dict[str, inspect.Parameter], weights: list[str], d: int, h: int, transposed: bool
) -> nn.Module:
    """The function's weights as parameters of a module."""
    constants = _constants(parameters, weights, d, h)

    def forward(self: Any, **given: Any) -> Any:
        return function(**given, **{n: getattr(self, n) for n in weights}, **constants)

    module = _module(function.__name__, forward, _signature(parameters, [*weights, *constants]))
    for n in weights:
        fused, bias = 3 * d if "qkv" in n.lower() else d, n.lower().startswith("b") or "bias" in n.lower()
        shape = (fused,) if bias else (fused, d) if transposed else (d, fused)
        value: Tensor = torch.randn(shape, generator=torch.Generator().manual_seed(len(n))) / d**0.5
        setattr(module, n, nn.Parameter(value))
    vars(module)["num_heads"] = h
    return module
