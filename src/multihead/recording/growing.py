"""Calls of one place that go on from each other – prefill and steps over a cache – as one picture that keeps each key once."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..masks import Frame, Mask, evaluate
from ..masks.blocks import split
from .call import Call
from .tensors import Intervals, compact


class Picture:
    """Calls over the same growing keys; `whole` is one call that says all of them.

    Every call's k is a part of one buffer, which grows by doubling.
    """

    def __init__(self, call: Call) -> None:
        self.calls = [call]
        self.k, self.v, self.length = call.k, call.v, call.k.shape[2]
        self._whole: Call | None = call

    @property
    def whole(self) -> Call:
        if self._whole is None:
            self._whole = joined(
                self.calls, self.k[:, :, : self.length], None if self.v is None else self.v[:, :, : self.length]
            )
        return self._whole

    @property
    def nbytes(self) -> int:
        own = sum(
            c.nbytes - c.k.untyped_storage().nbytes() - (0 if c.v is None else c.v.untyped_storage().nbytes())
            for c in self.calls
            if not c.answered
        )
        answered = sum(c.nbytes for c in self.calls if c.answered)
        held = 0 if self.calls[0].answered else sum(x.untyped_storage().nbytes() for x in (self.k, self.v) if x is not None)
        return own + answered + held

    def become(self, kind: str) -> None:
        for call in self.calls:
            call.kind = kind
        self.whole.kind = kind

    def extend(self, call: Call) -> bool:
        """Take a call that goes on from the last one; False where it does not. Its k and v become parts of the buffer."""
        last = self.calls[-1]
        if (
            call.answered
            or last.answered
            or call.k.requires_grad
            or call.step != last.step
            or call.kind != last.kind
            or (call.v is None) != (self.v is None)
            or (call.k.shape[0], call.k.shape[1], call.k.shape[3]) != (last.k.shape[0], last.k.shape[1], last.k.shape[3])
            or (call.q.shape[1], call.scale, call.softcap) != (last.q.shape[1], last.scale, last.softcap)
            or (call.score is None) != (last.score is None)
        ):
            return False
        at = self._cross(call, last) if call.kind == "cross" else self._follows(call, last)
        if at is None:
            return False
        self._append(call, *at)
        self.calls.append(call)
        self._whole = None
        return True

    def _cross(self, call: Call, last: Call) -> tuple[int, int] | None:
        """A step over a memory that stays the same."""
        same = call.q.shape[2] == 1 and call.k.shape == last.k.shape and torch.equal(call.k, last.k)
        if same and isinstance(last.frame.q_start, int):
            call.start = last.frame.q_start + last.q.shape[2]
        return (self.length - call.k.shape[2], 0) if same else None

    def _follows(self, call: Call, last: Call) -> tuple[int, int] | None:
        """The column of the buffer at which the call's first key stands, and how many of its last keys are new; None where it
        does not go on from the last call."""
        old, new, T = last.k.shape[2], call.k.shape[2], call.q.shape[2]
        end = self.length
        dropped = old + T - new  # keys that a window has left behind
        positions = isinstance(last.frame.q_start, int) and isinstance(last.key_start, int)
        if 0 <= dropped <= old and new > T and torch.equal(call.k[:, :, : new - T], last.k[:, :, dropped:]):
            if (
                positions
                and isinstance(call.frame.q_start, int)
                and isinstance(last.frame.q_start, int)
                and isinstance(last.key_start, int)
            ):
                call.start, call.key_start = last.frame.q_start + last.q.shape[2], last.key_start + dropped
            elif not _continues(call, last):
                return None
            return end - old + dropped, T
        if new >= old and positions and _continues(call, last):  # a buffer that is filled in place
            changed = (call.k[:, :, :old] != last.k).any(-1).flatten(0, 1).any(0).nonzero().flatten()
            if not len(changed) or not self._saw(int(changed[0])):
                return end - old, new - int(changed[0]) if len(changed) else new - old
        return None

    def _saw(self, column: int) -> bool:
        """Whether any query so far could see that column of the last call, or one behind it."""
        for call in self.calls:
            said, rest = split(call.mask, call.frame)
            if said is not None and int(_ends(said.end, call).max()) <= column:
                continue
            if said is None and rest is None:
                return True
            if rest is not None and not bool(evaluate(rest, call.frame)[..., column:].any()):
                continue
            return True
        return False

    def _append(self, call: Call, first: int, fresh: int) -> None:
        end = first + call.k.shape[2]
        self.k = self._grown(self.k, call.k, first, end, fresh)
        if self.v is not None and call.v is not None:
            self.v = self._grown(self.v, call.v, first, end, fresh)
        starts = [_column(c) for c in self.calls]
        for c, start in zip([*self.calls, call], [*starts, first], strict=True):
            c.k = self.k[:, :, start : start + c.k.shape[2]]
            c.v = None if self.v is None or c.v is None else self.v[:, :, start : start + c.v.shape[2]]
        self.length = max(self.length, end)

    def _grown(self, buffer: Tensor, new: Tensor, first: int, end: int, fresh: int) -> Tensor:
        if buffer.shape[2] < end:
            wider = buffer.new_empty(*buffer.shape[:2], max(end, 2 * self.length), buffer.shape[3])
            wider[:, :, : self.length] = buffer[:, :, : self.length]
            buffer = wider
        known = new.shape[2] - fresh
        buffer[:, :, first + known : end] = new[:, :, known:]
        return buffer


def _column(call: Call) -> int:
    """The column of the buffer at which a call's keys begin."""
    return int(call.k.storage_offset()) // max(call.k.shape[3], 1)


