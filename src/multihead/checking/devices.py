"""Other devices without one: tensors remember whether their device came from an input, and those that did not must not mix."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

Lines = list[tuple[str, int]]
MAKE = {"ones", "zeros", "full", "arange", "eye", "tensor", "as_tensor", "empty", "rand", "randn", "linspace", "from_numpy"}
FREE = {
    "__getitem__",
    "__get__",
    "size",
    "__len__",
    "item",
    "tolist",
    "__setitem__",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
}


class Devices(TorchFunctionMode):
    """Follows tensors made without the device of another; `mixed`: the lines that made one, and what it met."""

    def __init__(self) -> None:
        super().__init__()
        self.own: dict[int, tuple[Tensor, Lines]] = {}  # tensors are kept, so that no id comes back
        self.mixed: tuple[Lines, str] | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found, name = func(*args, **(kwargs or {})), getattr(func, "__name__", "")
        leaves = pytree.tree_leaves((args, kwargs))
        given = [x for x in leaves if isinstance(x, Tensor)]
        devices = [x for x in leaves if isinstance(x, torch.device)]
        mine = [x for x in given if id(x) in self.own]
        others = [x for x in given if id(x) not in self.own]
        lines: Lines | None = None
        if name in MAKE and not given and not devices:
            lines = _lines()
        elif mine and not others and not devices:
            lines = self.own[id(mine[0])][1]
        elif name == "to" and isinstance(leaves[1] if len(leaves) > 1 else None, str):
            lines = _lines()
        elif mine and others and self.mixed is None and name not in FREE | {"to", "type_as", "copy_"} and not devices:
            large = [x for x in mine if x.ndim > 0]
            if large:
                self.mixed = self.own[id(large[0])][1], name.strip("_")
        if lines is not None:
            for x in pytree.tree_leaves(found):
                if isinstance(x, Tensor):
                    self.own[id(x)] = x, lines
        return found


def _lines() -> Lines:
    """The lines that led here, the innermost first."""
    frame, found = sys._getframe(2), list[tuple[str, int]]()  # pyright: ignore[reportPrivateUsage]
    while frame is not None and len(found) < 12:
        found.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return found
