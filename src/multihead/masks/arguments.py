"""What the kinds of masks share: reading their arguments, checking them against a frame, looking positions up."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor

from .algebra import Frame, Mask, known

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

# ---- reading arguments ----------------------------------------------------------------------------------------------


def integers(kind: str, name: str, value: object, *dims: int) -> Tensor:
    """Whole numbers as a tensor; a list is checked as the list it is and stays on the host, whatever the default device."""
    if not isinstance(value, Tensor):
        try:
            nested = listed(value)
            least = min([0, *_flat(nested)])
        except TypeError as error:
            raise TypeError(f"{kind}: {name} must be a list or tensor of whole numbers; got {value!r}") from error
        if kind != "Documents" and least < 0:
            raise ValueError(f"{kind}: {name} must be ≥ 0; the smallest is {least}")
        try:
            value = torch.tensor(nested, dtype=torch.int64, device="cpu")
        except ValueError as error:
            raise ValueError(f"{kind}: {name} must have rows of one length; got {value!r}") from error
    if value.dtype not in INTEGERS:
        raise TypeError(f"{kind}: {name} must hold whole numbers; its dtype is {value.dtype}")
    if value.ndim not in dims:
        want = " or ".join(f"{d}-D" for d in dims)
        raise ValueError(f"{kind}: {name} must be {want}; its shape is {list(value.shape)}")
    return value


def listed(value: Any) -> Any:
    """A number, or nested lists of numbers, from whatever holds whole numbers: lists, ranges, tensors, arrays."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return [listed(item) for item in cast(Iterable[Any], value)]
    return whole(value)


def whole(value: Any) -> int:
    """One whole number; True is none."""
    if isinstance(value, bool):
        raise TypeError("a bool is no number here")
    return operator.index(value)


def _flat(nested: Any) -> Iterator[int]:
    if isinstance(nested, list):
        for item in cast(list[Any], nested):
            yield from _flat(item)
    else:
        yield nested


def bools(kind: str, value: object, dims: tuple[int, ...], shape: str) -> Tensor:
    if not isinstance(value, Tensor) or value.dtype != torch.bool:
        got = f"dtype {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise TypeError(
            f"{kind}: needs a bool tensor {shape}; got {got}. multihead.masks has a reader for each other convention: "
            "from_zeros (mask == 0 blocks), from_ones (1 blocks), from_additive (0 and −inf), from_huggingface, from_torch, "
            "from_sdpa"
        )
    if value.ndim not in dims:
        raise ValueError(f"{kind}: the mask must be {shape}; its shape is {list(value.shape)}")
    return value


def rows(ids: Tensor) -> Tensor:
    return ids[None] if ids.ndim == 1 else ids


def documents(name: str, lengths: object) -> Tensor:
    """[rows, tokens]: the number of each token's document in its row, −1 behind the last."""
    try:
        nested = listed(lengths)
        rows: list[list[int]] = [nested] if all(isinstance(n, int) for n in nested) else [list(row) for row in nested]
    except TypeError as error:
        raise TypeError(
            f"Documents.from_lengths: {name} must be whole numbers, a list or a list of lists; got {lengths!r}"
        ) from error
    if any(n < 0 for row in rows for n in row):
        raise ValueError(f"Documents.from_lengths: {name} must be ≥ 0; got {lengths!r}")
    here: dict[str, Any] = {"device": "cpu", "dtype": torch.int64}
    ids = [torch.arange(len(row), **here).repeat_interleave(torch.tensor(row, **here)) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-1)


# ---- looking up -----------------------------------------------------------------------------------------------------


def per_batch(values: Tensor, frame: Frame) -> Tensor:
    return values.to(frame.device).view(-1, 1, 1, 1)


def lookup(table: Tensor, *index: Tensor) -> Tensor:
    """table[index…] with broadcasting of axes of size 1; a position outside the table reads its border."""
    at = (i.clamp(0, n - 1) if n > 1 else i.new_zeros((1,) * i.ndim) for i, n in zip(index, table.shape, strict=True))
    return table[tuple(at)]


def columns(table: Tensor, frame: Frame) -> Tensor:
    """The columns of [·, ·, ·, kv] at which the frame's keys stand."""
    if table.shape[3] == 1:
        return table
    if isinstance(frame.k_start, Tensor):
        B, S = frame.batch, table.shape[3]
        k = frame.k.clamp(0, S - 1).expand(B, table.shape[1], table.shape[2], -1)
        return table.expand(B, -1, -1, -1).gather(3, k)
    return table.narrow(3, frame.k_start, frame.kv_len)


def check_batch(mask: Mask, batch: int, frame: Frame) -> None:
    if batch != 1 and batch != frame.batch:  # `in` does not see through a traced size
        raise ValueError(
            f"{type(mask).__name__}: the mask was made for batch {batch} but the call has batch {frame.batch}: {mask!r}"
        )


def check_device(mask: Mask, tensor: Tensor, frame: Frame) -> None:
    here, there = str(tensor.device), str(frame.device)
    if here != there and not here.startswith(f"{there}:") and not there.startswith(f"{here}:"):  # "cuda" is any of them
        raise ValueError(
            f"{type(mask).__name__}: the mask is on {tensor.device} but the call is on {frame.device}; "
            f'write mask.to("{frame.device}")'
        )


def check_positions(mask: Mask, covered: int, frame: Frame) -> None:
    """Queries must stand where the mask's table knows them; on a device nobody can look without waiting."""
    start = frame.q_start if not isinstance(frame.q_start, Tensor) else known(frame.q_start)
    if start is None or covered == 1 or not frame.q_len:
        return
    first, last = (start, start) if not isinstance(start, Tensor) else (int(start.min()), int(start.max()))
    if first < 0 or last + frame.q_len > covered:
        raise ValueError(
            f"{type(mask).__name__}: the mask covers positions 0 … {covered - 1} but queries stand at {first} … "
            f"{last + frame.q_len - 1}: {mask!r}"
        )


def check_keys(mask: Mask, covered: int, frame: Frame) -> None:
    end = frame.end
    if end is None or covered == 1:  # only the device knows where the keys end; one column is for all
        return
    if covered < end if frame.cached else covered != end:
        raise ValueError(f"{type(mask).__name__}: the mask covers {covered} keys but kv_len is {end}: {mask!r}")
