"""A mask as runs: queries side by side that see the same keys, or the same but for a diagonal band.

    group(mask, frame, host)   → a few groups of runs, each with one window as varlen attention counts it, or why not

A band (Causal, Window) is a pair of diagonals of columns, low + i ≤ j ≤ high + i. What a run of the other parts allows is cut
along them, so that in each piece the last query stands at the last key, as varlen attention aligns them:

    rows below the corner where the diagonal `high` leaves the keys:  the last row sees the last column kept    (…, 0)
    rows above it:                                                    they see all columns up to the last       (…, −1)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..masks import And, Causal, Frame, Lengths, Mask, Prefix, ValidLens, Window
from ..masks.blocks import Spans, split

GROUPS = 2  # each is a call of its own


@dataclass(frozen=True, eq=False)
class Runs:
    """Queries q0 … q1 − 1 of batch entry b see the columns k0 … k1 − 1 inside a window; all [n], on one device.

    window  (left, right) around the diagonal that ends at the last query and the last key; −1 is no bound
    """

    b: Tensor
    q0: Tensor
    q1: Tensor
    k0: Tensor
    k1: Tensor
    window: tuple[int, int] = (-1, -1)

    @property
    def fields(self) -> tuple[Tensor, ...]:
        return self.b, self.q0, self.q1, self.k0, self.k1

    def __getitem__(self, keep: Tensor) -> Runs:
        b, q0, q1, k0, k1 = (x[keep] for x in self.fields)
        return Runs(b, q0, q1, k0, k1, self.window)

    def some(self) -> Tensor:
        return (self.q1 > self.q0) & (self.k1 > self.k0)

    def emptied(self) -> Runs:
        """Runs without queries or without keys get neither: what is empty keeps its place, so that nobody must count."""
        some = self.some()
        return replace(self, q1=torch.where(some, self.q1, self.q0), k1=torch.where(some, self.k1, self.k0))


@dataclass(frozen=True)
class Band:
    """low + i ≤ j ≤ high + i for row i and column j, both measured from the diagonal of equal positions; None is no bound."""

    low: int | None = None
    high: int | None = None


def group(mask: Mask | None, frame: Frame, host: bool) -> list[Runs] | str:
    """The groups of runs that the mask leaves, or in one sentence why it cannot be said so."""
    band, base = bands(mask, frame)
    if band is None:
        return 'Causal(align="start") counts from a position that differs between texts'
    if not host and not all(_plain(part) for part in _parts(base)):
        return "only the device knows where its runs of queries end; give the mask's numbers as a list or a CPU tensor"
    for part in _parts(mask):
        part.check(frame)
    said, rest = split(base, frame)
    if rest is not None:
        return f"{type(rest).__name__} must be looked at pair by pair"
    runs = _runs(said, frame, host)
    if isinstance(runs, str):
        return runs
    below, above = _cut(runs, band, frame)
    if not host:
        if above is not None and band.low is not None:
            return "a window over lengths that only the device knows; give them as a list or a CPU tensor"
        return [piece.emptied() for piece in (below, above) if piece is not None]
    return _sorted_out(below, above, band, frame)


def bands(mask: Mask | None, frame: Frame) -> tuple[Band | None, Mask | None]:
    """The mask's Causal and Window parts as one band, and the other parts."""
    low: list[int] = []
    high: list[int] = []
    base: Mask | None = None
    for part in _parts(mask):
        if isinstance(part, Window):
            low.append(1 - part.width)
            high.append(part.ahead)
        elif isinstance(part, Causal) and part.align == "end":
            high.append(0)
        elif isinstance(part, Causal):
            if frame.shift is None or isinstance(frame.q_start, Tensor):
                return None, base
            high.append(-frame.q_start)
        else:
            base = part if base is None else base & part
    return Band(max(low, default=None), min(high, default=None)), base


def _parts(mask: Mask | None) -> list[Mask]:
    return mask.parts if isinstance(mask, And) else [] if mask is None else [mask]


def _plain(mask: Mask) -> bool:
    """Masks with one run a batch entry, whatever their numbers are."""
    return isinstance(mask, Lengths | Prefix) or (isinstance(mask, ValidLens) and mask.lens.ndim == 1)


