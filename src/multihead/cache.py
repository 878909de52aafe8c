"""KVCache: the keys and values of the tokens seen so far, so that decoding computes each of them once."""

from __future__ import annotations

from collections.abc import Sequence

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
        columns = max_tokens if window is None else min(max_tokens, 2 * window)
        self._k = torch.zeros(batch, kv_heads, columns, head_dim, device=device, dtype=dtype)
        self._v = torch.zeros(batch, kv_heads, columns, v_dim or head_dim, device=device, dtype=dtype)
        self._sizes = (batch, kv_heads, head_dim, v_dim or head_dim)
        self._end: int = 0  # columns in use
        self._tokens: int = 0  # of the longest text
        self._lengths: Tensor | None = None  # on the host, where texts differ; else all have _tokens

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
        self._check(k, v)
        start, T, end = self.start, k.shape[2], self._end + k.shape[2]
        if end > self._k.shape[2]:
            k, v = self._roll(k, v)
        else:
            self._write(k, v, self._end, end)
            first = 0 if self.window is None else max(0, self._end - self.window + 1)
            k, v = self._k.narrow(2, first, end - first), self._v.narrow(2, first, end - first)
            self._end = end
        self._tokens += T
        if self._lengths is not None:
            self._lengths = self._lengths + T
        return k, v, start, start + T - k.shape[2]

    def push(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        """append() of one token where nothing is in the way: all texts equally long, room left, no gradient; else None.

        Returns the keys and values that the token may see.
        """
        end, (B, G, _, D), (Bv, Gv, _, E) = self._end, k.shape, v.shape
        if self._sizes != (B, G, D, E) or Bv != B or Gv != G or end == self._k.shape[2] or self._lengths is not None:
            return None
        if k.dtype != self._k.dtype or k.device != self._k.device or self._k.requires_grad or torch.is_grad_enabled():
            return None
        self._k.narrow(2, end, 1).copy_(k)
        self._v.narrow(2, end, 1).copy_(v)
        first = 0 if self.window is None else max(0, end + 1 - self.window)
        self._end = end + 1
        self._tokens += 1
        return self._k.narrow(2, first, end + 1 - first), self._v.narrow(2, first, end + 1 - first)

    def _roll(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The buffer is full: what a later query can still see moves to its front."""
        if self.window is None or self._k.shape[2] < self.window:
            raise ValueError(
                f"KVCache: holds {self._k.shape[2]} tokens, {self._end} are there and {k.shape[2]} more came; "
                f"make it with max_tokens ≥ {self._end + k.shape[2]}"
            )
        keep = self.window - 1
        first = max(0, self._end - keep)
        k = torch.cat([self._k[:, :, first : self._end], k], 2)
        v = torch.cat([self._v[:, :, first : self._end], v], 2)
        fits = k.shape[2] <= self._k.shape[2]
        self._end = k.shape[2] if fits else min(keep, self._k.shape[2])
        self._write(k[:, :, k.shape[2] - self._end :], v[:, :, v.shape[2] - self._end :], 0, self._end)
        return k, v

    def _write(self, k: Tensor, v: Tensor, at: int, end: int) -> None:
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad or self._k.requires_grad):
            self._k = self._k.slice_scatter(k, 2, at, end)  # keeps the graph whole, at the price of a copy
            self._v = self._v.slice_scatter(v, 2, at, end)
        else:
            self._k.narrow(2, at, end - at).copy_(k)
            self._v.narrow(2, at, end - at).copy_(v)

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
        old = torch.tensor(self.lengths)
        new = torch.as_tensor(lengths).to("cpu", torch.int64).expand(self.batch).clone()
        if bool((new < 0).any()) or bool((new > old).any()):
            raise ValueError(f"KVCache.crop: lengths must be 0 … {old.tolist()}; they are {new.tolist()}")
        held = old - self._end  # the position in column 0
        if self.window is not None and bool(((new - self.window + 1).clamp(min=0) < held.clamp(min=0)).any()):
            raise ValueError(
                f"KVCache.crop: {new.tolist()} tokens need keys that a window of {self.window} has dropped; "
                f"the oldest kept are at {held.clamp(min=0).tolist()}"
            )
        tokens = int(new.max())
        end = max(0, self._end - (self._tokens - tokens))
        move = (new - end) - held  # column c of the new layout was column c + move[b]
        if bool((move != 0).any()):
            column = (torch.arange(end) + move[:, None]).clamp(0, max(self._end - 1, 0)).to(self._k.device)
            self._k, self._v = self._moved(self._k, column), self._moved(self._v, column)
        self._end, self._tokens = end, tokens
        self._lengths = None if bool((new == tokens).all()) else new

    def _moved(self, x: Tensor, column: Tensor) -> Tensor:
        index = column[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
        return x.slice_scatter(x.gather(2, index), 2, 0, column.shape[1])

    def reorder(self, indices: Sequence[int] | Tensor) -> None:
        """Text b becomes a copy of text indices[b], as beam search does; there may be more or fewer than before."""
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        if chosen.ndim != 1 or not chosen.numel() or int(chosen.min()) < 0 or int(chosen.max()) >= self.batch:
            raise ValueError(f"KVCache.reorder: indices must be texts 0 … {self.batch - 1}; they are {chosen.tolist()}")
        on_device = chosen.to(self._k.device)
        self._k, self._v = self._k.index_select(0, on_device), self._v.index_select(0, on_device)
        self._sizes = (len(chosen), *self._sizes[1:])
        if self._lengths is not None:
            self._lengths = self._lengths[chosen.cpu()]

    def reset(self) -> None:
        """Forget everything; the buffer stays."""
        self._end, self._tokens, self._lengths = 0, 0, None
        self._k, self._v = self._k.detach(), self._v.detach()
