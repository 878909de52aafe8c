"""Which of a module's dropouts falls on the weights and which on the output: each is set to drop everything, alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .core import Core
from .drive import Driver
from .layouts import Layout
from .search import CLOSE, off


@dataclass(frozen=True)
class Dropouts:
    """The probabilities that the module drops a weight, and an output; what was not understood."""

    weights: float = 0.0
    out: float = 0.0
    unknown: tuple[str, ...] = ()


def find_dropouts(driver: Driver, layout: Layout, core: Core) -> Dropouts:
    """The dropouts of an exact copy, which is left as it was."""
    module, sites = driver.module, list(_sites(driver.module))
    found: dict[str, list[float]] = {"weights": [], "out": []}
    unknown: list[str] = []
    given = driver.inputs(2, 5, seed=8)
    kept = driver(given)
    nothing = layout.merge(torch.zeros(2, layout.heads, 5, layout.v_dim, dtype=torch.float64))
    module.train()
    try:
        for name, owner, key, p in sites:
            with _alone(sites, owner, key):
                out = _ask(driver, given)
            if out is None:
                unknown.append(name)
            elif not bool(out.any()):
                found["out"].append(p)
            elif off(out, nothing) <= CLOSE or float((out - nothing).abs().max()) <= 1e-9:
                found["weights"].append(p)
            elif off(out, kept) > CLOSE and core.learned is None:
                unknown.append(name)
    finally:
        module.eval()
    return Dropouts(_both(found["weights"]), _both(found["out"]), tuple(unknown))


def _both(several: list[float]) -> float:
    kept = 1.0
    for p in several:
        kept *= 1 - p
    return 1 - kept if len(several) > 1 else several[0] if several else 0.0


def _sites(module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str, float]]:
    """Each dropout by name, where its probability is kept, and that."""
    for prefix, sub in module.named_modules():
        own = vars(sub)
        keys = ["p"] if isinstance(sub, nn.Dropout) else [k for k, x in own.items() if "drop" in k and isinstance(x, float)]
        for key in keys:
            if 0 < own[key] < 1:
                yield ".".join(filter(None, (prefix, key))), own, key, own[key]


class _alone:  # noqa: N801 - reads as a verb in `with`
    """Within it one dropout drops everything and the others nothing."""

    def __init__(self, sites: list[tuple[str, dict[str, Any], str, float]], owner: dict[str, Any], key: str) -> None:
        self.sites, self.this = sites, (id(owner), key)

    def __enter__(self) -> None:
        for _, owner, key, _ in self.sites:
            owner[key] = 1.0 if (id(owner), key) == self.this else 0.0

    def __exit__(self, *_: object) -> None:
        for _, owner, key, p in self.sites:
            owner[key] = p


def _ask(driver: Driver, given: dict[str, Tensor]) -> Tensor | None:
    try:
        out = driver(given)
    except Exception:  # a module that does not run in train()
        return None
    return out if bool(out.isfinite().all()) else None