def _runs(said: Spans | None, frame: Frame, host: bool) -> Runs | str:
    B, T, S = frame.batch, frame.q_len, frame.kv_len
    every = torch.arange(B, device=frame.device)
    zero = torch.zeros_like(every)
    if said is None:
        return Runs(every, zero, zero + T, zero, zero + S)
    if said.start.shape[-1] > 1:
        return "the keys of one query lie in several runs"
    start, end = (x[..., 0].expand(B, -1) for x in (said.start, said.end))  # [batch, q_len | 1]
    if start.shape[1] == 1:
        return Runs(every, zero, zero + T, start[:, 0], end[:, 0])
    if not host:  # Lengths with queries: those that see nothing stand at the end
        return Runs(every, zero, (end > start).sum(1), start[:, 0], end[:, 0])
    new = torch.ones(B, T, dtype=torch.bool)
    new[:, 1:] = (start[:, 1:] != start[:, :-1]) | (end[:, 1:] != end[:, :-1])
    b, q0 = new.nonzero().unbind(1)
    after = torch.cat([b[1:] * T + q0[1:], torch.tensor([B * T])])
    return Runs(b, q0, after - b * T, start[b, q0], end[b, q0])


def _cut(runs: Runs, band: Band, frame: Frame) -> tuple[Runs | None, Runs | None]:
    """The rows below the corner, and the rows above it, each with the columns that any of them sees."""
    b, q0, q1, k0, k1 = runs.fields
    diagonal = _diagonal(frame, b)
    low = None if band.low is None else diagonal + band.low
    if low is not None:
        q1 = torch.minimum(q1, k1 - low)
    if band.high is None:
        return None, Runs(b, q0, q1, k0 if low is None else torch.maximum(k0, q0 + low), k1)
    if band.low is not None and band.low > band.high:
        return None, Runs(b, q0, q0, k0, k0)
    high = diagonal + band.high
    q0 = torch.maximum(q0, k0 - high)
    corner = torch.minimum(q1, k1 - high)
    after = torch.maximum(q0, k1 - high)
    first, second = (k0, k0) if low is None else (torch.maximum(k0, q0 + low), torch.maximum(k0, after + low))
    left = -1 if band.low is None else band.high - band.low
    return Runs(b, q0, corner, first, corner + high, (left, 0)), Runs(b, after, q1, second, k1)


def _diagonal(frame: Frame, b: Tensor) -> Tensor:
    """[n]: the column that stands at the position of row 0."""
    shift: int | Tensor = frame.q_start - frame.k_start
    return shift.to(frame.device)[b] if isinstance(shift, Tensor) else torch.full_like(b, shift)


def _sorted_out(below: Runs | None, above: Runs | None, band: Band, frame: Frame) -> list[Runs] | str:
    """On the host: no empty runs, and those above the corner by what is left of the window."""
    groups: list[Runs] = []
    if below is not None:
        groups.append(below[below.some()])
    if above is not None:
        above = above[above.some()]
        lefts = _lefts(above, band, frame)
        for left in sorted({int(x) for x in lefts}):
            groups.append(replace(above[lefts == left], window=(left, -1)))
    groups = [g for g in groups if g.b.numel()]
    if len(groups) > GROUPS:
        return f"its sequences end at {len(groups)} different places of the window, each of which would be a call of its own"
    if any(_overlap(g) for g in groups):
        return "its queries do not fall into runs that see the same keys"
    return groups


def _lefts(above: Runs, band: Band, frame: Frame) -> Tensor:
    """[n]: the left bound of each run, −1 where it hides nothing and no bound of the others' can be shared."""
    if band.low is None:
        return torch.full_like(above.b, -1)
    low = _diagonal(frame, above.b) + band.low
    left = above.k1 - above.q1 - low
    binds = above.q1 - 1 + low > above.k0
    widest = int(torch.where(binds, left, -1).max()) if left.numel() else -1
    return torch.where(binds, left, torch.where(above.k1 - above.k0 - 1 <= widest, widest, -1))


def _overlap(runs: Runs) -> bool:
    """Whether a key would have to be packed twice."""
    most = int(runs.k1.max()) + 1
    start, order = (runs.b * most + runs.k0).sort()
    return bool((start[1:] < (runs.b * most + runs.k1)[order][:-1]).any())
