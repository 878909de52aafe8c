"""What is kept of a call: which places and heads, how much of it, where, and within which budget."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..masks import Allowed, Keys
from .call import Call
from .places import Places
from .recording import Recording, Seen
from .statistics import STATISTICS, compute
from .tensors import Intervals, Memory, grouped

PROJECTIONS = (
    "out_proj", "o_proj", "out", "c_proj", "wo", "W_o", "w_o", "o_linear", "output_linear", "to_out.0", "proj", "o", "dense",
    "fc_out", "fc_o", "output.dense",
)  # fmt: skip
KEPT = ("queries", "values", "statistics")


class BudgetError(MemoryError):
    """A call would have made the recording larger than its budget."""


class Select(NamedTuple):
    """A selected place, and the module in which it is."""

    seen: Seen
    module: nn.Module | None
    parents: list[nn.Module]
    key: int


class Keeper:
    """Chooses, copies and counts; the recorder hands it every call that it reads."""

    def __init__(
        self, seen: Recording, layers: Sequence[int] | None, heads: Sequence[int] | None,
        where: str | Callable[[str], bool] | None, keep: str, statistics: Sequence[str], device: Any, budget: int | None,
        out_proj: str | Tensor | None, differentiable: bool,
    ) -> None:  # fmt: skip
        _check(keep, statistics, budget, differentiable)
        self.seen, self.layers, self.heads, self.where = seen, layers, heads, where
        self.mode, self.statistics, self.device, self.budget = keep, tuple(statistics), device, budget
        self.out_proj, self.differentiable = out_proj, differentiable
        self.memory = Memory()
        self.recorded = self.step = self.used = 0
        self.unsaid: list[str] = []
        self.latest: dict[int, list[Seen]] = {}  # of each running module, the places that attended in it

    def grad(self) -> AbstractContextManager[Any]:
        return torch.set_grad_enabled(self.differentiable and torch.is_grad_enabled())

    # ---- which ----------------------------------------------------------------------------------------------------------

    def place(self, places: Places, module: nn.Module | None = None) -> Select | None:
        """The place where a call is being made, if it was selected."""
        key, name, count = places.here(module)
        self.recorded += 1
        known = self.seen.places.get((key, count))
        if known is None:
            if (key, count) in self.seen.left_out:
                return None
            number = len(self.seen.places) + len(self.seen.skipped)
            full = self._name(name if not count else f"{name}#{count + 1}")
            if not self._selected(number, full):
                self.seen.skipped[number] = full
                self.seen.left_out.add((key, count))
                return None
            known = self.seen.places[key, count] = Seen(self.seen, number, full)
        inside = module or (places.stack[-1] if places.stack else None)
        return Select(known, inside, places.stack[::-1][:3], key)

    def _name(self, name: str) -> str:
        taken = {place.name for place in self.seen.places.values()}
        n = 2
        while name in taken:
            name, n = f"{name} ({n})" if n == 2 else f"{name[: name.rindex(' (')]} ({n})", n + 1
        return name

    def _selected(self, number: int, name: str) -> bool:
        if self.layers is not None and number not in self.layers:
            return False
        if self.where is None:
            return True
        return bool(self.where(name)) if callable(self.where) else self.where in name or fnmatch.fnmatch(name, self.where)

    # ---- what -----------------------------------------------------------------------------------------------------------

    def keep(self, at: Select, call: Call, kind: str | None = None, out_proj: Tensor | None = None) -> None:
        """One call, copied: what a model does to its tensors afterwards cannot change what was seen."""
        q, k, v, place = call.q, call.k, call.v, at.seen
        call.name, call.order, call.step = place.name, len(place.pictures), self.step
        call.kind = kind or _kind(place, q, k)
        if call.kind == "cross" and (call.mask is None or isinstance(call.mask, Intervals | Keys | Allowed)):
            call.start = call.key_start = 0  # two texts share no positions: token by token is as near as can be said
        if self.heads is not None:
            call = _chosen(call, self.heads)
        elif k.shape[1] == q.shape[1] and (run := grouped(k)) > 1:
            call.k, call.v = k[:, ::run], v if v is None else v[:, ::run]
        call.out_proj = self._projection(at, q, v) if out_proj is None else out_proj.detach()
        if self.mode == "statistics":
            call.found = compute(call, self.statistics, progress=False)
            call.q, call.k, call.v = (None if x is None else x.detach().to("meta") for x in (call.q, call.k, call.v))  # pyright: ignore[reportAttributeAccessIssue]
            call.mask = call.bias = call.flat = None
        else:
            call.v = call.v if self.mode == "values" else None
            call.q, call.k, call.v = self._copy(call.q), self._copy(call.k), None if call.v is None else self._copy(call.v)
        if self.device is not None:
            _move(call, self.device)
        self._count(at, call)
        at.seen.add(call)
        self.latest.setdefault(at.key, []).append(at.seen)

    def _copy(self, x: Tensor) -> Tensor:
        return (
            torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)
            if not x.requires_grad
            else x.clone(memory_format=torch.contiguous_format)
        )

    def _count(self, at: Select, call: Call) -> None:
        if self.budget is None:
            return
        used = self.seen.nbytes
        if used + call.nbytes > self.budget:
            raise BudgetError(
                f"record: {at.seen.name} would take the recording from {used:,} to {used + call.nbytes:,} bytes, over its "
                f"budget of {self.budget:,}; record fewer places or heads (layers=, where=, heads=), "
                'keep="statistics", move what is kept (device="cpu"), or give a larger budget'
            )

    def miss(self, at: Select, why: str) -> None:
        said = f"{at.seen.name}: {why}"
        if said not in self.seen.missed:
            self.seen.missed.append(said)
            self.unsaid.append(said)

    # ---- afterwards -----------------------------------------------------------------------------------------------------

    def finished(self, module: nn.Module, around: list[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module has run: its arguments may tell that what attended in it attended to something else than itself.

        One without parameters was given queries and keys that are projected already; the module around it knows more.
        """
        places = self.latest.pop(id(module), None)
        if not places:
            return
        if next(module.parameters(), None) is None:
            if around:
                self.latest.setdefault(id(around[-1]), []).extend(places)
            return
        own = args[0] if args else kwargs.get("hidden_states", kwargs.get("query"))
        others = [kwargs.get(n) for n in ("key_value_states", "encoder_hidden_states", "context", "memory", "key")]
        others += [x for x in args[1:2] if isinstance(own, Tensor) and isinstance(x, Tensor) and x.ndim == own.ndim]
        given = [x for x in others if isinstance(x, Tensor) and x is not own and x.is_floating_point() and x.ndim > 1]
        if isinstance(own, Tensor) and any(x.shape != own.shape or not torch.equal(x, own) for x in given):
            for place in places:
                place.pictures[-1].picture.become("cross")

    def _projection(self, at: Select, q: Tensor, v: Tensor | None) -> Tensor | None:
        """The output projection's weight [dim, heads · v_dim], by its path in the module or in one around it."""
        if self.mode != "values" or v is None:
            return None
        if isinstance(self.out_proj, Tensor):
            return self.out_proj.detach()
        wide = q.shape[1] * v.shape[3]
        for module in at.parents[:3]:
            for path in (self.out_proj,) if self.out_proj else PROJECTIONS:
                part: Any = module
                for name in path.split("."):
                    part = (
                        getattr(part, name, None)
                        if not name.isdigit()
                        else part[int(name)]
                        if hasattr(part, "__getitem__")
                        else None
                    )
                weight = part if isinstance(part, Tensor) else getattr(part, "weight", None)
                if isinstance(weight, Tensor) and weight.ndim == 2:
                    turned = weight.mT if type(part).__name__ == "Conv1D" else weight
                    if turned.shape[1] == wide:
                        return turned.detach()
        return None


