"""The kinds of masks. Each is defined by its predicate alone; sizes are checked against the frame it is looked at in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from .algebra import Frame, Lang, Mask, register, show

Ints = Tensor | Sequence[int]
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


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


@register
class Window(Mask):
    """A query sees the `width` keys that end at its own position, and `ahead` keys after it: q − width < k ≤ q + ahead."""

    options = ("width", "ahead")

    def __init__(self, width: int, ahead: int = 0) -> None:
        if width < 1 or ahead < 0:
            raise ValueError(f"Window: width must be ≥ 1 and ahead ≥ 0; they are {width} and {ahead}")
        self.width, self.ahead = width, ahead

    def predicate(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, frame: Frame) -> Tensor:
        return (k > q - self.width) & (k <= q + self.ahead)

    def full(self, frame: Frame) -> bool:
        shift = frame.shift
        return shift is not None and frame.kv_len - 1 <= shift + self.ahead and shift + frame.q_len - 1 < self.width

    @property
    def diagonal(self) -> bool:
        return True

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
        self.keys = _integers("Lengths", "keys", keys, 1)
        self.queries = None if queries is None else _integers("Lengths", "queries", queries, 1)
        if self.queries is not None and self.queries.shape != self.keys.shape:
            raise ValueError(
                f"Lengths: keys and queries must have one length a batch entry each; "
                f"keys has {self.keys.shape[0]}, queries has {self.queries.shape[0]}"
            )

    def predicate(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, frame: Frame) -> Tensor:
        allowed = k < _per_batch(self.keys, frame)
        return allowed if self.queries is None else allowed & (frame.rows_of(q) < _per_batch(self.queries, frame))

    def check(self, frame: Frame) -> None:
        _check_batch(self, self.batch, frame)

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
        self.allowed = _bools("Keys", allowed, (2,), "[batch, kv_len]")

    def predicate(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, frame: Frame) -> Tensor:
        return _lookup(self.allowed, b, k)

    def evaluate(self, frame: Frame) -> Tensor:
        self.check(frame)
        return _columns(self.allowed[:, None, None, :], frame)

    def check(self, frame: Frame) -> None:
        _check_batch(self, self.batch, frame)
        _check_device(self, self.allowed, frame)
        _check_keys(self, self.allowed.shape[1], frame)

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
        self.ids = _rows(_integers("Documents", "ids", ids, 1, 2))
        self.queries = None if queries is None else _rows(_integers("Documents", "queries", queries, 1, 2))

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[int] | Sequence[Sequence[int]], queries: Sequence[int] | Sequence[Sequence[int]] | None = None
    ) -> Documents:
        """[3, 5, 2]: three documents in every row; [[3, 5], [8]]: row by row, a shorter row being padded at its end."""
        return cls(_ids("lengths", lengths), None if queries is None else _ids("queries", queries))

    def predicate(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, frame: Frame) -> Tensor:
        ids = self.ids.to(frame.device)
        theirs = _lookup(ids, b, k)
        if self.queries is None:
            mine = _lookup(ids, b, q)
        else:
            mine = _lookup(self.queries.to(frame.device), b, frame.rows_of(q))
        return (mine == theirs) & (theirs >= 0)

    def check(self, frame: Frame) -> None:
        _check_batch(self, self.batch, frame)
        _check_keys(self, self.ids.shape[1], frame)
        if self.queries is not None and self.queries.shape[1] != frame.q_len:
            raise ValueError(f"Documents: queries names {self.queries.shape[1]} tokens but q_len is {frame.q_len}")
        if self.queries is None and frame.shift is not None and frame.shift < 0:
            raise ValueError(
                f"Documents: with q_len {frame.q_len} and kv_len {frame.kv_len} some queries stand before the first key "
                "and have no id; pass queries=, the ids of the queries"
            )

    def positions(self) -> Tensor:
        """[batch, tokens]: each token's position within its document, as `position_ids=` wants it."""
        first = torch.ones_like(self.ids, dtype=torch.bool)
        first[:, 1:] = self.ids[:, 1:] != self.ids[:, :-1]
        index = torch.arange(self.ids.shape[1], device=self.ids.device).expand_as(self.ids)
        return index - torch.where(first, index, 0).cummax(1).values

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
        if isinstance(n, int):
            if n < 0:
                raise ValueError(f"Prefix: n must be ≥ 0; it is {n}")
            n = [n]
        self.n = _integers("Prefix", "n", n, 1)

    def predicate(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, frame: Frame) -> Tensor:
        return k < _per_batch(self.n, frame)

    def check(self, frame: Frame) -> None:
        _check_batch(self, self.batch, frame)

    @property
    def batch(self) -> int:
        return self.n.shape[0]

    @property
    def by_query(self) -> bool:
        return False

    def describe(self, lang: Lang = "en") -> str:
        n = str(self.n.tolist()[0]) if self.batch == 1 and self.n.device.type == "cpu" else "n[b]"
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
        self.lens = _integers("ValidLens", "lens", lens, 1, 2)

    def predicate(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, frame: Frame) -> Tensor:
        if self.lens.ndim == 1:
            return k < _per_batch(self.lens, frame)
        return k < _lookup(self.lens.to(frame.device), b, frame.rows_of(q))

    def check(self, frame: Frame) -> None:
        _check_batch(self, self.batch, frame)
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
        return "query i of batch entry b sees the first lens[b, i] keys" if lang == "en" else "第 b 个样本的第 i 个查询只看到前 lens[b, i] 个键"


