"""What a module's mask argument means: every convention in the wild, tried on the module until its output says which it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..masks import Allowed, Keys, Mask, ValidLens

LEAST = torch.finfo(torch.float16).min


@dataclass(frozen=True)
class Convention:
    """One way to write down what may attend.

    name    what it is called, with the reader that reads it
    write   allowed (bool) → the module's argument
    read    the module's argument → allowed (bool), or None where it is added to the scores as it is
    kind    "bool", "int" or "float": the dtype it comes in
    """

    name: str
    kind: str
    write: Callable[[Tensor], Tensor]
    read: Callable[[Tensor], Tensor] | None

    def __reduce__(self) -> Any:  # functions without a name cannot be pickled
        return _known, ("CONVENTIONS", CONVENTIONS.index(self))


CONVENTIONS = (
    Convention("True may attend (masks.from_sdpa)", "bool", lambda a: a, lambda m: m),
    Convention("True is blocked (masks.from_torch)", "bool", lambda a: ~a, lambda m: ~m),
    Convention("0 blocks (masks.from_zeros)", "int", lambda a: a.long(), lambda m: m != 0),
    Convention("1 blocks (masks.from_ones)", "int", lambda a: (~a).long(), lambda m: m == 0),
    Convention(
        "added to the scores (masks.from_additive)",
        "float",
        lambda a: torch.zeros(a.shape, dtype=torch.float64).masked_fill(~a, -math.inf),
        None,
    ),
    Convention(
        "added to the scores (masks.from_additive)",
        "float",
        lambda a: torch.zeros(a.shape, dtype=torch.float64).masked_fill(~a, -1e9),
        None,
    ),
    Convention("0 blocks (masks.from_zeros)", "float", lambda a: a.double(), lambda m: m != 0),
    Convention("1 blocks (masks.from_ones)", "float", lambda a: (~a).double(), lambda m: m == 0),
)
LENGTHS = "the number of valid keys (ValidLens)"


def kind_of(mask: Tensor) -> str:
    return "bool" if mask.dtype == torch.bool else "float" if mask.is_floating_point() else "int"


@dataclass(frozen=True)
class Shape:
    """Axes of a mask argument, and how our masks take them."""

    name: str
    sizes: Callable[[int, int, int, int], tuple[int, ...]]  # from batch, heads, q_len, kv_len
    wrap: Callable[[Tensor], Mask]

    def __reduce__(self) -> Any:
        return _known, ("SHAPES", SHAPES.index(self))


SHAPES = (
    Shape("[q, k]", lambda b, h, t, s: (t, s), Allowed),
    Shape("[batch, k]", lambda b, h, t, s: (b, s), Keys),
    Shape("[batch, q, k]", lambda b, h, t, s: (b, t, s), Allowed),
    Shape("[batch, 1, q, k]", lambda b, h, t, s: (b, 1, t, s), Allowed),
    Shape("[batch, heads, q, k]", lambda b, h, t, s: (b, h, t, s), Allowed),
    Shape("[batch, 1, 1, k]", lambda b, h, t, s: (b, 1, 1, s), Allowed),
)


def _known(table: str, index: int) -> Any:
    return globals()[table][index]


@dataclass
class Reader:
    """What was found out about one mask parameter: the convention for each dtype and number of axes.

    by_shape  (kind, axes) → (convention, shape)
    shapes    the names of all shapes in which it takes a convention;  lengths: axes in which it takes valid lengths
    """

    parameter: str
    by_shape: dict[tuple[str, int], tuple[Convention, Shape]] = field(
        default_factory=dict[tuple[str, int], tuple[Convention, Shape]]
    )
    shapes: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    lengths: set[int] = field(default_factory=set[int])

    def learn(self, convention: Convention, shape: Shape, axes: int) -> None:
        self.by_shape.setdefault((convention.kind, axes), (convention, shape))
        named = self.shapes.setdefault(
            convention.name if convention.kind == "bool" else f"{convention.kind} {convention.name}", []
        )
        if shape.name not in named:
            named.append(shape.name)

    def __bool__(self) -> bool:
        return bool(self.by_shape or self.lengths)

    def read(self, given: Tensor) -> tuple[Mask | None, Tensor | None] | None:
        """The argument as (mask, None) or (None, bias); None where this kind of argument was never proven."""
        kind = kind_of(given)
        if kind == "int" and given.ndim in self.lengths:
            return ValidLens(given), None
        known = self.by_shape.get((kind, given.ndim)) or self._like(kind, given)
        if known is None:
            return None
        convention, shape = known
        if convention.read is None:
            return None, given if given.ndim != 2 or shape.name == "[q, k]" else given[:, None, None]
        return shape.wrap(convention.read(given)), None

    def _like(self, kind: str, given: Tensor) -> tuple[Convention, Shape] | None:
        """A mask [batch, q, k] that the module itself would put on its heads is read as what it says, if others are known."""
        if given.ndim == 3:
            known = next((c for (k, n), (c, _) in self.by_shape.items() if k == kind and n in (2, 4)), None)
            return None if known is None else (known, SHAPES[2])
        return None

    def __str__(self) -> str:
        said = [f"{name} as {', '.join(shapes)}" for name, shapes in self.shapes.items()]
        if self.lengths:
            said.append(f"{LENGTHS} as {', '.join('[batch]' if n == 1 else '[batch, q]' for n in sorted(self.lengths))}")
        return f"{self.parameter}: " + "; ".join(said)


def patterns(batch: int, heads: int, q_len: int, kv_len: int) -> Iterator[tuple[Shape, Tensor]]:
    """For every shape a random pattern of what may attend; every query sees the first key, no pattern is all true."""
    random = torch.Generator().manual_seed(11)
    for shape in SHAPES:
        allowed = torch.rand(shape.sizes(batch, heads, q_len, kv_len), generator=random) < 0.5
        allowed[..., 0] = True
        allowed[..., 1] = False
        yield shape, allowed
