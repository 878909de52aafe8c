"""What a module's forward does, operation by operation, each with the author's line it comes from."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from .source import Place, Source

SHAPES_4 = {"view", "reshape", "unflatten", "rearrange", "_unsafe_view", "view_as", "as_strided"}
PRODUCTS = {"matmul", "bmm", "einsum", "baddbmm", "mm", "scaled_dot_product_attention"}
SOFTMAX = {"softmax", "log_softmax", "scaled_dot_product_attention", "exp"}
MADE = {"ones", "zeros", "full", "arange", "eye", "tensor", "triu", "tril", "to", "cuda", "float", "half", "empty", "linspace"}


@dataclass(frozen=True)
class Step:
    """One operation: its name without underscores, shapes of its tensors, of its result, its plain numbers, its line."""

    name: str
    raw: str
    given: tuple[tuple[int, ...], ...]
    made: tuple[int, ...]
    numbers: tuple[float, ...]
    file: str
    line: int
    dtype: torch.dtype | None = None
    size: int = 0


@dataclass
class Sizes:
    """What shapes are told by."""

    batch: int
    heads: int
    q_len: int
    kv_len: int
    head_dim: int


class Trace(TorchFunctionMode):
    """Records the steps that lines of these files do."""

    def __init__(self, files: set[str]) -> None:
        super().__init__()
        self.files, self.steps = files, list[Step]()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        where = self._line()
        if where is not None:
            leaves = pytree.tree_leaves((args, kwargs))
            tensors = [x for x in leaves if isinstance(x, Tensor)]
            numbers = [float(x) for x in leaves if isinstance(x, int | float) and not isinstance(x, bool)]
            numbers += [float(x) for x in tensors if x.ndim == 0 and x.numel() == 1 and not x.is_complex() and not x.is_meta]
            raw = getattr(func, "__name__", "")
            out = found if isinstance(found, Tensor) else None
            self.steps.append(
                Step(
                    raw.strip("_"), raw, tuple(tuple(x.shape) for x in tensors), tuple(out.shape) if out is not None else (),
                    tuple(numbers), *where, out.dtype if out is not None else None,
                    out.numel() * out.element_size() if out is not None else 0,
                )
            )  # fmt: skip
        return found

    def _line(self) -> tuple[str, int] | None:
        frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
        while frame is not None:
            if frame.f_code.co_filename in self.files:
                return frame.f_code.co_filename, frame.f_lineno
            frame = frame.f_back
        return None


@dataclass
class Steps:
    """The steps of one call, asked for what they are in attention."""

    steps: list[Step]
    source: Source
    sizes: Sizes
    names: dict[str, str] = field(default_factory=dict[str, str])  # what a finding is about: an attribute, a parameter

    def at(self, what: str, name: str = "") -> Place | None:
        """The line of one of the computation's parts; name: of the attribute or method that it is about."""
        if what in ("init", "kept", "state"):
            return self._assigned(name)
        if what == "def":
            return self.source.definition(name)
        if what == "return":
            return _last(self.source.grep(r"^\s*return\b", "forward|__call__")) or _last(self.source.grep(r"^\s*return\b"))
        if what == "turn":
            return _last(self.source.grep(r"(?i)(rope|rot|apply_)\w*\(", "forward|__call__")) or self._grep(r"(?i)rope|rot|cos")
        if what == "causal":
            found = self.source.grep(r"\b(triu|tril)_?\(|is_causal\s*=\s*True|<=|>=")
            return next(iter(found), None) or self._first(self._is("mask"))
        if what == "project" and name:
            return next(iter(self.source.grep(rf"\bself\.{re.escape(name)}\b(?!\s*=)", "(?!__init__).*")), self._assigned(name))
        steps = [s for s in self.steps if self._is(what)(s)]
        if what in ("split", "repeat"):
            telling = [s for s in steps if self._slipped(what, s)]
            steps = telling or steps
        chosen = (steps[-1] if what in ("merge", "context", "dropout") else steps[0]) if steps else None
        return None if chosen is None else self.source.place(chosen.file, chosen.line)

    def _slipped(self, what: str, step: Step) -> bool:
        """Of several steps of a kind, the one that looks like the mistake."""
        if what == "repeat":
            return step.name in ("repeat", "tile", "expand")
        return step.made[-3:-1] == (self.sizes.heads, self.sizes.q_len) or step.made[0] == self.sizes.batch * self.sizes.heads

    def all(self, what: str) -> list[Step]:
        return [s for s in self.steps if self._is(what)(s)]

    def _first(self, test: Callable[[Step], bool]) -> Place | None:
        step = next((s for s in self.steps if test(s)), None)
        return None if step is None else self.source.place(step.file, step.line)

    def _grep(self, pattern: str) -> Place | None:
        return next(iter(self.source.grep(pattern)), None)

    def _assigned(self, name: str) -> Place | None:
        if not name:
            return None
        return self.source.assigned(name.rpartition(".")[2])

    def _is(self, what: str) -> Callable[[Step], bool]:
        z = self.sizes
        scores = (z.q_len, z.kv_len)

        def square(shape: tuple[int, ...]) -> bool:
            return len(shape) >= 3 and shape[-2:] in (scores, scores[::-1])

        tests: dict[str, Callable[[Step], bool]] = {
            "split": lambda s: s.name in SHAPES_4 and len(s.made) >= 3 and len(s.given[0]) == 3 and s.made != s.given[0]
            and s.made[-1] == z.head_dim,
            "merge": lambda s: s.name in SHAPES_4 | {"flatten"} and bool(s.given) and len(s.made) == 3 and s.made[1] == z.q_len
            and s.made[-1] != s.given[0][-1],
            "average": lambda s: s.name in ("mean", "sum") and bool(s.given) and len(s.given[0]) == 4,
            "repeat": lambda s: s.name in ("repeat", "tile", "expand", "repeat_interleave", "expand_as"),
            "scores": lambda s: s.name in PRODUCTS
            and (square(s.made) or s.name.startswith("scaled") or s.made[-2:] == (z.heads,) * 2),
            "scale": lambda s: (
                s.name in ("div", "truediv", "mul", "rmul", "rtruediv", "imul", "itruediv", "div_", "mul_") and bool(s.numbers)
                and any(abs(abs(n) - 1) > 1e-9 and 1e-3 < abs(n) < 1e4 for n in s.numbers)
                and (square(s.made) or s.made[-1:] == (z.head_dim,) or len(s.made) == 3)
            ) or s.name == "scaled_dot_product_attention",
            "softmax": lambda s: s.name in SOFTMAX,
            "exp": lambda s: s.name == "exp",
            "context": lambda s: s.name in PRODUCTS and not square(s.made),
            "mask": lambda s: (
                s.name in ("masked_fill", "where", "add", "iadd", "mul", "imul", "radd", "rmul", "sub") and square(s.made)
                and (len(s.given) > 1 and max(map(len, s.given[1:])) >= 2)
            ) or (
                s.name in ("masked_fill", "where", "setitem") and len(s.given) > 1 and s.given[0][-1:] == (z.kv_len,)
            ) or s.name == "scaled_dot_product_attention",
            "cat": lambda s: s.name in ("cat", "concat", "concatenate"),
            "dropout": lambda s: s.name.endswith("dropout") or s.name == "scaled_dot_product_attention",
            "view": lambda s: s.name == "view",
            "inplace": lambda s: (s.raw.endswith("_") and not s.raw.startswith("__"))
            or bool(re.match(r"__i(add|mul|sub|truediv)__|__setitem__", s.raw)),
            "made": lambda s: s.name in MADE,
            "detach": lambda s: s.name in ("detach", "data"),
            "project": lambda s: s.name in ("linear", "matmul", "einsum", "addmm"),
        }  # fmt: skip
        return tests.get(what, lambda s: False)


def _last(places: list[Place]) -> Place | None:
    return places[-1] if places else None