def _check(keep: str, statistics: Sequence[str], budget: int | None, differentiable: bool) -> None:
    if keep not in KEPT:
        raise ValueError(f'record: keep must be one of "queries", "values", "statistics"; it is {keep!r}')
    unknown = [name for name in statistics if name not in STATISTICS]
    if unknown:
        raise ValueError(f"record: there is no statistic {unknown[0]!r}; there are {', '.join(STATISTICS)}")
    if budget is not None and (not isinstance(budget, int) or budget < 0):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"record: budget must be a number of bytes; it is {budget!r}")
    if differentiable and keep == "statistics":
        raise ValueError('record: differentiable=True keeps q and k with their graph; keep="statistics" drops them')


def _kind(place: Seen, q: Tensor, k: Tensor) -> str:
    if any(
        word in place.name.lower()
        for word in ("cross", "encdec", "enc_attn", "encoder_attn", "multihead_attn", "src_attn", "xattn")
    ):
        return "cross"
    if place.pictures:
        return place.pictures[-1]._asked().kind  # pyright: ignore[reportPrivateUsage]
    return "cross" if q.shape[2] > k.shape[2] else "self"


def _chosen(call: Call, heads: Sequence[int]) -> Call:
    H, G = call.q.shape[1], call.k.shape[1]
    wrong = [h for h in heads if not 0 <= h < H]
    if wrong:
        raise ValueError(f"record: heads must be within 0 … {H - 1}, which {call.name} has; there is {wrong[0]}")
    groups = [h * G // H for h in heads]
    call.q, call.k, call.heads = call.q[:, list(heads)], call.k[:, groups], list(heads)
    call.v = None if call.v is None else call.v[:, groups]
    call.sinks = None if call.sinks is None else call.sinks[list(heads)]
    for name in ("bias", "flat"):
        x = getattr(call, name)
        if x is not None and x.shape[1] > 1:
            setattr(call, name, x[:, list(heads)])
    if call.mask is not None and (call.mask.heads > 1 or call.score is not None):
        raise ValueError(f"record: {call.name} has a mask that differs by head; record all of its heads")
    return call


def _move(call: Call, device: Any) -> None:
    for name in ("q", "k", "v", "bias", "sinks", "flat"):
        x = getattr(call, name)
        if x is not None and not x.is_meta:
            setattr(call, name, x.to(device))
    call.mask = None if call.mask is None else call.mask.to(device)
    call.found = {n: _moved(x, device) for n, x in call.found.items()}


def _moved(x: Any, device: Any) -> Any:
    if isinstance(x, tuple):
        return type(x)(*(_moved(part, device) for part in x))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return x.to(device) if isinstance(x, Tensor) else x
