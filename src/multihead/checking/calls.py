"""How a module is called, found by adopting's names and trials, with dropout kept quiet and required masks made neutral."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..adopting.affine import Affine
from ..adopting.drive import Call, Driver, forms, mixes, signature, tried
from ..adopting.hints import Hints
from ..adopting.turning import angles

DROPS = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout", "dropout_"}
Fill = Callable[[int, int], Any]  # from batch and tokens
NEUTRAL: tuple[Fill, ...] = (  # masks that hide nothing, in one convention or another
    lambda b, t: torch.ones(t, t),
    lambda b, t: torch.zeros(t, t),
    lambda b, t: torch.ones(t, t, dtype=torch.bool),
    lambda b, t: torch.zeros(t, t, dtype=torch.bool),
    lambda b, t: torch.full((b,), t),
    lambda b, t: torch.ones(b, t),
    lambda b, t: torch.zeros(b, t),
    lambda b, t: torch.ones(b, t, dtype=torch.bool),
    lambda b, t: torch.zeros(b, t, dtype=torch.bool),
    lambda b, t: torch.ones(b, t, t),
    lambda b, t: torch.zeros(b, t, t),
)


class Quiet(TorchFunctionMode):
    """Nothing drops inside, whoever calls it and however; `heard` tells whether something would have."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in DROPS and len(args) > 0:
            p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            if (args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))) and p:
                self.heard.append(name)
                return args[0]
        if name == "scaled_dot_product_attention":
            p = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
            if p:
                self.heard.append(name)
                args, kwargs = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args, {**kwargs, "dropout_p": 0.0}
                kwargs = {k: v for k, v in kwargs.items() if k != "dropout_p" or len(args) <= 4}
        return func(*args, **kwargs)


class Caller(Driver):
    """A driver that gives what must be given, and hears no dropout."""

    def __init__(self, module: nn.Module, call: Call, fill: dict[str, Fill] | None = None, loud: bool = False) -> None:
        super().__init__(module, call)
        self.fill, self.loud, self.heard = fill or {}, loud, list[str]()

    def run(self, given: dict[str, Tensor], extra: dict[str, Any] | None = None, grad: bool = False) -> Any:
        B, T = given["query"].shape[:2]
        given = {role: x.clone() for role, x in given.items()}  # a module that changes them changes a copy
        more = {name: make(B, T) for name, make in self.fill.items()} | self._turned(T, given["query"]) | (extra or {})
        if self.loud:
            return super().run(given, more, grad)
        with Quiet() as quiet:
            found = super().run(given, more, grad)
        self.heard = quiet.heard
        return found

    def _turned(self, tokens: int, like: Tensor) -> dict[str, Any]:
        """Rotations that a caller hands over, in the dtype and on the device of the input."""
        form = self.call.form
        if form is None or (like.dtype == torch.float64 and not like.is_meta):
            return {}
        made = form.make(*angles(self.call.turned, torch.arange(tokens)))

        def cast(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return x.to(like.device, torch.complex64 if x.is_complex() else like.dtype if x.is_floating_point() else x.dtype)

        return {self.call.named("angles")[0]: pytree.tree_map(cast, made)}

    def raw(self, given: dict[str, Tensor]) -> Any:
        """With these very tensors."""
        B, T = given["query"].shape[:2]
        return super().run(given, {name: make(B, T) for name, make in self.fill.items()} | self._turned(T, given["query"]))

    def loudly(self) -> Caller:
        return Caller(self.module, self.call, self.fill, loud=True)

    def of(self, module: nn.Module, call: Call | None = None) -> Caller:
        """The same call of another copy."""
        return Caller(module, call or self.call, self.fill, self.loud)


def callers(module: nn.Module, affines: list[Affine], hints: Hints, errors: list[Exception]) -> list[Caller]:
    """The ways in which the copy can be called, likeliest first; what the others said goes into errors."""
    base = signature(module)
    required = [
        n
        for n, p in base.parameters.items()
        if p is inspect.Parameter.empty and base.roles.get(n) not in ("query", "key", "value", "angles")
    ]
    found: list[Caller] = []
    for fill in _fills(required):
        for call in itertools.islice(forms(base, affines, hints), 60):
            driver = _tried(module, call, affines, fill, errors)
            if driver is not None:
                found.append(driver)
            if len(found) >= 6:
                return found
        if found and not fill:
            break
    return found


def _fills(required: list[str]) -> Iterator[dict[str, Fill]]:
    yield {}
    for make in NEUTRAL if required else ():
        yield dict.fromkeys(required, make)


def _tried(
    module: nn.Module, call: Call, affines: list[Affine], fill: dict[str, Fill], errors: list[Exception]
) -> Caller | None:
    try:
        Caller(module, call, fill).run(Caller(module, call, fill).inputs(2, 3))
    except Exception as error:
        errors.append(error)
        return None
    said: list[str] = []
    driver = tried(module, call, affines, said, functools.partial(Caller, fill=fill), finite=False)
    if not isinstance(driver, Caller):
        errors.extend(map(ValueError, said))
        return None
    try:
        across, along = mixes(driver, 0), mixes(driver, 1)
    except Exception as error:
        errors.append(error)
        return None
    return driver.of(module, replace(driver.call, batch_first=False)) if across and not along else driver


def leaves(result: Any) -> list[Tensor]:
    """The tensors in a result."""
    return [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