class Table(Mask):
    """A tensor that says of each pair whether it is allowed; a subclass says what True means."""

    options = ("absolute",)

    def __init__(self, tensor: object, absolute: bool) -> None:
        self.absolute = absolute
        tensor = _bools(type(self).__name__, tensor, (2, 3, 4), "[q, k], [batch, q, k] or [batch, heads, q, k]")
        setattr(self, self.tensors[0], tensor)

    @property
    def tensor(self) -> Tensor:
        return getattr(self, self.tensors[0])

    @property
    def table(self) -> Tensor:
        """The tensor as [batch|1, heads|1, rows, columns]: a 3-D mask varies over the batch, never over the heads."""
        t = self.tensor
        return t[None, None] if t.ndim == 2 else t[:, None] if t.ndim == 3 else t

    def allows(self, found: Tensor) -> Tensor:
        raise NotImplementedError

    def predicate(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, frame: Frame) -> Tensor:
        row = q if self.absolute else frame.rows_of(q)
        return self.allows(_lookup(self.table, b, h, row, k))

    def evaluate(self, frame: Frame) -> Tensor:
        self.check(frame)
        if self.absolute:
            return self.predicate(frame.b, frame.h, frame.q, frame.k, frame)
        return self.allows(_columns(self.table, frame))

    def check(self, frame: Frame) -> None:
        name, shape, (B, H, T, S) = type(self).__name__, list(self.tensor.shape), self.table.shape
        _check_batch(self, B, frame)
        _check_device(self, self.tensor, frame)
        if H not in (1, frame.heads):
            raise ValueError(
                f"{name}: the mask has {H} heads (4-D is [batch, heads, q, k]) but the call has {frame.heads}; "
                f"its shape is {shape}"
            )
        if self.absolute:
            self._check_positions(name, shape, T, S, frame)
            return
        if T not in (1, frame.q_len):
            raise ValueError(
                f"{name}: the mask has {T} rows but q_len is {frame.q_len}; its shape is {shape}. "
                f"Give one row a query, or {name}(t, absolute=True) for a table over absolute positions"
            )
        _check_keys(self, S, frame)

    def _check_positions(self, name: str, shape: list[int], rows: int, columns: int, frame: Frame) -> None:
        end = frame.end
        first = frame.q_start if not isinstance(frame.q_start, Tensor) else 0 if end is None else end - frame.q_len
        if first < 0 or (1 < rows < first + frame.q_len) or (end is not None and 1 < columns < end):
            raise ValueError(
                f"{name}: the table of shape {shape} must cover every position of the call; its queries stand at "
                f"{first} … {first + frame.q_len - 1}, its last key at {'?' if end is None else end - 1}"
            )

    @property
    def batch(self) -> int:
        return self.table.shape[0]

    @property
    def heads(self) -> int:
        return self.table.shape[1]

    @property
    def by_query(self) -> bool:
        return self.table.shape[2] > 1

    def __repr__(self) -> str:
        return f"{type(self).__name__}({show(self.tensor)}{', absolute=True' if self.absolute else ''})"


@register
class Allowed(Table):
    """A tensor in which True means *may attend*.

    allowed   bool, 2-D [q_len, kv_len], 3-D [batch, q_len, kv_len], 4-D [batch, heads, q_len, kv_len]; size 1 broadcasts
    absolute  rows and columns are absolute positions, of which a call may use a part (a table made for the longest text)
    """

    tensors = ("allowed",)

    def __init__(self, allowed: Tensor, absolute: bool = False) -> None:
        super().__init__(allowed, absolute)

    def allows(self, found: Tensor) -> Tensor:
        return found

    def describe(self, lang: Lang = "en") -> str:
        shape = list(self.tensor.shape)
        return f"a tensor {shape} in which True may attend" if lang == "en" else f"张量 {shape}，True 表示可以注意"


