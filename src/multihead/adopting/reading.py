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
from ..masks import Causal, Window
from ..positions import RoPE
from . import AdoptionError
from .affine import Affine, exact_copy, find, perturbed
from .build import Copied, build
from .conventions import pattern
from .core import Core
from .drive import Driver, drivers
from .dropouts import Dropouts, find_dropouts
from .hints import Hints
from .probe import Behaviour, Probe, predict
from .rotations import configured
from .search import CLOSE, MOST, Found, Search, off
from .turning import FORMS, Form

LONG, LONGEST = 100, 1100  # tokens of the longest proof where nothing tells of a limit, and where something does


@dataclass(frozen=True)
class Origin:
    """Where a layer comes from and how far it was proven; print it.

    module       the class it was read from
    projections  which of its parts became query, key, value and out, and how they fall into heads
    between      what happens between them, where that is unusual
    masks        for each parameter that took a mask: the conventions it understands, by the names of our readers
    differences  where its own code does something else than this layer
    error        the largest difference seen, over the largest value, both in float64
    compared     comparisons;  longest  tokens of the longest text among them;  tried  hypotheses
    """

    module: str
    projections: str
    between: str
    masks: tuple[str, ...]
    differences: tuple[str, ...]
    error: float
    compared: int
    longest: int
    tried: int

    def __str__(self) -> str:
        rows = [("from", self.module), ("projections", self.projections), ("between", self.between)]
        rows += [("mask", said) for said in self.masks] + [("differs", said) for said in self.differences]
        rows += [
            (
                "proof",
                f"{self.compared} comparisons in float64, up to {self.longest} tokens, largest difference {self.error:.1e}",
            )
        ]
        return "\n".join(f"{name:<12} {said}" for name, said in rows)


@dataclass(frozen=True)
class Turning:
    """How a module takes rotations from its caller, and what it turns by them."""

    form: Form
    rope: RoPE


@dataclass
class Reading:
    """All that is known of a module that was read. `exact` and `driver` are its float64 copy and how to call that.

    memory    whether keys and values may come from another text, by a parameter of their own; and masks with it
    turning   how it takes rotations from its caller, if it does
    left_out  its parameters that change nothing, and are not in the layer
    """

    layer: MultiHeadAttention
    copied: list[Copied]
    driver: Driver
    exact: MultiHeadAttention
    behaviour: Behaviour
    found: Found
    dropouts: Dropouts
    origin: Origin
    memory: bool
    memory_masks: bool
    turning: Turning | None
    left_out: list[str]


