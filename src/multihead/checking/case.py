"""One module under examination: what is known of it so far, and what was found."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..adopting.affine import Affine, exact_copy, find, perturbed
from ..adopting.hints import Hints
from ..adopting.search import Search
from .calls import Caller, callers
from .diagnose import Diagnosis, Explanation
from .mistakes import CATALOGUE, Level, Text
from .report import Check, Finding, Mark
from .source import Place, Source, diff
from .trace import Sizes, Steps, Trace


@dataclass
class Case:
    """A module, its float64 copy with every number moved, how that is called, and what explains it.

    free  whether there may be another number of keys than of queries;  fails  what it said where there may not
    """

    module: nn.Module
    source: Source
    moved: nn.Module = field(init=False)
    affines: list[Affine] = field(init=False)
    hints: Hints = field(init=False)
    errors: list[Exception] = field(default_factory=list[Exception])
    callers: list[Caller] = field(default_factory=list[Caller])
    explanation: Explanation | None = None
    findings: list[Finding] = field(default_factory=list[Finding])
    checks: list[Check] = field(default_factory=list[Check])
    about: list[tuple[Text, Text]] = field(default_factory=list[tuple[Text, Text]])
    readers: list[Any] = field(default_factory=list[Any])
    steps: Steps | None = None
    free: bool = False
    tokens: int = 5

    def __post_init__(self) -> None:
        self.moved = perturbed(exact_copy(self.module))
        self.affines, self.hints = find(self.moved), Hints(self.module)

    def ask(self) -> None:
        """Find how it is called, and what explains it."""
        self.callers = callers(self.moved, self.affines, self.hints, self.errors)
        search = Search(self.moved, self.affines, self.hints)
        diagnosis = Diagnosis(search, self.affines, self.hints, self.callers)
        self.tokens = diagnosis.tokens
        if self.callers:
            seen = self.trace(self.caller, self.inputs(2, self.tokens)).all("scale")
            diagnosis.numbers = list(dict.fromkeys(abs(n) for s in seen for n in s.numbers if 1e-4 < abs(n) < 1e4))[:6]
            self.explanation = diagnosis.run()
            self.steps = self.trace(self.caller, self.inputs(2, self.tokens))
            self.free = self._free()

    @property
    def caller(self) -> Caller:
        return self.explanation.caller if self.explanation else self.callers[0]

    @property
    def size(self) -> float:
        return self.explanation.size if self.explanation else 1.0

    def inputs(self, batch: int, q_len: int, kv_len: int | None = None, seed: int = 30) -> dict[str, Tensor]:
        return self.caller.inputs(batch, q_len, kv_len, seed, self.size)

    def trace(self, caller: Caller, given: dict[str, Tensor], extra: dict[str, Any] | None = None) -> Steps:
        """The steps of a call; of what it did until it raised, if it does."""
        e, loud = self.explanation, caller.loudly()
        heads = e.layout.heads if e else (self.hints.heads or [1])[0]
        dim = e.layout.head_dim if e else max((a.out_features for a in self.affines), default=heads) // heads
        q_len = given["query"].shape[1]
        kv = given.get("key", given.get("memory", given["query"])).shape[1]
        with warnings.catch_warnings(), Trace(self.source.files) as trace:
            warnings.simplefilter("ignore")
            with contextlib.suppress(Exception):  # its steps up to there are what is wanted
                loud.run(given, extra)
        return Steps(trace.steps, self.source, Sizes(given["query"].shape[0], heads, q_len, kv, dim))

    def _free(self) -> bool:
        if self.caller.call.fed == ("query",):
            return False
        try:
            for q_len, kv_len in ((self.tokens, self.tokens + 2), (self.tokens + 2, self.tokens)):
                self.caller(self.inputs(2, q_len, kv_len))
        except Exception as error:
            self.errors.append(error)
            return False
        return True

    def each(self, *checks: Callable[[Case], None]) -> None:
        """Run checks; one that cannot be made, because the module fails at it, says nothing."""
        for check in checks:
            try:
                check(self)
            except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError, ArithmeticError) as error:
                self.errors.append(error)

    # ---- what was found ---------------------------------------------------------------------------------------------

    def found(
        self,
        name: str,
        evidence: Text,
        *,
        certain: bool = True,
        level: Level | None = None,
        place: Place | None = None,
        about: str = "",
        instead: tuple[str, ...] = (),
        steps: Steps | None = None,
    ) -> None:
        """Add a finding, once, with the line it comes from and that line put right."""
        if any(f.name == name and f.evidence == evidence for f in self.findings):
            return
        mistake, steps = CATALOGUE[name], steps or self.steps
        if place is None and steps is not None:
            places = [p for at in mistake.at.split("|") if (p := steps.at(at, about)) is not None]
            place = next((p for p in places if diff(p, mistake.swaps)), next(iter(places), None))
        fix = None if place is None else diff(place, mistake.swaps)
        self.findings.append(Finding(name, level or mistake.level, certain, evidence, place, fix, instead))

    def check(self, mark: Mark, en: str, zh: str) -> None:
        self.checks.append(Check(mark, Text(en, zh)))

    def has(self, *names: str) -> bool:
        return any(f.name in names for f in self.findings)


def half(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    return exact_copy(module).to(dtype)
