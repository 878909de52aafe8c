"""from_module(): another project's attention layer, read, rebuilt as ours and compared with the original."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..layer import MultiHeadAttention
from ..positions import RoPE
from . import AdoptionError
from .affine import exact_copy, find
from .build import Copied, build
from .conventions import Reader
from .core import Core
from .drive import Driver, drivers
from .dropouts import Dropouts, find_dropouts
from .hints import Hints
from .probe import Masks, Probe, predict
from .rotations import configured
from .search import CLOSE, Found, Search, off
from .turning import FORMS, Form


@dataclass(frozen=True)
class Origin:
    """Where a layer comes from and how far it was proven; print it.

    module       the class it was read from
    projections  which of its parts became query, key, value and out, and how they fall into heads
    between      what happens between them, where that is unusual
    masks        for each parameter that took a mask: the conventions it understands, by the names of our readers
    differences  where its own code does something else than this layer
    error        the largest difference seen, over the largest value, both in float64
    compared     comparisons;  tried  hypotheses
    """

    module: str
    projections: str
    between: str
    masks: tuple[str, ...]
    differences: tuple[str, ...]
    error: float
    compared: int
    tried: int

    def __str__(self) -> str:
        rows = [("from", self.module), ("projections", self.projections), ("between", self.between)]
        rows += [("mask", said) for said in self.masks] + [("differs", said) for said in self.differences]
        rows += [("proof", f"{self.compared} comparisons in float64, largest difference {self.error:.1e} of the largest value")]
        return "\n".join(f"{name:<12} {said}" for name, said in rows)


@dataclass(frozen=True)
class Turning:
    """How a module takes rotations from its caller, and what it turns by them."""

    form: Form
    rope: RoPE


@dataclass
class Reading:
    """All that is known of a module that was read. `exact` and `driver` are its float64 copy and how to call that.

    memory   whether keys and values may come from another text, by a parameter of their own
    turning  how it takes rotations from its caller, if it does
    """

    layer: MultiHeadAttention
    copied: list[Copied]
    driver: Driver
    exact: MultiHeadAttention
    masks: Masks
    found: Found
    dropouts: Dropouts
    origin: Origin
    memory: bool
    turning: Turning | None

    @property
    def readers(self) -> dict[str, Reader]:
        return self.masks.readers


def read(module: nn.Module) -> Reading:
    """from_module(), with everything that was learned on the way."""
    if not isinstance(module, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"from_module: needs an nn.Module; got a {type(module).__name__}")
    if isinstance(module, MultiHeadAttention):
        raise AdoptionError("from_module: it is a multihead.MultiHeadAttention already")
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            return _read(module)
    except AdoptionError as error:
        raise AdoptionError(f"from_module: {type(module).__name__} cannot be adopted: {error}") from None


def _read(module: nn.Module) -> Reading:
    exact_module = exact_copy(module)
    affines, hints = find(exact_module), Hints(module)
    found = Search(exact_module, affines, hints).run(drivers(exact_module, affines, hints))
    driver, layout, core = found.driver, found.layout, found.core
    dropouts = find_dropouts(driver, layout)
    exact, bare = (build(exact_module, layout, c, Dropouts())[0].eval() for c in (core, replace(core, mask=None)))
    masks = Probe(driver, exact, bare, found.size).run()
    error, compared = prove(driver, exact, found)
    memory, turning = _takes_memory(driver, exact, found), _takes_rotations(driver, exact, found)
    layer, copied = build(module, layout, core, dropouts)
    notes = list(_notes(hints, core, driver, dropouts, masks))
    if core.turn is not None and driver.call.form is not None:
        layer.positions, more = configured(core.turn, module)
        notes += more
    layer.origin = Origin(
        type(module).__name__, repr(layout), repr(core), tuple(map(str, masks.readers.values())), (*masks.differences, *notes),
        max(error, masks.worst, found.error), compared + masks.compared, found.tried,
    )  # fmt: skip
    return Reading(layer, copied, driver, exact, masks, found, dropouts, layer.origin, memory, turning)


def prove(driver: Driver, exact: MultiHeadAttention, found: Found) -> tuple[float, int]:
    """The built layer against the module itself, both in float64; raises where they differ beyond rounding."""
    worst, compared = 0.0, 0
    for seed, (batch, tokens) in enumerate(((2, 5), (1, 11), (3, 2), (1, 1)), start=20):
        given = driver.inputs(batch, tokens, seed=seed, size=found.size)
        error = off(predict(exact, given, None), driver(given))
        if error > CLOSE:
            raise AdoptionError(
                f"the layer built from it differs by {error:.2g} of the largest value for {batch} texts of {tokens} tokens; "
                f"what was found: {found.layout!r}; {found.core!r}"
            )
        worst, compared = max(worst, error), compared + 1
    return worst, compared


def _takes_memory(driver: Driver, exact: MultiHeadAttention, found: Found) -> bool:
    """Whether keys and values may come from another text, by a parameter that the search left out."""
    call = driver.call
    if not call.takes("memory") or "memory" in call.fed or call.fed != ("query",) or exact.mask is not None:
        return False
    other = Driver(driver.module, replace(call, fed=("query", "memory"), dims=(call.dims[0], exact.key_dim)))
    given = other.inputs(2, 5, 7, seed=9, size=found.size)
    try:
        return off(predict(exact, given, None), other(given)) <= CLOSE
    except Exception:  # it does not take one after all
        return False


def _takes_rotations(driver: Driver, exact: MultiHeadAttention, found: Found) -> Turning | None:
    """How rotations are handed over: as the search found, or in a parameter that may also be left out."""
    call = driver.call
    if call.form is not None and found.core.turn is not None:
        return Turning(call.form, found.core.turn)
    if not call.takes("angles") or exact.positions is not None:
        return None
    for form, how in itertools.product(FORMS, ("half", "interleaved")):
        other = Driver(driver.module, replace(call, form=form, turned=exact.head_dim))
        given = other.inputs(2, 5, seed=9, size=found.size)
        exact.positions = RoPE(dim=exact.head_dim, layout=how)
        try:
            if off(predict(exact, given, None), other(given)) <= CLOSE:
                return Turning(form, exact.positions)
        except Exception:  # not in this form
            continue
        finally:
            exact.positions = None
    return None


def _notes(hints: Hints, core: Core, driver: Driver, dropouts: Dropouts, masks: Masks) -> Iterator[str]:
    if masks.takes_place:
        yield "a mask that is given takes the place of its own causal one; here both hold"
    windows = [w for w in hints.whole(r"^sliding_window$|^window$|^attention_window$|^local_window") if w]
    if windows and "Window" not in repr(core.mask) and driver.call.takes("mask"):
        yield f"its window of {windows[0]} is in the mask that its model makes; here pass mask=Causal() & Window({windows[0]})"
    if dropouts.unknown:
        yield f"dropout that falls neither on the weights nor on the output was left out: {', '.join(dropouts.unknown)}"


def differing(a: Any, b: Any) -> float:
    """The largest difference of two results, tensors within them compared in pairs, over the largest value."""
    worst = 0.0
    for x, y in zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True):
        if isinstance(x, Tensor) and isinstance(y, Tensor) and x.is_floating_point():
            worst = max(worst, off(x.detach().double(), y.detach().double()))
    return worst