def read(module: nn.Module, most: int = MOST) -> Reading:
    """from_module(), with everything that was learned on the way; most: hypotheses before it gives up."""
    if not isinstance(module, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"from_module: needs an nn.Module; got a {type(module).__name__}")
    if isinstance(module, MultiHeadAttention):
        raise AdoptionError("from_module: it is a multihead.MultiHeadAttention already")
    if "original" in vars(module):
        raise AdoptionError("from_module: it has been adopted already; its layer is module.layer")
    try:
        with warnings.catch_warnings(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            return _read(module, most)
    except AdoptionError as error:
        raise AdoptionError(f"from_module: {type(module).__name__} cannot be adopted: {error}") from None
    except Exception as error:
        said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise AdoptionError(f"from_module: {type(module).__name__} cannot be adopted: reading it failed with {said}") from error


def _read(module: nn.Module, most: int) -> Reading:
    moved = perturbed(exact_copy(module))  # as it is, a zero or a one may hide what a parameter is for
    affines, hints = find(moved), Hints(module)
    found = Search(moved, affines, hints, most).run(drivers(moved, affines, hints))
    driver, layout = found.driver, found.layout
    dropouts = find_dropouts(driver, layout)
    core, (error, compared, longest) = _proven(moved, found, hints, _lengths(module, hints, affines))
    exact, bare = (build(moved, layout, c, Dropouts())[0].eval() for c in (core, replace(core, mask=None)))
    behaviour = Probe(driver, exact, bare, found.size).run()
    as_it_is = exact_copy(module)
    prove(Driver(as_it_is, driver.call), build(as_it_is, layout, core, Dropouts())[0].eval(), found, [])
    memory, memory_masks = _takes_memory(driver, exact, found, behaviour)
    turning = _takes_rotations(driver, exact, found)
    layer, copied = build(module, layout, core, dropouts)
    left_out = _left_out(module, layer, copied)
    notes = list(_notes(hints, core, driver, dropouts, behaviour, left_out, longest))
    if core.turn is not None and driver.call.form is not None:
        layer.positions, more = configured(core.turn, module)
        notes += more
    layer.origin = origin = Origin(
        type(module).__name__, repr(layout), repr(core), tuple(map(str, behaviour.readers.values())),
        (*behaviour.differences, *notes), max(error, behaviour.worst, found.error), compared + behaviour.compared, longest,
        found.tried,
    )  # fmt: skip
    return Reading(
        layer, copied, driver, exact, behaviour, found, dropouts, origin, memory, memory_masks, turning, left_out
    )  # fmt: skip


def _proven(moved: nn.Module, found: Found, hints: Hints, lengths: list[int]) -> tuple[Core, tuple[float, int, int]]:
    """What was found, or the same within a window that shows in long texts only; and its proof."""
    cores = [found.core]
    if found.core.mask is None or found.core.mask == Causal():
        widths = [n for w in hints.windows for n in (w, w + 1) if w > 10]
        shapes = [Causal() & Window(n) if found.core.mask is not None else Window(n, ahead=n - 1) for n in widths]
        cores += [replace(found.core, mask=mask) for mask in shapes]
    errors: list[AdoptionError] = []
    for core in cores:
        exact = build(moved, found.layout, core, Dropouts())[0].eval()
        try:
            return core, prove(found.driver, exact, found, lengths)
        except AdoptionError as error:
            errors.append(error)
    raise errors[0]


def prove(driver: Driver, exact: MultiHeadAttention, found: Found, lengths: list[int]) -> tuple[float, int, int]:
    """The built layer against the module itself, both in float64; raises where they differ beyond rounding.

    Returns the largest difference, the number of comparisons and the longest text.
    """
    worst, compared, longest = 0.0, 0, 0
    for seed, (batch, tokens) in enumerate([(2, 5), (1, 11), (3, 2), (1, 1), *((1, n) for n in lengths)], start=20):
        given = driver.inputs(batch, tokens, seed=seed, size=found.size)
        if tokens > 20:
            if longest > 20:
                break  # the longest text that it takes is enough
            try:
                truth = driver(given)
            except Exception:  # too long for its tables
                continue
        else:
            truth = driver(given)
        error = off(predict(exact, given), truth)
        if error > CLOSE:
            raise AdoptionError(
                f"the layer built from it differs by {error:.2g} of the largest value for {batch} texts of {tokens} tokens; "
                f"what was found: {found.layout!r}; {found.core!r}"
            )
        worst, compared, longest = max(worst, error), compared + 1, max(longest, tokens)
    _prove_gradients(driver, exact, found)
    return worst, compared, longest


def _prove_gradients(driver: Driver, exact: MultiHeadAttention, found: Found) -> None:
    given = driver.inputs(2, 5, seed=40, size=found.size)
    grads: list[dict[str, Tensor]] = []
    for theirs in (True, False):
        with torch.enable_grad():
            leaves = {role: x.clone().requires_grad_() for role, x in given.items()}
            try:
                out = driver(leaves, grad=True) if theirs else predict(exact, leaves)
                cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(4), dtype=out.dtype)
                total = (out * cotangent).sum()  # a scalar: other outputs make torch import sympy, which takes 0.6 s
                came = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
            except RuntimeError:  # it keeps no graph, or breaks it in place
                return
        grads.append(dict(zip(leaves, came, strict=True)))
    worst = max(off(grads[1][role], grads[0][role]) for role in given)
    if worst > 1e-4:
        raise AdoptionError(
            f"the gradients into its inputs are others by {worst:.2g} of the largest, though its output is the same"
        )


