"""What a mask is: a predicate (b, h, q, k) → bool over absolute positions, and the algebra & | ~ on such predicates.

A mask is a value. It holds no sizes and no device of its own; it is looked at in a `Frame`, which says how many queries
and keys a call has and at which absolute positions they stand. Everything else (dense tensors, kernel flags, counts) is
derived from the predicate and tested against it.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree  # the registry that compile and export read; torch has no public name for it

Lang = Literal["en", "zh"]
Position = int | Tensor
_M = TypeVar("_M", bound="type[Mask]")


class Frame:
    """The call in which a mask is looked at: query i stands at q_start + i, key j at k_start + j.

    q_start  int or [batch]; kv_len − q_len unless given, so that the last query stands at the last key
    k_start  int or [batch]; a cache that dropped old keys, or holds batch entries of different lengths, gives its own
    cached   positions were given: masks may know of more keys than this call holds
    """

    __slots__ = ("batch", "cached", "device", "heads", "k_start", "kv_len", "q_len", "q_start")

    def __init__(
        self,
        batch: int,
        heads: int,
        q_len: int,
        kv_len: int,
        *,
        q_start: Position | None = None,
        k_start: Position = 0,
        device: torch.device | str | None = None,
    ) -> None:
        self.batch, self.heads, self.q_len, self.kv_len = batch, heads, q_len, kv_len
        if type(k_start) is int and k_start < 0:  # columns without a key, as a ragged cache has them
            k_start = torch.full((batch,), k_start, device=device)
        self.q_start: Position = kv_len - q_len + k_start if q_start is None else q_start
        self.k_start = k_start
        self.device = torch.device("cpu" if device is None else device)
        self.cached = q_start is not None

    @property
    def b(self) -> Tensor:
        return torch.arange(self.batch, device=self.device).view(-1, 1, 1, 1)

    @property
    def h(self) -> Tensor:
        return torch.arange(self.heads, device=self.device).view(1, -1, 1, 1)

    @property
    def q(self) -> Tensor:
        return self._at(self.q_start) + self.row

    @property
    def k(self) -> Tensor:
        return self._at(self.k_start) + torch.arange(self.kv_len, device=self.device).view(1, 1, 1, -1)

    @property
    def row(self) -> Tensor:
        """The query's number within the call, 0 … q_len − 1."""
        return torch.arange(self.q_len, device=self.device).view(1, 1, -1, 1)

    def rows_of(self, q: Tensor) -> Tensor:
        return q - self._at(self.q_start)

    def there(self) -> Tensor | None:
        """[batch, 1, 1, kv_len], False where a ragged cache holds no key; None where every key is there."""
        return self.k >= 0 if isinstance(self.k_start, Tensor) else None

    @property
    def end(self) -> int | None:
        """One more than the position of the last key; None where only the device knows."""
        if not isinstance(self.k_start, Tensor):
            return self.k_start + self.kv_len
        last = known(self.k_start)
        return None if last is None else int(last.max()) + self.kv_len

    @property
    def shift(self) -> int | None:
        """q_start − k_start where both are numbers: the number of keys that stand before the first query."""
        if isinstance(self.q_start, Tensor) or isinstance(self.k_start, Tensor):
            return None
        return self.q_start - self.k_start

    def _at(self, start: Position) -> Position:
        return start.to(self.device).view(-1, 1, 1, 1) if isinstance(start, Tensor) else start


