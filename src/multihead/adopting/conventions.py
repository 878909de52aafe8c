"""What a module's mask argument means: every convention in the wild, tried on the module until its output says which it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..masks import Allowed, Keys, Mask, ValidLens


@dataclass(frozen=True)
class Convention:
    """One way to write down what may attend.

    name    what it is called, with the reader that reads it
    write   allowed (bool) → the module's argument
    read    the module's argument → allowed (bool), or None where it is added to the scores as it is
    kind    "bool", "int" or "float": the dtype it comes in
    fits    whether the argument holds only values that were proven
    """

    name: str
    kind: str
    write: Callable[[Tensor], Tensor]
    read: Callable[[Tensor], Tensor] | None
    fits: Callable[[Tensor], bool] | None = None

    def __reduce__(self) -> Any:  # functions without a name cannot be pickled
        return _known, ("CONVENTIONS", CONVENTIONS.index(self))


def _zero_or_one(m: Tensor) -> bool:
    """Whether there is nothing else; inside a compiled graph nobody can look."""
    return torch.compiler.is_compiling() or bool(((m == 0) | (m == 1)).all())


def _zero_or_least(m: Tensor) -> bool:
    return torch.compiler.is_compiling() or bool(((m == 0) | (m <= -1e4)).all())


CONVENTIONS = (
    Convention("True may attend (masks.from_sdpa)", "bool", lambda a: a, lambda m: m),
    Convention("True is blocked (masks.from_torch)", "bool", lambda a: ~a, lambda m: ~m),
    Convention("0 blocks (masks.from_zeros)", "int", lambda a: a.long(), lambda m: m != 0, _zero_or_one),
    Convention("1 blocks (masks.from_ones)", "int", lambda a: (~a).long(), lambda m: m == 0, _zero_or_one),
    Convention("added to the scores (masks.from_additive)", "float", lambda a: soft(a.shape), None),
    Convention("0 blocks (masks.from_zeros)", "float", lambda a: a.double(), lambda m: m != 0, _zero_or_one),
    Convention("1 blocks (masks.from_ones)", "float", lambda a: (~a).double(), lambda m: m == 0, _zero_or_one),
    Convention("−inf blocks (masks.from_additive)", "float", lambda a: hard(a, -math.inf), lambda m: m == 0, _zero_or_least),
    Convention("−1e9 blocks (masks.from_additive)", "float", lambda a: hard(a, -1e9), lambda m: m == 0, _zero_or_least),
)


def soft(shape: torch.Size) -> Tensor:
    """Numbers to be added to scores, of which none is a mask."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(13), dtype=torch.float64)


def hard(allowed: Tensor, value: float) -> Tensor:
    return torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, value)


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

    known        (kind, axes) → every (convention, shape) that was proven; lengths: axes in which it takes valid lengths
    takes_place  whether it takes the place of the module's own mask instead of holding beside it
    """

    parameter: str
    known: dict[tuple[str, int], list[tuple[Convention, Shape]]] = field(
        default_factory=dict[tuple[str, int], list[tuple[Convention, Shape]]]
    )
    lengths: set[int] = field(default_factory=set[int])
    takes_place: bool = False

    def learn(self, convention: Convention, shape: Shape, axes: int) -> None:
        """The first convention of a kind that agrees is the one; other shapes of it are learned as well."""
        several = self.known.setdefault((convention.kind, axes), [])
        if not several or several[0][0] is convention:
            several.append((convention, shape))

    def __bool__(self) -> bool:
        return bool(self.known or self.lengths)

    def read(self, given: Tensor, sizes: tuple[int, int, int, int]) -> tuple[Mask | None, Tensor | None] | None:
        """The argument as (mask, None) or (None, bias); None where this kind of argument was never proven.

        sizes  batch, heads, q_len, kv_len of the call
        """
        kind = kind_of(given)
        if kind == "int" and given.ndim in self.lengths:
            return ValidLens(given), None
        fitting = [(c, s) for c, s in self._candidates(kind, given) if _fits(given, s.sizes(*sizes))]
        if not fitting or len({s.name for _, s in fitting if given.ndim == 2}) > 1:
            return None
        convention, shape = fitting[0]
        if convention.fits is not None and not convention.fits(given):
            return None
        if convention.read is None:
            return None, given if given.ndim != 2 or shape.name == "[q, k]" else given[:, None, None]
        return shape.wrap(convention.read(given)), None

    def _candidates(self, kind: str, given: Tensor) -> list[tuple[Convention, Shape]]:
        """A mask [batch, q, k] that the module itself would put on its heads is read as what it says, if others are known."""
        found = self.known.get((kind, given.ndim), [])
        if not found and given.ndim == 3:
            other = next((several[0][0] for (k, n), several in self.known.items() if k == kind and n in (2, 4)), None)
            return [] if other is None else [(other, SHAPES[2])]
        return found

    def __str__(self) -> str:
        alike: dict[str, dict[str, list[str]]] = {}  # conventions by the shapes they come in
        conventions: dict[tuple[str, str], list[str]] = {}
        for several in self.known.values():
            for convention, shape in several:
                conventions.setdefault((convention.name, convention.kind), []).append(shape.name)
        for (name, kind), shapes in conventions.items():
            alike.setdefault(", ".join(shapes), {}).setdefault(name, []).extend([] if kind == "bool" else [kind])
        said = [
            f"{', '.join(' '.join(filter(None, (' or '.join(kinds), name))) for name, kinds in names.items())} as {shapes}"
            for shapes, names in alike.items()
        ]
        if self.lengths:
            said.append(f"{LENGTHS} as {', '.join('[batch]' if n == 1 else '[batch, q]' for n in sorted(self.lengths))}")
        return f"{self.parameter}: " + "; ".join(said)


def _fits(given: Tensor, sizes: tuple[int, ...]) -> bool:
    return given.ndim == len(sizes) and all(n in (1, m) for n, m in zip(given.shape, sizes, strict=True))


def pattern(shape: Shape, batch: int, heads: int, q_len: int, kv_len: int) -> Tensor:
    """The pattern of one shape."""
    return next(allowed for other, allowed in patterns(batch, heads, q_len, kv_len) if other is shape)


def patterns(batch: int, heads: int, q_len: int, kv_len: int) -> Iterator[tuple[Shape, Tensor]]:
    """For every shape a random pattern of what may attend; every query sees the first key, no pattern is all true."""
    random = torch.Generator().manual_seed(11)
    for shape in SHAPES:
        allowed = torch.rand(shape.sizes(batch, heads, q_len, kv_len), generator=random) < 0.5
        allowed[..., 0] = True
        allowed[..., 1] = False
        yield shape, allowed
