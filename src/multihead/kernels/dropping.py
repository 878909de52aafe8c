"""Dropout that no tiling, checkpointing or sharding can change: kept or dropped is a hash of (seed, batch, head, q, k).

    row = mix(mix(mix(seed) + b·c₁ + h·c₂) + q·c₃)     column = mix(k·c₄ + c₀)     x = row ⊕ column
    kept ⇔ x · (2x + 1) ≥ dropout · 2³² − 2³¹

in 32-bit arithmetic, the last product as a signed number; q and k are absolute positions. mix is the finaliser of MurmurHash3,
computed once a row and once a column. x(2x + 1) is the permutation of RC6 (https://people.csail.mit.edu/rivest/pubs/RRSY98.pdf):
its high bits depend on all bits of x, and it costs three passes a weight instead of MurmurHash3's eight.
"""

from __future__ import annotations

import torch
from torch import Tensor

GOLDEN, ODD_B, ODD_H, ODD_Q, ODD_K = 0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F, 0x165667B1


def kept(seed: int | Tensor, dropout: float, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """bool, broadcast over b, h, q and k: which weights survive; dropout below 1."""
    x = rows(seed, b, h, q) ^ columns(k)
    return x * (2 * x + 1) >= least(dropout)


def rows(seed: int | Tensor, b: Tensor, h: Tensor, q: Tensor) -> Tensor:
    """int32, broadcast over b, h and q."""
    start = _mix(_mix(_low(seed, q) + GOLDEN) + _high(seed, q))
    return _signed(_mix(_mix(start + b * ODD_B + h * ODD_H) + q * ODD_Q))


def columns(k: Tensor) -> Tensor:
    """int32 like k."""
    return _signed(_mix(k * ODD_K + GOLDEN))


def keep_(x: Tensor, dropout: float) -> Tensor:
    """kept() in place: x = rows ^ columns becomes 1 or 0."""
    odd = torch.bitwise_left_shift(x, 1)
    return x.mul_(odd.add_(1)).ge_(least(dropout))


def least(dropout: float) -> int:
    """The smallest hash that is kept."""
    return min(round(dropout * 2**32) - 2**31, 2**31 - 1)


def _low(seed: int | Tensor, like: Tensor) -> Tensor:
    return seed.to(like.device) & 0xFFFFFFFF if isinstance(seed, Tensor) else torch.tensor(seed & 0xFFFFFFFF).to(like.device)


def _high(seed: int | Tensor, like: Tensor) -> Tensor:
    return seed.to(like.device) >> 32 if isinstance(seed, Tensor) else torch.tensor(seed >> 32).to(like.device)


def _signed(x: Tensor) -> Tensor:
    """0 … 2³² − 1 as int32 with the same bits."""
    return torch.where(x >= 2**31, x - 2**32, x).to(torch.int32)


def _mix(x: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finaliser on int64 tensors."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)