def _lengths(module: nn.Module, hints: Hints, affines: list[Affine]) -> list[int]:
    """Long texts to try, the longest first: past every number that could be a window, a table or a limit."""
    widths = {n for a in affines for n in a.weight.shape}
    sizes = {n for b in module.buffers() for n in b.shape}
    numbers = {int(v) for _, v in hints.values if float(v).is_integer()} | sizes
    limits = sorted(({n for n in numbers if 12 <= n <= LONGEST} - widths) | {LONG}, reverse=True)
    return list(dict.fromkeys(n + more for n in limits for more in (9, 0)))


def _left_out(module: nn.Module, layer: MultiHeadAttention, copied: list[Copied]) -> list[str]:
    taken = {id(p) for p in layer.parameters()}
    return [n for n, p in module.named_parameters() if id(p) not in taken and n not in {c.source for c in copied}]


def _takes_memory(driver: Driver, exact: MultiHeadAttention, found: Found, behaviour: Behaviour) -> tuple[bool, bool]:
    """Whether keys and values may come from another text, by a parameter that the search left out; and masks with that."""
    call = driver.call
    if "memory" in call.fed:
        return True, True
    if not call.takes("memory") or call.fed != ("query",) or exact.mask is not None:
        return False, False
    other = Driver(driver.module, replace(call, fed=("query", "memory"), dims=(call.dims[0], exact.key_dim)))
    given = other.inputs(2, 5, 7, seed=9, size=found.size)
    masks = True
    try:
        if off(predict(exact, given), other(given)) > CLOSE:
            return False, False
        for name, reader in behaviour.readers.items():
            for convention, shape in (
                pair for several in reader.known.values() for pair in several if pair[0].read is not None
            ):
                allowed = pattern(shape, 2, exact.num_heads, 5, 7)
                masks &= (
                    off(predict(exact, given, shape.wrap(allowed)), other(given, {name: convention.write(allowed)})) <= CLOSE
                )
    except Exception:  # it does not take one after all, or no masks with it
        return masks is not True, False
    return True, masks


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


def _notes(
    hints: Hints,
    core: Core,
    driver: Driver,
    dropouts: Dropouts,
    behaviour: Behaviour,
    left_out: list[str],
    longest: int,
) -> Iterator[str]:
    if any(reader.takes_place for reader in behaviour.readers.values()):
        yield "a mask that is given takes the place of its own causal one; here both hold"
    windows = [w for w in hints.whole(r"^sliding_window$|^window$|^attention_window$|^local_window") if w]
    if windows and "Window" not in repr(core.mask) and driver.call.takes("mask"):
        yield f"its window of {windows[0]} is in the mask that its model makes; here pass mask=Causal() & Window({windows[0]})"
    if dropouts.unknown:
        yield f"in train() it does what was not understood and is left out here: {', '.join(dropouts.unknown)}"
    if left_out:
        yield f"parameters that change nothing were left out: {', '.join(left_out)}"
    for width in hints.windows:
        if width > longest:
            yield f"{width} may be a window, and lies beyond the longest text that was compared"


def differing(a: Any, b: Any) -> float:
    """The largest difference of two results, tensors within them compared in pairs, over the largest finite value."""
    worst = 0.0
    for x, y in zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True):
        if isinstance(x, Tensor) and isinstance(y, Tensor) and x.is_floating_point():
            x, y = x.detach().double(), y.detach().double()
            alike = (x == y) | x.isnan()  # where theirs is no number there is nothing to compare with
            worst = max(
                worst,
                off(y.masked_fill(alike, 0.0), x.masked_fill(alike | ~x.isfinite(), 0.0)) if not bool(alike.all()) else 0.0,
            )
    return worst
