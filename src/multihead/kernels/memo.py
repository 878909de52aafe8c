"""What was worked out of a mask, kept as long as the mask is the same: the layers of a model share one."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..masks import Mask, Where
from ..masks.algebra import known
from .spec import Spec

T = TypeVar("T")


class Memo(Generic[T]):
    """The last few results: a mask is the same if its kinds, options and tensors are, and no tensor was written to since.

    most   so many: kinds of masks that the layers of a model take in turns
    blind  a result that does not depend on what functions of the user's say
    """

    def __init__(self, most: int = 4, blind: bool = False) -> None:
        self.most, self.blind = most, blind
        self._kept: list[tuple[tuple[object, ...], list[weakref.ref[Tensor]], T]] = []

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, spec: Spec, make: Callable[[], T], also: object = None) -> T:
        """What `make` gives for the mask and the sizes of a call; `also` is what else it depends on."""
        tensors = leaves(spec)
        free_to_change = not self.blind and free(spec.mask)
        if torch.compiler.is_compiling() or free_to_change or any(x.is_inference() for x in tensors):
            return make()
        structure: Any = pytree.tree_structure(spec.mask)
        positions = tuple(x if type(x) is int else None for x in (spec.start, spec.key_start))
        sizes = spec.batch, spec.heads, spec.q_len, spec.kv_len, spec.device
        key = also, structure, sizes, positions, spec.start is None, tuple(x._version for x in tensors)  # pyright: ignore[reportPrivateUsage]
        for before, seen, found in self._kept:
            if before == key and all(a() is b for a, b in zip(seen, tensors, strict=True)):
                return found
        found = make()
        self._kept = [*self._kept[1 - self.most :], (key, [weakref.ref(x) for x in tensors], found)]
        return found

    def clear(self) -> None:
        self._kept = []


def leaves(spec: Spec) -> list[Tensor]:
    """The tensors on which it depends what a call's queries may see."""
    positions = [x for x in (spec.start, spec.key_start) if isinstance(x, Tensor)]
    return [*([] if spec.mask is None else spec.mask.leaves()), *positions]


def on_host(spec: Spec) -> bool:
    """Whether all of them can be read without waiting for a device."""
    return all(known(x) is not None for x in leaves(spec))


def free(mask: Mask | None) -> bool:
    """Whether a function of the user's decides, which may look at anything: Where, or a kind that is not ours."""
    if mask is None:
        return False
    found: list[object] = pytree.tree_leaves(mask)
    known_kinds = all(leaf is None or isinstance(leaf, Tensor) for leaf in found)
    return not known_kinds or any(isinstance(atom, Where) for atom in mask.atoms())