class Mask:
    """What may attend to what: True means *may attend*. Combine masks with & | ~.

    A kind of mask is a subclass with a predicate; `tensors` and `options` name the attributes that make its value.
    """

    tensors: ClassVar[tuple[str, ...]] = ()
    options: ClassVar[tuple[str, ...]] = ()

    def predicate(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, frame: Frame) -> Tensor:
        """bool, broadcastable over b [batch,1,1,1], h [1,heads,1,1], q [·,1,q_len,1], k [·,1,1,kv_len]."""
        raise NotImplementedError

    def evaluate(self, frame: Frame) -> Tensor:
        """The predicate over a whole frame: bool [batch|1, heads|1, q_len|1, kv_len|1]."""
        self.check(frame)
        return self.predicate(frame.b, frame.h, frame.q, frame.k, frame)

    def part(self, frame: Frame, rows: slice, columns: slice) -> Tensor:
        """The predicate for some queries and keys of a frame: bool [batch|1, heads|1, rows|1, columns|1]."""
        return self.predicate(frame.b, frame.h, frame.q[:, :, rows], frame.k[..., columns], frame)

    def atoms(self) -> list[Mask]:
        """The kinds of which the mask is made, itself if it is one."""
        return [self]

    def check(self, frame: Frame) -> None:
        """Raise if the mask's own sizes do not fit the frame."""

    def full(self, frame: Frame) -> bool:
        """True only where arithmetic alone shows that every pair of the frame is allowed."""
        del frame
        return False

    def within(self, frame: Frame) -> Mask:
        """A mask that says the same in this frame and is no harder to compute."""
        del frame
        return self

    @property
    def diagonal(self) -> bool:
        """True only where a query is known to see the key at its own position: no row and no column is empty then."""
        return False

    @property
    def reach(self) -> int | None:
        """No query sees a key this many positions or more behind it; None where there is no such bound."""
        return None

    @property
    def batch(self) -> int:
        """The batch size the mask's tensors were made for; 1 where it is the same for all."""
        return 1

    @property
    def heads(self) -> int:
        return 1

    @property
    def by_query(self) -> bool:
        """False where every query of a batch entry sees the same keys: the mask is a row, not a square."""
        return True

    # ---- looking ----------------------------------------------------------------------------------------------------

    def dense(
        self,
        q_len: int,
        kv_len: int,
        *,
        batch: int | None = None,
        heads: int | None = None,
        start: Position | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """For looking: bool [q_len, kv_len], or [batch, heads, q_len, kv_len] for a mask that varies over them."""
        B, H = self.batch if batch is None else batch, self.heads if heads is None else heads
        allowed = evaluate(self, Frame(B, H, q_len, kv_len, q_start=start, device=device or self.device))
        allowed = allowed.expand(*allowed.shape[:2], q_len, kv_len)
        if batch is not None or heads is not None:
            return allowed.expand(B, H, q_len, kv_len)
        return allowed[0, 0] if allowed.shape[:2] == (1, 1) else allowed

    def pairs(self, q_len: int, kv_len: int, *, batch: int | None = None, heads: int | None = None) -> int:
        """How many (query, key) pairs are left, over all batch entries and heads."""
        B, H = self.batch if batch is None else batch, self.heads if heads is None else heads
        return count(self, Frame(B, H, q_len, kv_len, device=self.device))

    def draw(self, q_len: int, kv_len: int, *, start: Position | None = None) -> str:
        """A picture in text, a line a query: ■ may attend, · may not. Batch entries and heads stand below each other."""
        allowed = self.dense(q_len, kv_len, start=start)
        allowed = allowed.reshape(math.prod(allowed.shape[:-2]), q_len, kv_len)
        pictures = ("\n".join(" ".join("■" if x else "·" for x in row) for row in one) for one in allowed)
        return "\n\n".join(pictures)

    def describe(self, lang: Lang = "en") -> str:
        """The mask in words, English or Chinese."""
        raise NotImplementedError

    def __repr__(self) -> str:
        values = ", ".join(show(getattr(self, name)) for name in self.tensors + self.options)
        return f"{type(self).__name__}({values})"

    # ---- algebra ----------------------------------------------------------------------------------------------------

    def __and__(self, other: Mask) -> Mask:
        return _join(And, self, other)

    def __or__(self, other: Mask) -> Mask:
        return _join(Or, self, other)

    def __invert__(self) -> Mask:
        return Not(self)

    def __bool__(self) -> bool:
        raise TypeError(f"{type(self).__name__}: a mask has no truth value; combine masks with & | ~, not with and, or, not")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mask) or type(self) is not type(other):
            return NotImplemented if not isinstance(other, Mask) else False
        return all(_same(getattr(self, n), getattr(other, n)) for n in self.tensors + self.options)

    def __hash__(self) -> int:  # tensors compare by value but have none to hash
        return hash((type(self), *(repr(getattr(self, n)) for n in self.options)))

    # ---- tensors ----------------------------------------------------------------------------------------------------

    def leaves(self) -> list[Tensor]:
        """The mask's own tensors, those of its parts included."""
        found: list[Tensor] = pytree.tree_leaves(self)
        return [leaf for leaf in found if isinstance(leaf, Tensor)]  # pyright: ignore[reportUnnecessaryIsInstance]

    def map(self, change: Callable[[Tensor], Tensor]) -> Mask:
        """The same mask with every tensor changed."""
        return pytree.tree_map_only(Tensor, change, self)

    def to(self, device: torch.device | str) -> Mask:
        if not isinstance(device, torch.device | str | int):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"{type(self).__name__}.to: a mask moves between devices and keeps its dtype; it got {device!r}")
        return self.map(lambda t: t.to(device))

    @property
    def device(self) -> torch.device:
        leaves = self.leaves()
        return leaves[0].device if leaves else torch.device("cpu")


