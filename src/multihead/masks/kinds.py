"""The kinds of masks. Each is defined by its predicate alone; sizes are checked against the frame it is looked at in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, cast

import torch
from torch import Tensor

from .algebra import Frame, Lang, Mask, register
from .arguments import (
    bools,
    check_batch,
    check_device,
    check_keys,
    check_positions,
    columns,
    documents,
    integers,
    lookup,
    per_batch,
    rows,
    whole,
)  # fmt: skip

Ints = Tensor | Sequence[int]


@register
class Causal(Mask):
    """A query sees the keys up to its own position.

    align="end"    k ≤ q    the last query sees the last key, which is what a KV cache needs
    align="start"  k ≤ i    query i of the call sees the first i + 1 keys (torch's is_causal when q_len ≠ kv_len)
    """

    options = ("align",)

    def __init__(self, align: Literal["end", "start"] = "end") -> None:
        if align not in ("end", "start"):
            raise ValueError(f'Causal: align must be "end" or "start"; it is {align!r}')
        self.align = align

    def predicate(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, frame: Frame) -> Tensor:
        return k <= (q if self.align == "end" else frame.rows_of(q))

    def aligned(self, frame: Frame) -> bool:
        """In a square frame the two alignments differ only where the first key does not stand at 0."""
        return self.align == "end" or (isinstance(frame.k_start, int) and frame.k_start == 0)

    def full(self, frame: Frame) -> bool:
        if self.align == "start":
            return frame.end == 1
        return frame.shift is not None and frame.kv_len - 1 <= frame.shift

    @property
    def diagonal(self) -> bool:
        return self.align == "end"

    def describe(self, lang: Lang = "en") -> str:
        if lang == "zh":
            where = "末尾对齐：最后一个查询看到最后一个键" if self.align == "end" else "开头对齐：第一个查询只看到第一个键"
            return f"每个查询只看到自己位置及之前的键（{where}）"
        where = "the last query sees the last key" if self.align == "end" else "the first query sees the first key only"
        return f"a query sees the keys up to its own position ({where})"

    def __repr__(self) -> str:
        return "Causal()" if self.align == "end" else 'Causal(align="start")'


CAUSAL = Causal()


@register
class Window(Mask):
    """A query sees the `width` keys that end at its own position, and `ahead` keys after it: q − width < k ≤ q + ahead."""

    options = ("width", "ahead")

    def __init__(self, width: int, ahead: int = 0) -> None:
        try:
            self.width, self.ahead = whole(width), whole(ahead)
        except TypeError:
            raise TypeError(f"Window: width and ahead must be whole numbers; they are {width!r} and {ahead!r}") from None
        if self.width < 1 or self.ahead < 0:
            raise ValueError(f"Window: width must be ≥ 1 and ahead ≥ 0; they are {width} and {ahead}")

    def predicate(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, frame: Frame) -> Tensor:
        return (k > q - self.width) & (k <= q + self.ahead)

    def full(self, frame: Frame) -> bool:
        shift = None if torch.compiler.is_compiling() else frame.shift
        return shift is not None and frame.kv_len - 1 <= shift + self.ahead and shift + frame.q_len - 1 < self.width

    @property
    def diagonal(self) -> bool:
        return True

    def within(self, frame: Frame) -> Mask:
        """As long as the text is no longer than the window, it is causal; a traced graph must hold for longer ones too."""
        shift = None if torch.compiler.is_compiling() else frame.shift
        return CAUSAL if not self.ahead and shift is not None and shift + frame.q_len <= self.width else self

    @property
    def reach(self) -> int:
        return self.width

    def describe(self, lang: Lang = "en") -> str:
        if lang == "zh":
            after = f"以及之后的 {self.ahead} 个键" if self.ahead else "不看之后的键"
            return f"每个查询看到截至自己位置的 {self.width} 个键，{after}"
        after = f"and {self.ahead} after it" if self.ahead else "and none after it"
        return f"a query sees the {self.width} keys that end at its own position {after}"

    def __repr__(self) -> str:
        return f"Window({self.width}, ahead={self.ahead})" if self.ahead else f"Window({self.width})"


@register
class Lengths(Mask):
    """Batch entry b has keys[b] keys, the rest is padding on the right: k < keys[b]; with queries, also i < queries[b].

    keys, queries  [batch], a list or an integer tensor; i is the query's number within the call
    """

    tensors = ("keys", "queries")

    def __init__(self, keys: Ints, queries: Ints | None = None) -> None:
        self.keys = integers("Lengths", "keys", keys, 1)
        self.queries = None if queries is None else integers("Lengths", "queries", queries, 1)
        if self.queries is not None and self.queries.shape != self.keys.shape:
            raise ValueError(
                f"Lengths: keys and queries must have one length a batch entry each; "
                f"keys has {self.keys.shape[0]}, queries has {self.queries.shape[0]}"
            )

    def predicate(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, frame: Frame) -> Tensor:
        allowed = k < per_batch(self.keys, frame)
        return allowed if self.queries is None else allowed & (frame.rows_of(q) < per_batch(self.queries, frame))

    def check(self, frame: Frame) -> None:
        check_batch(self, self.batch, frame)

    @property
    def batch(self) -> int:
        return self.keys.shape[0]

    @property
    def by_query(self) -> bool:
        return self.queries is not None

    def describe(self, lang: Lang = "en") -> str:
        if lang == "zh":
            return "每个样本只有前 keys[b] 个键有效，其余是右侧填充" + ("，查询同理" if self.queries is not None else "")
        rest = ", and likewise for queries" if self.queries is not None else ""
        return f"of batch entry b the first keys[b] keys are real, the rest is padding on the right{rest}"

    def __repr__(self) -> str:
        return super().__repr__().replace(", None)", ")")


@register
class Keys(Mask):
    """Any padding, left, right or in between: key k of batch entry b may be seen where allowed[b, k].

    allowed  bool [batch, kv_len]
    """

    tensors = ("allowed",)

    def __init__(self, allowed: Tensor) -> None:
        self.allowed = bools("Keys", allowed, (2,), "[batch, kv_len]")

    def predicate(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, frame: Frame) -> Tensor:
        return lookup(self.allowed, b, k)

    def evaluate(self, frame: Frame) -> Tensor:
        self.check(frame)
        return columns(self.allowed[:, None, None, :], frame)

    def check(self, frame: Frame) -> None:
        check_batch(self, self.batch, frame)
        check_device(self, self.allowed, frame)
        check_keys(self, self.allowed.shape[1], frame)

    @property
    def batch(self) -> int:
        return self.allowed.shape[0]

    @property
    def by_query(self) -> bool:
        return False

    def describe(self, lang: Lang = "en") -> str:
        return "the keys marked True are real, the rest is padding" if lang == "en" else "标为 True 的键有效，其余是填充"


@register
class Documents(Mask):
    """Sequences packed into one row: a query sees the keys of its own document, ids[b, q] == ids[b, k] and not −1.

    ids      integer [tokens] or [batch, tokens]; −1 belongs to no document (padding)
    queries  the ids of the call's queries, where they are not the keys' own (cross-attention between packed rows)
    """

    tensors = ("ids", "queries")

    def __init__(self, ids: Tensor | Sequence[int], queries: Tensor | Sequence[int] | None = None) -> None:
        self.ids = rows(integers("Documents", "ids", ids, 1, 2))
        self.queries = None if queries is None else rows(integers("Documents", "queries", queries, 1, 2))

    @classmethod
    def from_lengths(
        cls,
        lengths: Sequence[int] | Sequence[Sequence[int]],
        queries: Sequence[int] | Sequence[Sequence[int]] | None = None,
    ) -> Documents:
        """[3, 5, 2]: three documents in every row; [[3, 5], [8]]: row by row, a shorter row being padded at its end."""
        return cls(documents("lengths", lengths), None if queries is None else documents("queries", queries))

    def predicate(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, frame: Frame) -> Tensor:
        ids = self.ids.to(frame.device)
        theirs = lookup(ids, b, k)
        whose, at = (ids, q) if self.queries is None else (self.queries.to(frame.device), frame.rows_of(q))
        mine = lookup(whose, b, at)
        return (mine == theirs) & (theirs >= 0)

    def check(self, frame: Frame) -> None:
        check_batch(self, self.batch, frame)
        check_keys(self, self.ids.shape[1], frame)
        if self.queries is not None and self.queries.shape[1] != frame.q_len:
            raise ValueError(f"Documents: queries names {self.queries.shape[1]} tokens but q_len is {frame.q_len}")
        if self.queries is not None:
            return
        if frame.shift is not None and frame.shift < 0:
            raise ValueError(
                f"Documents: with q_len {frame.q_len} and kv_len {frame.kv_len} some queries stand before the first key "
                "and have no id; pass queries=, the ids of the queries"
            )
        check_positions(self, self.ids.shape[1], frame)

    def positions(self) -> Tensor:
        """[batch, tokens]: each token's position within its document, as `position_ids=` wants it."""
        order = self.ids.argsort(dim=1, stable=True)  # a document's tokens side by side, whether or not they lie so
        ids, index = self.ids.gather(1, order), torch.arange(self.ids.shape[1], device=self.ids.device).expand_as(self.ids)
        first = torch.ones_like(ids, dtype=torch.bool)
        first[:, 1:] = ids[:, 1:] != ids[:, :-1]
        rank = index - torch.where(first, index, 0).cummax(1).values
        return torch.empty_like(self.ids).scatter_(1, order, rank.to(self.ids.dtype))

    @property
    def batch(self) -> int:
        return max(self.ids.shape[0], 1 if self.queries is None else self.queries.shape[0])

    def describe(self, lang: Lang = "en") -> str:
        return "a query sees the keys of its own document only" if lang == "en" else "每个查询只看到同一文档内的键"

    def __repr__(self) -> str:
        return super().__repr__().replace(", None)", ")")


@register
class Prefix(Mask):
    """Every query sees the first n keys: k < n; `Causal() | Prefix(n)` is the mask of a prefix language model.

    n  a number, or [batch]
    """

    tensors = ("n",)

    def __init__(self, n: int | Ints) -> None:
        if isinstance(n, Tensor):
            n = n.view(1) if n.ndim == 0 else n
        self.n = integers("Prefix", "n", n if isinstance(n, Iterable) else [n], 1)

    def predicate(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, frame: Frame) -> Tensor:
        return k < per_batch(self.n, frame)

    def check(self, frame: Frame) -> None:
        check_batch(self, self.batch, frame)

    @property
    def batch(self) -> int:
        return self.n.shape[0]

    @property
    def by_query(self) -> bool:
        return False

    def describe(self, lang: Lang = "en") -> str:
        n = str(int(self.n[0])) if self.batch == 1 and self.n.device.type == "cpu" else "n[b]"
        return f"every query sees the first {n} keys" if lang == "en" else f"所有查询都能看到前 {n} 个键"

    def __repr__(self) -> str:
        return f"Prefix({self.n.item()})" if self.batch == 1 and self.n.device.type == "cpu" else super().__repr__()


@register
class ValidLens(Mask):
    """d2l's valid_lens: k < lens[b] for a 1-D tensor, k < lens[b, i] for a 2-D one (i: the query's number in the call).

    lens  integer [batch] or [batch, q_len]
    """

    tensors = ("lens",)

    def __init__(self, lens: Tensor | Sequence[int]) -> None:
        self.lens = integers("ValidLens", "lens", lens, 1, 2)

    def predicate(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, frame: Frame) -> Tensor:
        if self.lens.ndim == 1:
            return k < per_batch(self.lens, frame)
        return k < lookup(self.lens.to(frame.device), b, frame.rows_of(q))

    def check(self, frame: Frame) -> None:
        check_batch(self, self.batch, frame)
        if self.lens.ndim == 2 and self.lens.shape[1] != frame.q_len:
            raise ValueError(
                f"ValidLens: lens [batch, q_len] has shape {list(self.lens.shape)} but q_len is {frame.q_len}; "
                "give one length a query, or one a batch entry"
            )

    @property
    def batch(self) -> int:
        return self.lens.shape[0]

    @property
    def by_query(self) -> bool:
        return self.lens.ndim == 2

    def describe(self, lang: Lang = "en") -> str:
        if self.lens.ndim == 1:
            return "of batch entry b the first lens[b] keys are valid" if lang == "en" else "第 b 个样本的前 lens[b] 个键有效"
        return (
            "query i of batch entry b sees the first lens[b, i] keys"
            if lang == "en"
            else "第 b 个样本的第 i 个查询只看到前 lens[b, i] 个键"
        )


@register
class Where(Mask):
    """Your own predicate over absolute positions, made of tensor operations: Where(lambda b, h, q, k: (q - k) % 4 == 0)."""

    options = ("allows",)

    def __init__(self, allows: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> None:
        if not callable(allows):
            raise TypeError(f"Where: needs a function (b, h, q, k) → bool; got {type(allows).__name__}")
        self.allows = allows

    def predicate(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, frame: Frame) -> Tensor:
        allowed = self.allows(b, h, q, k)
        if not isinstance(allowed, Tensor) or allowed.dtype != torch.bool:  # pyright: ignore[reportUnnecessaryIsInstance]
            got = allowed.dtype if isinstance(allowed, Tensor) else type(allowed).__name__  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"Where: the predicate must return a bool tensor made from b, h, q, k; it returned {got}")
        shape = list(cast(torch.Size, torch.broadcast_shapes(b.shape, h.shape, q.shape, k.shape)))
        if allowed.ndim > 4 or any(n not in (1, m) for n, m in zip(allowed.shape[::-1], shape[::-1], strict=False)):
            raise ValueError(
                "Where: the predicate must combine b, h, q and k by operations on tensors, which broadcast to "
                f"[batch, heads, q, k] = {shape}; it returned shape {list(allowed.shape)}"
            )
        return allowed[(None,) * (4 - allowed.ndim)]

    def describe(self, lang: Lang = "en") -> str:
        name = getattr(self.allows, "__name__", type(self.allows).__name__)
        return f"your own predicate {name}(b, h, q, k) holds" if lang == "en" else f"满足自定义谓词 {name}(b, h, q, k)"
