"""What people ask of attention, each exact, several in one pass over the blocks of stream_cpu; nothing L×L is ever stored.

A statistic is a class: `take` looks at a block, `result` says what was found. Its docstring begins with its formula, in which
w[t,s] are the weights of a head, l[t,s] its scores, and t ranges over queries, s over keys.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from .call import Call
from .progress import Progress
from .stream_cpu import Block, blocks


class Strongest(NamedTuple):
    """weight, key  [batch, heads, q_len]; of keys with equal weights any one"""

    weight: Tensor
    key: Tensor


class Top(NamedTuple):
    """weights, keys  [batch, heads, q_len, k], the strongest first; where fewer keys are seen, weight 0 and key −1"""

    weights: Tensor
    keys: Tensor


class Map(NamedTuple):
    """mean, max  [batch, heads, rows, columns]; a cell pools `row_size` queries × `column_size` keys, or what is left"""

    mean: Tensor
    max: Tensor
    row_size: int
    column_size: int


class Profile(NamedTuple):
    """mass  [batch, heads, offsets]: the mean weight at each relative offset k − q;   offsets  [offsets]"""

    mass: Tensor
    offsets: Tensor


class Statistic:
    """One question to a call."""

    scores: ClassVar[bool] = False  # whether it needs the scores beside the weights
    first: ClassVar[bool] = False  # whether it looks at a block before the others, which can use what it makes of it

    def __init__(self, call: Call, argument: Any = None) -> None:
        del argument
        self.out = self.new(call, call.q.shape[2])

    @staticmethod
    def new(call: Call, *shape: int, fill: float = 0.0, dtype: torch.dtype | None = None) -> Tensor:
        """A result [batch, heads, *shape]."""
        wide = torch.float64 if call.q.dtype == torch.float64 else torch.float32
        return torch.full((*call.q.shape[:2], *shape), fill, dtype=dtype or wide, device=call.q.device)

    def take(self, block: Block) -> None:
        raise NotImplementedError

    def result(self) -> Any:
        return self.out


class LogSumExp(Statistic):
    """lse[t] = ln Σ_s exp(l[t,s]), sinks included; −inf where a query sees nothing."""

    def __init__(self, call: Call, argument: Any = None) -> None:
        super().__init__(call, argument)
        self.out.fill_(-math.inf)

    def take(self, block: Block) -> None:
        self.out[block.rows] = block.lse


class Largest(LogSumExp):
    """largest[t] = max_s l[t,s], the largest logit; −inf where a query sees nothing."""

    def take(self, block: Block) -> None:
        self.out[block.rows] = block.most


class Entropy(Statistic):
    """entropy[t] = −Σ_s w[t,s] ln w[t,s] = mass[t] · lse[t] − Σ_s w[t,s] l[t,s], in nats; 0 where a query sees nothing."""

    scores = True

    def take(self, block: Block) -> None:
        found = block.mass * block.lse.nan_to_num(neginf=0.0) - block.expected
        self.out[block.rows] = found.clamp_(min=0.0).masked_fill_(~block.live, 0.0)


class EffectiveKeys(Entropy):
    """effective_keys[t] = exp(entropy[t]): as many keys, equally weighted, have this entropy; 0 where a query sees nothing."""

    def take(self, block: Block) -> None:
        super().take(block)
        self.out[block.rows] = torch.where(block.live, self.out[block.rows].exp(), 0.0)


class Received(Statistic):
    """received[s] = Σ_t w[t,s]: what all queries together give to a key; its sum is the number of queries that see anything.

    As in the heavy hitters of https://arxiv.org/abs/2306.14048.
    """

    def __init__(self, call: Call, argument: Any = None) -> None:
        super().__init__(call, argument)
        self.out = self.new(call, call.k.shape[2])

    def take(self, block: Block) -> None:
        self.out[block.columns] += block.received


class Distance(Statistic):
    """distance[t] = Σ_s w[t,s] |q_t − k_s|, q_t and k_s being positions: how far a query looks on average.

    https://arxiv.org/abs/2010.11929 shows it of every head of a vision transformer.
    """

    def take(self, block: Block) -> None:
        base = block.i.start + block.shift  # the column of the block's first query
        R, C = block.w.shape[1:]
        a = min(max(base - block.j.start, 0), C)  # columns before it
        z = min(max(base + R - block.j.start, a), C)  # and those after the last
        own = torch.arange(R, device=block.w.device)
        found = torch.zeros_like(block.mass)
        at = torch.arange(block.j.start - base, block.j.stop - base, device=block.w.device, dtype=block.w.dtype)
        if a:
            left = block.w[..., :a]
            rest = block.mass if a == C else left.sum(-1)
            found += left @ -at[:a] + own * rest
        if a < z:
            found += _dot(block.w[..., a:z], (own[:, None] - at[a:z]).abs())
        if z < C:
            right = block.w[..., z:]
            found += right @ at[z:] - own * right.sum(-1)
        self.out[block.rows] = found


class StrongestKey(Statistic):
    """weight[t] = max_s w[t,s] and the key where it is; weight 0 and key −1 where a query sees nothing."""

    def __init__(self, call: Call, argument: Any = None) -> None:
        super().__init__(call, argument)
        self.key = self.new(call, call.q.shape[2], fill=-1, dtype=torch.int64)

    def take(self, block: Block) -> None:
        self.out[block.rows] = block.peak
        self.key[block.rows] = torch.where(block.live, block.strongest + block.j.start, -1)

    def result(self) -> Strongest:
        return Strongest(self.out, self.key)


class TopKeys(Statistic):
    """The k keys with the largest weights of each query."""

    def __init__(self, call: Call, argument: Any = None) -> None:
        self.k = min(_whole("top", argument, least=1), call.k.shape[2])
        self.weights = self.new(call, call.q.shape[2], self.k)
        self.keys = self.new(call, call.q.shape[2], self.k, fill=-1, dtype=torch.int64)

    def take(self, block: Block) -> None:
        k = min(self.k, block.w.shape[2])
        weight, key = block.w.topk(k, -1)
        self.weights[block.rows][..., :k] = weight
        self.keys[block.rows][..., :k] = torch.where(weight > 0, key + block.j.start, -1)

    def result(self) -> Top:
        return Top(self.weights, self.keys)


class First(Statistic):
    """first(n)[t] = Σ_{s<n} w[t,s]: the mass on the first n keys, where sinks are (https://arxiv.org/abs/2309.17453)."""

    def __init__(self, call: Call, argument: Any = None) -> None:
        super().__init__(call)
        self.n = _whole("first", argument, least=0)

    def take(self, block: Block) -> None:
        if block.j.start < self.n:
            self.out[block.rows] = block.w[..., : self.n - block.j.start].sum(-1)


class Within(Statistic):
    """within(n)[t] = Σ_{|q_t − k_s| ≤ n} w[t,s]: the mass on the query's own key and the n on each side."""

    def __init__(self, call: Call, argument: Any = None) -> None:
        super().__init__(call)
        self.n = _whole("within", argument, least=0)

    def take(self, block: Block) -> None:
        base, (R, C) = block.i.start + block.shift - block.j.start, block.w.shape[1:]
        a, z = max(base - self.n, 0), min(base + R + self.n, C)
        if a < z:
            own = torch.arange(base, base + R, device=block.w.device)[:, None]
            near = (torch.arange(a, z, device=block.w.device) - own).abs() <= self.n
            self.out[block.rows] = (block.w[..., a:z] * near).sum(-1)


class Offsets(Statistic):
    """offsets(n)[d] = mean_t w[t, t + d] for |d| ≤ n (every offset unless n is given), over the queries that see anything."""

    def __init__(self, call: Call, argument: Any = None) -> None:
        shifts, (_, _, _, T, S) = call.shift or [0], call.sizes
        low, high = -(T - 1) - max(shifts), S - 1 - min(shifts)
        n = _whole("offsets", max(-low, high, 0) if argument is None else argument, least=0)
        self.low, self.high = max(low, -n), min(high, n)
        self.out = self.new(call, max(self.high - self.low + 1, 0))
        self.live = self.new(call, 1)

    def take(self, block: Block) -> None:
        n, R, C = block.w.shape
        self.live[block.b, block.h] += block.live.sum(-1, keepdim=True)
        skewed = torch.nn.functional.pad(block.w.flip(1), (0, R)).view(n, -1)[:, : R * (C + R - 1)]
        sums = skewed.view(n, R, C + R - 1).sum(1)  # row r was moved r to the right, the last query standing first
        first = block.j.start - (block.i.stop - 1 + block.shift)  # the offset of the first sum
        a, z = max(self.low, first), min(self.high + 1, first + C + R - 1)
        if a < z:
            self.out[block.b, block.h, a - self.low : z - self.low] += sums[:, a - first : z - first]

    def result(self) -> Profile:
        offsets = torch.arange(self.low, self.low + self.out.shape[2], device=self.out.device)
        return Profile(self.out / self.live.clamp(min=1), offsets)


class Picture(Statistic):
    """map(n): the weights pooled to at most n × n cells, by mean (a hidden pair counts as 0) and by max."""

    first = True

    def __init__(self, call: Call, argument: Any = None) -> None:
        n = _whole("map", argument, least=1)
        _, _, _, T, S = call.sizes
        self.sizes, self.row, self.column = (T, S), max(1, -(-T // n)), max(1, -(-S // n))
        self.mean = self.new(call, -(-T // self.row), -(-S // self.column))
        self.max = self.mean.clone()

    def take(self, block: Block) -> None:
        first, begin = block.i.start // self.row, block.j.start // self.column
        left = block.j.start % self.column
        for out, how in ((self.mean, "sum"), (self.max, "amax")):
            x = block.bands(self.row, how)
            cells = -(-(left + x.shape[2]) // self.column)
            x = torch.nn.functional.pad(x, (left, cells * self.column - left - x.shape[2])) if self.column > 1 else x
            x = _pooled(x.view(*x.shape[:2], cells, self.column), how)
            into = out[block.b, block.h, first : first + x.shape[1], begin : begin + cells]
            into.add_(x) if how == "sum" else torch.maximum(into, x, out=into)

    def result(self) -> Map:
        sizes = (
            [min(size, n - i * size) for i in range(-(-n // size))]
            for n, size in zip(self.sizes, (self.row, self.column), strict=True)
        )
        rows, columns = (torch.tensor(x, dtype=self.mean.dtype, device=self.mean.device) for x in sizes)
        return Map(self.mean / (rows[:, None] * columns), self.max, self.row, self.column)


class Passed(Statistic):
    """passed[s] = Σ_t x[t] mean_h w[h,t,s]: a vector over queries carried to the keys; one step of rollout.

    x  [batch, q_len]
    """

    def __init__(self, call: Call, argument: Any = None) -> None:
        self.x, self.heads = argument.to(self.new(call).dtype), call.q.shape[1]
        self.out = torch.zeros(call.q.shape[0], call.k.shape[2], dtype=self.x.dtype, device=call.q.device)

    def take(self, block: Block) -> None:
        x = self.x[block.b, block.i].expand(block.w.shape[0], 1, -1)
        self.out[block.b, block.j] += torch.bmm(x, block.w).sum((0, 1)) / self.heads


STATISTICS: Mapping[str, type[Statistic]] = {
    "lse": LogSumExp,
    "largest": Largest,
    "entropy": Entropy,
    "effective_keys": EffectiveKeys,
    "received": Received,
    "distance": Distance,
    "strongest": StrongestKey,
    "top": TopKeys,
    "first": First,
    "within": Within,
    "offsets": Offsets,
    "map": Picture,
}
NUMBERS = {"top": 5, "first": 1, "within": 8, "map": 256}  # what they are asked for unless told
ALL = ("entropy", "received", "distance", "strongest", "map")


def compute(
    call: Call, wanted: Sequence[str], arguments: Mapping[str, Any] | None = None, *, progress: bool | None = None
) -> dict[str, Any]:
    """Several statistics of a call in one pass.

    wanted     names out of STATISTICS;   arguments  the number of those that take one, {"top": 5, "map": 256}
    """
    unknown = [name for name in wanted if name not in STATISTICS]
    if unknown:
        raise ValueError(f"compute: there is no statistic {unknown[0]!r}; there are {', '.join(STATISTICS)}")
    given = dict(arguments or {})
    asked = {name: STATISTICS[name](call, given.get(name)) for name in dict.fromkeys(wanted)}
    look(call, list(asked.values()), progress=progress, what=call.name)
    return {name: asked[name].result() for name in wanted}


@contextmanager
def unseen(call: Call) -> Generator[None]:
    """Out of the sight of any recorder, autograd and autocast."""
    plain = torch.autocast(call.q.device.type, enabled=False)
    with torch.no_grad(), torch._C.DisableTorchFunction(), plain:  # pyright: ignore[reportPrivateUsage]
        yield


def look(
    call: Call, asked: Sequence[Statistic], *, stop: int | None = None, progress: bool | None = None, what: str = ""
) -> None:
    """One pass over a call."""
    order = sorted(asked, key=lambda one: not one.first)
    takes: list[Callable[[Block], None]] = [one.take for one in order]
    with unseen(call), Progress(what, progress) as bar:
        for block in blocks(call.detached(), any(one.scores for one in order), stop, bar.show):
            for take in takes:
                take(block)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Σ over the last axis of a · b, which never is stored."""
    return cast(Tensor, torch.linalg.vecdot(a, b))


def _pooled(x: Tensor, how: str) -> Tensor:
    """The last axis reduced by "sum" or "amax"; torch is slow at that where it is short."""
    if how == "sum":
        return x @ x.new_ones(x.shape[3])
    return functools.reduce(torch.maximum, x.unbind(3)) if x.shape[3] <= 8 else x.amax(3)


def _whole(name: str, value: Any, least: int) -> int:
    value = NUMBERS[name] if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}: needs a whole number ≥ {least}; it is {value!r}")
    return value
