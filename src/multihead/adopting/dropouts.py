"""Which of a module's dropouts falls on the weights and which on the output: each is set to drop everything, alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .affine import named
from .drive import Driver
from .layouts import Layout
from .search import CLOSE, off

Site = tuple[str, dict[str, Any], str, float]


@dataclass(frozen=True)
class Dropouts:
    """The probabilities that the module drops a weight, and an output; what was not understood."""

    weights: float = 0.0
    out: float = 0.0
    unknown: tuple[str, ...] = ()


def find_dropouts(driver: Driver, layout: Layout) -> Dropouts:
    """The dropouts of an exact copy, which is left as it was."""
    module, sites = driver.module, list(find_sites(driver.module))
    found: dict[str, list[float]] = {"weights": [], "out": []}
    unknown: list[str] = []
    given = driver.inputs(2, 5, seed=8)
    kept = driver(given)
    nothing = layout.merge(torch.zeros(2, layout.heads, 5, layout.v_dim, dtype=torch.float64))
    module.train()
    try:
        with torch.random.fork_rng(devices=[]):
            for name, owner, key, p in sites:
                half, none = (ask(driver, given, sites, owner, key, q) for q in (0.5, 1.0))
                if half is None or none is None:
                    unknown.append(name)
                elif near(half, kept):
                    continue  # it is never used
                elif bool((half.isclose(2 * kept) | (half == 0)).all()):
                    found["out"].append(p)
                elif near(none, nothing):
                    found["weights"].append(p)
                else:
                    unknown.append(name)
            rest = ask(driver, given, sites, {}, "", 0.0)  # nothing drops any more
            if rest is None or not near(rest, kept):
                unknown.append("what changes its output though no dropout of its own drops")
    finally:
        module.eval()
    return Dropouts(_both(found["weights"]), _both(found["out"]), tuple(unknown))


def near(x: Tensor, y: Tensor) -> bool:
    return off(x, y) <= CLOSE or float((x - y).abs().max()) <= 1e-9


def _both(several: list[float]) -> float:
    kept = 1.0
    for p in several:
        kept *= 1 - p
    return 1 - kept if len(several) > 1 else several[0] if several else 0.0


def find_sites(module: nn.Module) -> Iterator[Site]:
    """Each dropout by name, where its probability is kept, and that."""
    for prefix, sub in named(module):
        own = vars(sub)
        keys = ["p"] if isinstance(sub, nn.Dropout) else [k for k, x in own.items() if "drop" in k and isinstance(x, float)]
        for key in keys:
            if 0 < own[key] < 1:
                yield ".".join(filter(None, (prefix, key))), own, key, own[key]


def ask(
    driver: Driver, given: dict[str, Tensor], sites: list[Site], owner: dict[str, Any], key: str, p: float
) -> Tensor | None:
    """The output where one dropout has this probability and the others never drop."""
    try:
        for _, other, name, _ in sites:
            other[name] = p if other is owner and name == key else 0.0
        out = driver(given)
        return out if bool(out.isfinite().all()) else None
    except Exception:  # a module that does not run in train()
        return None
    finally:
        for _, other, name, usual in sites:
            other[name] = usual