def _ends(end: Tensor, call: Call) -> Tensor:
    """Where each query's intervals end; a levelled row attends to all alike whatever the keys hold, and counts as nothing."""
    if call.flat is None or call.flat.shape[1] > 1:
        return end
    return end.expand(-1, call.q.shape[2], -1) * ~call.flat[:, 0, :, None]


def _continues(call: Call, last: Call) -> bool:
    """Whether the first query stands behind the last call's last."""
    a, b = torch.as_tensor(call.frame.q_start).cpu(), torch.as_tensor(last.frame.q_start).cpu() + last.q.shape[2]
    return bool((a == b).all())


def joined(calls: list[Call], k: Tensor, v: Tensor | None) -> Call:
    """One call with the queries of all, each seeing what it saw."""
    first, firsts = calls[0], [_column(c) for c in calls]
    S, q = k.shape[2], torch.cat([c.q for c in calls], 2)
    made = replace(first, q=q, k=k, v=v, found={}, flat=_levelled(calls), bias=_biases(calls, firsts, S))
    made.start, made.key_start = first.frame.q_start, first.frame.k_start
    made.mask = _masks(calls, firsts, S)
    return made


def _masks(calls: list[Call], firsts: list[int], S: int) -> Mask | None:
    starts: list[Tensor] = []
    ends: list[Tensor] = []
    for call, first in zip(calls, firsts, strict=True):
        said, rest = split(call.mask, call.frame)
        if rest is not None:
            return _dense(calls, firsts, S)
        T, n = call.q.shape[2], call.k.shape[2]
        start = torch.zeros(1, 1, 1, dtype=torch.int64) if said is None else said.start
        end = torch.full((1, 1, 1), n) if said is None else said.end
        starts.append((start + first).expand(-1, T, -1))
        ends.append((end + first).expand(-1, T, -1))
    B, n = max(len(x) for x in starts), max(x.shape[2] for x in starts)
    device = calls[0].q.device

    def cat(parts: list[Tensor]) -> Tensor:
        return torch.cat([torch.nn.functional.pad(x.to(device).expand(B, -1, -1), (0, n - x.shape[2])) for x in parts], 1)

    return Intervals(cat(starts), cat(ends))


def _dense(calls: list[Call], firsts: list[int], S: int) -> Mask | None:
    """Tables, where some call's mask is no intervals."""
    parts: list[Tensor] = []
    for call, first in zip(calls, firsts, strict=True):
        B, H, _, T, n = call.sizes
        frame = Frame(B, H, T, n, q_start=call.start, k_start=call.key_start, device=call.q.device)
        seen = frame.there() if call.mask is None else evaluate(call.mask, frame)
        seen = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=call.q.device) if seen is None else seen
        parts.append(torch.nn.functional.pad(seen.expand(*seen.shape[:2], T, n), (first, S - first - n)))
    return compact(_cat(parts))


def _biases(calls: list[Call], firsts: list[int], S: int) -> Tensor | None:
    if all(c.bias is None for c in calls):
        return None
    parts: list[Tensor] = []
    for call, first in zip(calls, firsts, strict=True):
        T, n = call.q.shape[2], call.k.shape[2]
        bias = call.q.new_zeros(1, 1, 1, 1) if call.bias is None else call.bias
        parts.append(torch.nn.functional.pad(bias.expand(*bias.shape[:2], T, n), (first, S - first - n)))
    return _cat(parts)


def _levelled(calls: list[Call]) -> Tensor | None:
    if all(c.flat is None for c in calls):
        return None
    parts = [torch.zeros(1, 1, c.q.shape[2], dtype=torch.bool, device=c.q.device) if c.flat is None else c.flat for c in calls]
    return _cat([x.unsqueeze(-1) for x in parts]).squeeze(-1)


def _cat(parts: list[Tensor]) -> Tensor:
    B, H = (max(x.shape[i] for x in parts) for i in (0, 1))
    return torch.cat([x.expand(B, H, -1, -1) for x in parts], 2)
