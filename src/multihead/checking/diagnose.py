"""Which mistake explains a module: its own weights in every way of computing attention, until one gives its output."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..adopting.affine import Affine
from ..adopting.core import Core
from ..adopting.hints import Hints
from ..adopting.layouts import LIKE, Layout, Rows, layouts, parts, roles
from ..adopting.search import Search
from .calls import Caller
from .mistakes import CATALOGUE, SEARCHED, Mistake
from .ways import RIGHT, Parts, Way, compute, far

CLOSE = 1e-6  # of the largest output, in float64; softmax in float32 inside gives 1e-7, a wrong explanation 1e-2 or more
LAYOUTS, CORES, MOST_GROUPS = 5, 96, 16  # how many are tried of each
SINGLES, PAIRS = 1.0, 0.4  # seconds of this thread's work for single mistakes, and for pairs


@dataclass
class Explanation:
    """A way that gives the module's output.

    mistakes  what distinguishes it from the right way; none: the module is right
    instead   sets of mistakes that give the same output and cannot be told apart at these sizes
    error     the largest difference, over the largest value;  compared  how many outputs;  tried  how many ways
    """

    mistakes: tuple[Mistake, ...]
    way: Way
    layout: Layout
    core: Core
    caller: Caller
    size: float
    error: float
    compared: int
    tried: int
    instead: list[tuple[Mistake, ...]] = field(default_factory=list[tuple[Mistake, ...]])

    def parts(self, given: dict[str, Tensor], blocked: Tensor | None = None, bias: Tensor | None = None) -> Parts:
        return Parts(self.caller.module, self.layout, self.core, given, blocked, bias)

    def predict(self, given: dict[str, Tensor], way: Way | None = None, blocked: Tensor | None = None) -> Tensor:
        return compute(self.parts(given, blocked), way or self.way)

    def inputs(self, batch: int, q_len: int, kv_len: int | None = None, seed: int = 0) -> dict[str, Tensor]:
        return self.caller.inputs(batch, q_len, kv_len, seed, self.size)


@dataclass(eq=False)
class Trial:
    """One call, one layout and one core, with what the module gave."""

    caller: Caller
    size: float
    parts: Parts
    truth: Tensor

    def explains(self, way: Way) -> float:
        try:
            return far(compute(self.parts, way), self.truth)
        except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError):  # a way that these sizes do not allow
            return float("inf")


class Diagnosis:
    """One module's search. `tokens` is a length unlike its other sizes; numbers: what its forward scales by, as far as seen."""

    def __init__(self, search: Search, affines: list[Affine], hints: Hints, callers: list[Caller]) -> None:
        self.search, self.affines, self.hints, self.callers = search, affines, hints, callers
        self.numbers: list[float] = []
        self.tried = 0
        sizes = {n for a in affines for n in a.weight.shape} | set(hints.heads) | set(hints.head_dims)
        self.tokens = next(n for n in (5, 7, 9, 11, 13) if n not in sizes)

    def run(self) -> Explanation | None:
        trials = [t for caller in self.callers for t in self._trials(caller)]
        for change, seconds in ((_none, 30.0), (_one, SINGLES), (self._odd, SINGLES), (_two, PAIRS)):
            found = self._level(trials, change, time.thread_time() + seconds)
            if found is not None:
                return found
            trials = _likeliest(trials) if change is _none else trials
        return None

    def _level(self, trials: list[Trial], change: Change, ends: float) -> Explanation | None:
        """The first explanation of so many mistakes, with all others of the same trial that fit as well."""
        for trial in trials:
            found: list[Explanation] = []
            for mistakes, way in change(trial.parts.layout):
                if time.thread_time() > ends:
                    break
                self.tried += 1
                error = trial.explains(way)
                if error <= CLOSE and (one := self._confirmed(trial, mistakes, way, error)) is not None:
                    found.append(one)
            if found:
                return _best(found)
        return None

    def _confirmed(self, trial: Trial, mistakes: tuple[Mistake, ...], way: Way, error: float) -> Explanation | None:
        """Other numbers, another length, another batch."""
        caller, compared = trial.caller, 1
        for batch, tokens, seed in ((1, 11, 3), (3, 2, 4), (3, self.tokens, 6), (4, 1, 7)):
            given = caller.inputs(batch, tokens, seed=seed, size=trial.size)
            try:
                truth = caller(given)
                guess = compute(Parts(caller.module, trial.parts.layout, trial.parts.core, given), way)
            except Exception:  # lengths that its buffers, or this way, do not allow
                continue
            if int(guess.isnan().sum()) == guess.numel() or not bool(truth.isfinite().any()):
                continue
            worse = far(guess, truth)
            if worse > CLOSE:
                return None
            error, compared = max(error, worse), compared + 1
        return Explanation(mistakes, way, trial.parts.layout, trial.parts.core, caller, trial.size, error, compared, self.tried)

    def _odd(self, layout: Layout) -> Iterator[tuple[tuple[Mistake, ...], Way]]:
        """Scales by numbers that the forward was seen to use."""
        for n in self.numbers:
            for scale in {n, 1 / n} - {1.0, layout.head_dim**-0.5}:
                yield (CATALOGUE["scale_odd"],), Way(scale=scale)

    # ---- what is tried ----------------------------------------------------------------------------------------------

    def _trials(self, caller: Caller) -> Iterator[Trial]:
        call = caller.call
        dims = dict(zip(call.fed, call.dims, strict=True))
        dims = {"query": dims["query"], "key": dims.get("key", dims.get("memory", dims["query"]))} | dims
        dims["value"] = dims.get("value", dims["key"])
        size = self.search.fitting_size(dims)
        one, few = caller.inputs(1, 1, seed=1, size=size), caller.inputs(2, self.tokens, seed=2, size=size)
        try:
            single, several = caller(one), caller(few)
        except Exception:
            return
        if float((~several.isfinite()).double().mean()) > 0.5:  # a single token may still tell
            few = caller.inputs(3, 1, seed=2, size=size)
            several = caller(few)
        for layout in self._layouts(dims, one, single):
            for core in itertools.islice(self._cores(caller, layout), CORES):
                yield Trial(caller, size, Parts(caller.module, layout, core, few), several)

    def _layouts(self, dims: dict[str, int], one: dict[str, Tensor], single: Tensor) -> list[Layout]:
        """Those whose value and output projections give what a single token gives; and the likeliest by name."""
        value = one.get("value", one.get("memory", one.get("key", one["query"])))
        width, heads = single.shape[2], self.hints.heads[:3]
        fitting: list[Layout] = []
        likely: list[Layout] = []
        for layout in itertools.islice(layouts(self.affines, self.hints, dims, width), 600):
            if layout.strided or (heads and layout.heads not in heads):
                continue
            if len(likely) < (2 if all(a.whole for a in self.affines) else 16):
                likely.append(layout)
            alike = sum(layout.heads == other.heads for other in fitting)
            if alike < (LAYOUTS if heads else 2) and far(layout.one_token(value), single) <= CLOSE:
                fitting.append(layout)
            if len(fitting) >= (LAYOUTS if heads else 3 * LAYOUTS):
                break
        averaged = list(itertools.islice(self._averaged(dims, width, heads, value, single), 2))
        return list(dict.fromkeys([*fitting, *averaged, *likely]))

    def _averaged(self, dims: dict[str, int], width: int, heads: list[int], value: Tensor, single: Tensor) -> Iterator[Layout]:
        """Layouts for heads that are averaged or summed: the output projection takes one head's features."""
        for (q, k, v, out), h in itertools.product(roles(self.affines, dims, width), heads or (2, 3, 4, 6, 8)):
            inner, dim = width if out is None else out.in_features, q.out_features // (3 * h if q is k is v else h)
            for rows in parts(q, k, v, h, dim, inner) if h > 1 and dim else ():
                layout = Layout(*rows, out, h, len(_rows(rows[1])) // dim, dim, inner)
                mean = layout.split(layout.v(value), layout.kv_heads).mean(1)
                if any(far(x if out is None else out(x), single) <= CLOSE for x in (mean, h * mean)):
                    yield layout

    def _cores(self, caller: Caller, layout: Layout) -> Iterator[Core]:
        """What a layer may have besides: norms, rotations, biases, a soft cap, a mask of its own."""
        search = self.search
        axes = [
            [{"norms": x} for x in search.norms(layout)],
            [{"turn": x} for x in search.turns(caller, layout)],
            search.biases(layout),
            [{"softcap": x} for x in search.softcaps()],
            [{"mask": x} for x in search.own_masks()],
        ]
        for rank in sorted(itertools.product(*(range(len(axis)) for axis in axes)), key=sum):
            chosen: dict[str, object] = {}
            for i, axis in zip(rank, axes, strict=True):
                chosen |= axis[i]
            yield Core(**chosen)  # pyright: ignore[reportArgumentType]


def _likeliest(trials: list[Trial]) -> list[Trial]:
    """Where mistakes are sought: the two likeliest calls, the layouts whose names fit best, the plainest and first cores."""
    calls = list(dict.fromkeys(id(t.caller) for t in trials))[:2]
    chosen: dict[tuple[int, int], list[Trial]] = {}
    for trial in trials:
        if id(trial.caller) in calls:
            chosen.setdefault((id(trial.caller), id(trial.parts.layout)), []).append(trial)
    groups = sorted(chosen.values(), key=lambda group: misnamed(group[0].parts.layout))[:MOST_GROUPS]
    found = [t for group in groups for t in dict.fromkeys([*sorted(group, key=_features)[:7], *group[:2]])]
    return sorted(found, key=lambda trial: (_features(trial), misnamed(trial.parts.layout)))


def _features(trial: Trial) -> int:
    core = trial.parts.core
    return sum(x is not None for x in (core.norms, core.turn, core.bias, core.softcap, core.mask))


def _best(found: list[Explanation]) -> Explanation:
    """The first of those that are as near as the nearest; the others of these stand beside it."""
    nearest = max(min(e.error for e in found), 1e-13)
    alike = [e for e in found if e.error <= 100 * nearest]
    first = alike[0]
    first.instead = list(dict.fromkeys(e.mistakes for e in alike if set(e.mistakes) != set(first.mistakes)))
    return first


Change = Callable[[Layout], Iterator[tuple[tuple[Mistake, ...], Way]]]


def _none(layout: Layout) -> Iterator[tuple[tuple[Mistake, ...], Way]]:
    del layout
    yield (), RIGHT


def _one(layout: Layout, way: Way = RIGHT) -> Iterator[tuple[tuple[Mistake, ...], Way]]:
    for mistake in SEARCHED:
        if mistake.change is not None:
            yield from (((mistake,), changed) for changed in mistake.change(way, layout))


def _two(layout: Layout) -> Iterator[tuple[tuple[Mistake, ...], Way]]:
    for (first,), way in _one(layout):
        for (second,), both in _one(layout, way):
            if second is not first and SEARCHED.index(second) > SEARCHED.index(first):
                yield (first, second), both


def misnamed(layout: Layout) -> int:
    """How many projections bear the name of another."""
    used = {"q": layout.q.affine, "k": layout.k.affine, "v": layout.v.affine}
    others = {role: [o for o in "qkv" if o != role] for role in used}
    return sum(any(_is(o, a) for o in others[r]) and not _is(r, a) for r, a in used.items())


def projections(layout: Layout, affines: list[Affine]) -> list[tuple[str, str]]:
    """(mistake, sentence-less evidence) for projections that stand where their names do not belong."""
    used = {"q": layout.q.affine, "k": layout.k.affine, "v": layout.v.affine}
    named = {role: [a for a in affines if _is(role, a)] for role in ("q", "k", "v", "out")}
    every = {a.name for a in (*used.values(), layout.out) if a is not None}
    idle = {role: next((a.name for a in named[role] if a.name not in every), None) for role in named}
    found: list[tuple[str, str]] = []
    whole = all(rows.index is None for rows in (layout.q, layout.k, layout.v))
    if whole and used["v"] in (used["k"], used["q"]) and idle["v"]:
        found.append(("k_as_v", f"v = {used['v'].name}(…), {idle['v']} ∅"))
    elif whole and len({id(a) for a in used.values()}) < 3:
        role = next((r for r in ("q", "k", "v") if idle[r]), None)
        if role is not None:
            found.append(("shared_projection", f"{role} = {used[role].name}(…), {idle[role]} ∅"))
    elif whole and _is("k", used["q"]) and _is("q", used["k"]) and not _is("q", used["q"]):
        found.append(("qk_swapped", f"q = {used['q'].name}(…), k = {used['k'].name}(…)"))
    if layout.out is None:
        found.append(("out_missing", str(idle["out"])) if idle["out"] else ("no_out", ""))
    return found


def _is(role: str, affine: Affine) -> bool:
    return bool(LIKE[role].search(affine.name.lower()))


def _rows(rows: Rows) -> Tensor:
    return torch.arange(rows.affine.out_features) if rows.index is None else rows.index
