"""Masks given as tensors: Allowed and Blocked, which say in their names what True means."""

from __future__ import annotations

import torch
from torch import Tensor

from .algebra import Frame, Lang, Mask, known, register, show
from .arguments import bools, check_batch, check_device, check_keys, columns, lookup


class Table(Mask):
    """A tensor that says of each pair whether it is allowed; a subclass says what True means."""

    options = ("absolute",)

    def __init__(self, tensor: object, absolute: bool) -> None:
        self.absolute = absolute
        tensor = bools(type(self).__name__, tensor, (2, 3, 4), "[q, k], [batch, q, k] or [batch, heads, q, k]")
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
        return self.allows(lookup(self.table, b, h, row, k))

    def evaluate(self, frame: Frame) -> Tensor:
        self.check(frame)
        if self.absolute:
            return self.predicate(frame.b, frame.h, frame.q, frame.k, frame)
        return self.allows(columns(self.table, frame))

    def part(self, frame: Frame, rows: slice, columns: slice) -> Tensor:
        start = frame.q_start if self.absolute else 0
        if isinstance(start, Tensor) or isinstance(frame.k_start, Tensor):
            return super().part(frame, rows, columns)
        table = self.table
        if table.shape[2] > 1:
            table = table[:, :, start + rows.start : start + rows.stop]
        if table.shape[3] > 1:
            table = table[..., frame.k_start + columns.start : frame.k_start + columns.stop]
        return self.allows(table)

    def check(self, frame: Frame) -> None:
        name, shape, (B, H, T, S) = type(self).__name__, list(self.tensor.shape), self.table.shape
        check_batch(self, B, frame)
        check_device(self, self.tensor, frame)
        if H != 1 and frame.heads != H:
            raise ValueError(
                f"{name}: the mask has {H} heads (4-D is [batch, heads, q, k]) but the call has {frame.heads}; "
                f"its shape is {shape}"
            )
        if self.absolute:
            self._check_positions(name, shape, T, S, frame)
            return
        if T != 1 and frame.q_len != T:
            raise ValueError(
                f"{name}: the mask has {T} rows but q_len is {frame.q_len}; its shape is {shape}. "
                f"Give one row a query, or {name}(t, absolute=True) for a table over absolute positions"
            )
        check_keys(self, S, frame)

    def _check_positions(self, name: str, shape: list[int], rows: int, columns: int, frame: Frame) -> None:
        end, first, last = frame.end, frame.q_start, frame.q_start
        if isinstance(first, Tensor) or isinstance(last, Tensor):
            start = known(torch.as_tensor(first))
            first, last = (0, 0) if start is None else (int(start.min()), int(start.max()))
        if first < 0 or (1 < rows < last + frame.q_len) or (end is not None and 1 < columns < end):
            raise ValueError(
                f"{name}: the table of shape {shape} must cover every position of the call; its queries stand at "
                f"{first} … {last + frame.q_len - 1}, its last key at {'?' if end is None else end - 1}"
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