@register
class Blocked(Table):
    """A tensor in which True means *may not attend*; its shapes are those of Allowed."""

    tensors = ("blocked",)

    def __init__(self, blocked: Tensor, absolute: bool = False) -> None:
        super().__init__(blocked, absolute)

    def allows(self, found: Tensor) -> Tensor:
        return ~found

    def describe(self, lang: Lang = "en") -> str:
        shape = list(self.tensor.shape)
        return f"a tensor {shape} in which True is blocked" if lang == "en" else f"张量 {shape}，True 表示被屏蔽"


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
        return allowed[(None,) * (4 - allowed.ndim)]

    def describe(self, lang: Lang = "en") -> str:
        name = self.allows.__name__
        return f"your own predicate {name}(b, h, q, k) holds" if lang == "en" else f"满足自定义谓词 {name}(b, h, q, k)"


# ---- reading arguments ----------------------------------------------------------------------------------------------


def _integers(kind: str, name: str, value: object, *dims: int) -> Tensor:
    if not isinstance(value, Tensor):
        try:
            value = torch.tensor(value)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{kind}: {name} must be a list or tensor of whole numbers; got {value!r}") from error
        if value.dtype in _INTEGERS and kind != "Documents" and value.numel() and int(value.min()) < 0:
            raise ValueError(f"{kind}: {name} must be ≥ 0; the smallest is {int(value.min())}")
    if value.dtype not in _INTEGERS:
        raise TypeError(f"{kind}: {name} must hold whole numbers; its dtype is {value.dtype}")
    if value.ndim not in dims:
        want = " or ".join(f"{d}-D" for d in dims)
        raise ValueError(f"{kind}: {name} must be {want}; its shape is {list(value.shape)}")
    return value


def _bools(kind: str, value: object, dims: tuple[int, ...], shape: str) -> Tensor:
    if not isinstance(value, Tensor) or value.dtype != torch.bool:
        got = f"dtype {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise TypeError(
            f"{kind}: needs a bool tensor {shape}; got {got}. multihead.masks has a reader for each other convention: "
            "from_zeros (mask == 0 blocks), from_ones (1 blocks), from_additive (0 and −inf), from_huggingface, from_torch, from_sdpa"
        )
    if value.ndim not in dims:
        raise ValueError(f"{kind}: the mask must be {shape}; its shape is {list(value.shape)}")
    return value


def _rows(ids: Tensor) -> Tensor:
    return ids[None] if ids.ndim == 1 else ids


def _ids(name: str, lengths: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    rows = [[n] if isinstance(n, int) else list(n) for n in lengths]
    rows = [[n for row in rows for n in row]] if all(isinstance(n, int) for n in lengths) else rows
    if any(n < 0 for row in rows for n in row):
        raise ValueError(f"Documents.from_lengths: {name} must be ≥ 0; got {lengths!r}")
    ids = [torch.arange(len(row)).repeat_interleave(torch.tensor(row, dtype=torch.int64)) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-1)


# ---- looking up -----------------------------------------------------------------------------------------------------


def _per_batch(values: Tensor, frame: Frame) -> Tensor:
    return values.to(frame.device).view(-1, 1, 1, 1)


def _lookup(table: Tensor, *index: Tensor) -> Tensor:
    """table[index…] with broadcasting of axes of size 1; a position outside the table reads its border."""
    return table[tuple(i.clamp(0, n - 1) if n > 1 else torch.zeros_like(i) for i, n in zip(index, table.shape, strict=True))]


def _columns(table: Tensor, frame: Frame) -> Tensor:
    """The columns of [·, ·, ·, kv] at which the frame's keys stand."""
    if table.shape[3] == 1:
        return table
    if isinstance(frame.k_start, Tensor):
        B, S = frame.batch, table.shape[3]
        k = frame.k.clamp(0, S - 1).expand(B, table.shape[1], table.shape[2], -1)
        return table.expand(B, -1, -1, -1).gather(3, k)
    return table.narrow(3, frame.k_start, frame.kv_len)


def _check_batch(mask: Mask, batch: int, frame: Frame) -> None:
    if batch not in (1, frame.batch):
        raise ValueError(f"{type(mask).__name__}: the mask was made for batch {batch} but the call has batch {frame.batch}: {mask!r}")


def _check_device(mask: Mask, tensor: Tensor, frame: Frame) -> None:
    here, there = tensor.device, frame.device
    if here.type != there.type or (here.index is not None and there.index is not None and here.index != there.index):
        raise ValueError(
            f"{type(mask).__name__}: the mask is on {tensor.device} but the call is on {frame.device}; "
            f'write mask.to("{frame.device}")'
        )


def _check_keys(mask: Mask, covered: int, frame: Frame) -> None:
    end = frame.end
    if end is not None and (covered < end if frame.cached else covered != end) and covered != 1:
        raise ValueError(f"{type(mask).__name__}: the mask covers {covered} keys but kv_len is {end}: {mask!r}")
