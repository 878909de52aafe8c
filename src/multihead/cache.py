"""KVCache: the keys and values of the tokens seen so far, so that decoding computes each of them once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

Start = int | Tensor


class KVCache:
    """Keys and values of a batch of texts, in one buffer that is never reallocated.

        columns    0 … end − 1 hold tokens; all texts end in column end − 1
        positions  text b has lengths[b] tokens, so column c holds its position lengths[b] − end + c; below 0: nothing

    Texts of different lengths thus share one write a step, and a mask sees every text's own positions.
    With a window only what a later query can still see is kept, and the buffer rolls: its size does not grow with the text.
    """

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        max_tokens: int,
        head_dim: int,
        v_dim: int | None = None,
        *,
        window: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if min(batch, kv_heads, max_tokens, head_dim) < 1 or (window is not None and window < 1):
            raise ValueError(
                "KVCache: batch, kv_heads, max_tokens, head_dim and window must be ≥ 1; they are "
                f"{batch}, {kv_heads}, {max_tokens}, {head_dim}, {window}"
            )
        self.window = window
        self.max_tokens = max_tokens
        self._columns = columns = max_tokens if window is None else min(max_tokens, 2 * window)
        self._k = torch.zeros(batch, kv_heads, columns, head_dim, device=device, dtype=dtype)
        self._v = torch.zeros(batch, kv_heads, columns, v_dim or head_dim, device=device, dtype=dtype)
        self._sizes = (batch, kv_heads, head_dim, v_dim or head_dim)
        self._end: int = 0  # columns in use
        self._tokens: int = 0  # of the longest text
        self._lengths: Tensor | None = None  # on the host, where texts differ; else all have _tokens
        self._oldest: Tensor | int = 0  # the first position of each text that is still there

    # ---- what it holds ----------------------------------------------------------------------------------------------

    @property
    def lengths(self) -> list[int]:
        """How many tokens each text has had, those a window has dropped included."""
        return [self._tokens] * self.batch if self._lengths is None else [int(n) for n in self._lengths]

    @property
    def batch(self) -> int:
        return self._sizes[0]

    @property
    def start(self) -> Start:
        """The position of the next token, a number or [batch]."""
        return self._tokens if self._lengths is None else self._lengths

    @property
    def nbytes(self) -> int:
        return self._k.nbytes + self._v.nbytes

    def __repr__(self) -> str:
        B, G, S, D = self._k.shape
        kind = "fixed" if self.window is None else f"rolling, window {self.window}"
        lengths = self._tokens if self._lengths is None else self.lengths
        where = f"{str(self._k.dtype).removeprefix('torch.')} on {self._k.device}"
        return f"KVCache({kind}: lengths {lengths}, batch {B}, kv_heads {G}, columns {S}, head_dim {D}, {where})"

    # ---- growing ----------------------------------------------------------------------------------------------------

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Start, Start]:
        """Add new tokens; returns keys and values to attend to, the first new token's position, and the first key's.

        k, v  [batch, kv_heads, new tokens, head_dim | v_dim]
        """
        keys, values, start, key_start, commit = self.prepare(k, v)
        commit()
        return keys, values, start, key_start

    def prepare(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Start, Start, Callable[[], None]]:
        """append() in two steps: nothing that the cache holds changes until the last of what is returned is called."""
        self._check(k, v)
        start, T, end = self.start, k.shape[2], self._end + k.shape[2]
        if end > self._columns:
            k, v, commit = self._roll(k, v)
        else:
            keys, values = self._with(k, v, self._end, end)
            first = 0 if self.window is None else max(0, self._end - self.window + 1)
            k, v = keys.narrow(2, first, end - first), values.narrow(2, first, end - first)
            commit = functools.partial(self._set, keys, values, end, T)
        return k, v, start, start + T - k.shape[2], commit

    def push(self, k: Tensor, v: Tensor, sizes: tuple[int, int, int, int]) -> tuple[Tensor, Tensor, int] | None:
        """append() of one token where nothing is in the way: all texts equally long, room left, no gradient; else None.

        sizes  batch, kv_heads, head_dim, v_dim of k and v, which the caller knows
        Returns the keys and values that the token may see, and how many they are.
        """
        end, keys, values, window = self._end, self._k, self._v, self.window
        if self._sizes != sizes or self._lengths is not None or end == self._columns or keys.requires_grad:
            return None
        if k.dtype != keys.dtype or k.device != keys.device:
            return None
        keys.narrow(2, end, 1).copy_(k)
        values.narrow(2, end, 1).copy_(v)
        self._end = now = end + 1
        self._tokens += 1
        first = 0 if window is None or now < window else now - window
        there = now - first
        return keys.narrow(2, first, there), values.narrow(2, first, there), there

    def _roll(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Callable[[], None]]:
        """The buffer is full: what a later query can still see moves to its front."""
        if self.window is None or self._columns < self.window:
            raise ValueError(
                f"KVCache: holds {self._columns} tokens, {self._end} are there and {k.shape[2]} more came; "
                f"make it with max_tokens ≥ {self._end + k.shape[2]}"
            )
        keep, T = self.window - 1, k.shape[2]
        first = max(0, self._end - keep)
        k = torch.cat([self._k[:, :, first : self._end], k], 2)
        v = torch.cat([self._v[:, :, first : self._end], v], 2)
        end = k.shape[2] if k.shape[2] <= self._columns else min(keep, self._columns)

        def commit() -> None:
            self._set(*self._with(k[:, :, k.shape[2] - end :], v[:, :, v.shape[2] - end :], 0, end), end, T)
            first_kept = (self._tokens if self._lengths is None else self._lengths) - end
            self._oldest = _larger(self._oldest, first_kept)

        return k, v, commit

    def _with(self, k: Tensor, v: Tensor, at: int, end: int) -> tuple[Tensor, Tensor]:
        """The buffers with k and v in columns at … end; new ones where a gradient may still need the old."""
        if torch.is_grad_enabled() or self._k.requires_grad:
            return self._k.slice_scatter(k, 2, at, end), self._v.slice_scatter(v, 2, at, end)
        self._k.narrow(2, at, end - at).copy_(k)
        self._v.narrow(2, at, end - at).copy_(v)
        return self._k, self._v

    def _set(self, keys: Tensor, values: Tensor, end: int, tokens: int) -> None:
        self._k, self._v, self._end = keys, values, end
        self._tokens += tokens
        if self._lengths is not None:
            self._lengths = self._lengths + tokens

    def _check(self, k: Tensor, v: Tensor) -> None:
        keys, values = k.shape, v.shape
        if (*keys[:2], *keys[3:], *values[3:]) != self._sizes or keys[:3] != values[:3]:
            raise ValueError(
                f"KVCache: was made for batch, kv_heads, head_dim, v_dim = {list(self._sizes)}; "
                f"k has shape {list(keys)}, v has shape {list(values)}"
            )
        if k.dtype != self._k.dtype or k.device != self._k.device:
            raise ValueError(
                f"KVCache: holds {self._k.dtype} on {self._k.device} but {k.dtype} on {k.device} came; "
                "make it with new_cache(…, dtype=, device=)"
            )

    # ---- changing ---------------------------------------------------------------------------------------------------

    def crop(self, lengths: int | Sequence[int] | Tensor) -> None:
        """Forget all but the first lengths[b] tokens of text b: after a padded prefill, or to take drafted tokens back."""
        old, new = torch.tensor(self.lengths, device="cpu"), _whole("KVCache.crop: lengths", lengths)
        if new.shape not in ((), (self.batch,)):
            raise ValueError(
                f"KVCache.crop: lengths must be one number, or one for each of the {self.batch} texts; there are {new.tolist()}"
            )
        new = new.expand(self.batch).clone()
        if bool((new < 0).any()) or bool((new > old).any()):
            raise ValueError(f"KVCache.crop: lengths must be 0 … {old.tolist()}; they are {new.tolist()}")
        oldest = torch.as_tensor(self._oldest).expand(self.batch)
        if self.window is not None and bool(((new - self.window + 1).clamp(min=0) < oldest).any()):
            raise ValueError(
                f"KVCache.crop: {new.tolist()} tokens need keys that a window of {self.window} has dropped; "
                f"the oldest kept are at {oldest.tolist()}"
            )
        tokens = int(new.max())
        end = max(0, self._end - (self._tokens - tokens))
        self._align(new, (new - end) - (old - self._end), end)  # column c of the new layout was column c + move[b]
        self._tokens = tokens

    def _align(self, lengths: Tensor, move: Tensor, end: int) -> None:
        """Shift every text's columns by its own number, so that all end in column end − 1."""
        if bool((move != 0).any()):
            column = (torch.arange(end, device="cpu") + move[:, None]).clamp(0, max(self._end - 1, 0)).to(self._k.device)
            self._k, self._v = self._moved(self._k, column), self._moved(self._v, column)
        self._end = end
        self._lengths = None if bool((lengths == lengths.max()).all()) else lengths

    def _moved(self, x: Tensor, column: Tensor) -> Tensor:
        index = column[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
        if torch.is_grad_enabled() or x.requires_grad:
            return x.slice_scatter(x.gather(2, index), 2, 0, column.shape[1])
        x.narrow(2, 0, column.shape[1]).copy_(x.gather(2, index))
        return x

    def reorder(self, indices: Sequence[int] | Tensor) -> None:
        """Text b becomes a copy of text indices[b], as beam search does; there may be more or fewer than before."""
        chosen = _whole("KVCache.reorder: indices", indices)
        if chosen.ndim != 1 or not chosen.numel() or int(chosen.min()) < 0 or int(chosen.max()) >= self.batch:
            raise ValueError(f"KVCache.reorder: indices must be texts 0 … {self.batch - 1}; they are {chosen.tolist()}")
        lengths = torch.tensor(self.lengths, device="cpu")[chosen]
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            on_device = chosen.to(self._k.device)
            self._k, self._v = self._k.index_select(0, on_device), self._v.index_select(0, on_device)
        self._sizes = (len(chosen), *self._sizes[1:])
        self._oldest = self._oldest[chosen] if isinstance(self._oldest, Tensor) else self._oldest
        spare = self._tokens - int(lengths.max())  # columns that only texts now gone were long enough to fill
        end = max(0, self._end - spare)
        self._align(lengths, torch.full((len(chosen),), self._end - end, device="cpu"), end)
        self._tokens -= spare

    def reset(self) -> None:
        """Forget everything; the buffer stays."""
        self._end, self._tokens, self._lengths, self._oldest = 0, 0, None, 0
        self._k, self._v = self._k.detach(), self._v.detach()


def _larger(a: Tensor | int, b: Tensor | int) -> Tensor | int:
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    return torch.maximum(torch.as_tensor(a), torch.as_tensor(b))


def _whole(name: str, values: object) -> Tensor:
    """Whole numbers on the host."""
    found = torch.as_tensor(values, device="cpu")
    if found.dtype.is_floating_point or found.dtype in (torch.bool, torch.complex64):
        raise TypeError(f"{name} must be whole numbers; their dtype is {found.dtype}")
    return found.to(torch.int64)