def known(values: Tensor) -> Tensor | None:
    """The values, where they can be read without waiting for a device and outside of a tracer; else None."""
    if values.device.type != "cpu" or torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(values):  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType, reportAttributeAccessIssue]
        return None
    return values


def extent(mask: Mask, frame: Frame) -> tuple[int, int]:
    """Over how many batch entries and heads the mask really varies: the axes of its predicate at one query and one key."""
    there, first = frame.there(), mask.predicate(frame.b, frame.h, frame.q[:, :, :1], frame.k[..., :1], frame)
    return max(first.shape[0], 1 if there is None else there.shape[0]), first.shape[1]


def evaluate(mask: Mask, frame: Frame) -> Tensor:
    """What the frame allows: the mask's predicate, and no key that a ragged cache does not hold."""
    allowed, there = mask.evaluate(frame), frame.there()
    return allowed if there is None else allowed & there


def count(mask: Mask | None, frame: Frame) -> int:
    """How many pairs of the frame are allowed: by intervals, or a few rows at a time, but never through an L×L tensor."""
    from .blocks import split  # which knows every kind of mask

    there, total = frame.there(), 0
    if mask is None:
        keys = frame.batch * frame.kv_len if there is None else int(there.sum())
        return keys * frame.heads * frame.q_len
    mask.check(frame)
    said, rest = split(mask, frame)
    if rest is None and said is not None:
        return int(said.pairs(frame.q_len).expand(frame.batch).sum()) * frame.heads
    batch, heads = extent(mask, frame) if frame.q_len and frame.kv_len else (1, 1)
    rows = max(1, 2**22 // max(batch * heads * frame.kv_len, 1))
    for first in range(0, frame.q_len, rows):
        q = frame.q.narrow(2, first, min(rows, frame.q_len - first))
        allowed = mask.predicate(frame.b, frame.h, q, frame.k, frame)
        allowed = allowed if there is None else allowed & there
        sizes = (frame.batch, frame.heads, q.shape[2], frame.kv_len)
        total += int(allowed.sum()) * math.prod(n for n, m in zip(sizes, allowed.shape, strict=True) if m == 1)
    return total


def register(kind: _M) -> _M:
    """Class decorator: the mask's tensors become pytree leaves, so that compile, export and torch.func see them."""

    def flatten(mask: Any) -> tuple[list[Any], Any]:
        return [getattr(mask, n) for n in kind.tensors], tuple(getattr(mask, n) for n in kind.options)

    def flatten_with_keys(mask: Any) -> tuple[list[Any], Any]:
        children, options = flatten(mask)
        return [(pytree.GetAttrKey(n), c) for n, c in zip(kind.tensors, children, strict=True)], options

    def unflatten(children: Any, options: Any) -> Any:  # no __init__: a tracer's leaves need not be tensors
        mask = object.__new__(kind)
        for name, value in (*zip(kind.tensors, children, strict=True), *zip(kind.options, options, strict=True)):
            object.__setattr__(mask, name, value)
        return mask

    pytree.register_pytree_node(
        kind,
        flatten,
        unflatten,
        serialized_type_name=f"multihead.masks.{kind.__name__}",
        to_dumpable_context=list,
        from_dumpable_context=tuple,
        flatten_with_keys_fn=flatten_with_keys,
    )
    torch.serialization.add_safe_globals([kind])  # plain data: a saved program may hold one as its example input
    return kind


class _Several(Mask):
    """Masks joined by one operator; the order of the parts does not matter."""

    tensors = ("parts",)
    sign: ClassVar[str]
    join: ClassVar[Callable[[Any, Any], Any]]

    def __init__(self, *parts: Mask) -> None:
        self.parts = list(parts)

    def predicate(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, frame: Frame) -> Tensor:
        return functools.reduce(type(self).join, [part.predicate(b, h, q, k, frame) for part in self.parts])

    def evaluate(self, frame: Frame) -> Tensor:
        return functools.reduce(type(self).join, [part.evaluate(frame) for part in self.parts])

    def part(self, frame: Frame, rows: slice, columns: slice) -> Tensor:
        return functools.reduce(type(self).join, [part.part(frame, rows, columns) for part in self.parts])

    def check(self, frame: Frame) -> None:
        for part in self.parts:
            part.check(frame)

    def atoms(self) -> list[Mask]:
        return [atom for part in self.parts for atom in part.atoms()]

    @property
    def batch(self) -> int:
        return max(part.batch for part in self.parts)

    @property
    def heads(self) -> int:
        return max(part.heads for part in self.parts)

    @property
    def by_query(self) -> bool:
        return any(part.by_query for part in self.parts)

    def __repr__(self) -> str:
        return f" {self.sign} ".join(f"({p!r})" if isinstance(p, _Several) else repr(p) for p in self.parts)

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other) or not isinstance(other, _Several):
            return NotImplemented if not isinstance(other, Mask) else False
        rest = list(other.parts)
        for part in self.parts:
            match = next((i for i, candidate in enumerate(rest) if part == candidate), None)
            if match is None:
                return False
            del rest[match]
        return not rest

    def __hash__(self) -> int:
        return hash((type(self), frozenset(hash(part) for part in self.parts)))


