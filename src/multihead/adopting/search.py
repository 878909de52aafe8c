"""Which attention a module computes: hypotheses, the likely first, each compared with the module's own output."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..masks import Causal, Mask, Window
from ..positions import ALiBi, RelativeBias, RoPE
from . import AdoptionError
from .affine import Affine, named
from .core import Core, compute
from .drive import Driver
from .hints import Hints
from .layouts import Layout, layouts
from .tables import first_angles, names, slopes

CLOSE = 1e-5  # of the largest output: float32 inside a float64 copy gives 1e-7, a wrong hypothesis 1e-2 or more
MOST = 6_000  # hypotheses
MOST_OPEN = 1_500  # of one way to call it, with sinks, learned keys or gates, which no single token rules out


@dataclass
class Found:
    """A hypothesis that gives the module's output."""

    driver: Driver
    layout: Layout
    core: Core
    error: float
    tried: int
    size: float


# ---- the search -----------------------------------------------------------------------------------------------------


class Search:
    """One module's search."""

    def __init__(self, module: nn.Module, affines: Sequence[Affine], hints: Hints, most: int = MOST) -> None:
        self.module, self.affines, self.hints, self.most = module, affines, hints, most
        self.tried, self.nearest = 0, (math.inf, "nothing")

    def run(self, drivers: Sequence[Driver]) -> Found:
        for driver in drivers:
            for opens in (False, True):  # sinks, learned keys and gates hide what a single token would show: they come last
                found = None if opens and self._more_than_attention(driver) else self._with(driver, opens)
                if found is not None:
                    return found
        raise AdoptionError(self._failure(drivers))

    def _with(self, driver: Driver, opens: bool) -> Found | None:
        call = driver.call
        dims = dict(zip(call.fed, call.dims, strict=True))
        dims = {"query": dims["query"], "key": dims.get("key", dims.get("memory", dims["query"]))} | dims
        dims["value"] = dims.get("value", dims["key"])
        size = self.fitting_size(dims)
        one, few = driver.inputs(2, 1, seed=1, size=size), driver.inputs(2, 5, seed=2, size=size)
        value_of = "value" if "value" in one else "key" if "key" in one else "memory" if "memory" in one else "query"
        single, several = driver(one), driver(few)
        last = min(self.most, self.tried + MOST_OPEN) if opens else self.most
        for layout in layouts(self.affines, self.hints, dims, several.shape[2]):
            if not opens and not _close(layout.one_token(one[value_of]), single):
                continue
            for core in self._cores(driver, layout, opens):
                self.tried += 1
                if self.tried > last:
                    return None
                try:
                    guess = compute(self.module, layout, core, few)
                except (RuntimeError, ValueError, TypeError):  # a part that does not fit these sizes
                    continue
                far = off(guess, several)
                if far < self.nearest[0]:
                    self.nearest = (far, f"{layout!r}; {core!r}")
                if far <= CLOSE and (found := self._confirmed(driver, layout, core, size)):
                    return found
        return None

    def _confirmed(self, driver: Driver, layout: Layout, core: Core, size: float) -> Found | None:
        """Other numbers, another length, another batch."""
        windows = [w for w in self.hints.windows if w <= 512]
        worst = 0.0
        for batch, tokens, seed in ((1, 11, 3), (3, 2, 4), (1, max([19, *(w + 3 for w in windows)]), 5)):
            try:
                given = driver.inputs(batch, tokens, seed=seed, size=size)
                worst = max(worst, off(compute(self.module, layout, core, given), driver(given)))
            except (RuntimeError, ValueError, TypeError):
                if tokens > 11:  # some modules know no longer text than their buffers
                    continue
                return None
        return Found(driver, layout, core, worst, self.tried, size) if worst <= CLOSE else None

    def fitting_size(self, dims: dict[str, int]) -> float:
        """Inputs large enough for scores to matter: projections of root mean square about 1.5."""
        gains = [
            float(a.weight.square().mean().sqrt()) * math.sqrt(a.in_features)
            for a in self.affines
            if a.in_features in dims.values()
        ]
        gains = sorted(g for g in gains if g > 0)
        return min(1.5 / gains[len(gains) // 2], 1e4) if gains else 1.0

    def _failure(self, drivers: Sequence[Driver]) -> str:
        convolutions = [
            f"{n} ({type(m).__name__})" for n, m in named(self.module) if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        ]
        if convolutions:
            return f"it convolves ({', '.join(convolutions)}); a projection must be one matrix for every token"
        if len(self.affines) < 2 and not any(a.out_features >= 3 * a.in_features for a in self.affines):
            names = ", ".join(f"{a.name} {list(a.weight.shape)}" for a in self.affines) or "none"
            return f"there are not enough projections in it: {names}"
        far, what = self.nearest
        said = f"none of {self.tried} hypotheses gives its output"
        if self.tried:
            said += f"; the nearest ({what}) differs by {far:.2g} of the largest value"
        more = self._more_than_attention(drivers[0]) if drivers else None
        if more:
            said += f"; {more}"
        known = {a.name for a in self.affines} | {a.bias_at[0] for a in self.affines if a.bias_at}
        rest = [
            f"{n} {list(p.shape)}"
            for n, p in self.module.named_parameters()
            if not any(n == k or n.startswith(f"{k}.") for k in known if k)
        ]
        return said + (f"; parameters that are no projection: {', '.join(rest)}" if rest else "")

    def _more_than_attention(self, driver: Driver) -> str | None:
        """A sentence where a residual or a normalisation is inside the module as well."""
        call, take = driver.call, "; take the attention inside it, without "
        one = driver.inputs(1, 1, seed=7)
        query, out = one["query"], driver(one)
        if query.shape == out.shape:
            dims = dict.fromkeys(("query", "key", "value"), call.dims[0]) | dict(zip(call.fed, call.dims, strict=True))
            value = one.get("value", one.get("memory", one.get("key", query)))
            guesses = itertools.islice(layouts(self.affines, self.hints, dims, out.shape[2]), 100)
            if any(_close(layout.one_token(value) + query, out) for layout in guesses):
                return "it adds its input to its output" + take + "the residual"
        few = driver.inputs(2, 5, seed=7)
        large = {role: 1e6 * x for role, x in few.items()}
        small, grown = driver(few), driver(large)
        if query.shape == out.shape and off(grown, large["query"]) < 1e-3 < off(small, few["query"]):
            return "it adds its input to its output, and a normalisation is inside it" + take + "both"
        if float(grown.abs().max()) < 1e3 * max(1.0, float(small.abs().max())):
            return "its output does not grow with its input, so a normalisation is inside it" + take + "that"
        return None

    # ---- what may happen between the projections, the likely first -----------------------------------------------------

    def _cores(self, driver: Driver, layout: Layout, opens: bool) -> Iterator[Core]:
        axes: list[list[dict[str, Any]]] = [
            [{"norms": x} for x in self.norms(layout)],
            [{"turn": x} for x in self.turns(driver, layout)],
            self.biases(layout),
            [{"softcap": x} for x in self.softcaps()],
            [{"mask": x} for x in self.own_masks()],
            [{"scale": x} for x in self._scales(layout)],
        ]
        if opens:
            axes.append(list(self._openings(layout)))
        ranks = sorted(itertools.product(*(range(len(axis)) for axis in axes)), key=sum)
        for rank in ranks:
            chosen: dict[str, Any] = {}
            for i, axis in zip(rank, axes, strict=True):
                chosen |= axis[i]
            yield Core(**chosen)

    def _scales(self, layout: Layout) -> list[float | None]:
        D, inner = layout.head_dim, layout.heads * layout.head_dim
        said = [x for v in self.hints.real(r"scal|temperature|factor|sqrt|denom") if v > 0 for x in (v, 1 / v, v**-0.5)]
        usual = [1.0, inner**-0.5, layout.q.affine.in_features**-0.5, 1 / D, layout.heads**-0.5, D**-0.25]
        near = [x for x in said if not math.isclose(x, D**-0.5, rel_tol=1e-9)]
        return [None, *dict.fromkeys(near[:8] + usual)]

    def own_masks(self) -> list[Mask | None]:
        windows = [w for n in self.hints.windows if n <= 512 for w in (n, n + 1)]
        causal = [Causal(), *(Causal() & Window(w) for w in windows)]
        return [None, *causal, *(Window(w, ahead=w - 1) for w in windows)]

    def softcaps(self) -> list[float | None]:
        found = self.hints.real(r"cap|clamp")
        return [*(v for v in found if v > 0), None]

    def norms(self, layout: Layout) -> list[tuple[str, str] | None]:
        """Pairs of modules that change [batch, heads, tokens, head_dim] and are no projections."""
        taken = {a.name for a in self.affines}
        found: list[str] = []
        x = torch.linspace(-2, 2, layout.head_dim, dtype=torch.float64).expand(1, layout.heads, 2, -1)
        for name, sub in named(self.module):
            if not name or name in taken or any(name.startswith(f"{t}.") for t in taken) or any(sub.children()):
                continue
            try:
                y = sub(x)
                changed = isinstance(y, Tensor) and y.shape == x.shape and not torch.equal(y, x)
            except Exception:  # not a map of one tensor
                continue
            if changed and not isinstance(sub, nn.Softmax | nn.ReLU | nn.GELU | nn.Sigmoid | nn.Tanh):
                found.append(name)
        pairs = list(itertools.permutations(found, 2))
        pairs.sort(key=lambda pair: -("q" in pair[0].lower()) - ("k" in pair[1].lower()))
        return [*pairs[:6], *((n, n) for n in found[:4]), None]

    def turns(self, driver: Driver, layout: Layout) -> list[RoPE | None]:
        call = driver.call
        both = ("half", "interleaved")
        if call.form is not None:
            return [RoPE(dim=call.turned, layout=how) for how in both if call.turned <= layout.head_dim] + [None]
        found = [RoPE(theta, dim=dim, layout=how) for theta, dim in self._thetas(layout.head_dim) for how in both]
        usual = [RoPE(dim=layout.head_dim, layout=how) for how in both] if layout.head_dim % 2 == 0 else []
        return [*found, None] if found else [None, *usual]

    def _thetas(self, head_dim: int) -> Iterator[tuple[float, int]]:
        """(theta, turned features) as the module's own tables tell, or its numbers."""
        for pairs, first in first_angles(self.module):
            if pairs >= 2 and 2 * pairs <= head_dim and 0 < first < 1:
                yield first**-pairs, 2 * pairs
        names = " ".join(n for n, _ in self.hints.values) + " ".join(n.lower() for n, _ in named(self.module))
        if "rot" in names or "rope" in names or "theta" in names:
            part = self.hints.real(r"rot.*(pct|percent|factor|fraction)|partial") or [1.0]
            dims = [*self.hints.whole(r"rot.*dim|rope.*dim"), *(int(head_dim * p) for p in part if 0 < p <= 1), head_dim]
            thetas = [*self.hints.real(r"theta|rope.*base|rot.*base|^base$"), 10_000.0]
            for theta, dim in itertools.product(dict.fromkeys(t for t in thetas if t > 1), dict.fromkeys(dims)):
                if 2 <= dim <= head_dim and dim % 2 == 0:
                    yield theta, dim

    def biases(self, layout: Layout) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for name, sub in named(self.module):
            if isinstance(sub, nn.Embedding) and sub.embedding_dim == layout.heads:
                far = [*self.hints.whole(r"max.*dist|dist.*max"), 128]
                for way, distance in itertools.product((True, False), dict.fromkeys(far)):
                    exact = sub.num_embeddings // (4 if way else 2)
                    if exact >= 1 and distance > exact:
                        made = RelativeBias(layout.heads, sub.num_embeddings, distance, way)
                        made.weight = nn.Parameter(sub.weight, requires_grad=False)
                        found.append({"bias": made, "bias_name": f"{name}.weight"})
        found_slopes = next(slopes(self.module, layout.heads), None)
        if found_slopes is not None or any("alibi" in n for n, _ in names(self.module)):
            alibi = ALiBi(found_slopes)
            alibi.fit(layout.heads, layout.head_dim)
            found.append({"bias": alibi})
        return [*found, {}]

    def _openings(self, layout: Layout) -> Iterator[dict[str, Any]]:
        """What lets the weights of the keys sum to less than one, or adds to them."""
        own = [(n, p) for n, p in self.module.named_parameters()]
        pairs = [
            (a, b)
            for (a, p), (b, r) in itertools.permutations(own, 2)
            if p.ndim == r.ndim == 3 and p.numel() and p.numel() % (layout.kv_heads * layout.head_dim) == 0
            and p.numel() * layout.v_dim == r.numel() * layout.head_dim
            and "k" in a.rpartition(".")[2].lower() and "v" in b.rpartition(".")[2].lower()
        ]  # fmt: skip
        sinks = [n for n, p in own if p.numel() == layout.heads and "bias" not in n]
        for pair in pairs:
            yield {"learned": pair}
            yield {"learned": pair, "sinks": "zero"}
        for name in (*sinks, "zero"):
            yield {"sinks": name}
        used = {layout.q.affine.name, layout.k.affine.name, layout.v.affine.name, layout.out.name if layout.out else ""}
        for a in self.affines:
            if (
                a.name not in used
                and a.out_features == layout.heads * layout.v_dim
                and a.in_features == layout.q.affine.in_features
            ):
                yield {"gate": a}


# ---- comparing ------------------------------------------------------------------------------------------------------


def off(guess: Tensor, truth: Tensor) -> float:
    """The largest difference, over the largest true value."""
    if guess.shape != truth.shape:
        return math.inf
    found = float((guess - truth).abs().max() / truth.abs().max().clamp(min=1e-30))
    return found if math.isfinite(found) else math.inf


def _close(guess: Tensor, truth: Tensor) -> bool:
    return off(guess, truth) <= CLOSE