@register
class And(_Several):
    """Both hold."""

    sign = "&"
    join = operator.and_  # pyright: ignore[reportUnknownVariableType]

    def full(self, frame: Frame) -> bool:
        return all(part.full(frame) for part in self.parts)

    @property
    def diagonal(self) -> bool:
        return all(part.diagonal for part in self.parts)

    @property
    def reach(self) -> int | None:
        return min((part.reach for part in self.parts if part.reach is not None), default=None)

    def describe(self, lang: Lang = "en") -> str:
        return (", and " if lang == "en" else "，并且").join(part.describe(lang) for part in self.parts)


@register
class Or(_Several):
    """At least one holds."""

    sign = "|"
    join = operator.or_  # pyright: ignore[reportUnknownVariableType]

    def full(self, frame: Frame) -> bool:
        return any(part.full(frame) for part in self.parts)

    @property
    def diagonal(self) -> bool:
        return any(part.diagonal for part in self.parts)

    @property
    def reach(self) -> int | None:
        reaches = [part.reach for part in self.parts]
        return None if None in reaches else max(r for r in reaches if r is not None)

    def describe(self, lang: Lang = "en") -> str:
        words = (", or " if lang == "en" else "，或者").join(part.describe(lang) for part in self.parts)
        return f"({words})" if lang == "en" else f"（{words}）"


@register
class Not(Mask):
    """What the mask does not allow."""

    tensors = ("mask",)

    def __init__(self, mask: Mask) -> None:
        self.mask = mask

    def predicate(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, frame: Frame) -> Tensor:
        return ~self.mask.predicate(b, h, q, k, frame)

    def evaluate(self, frame: Frame) -> Tensor:
        return ~self.mask.evaluate(frame)

    def part(self, frame: Frame, rows: slice, columns: slice) -> Tensor:
        return ~self.mask.part(frame, rows, columns)

    def check(self, frame: Frame) -> None:
        self.mask.check(frame)

    def atoms(self) -> list[Mask]:
        return self.mask.atoms()

    def __invert__(self) -> Mask:
        return self.mask

    @property
    def batch(self) -> int:
        return self.mask.batch

    @property
    def heads(self) -> int:
        return self.mask.heads

    @property
    def by_query(self) -> bool:
        return self.mask.by_query

    def describe(self, lang: Lang = "en") -> str:
        words = self.mask.describe(lang)
        return f"not ({words})" if lang == "en" else f"并非（{words}）"

    def __repr__(self) -> str:
        return f"~({self.mask!r})" if isinstance(self.mask, _Several) else f"~{self.mask!r}"


def _join(kind: type[_Several], left: Mask, right: object) -> Mask:
    if not isinstance(right, Mask):
        what = "a bare tensor" if isinstance(right, Tensor) else f"a {type(right).__name__}"
        raise TypeError(
            f"{left!r} {kind.sign} …: both sides must be masks, but the right one is {what}; "
            "wrap a tensor as Allowed(t) if True may attend, Blocked(t) if True may not"
        )
    parts: list[Mask] = []
    for mask in (left, right):
        for part in mask.parts if isinstance(mask, kind) else [mask]:
            if not any(part is seen or (not part.leaves() and part == seen) for seen in parts):
                parts.append(part)
    return parts[0] if len(parts) == 1 else kind(*parts)


def _same(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a is b or a.shape != b.shape or a.device != b.device or a.is_meta:
            return a is b
        return torch.equal(a, b)
    return type(a) is type(b) and a == b


def show(value: object) -> str:
    """A value of a mask, short: small tensors by their numbers, large ones by dtype and shape."""
    if not isinstance(value, Tensor):
        return getattr(value, "__name__", None) or repr(value)
    if value.numel() <= 16 and value.device.type == "cpu":
        return str(value.tolist())  # pyright: ignore[reportUnknownArgumentType]
    return f"<{str(value.dtype).removeprefix('torch.')} {list(value.shape)}>"
