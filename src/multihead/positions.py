"""Where tokens stand, told to attention: by turning q and k (RoPE), or by a bias on the scores (ALiBi, relative bias).

They are parts: made once, passed to a layer as `positions=`. None holds a table as long as the text.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn


class Positions(nn.Module):
    """A layer's sense of position. A subclass turns q and k, or adds a bias to the scores, or both."""

    turns: bool = False
    biases: bool = False
    axes: int = 1  # numbers that say where a token stands: 1 in a text, 2 in a picture

    def fit(self, heads: int, head_dim: int) -> None:
        """Called once by the layer that owns it, with the sizes that the part left open."""

    def turn(self, q: Tensor, k: Tensor, q_at: Tensor, k_at: Tensor) -> tuple[Tensor, Tensor]:
        """q and k [batch, heads, tokens, head_dim], their tokens standing at q_at and k_at, [tokens] or [batch, tokens]."""
        raise NotImplementedError

    def bias(self, q_at: Tensor, k_at: Tensor) -> Tensor:
        """Added to the scores, [batch|1, heads, q_len, kv_len], from positions [·, q_len] and [·, kv_len]."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Constants are derived, not moved: a layer in bfloat16, or brought up from the meta device, keeps exact ones."""
        found = super()._apply(fn, recurse)
        self.derive()
        return found

    def derive(self) -> None:
        """Compute the constants anew, on the device where they are and as exactly as the layer computes."""


# ---- rotation -------------------------------------------------------------------------------------------------------


def _positive(scaling: object, **numbers: float) -> None:
    for name, value in numbers.items():
        if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"{type(scaling).__name__}: {name} must be a finite number > 0; it is {value!r}")


@dataclass(frozen=True)
class Linear:
    """Position interpolation: every position is divided by factor (arXiv 2306.15595)."""

    factor: float

    def __post_init__(self) -> None:
        _positive(self, factor=self.factor)

    def frequencies(self, theta: float, dim: int, f: Tensor) -> Tensor:
        del theta, dim
        return f / self.factor

    attention_factor = 1.0


@dataclass(frozen=True)
class NTK:
    """NTK-aware: theta grows by factor^(dim / (dim − 2)), so that only low frequencies stretch."""

    factor: float

    def __post_init__(self) -> None:
        _positive(self, factor=self.factor)

    def frequencies(self, theta: float, dim: int, f: Tensor) -> Tensor:
        if dim == 2:
            raise ValueError("NTK: has nothing to stretch where only one pair of features turns; use Linear")
        return _frequencies(theta * self.factor ** (dim / (dim - 2)), dim, f.device)

    attention_factor = 1.0


@dataclass(frozen=True)
class YaRN:
    """High frequencies stay, low ones are divided by factor, a ramp lies between (arXiv 2309.00071).

    original      the length the model was trained for
    attention     factor on the turned q and k; 0.1 · ln(factor) + 1 unless given
    """

    factor: float
    original: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention: float | None = None

    def __post_init__(self) -> None:
        _positive(self, factor=self.factor, original=self.original, beta_fast=self.beta_fast, beta_slow=self.beta_slow)

    def frequencies(self, theta: float, dim: int, f: Tensor) -> Tensor:
        def turns_to_index(turns: float) -> float:
            return dim * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low = max(math.floor(turns_to_index(self.beta_fast)), 0)
        high = min(math.ceil(turns_to_index(self.beta_slow)), dim - 1)
        ramp = ((torch.arange(dim // 2, dtype=f.dtype, device=f.device) - low) / max(high - low, 0.001)).clamp(0, 1)
        return f / self.factor * ramp + f * (1 - ramp)

    @property
    def attention_factor(self) -> float:
        if self.attention is not None:
            return self.attention
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@dataclass(frozen=True)
class Llama3:
    """Llama 3.1: wavelengths over original / low are divided by factor, those under original / high stay, smooth between."""

    factor: float = 8.0
    original: int = 8192
    low: float = 1.0
    high: float = 4.0

    def __post_init__(self) -> None:
        _positive(self, factor=self.factor, original=self.original, low=self.low, high=self.high)
        if self.low >= self.high:
            raise ValueError(f"Llama3: low must be below high; they are {self.low} and {self.high}")

    def frequencies(self, theta: float, dim: int, f: Tensor) -> Tensor:
        del theta, dim
        smooth = ((self.original * f / (2 * math.pi) - self.low) / (self.high - self.low)).clamp(0, 1)
        return (1 - smooth) * f / self.factor + smooth * f

    attention_factor = 1.0


Scaling = Linear | NTK | YaRN | Llama3


class RoPE(Positions):
    """Rotary positions: feature pair i of a token at position p turns by p · theta^(−2i / dim) (arXiv 2104.09864).

    dim      the first dim features turn, the rest stay; all of head_dim unless given
    layout   which features make a pair: "half" (i, i + dim/2) as in Llama and GPT-NeoX, "interleaved" (2i, 2i + 1) as in
             GPT-J and the paper
    axes     2 for images: position_ids is [.., tokens, 2]; half of the pairs turn by the row, half by the column
    scaling  Linear, NTK, YaRN or Llama3, for texts longer than those trained on

    Angles are computed in float64 and turned in float32 at least, so that long texts lose nothing.
    """

    turns = True
    frequencies: Tensor | None

    def __init__(
        self,
        theta: float = 10_000.0,
        *,
        dim: int | None = None,
        layout: Literal["half", "interleaved"] = "half",
        axes: int = 1,
        scaling: Scaling | None = None,
    ) -> None:
        super().__init__()
        if layout not in ("half", "interleaved"):
            raise ValueError(f'RoPE: layout must be "half" or "interleaved"; it is {layout!r}')
        if not (isinstance(theta, int | float) and 1 < theta < math.inf) or axes < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"RoPE: theta must be a finite number > 1 and axes ≥ 1; they are {theta!r} and {axes}")
        if scaling is not None and not isinstance(scaling, Scaling):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                "RoPE: scaling must be positions.Linear(…), NTK(…), YaRN(…) or Llama3(…), an object with its numbers; "
                f"it is {scaling!r}"
            )
        self.theta, self.dim, self.layout, self.axes, self.scaling = theta, dim, layout, axes, scaling
        self.whole = dim is None
        self.register_buffer("frequencies", None, persistent=False)
        if dim is not None:
            self._check(dim)
            self.derive(torch.device("cpu"))

    def fit(self, heads: int, head_dim: int) -> None:
        if self.whole and self.dim not in (None, head_dim):
            raise ValueError(
                f"RoPE: turns whole heads of {self.dim} features since another layer took it, but these have {head_dim}; "
                "give each layer a RoPE of its own, or give dim="
            )
        if self.dim is None:
            self._check(head_dim)
            self.dim = head_dim
            self.derive(torch.get_default_device())
        if self.dim > head_dim:
            raise ValueError(f"RoPE: dim is {self.dim} but a head has only {head_dim} features")

    def derive(self, device: torch.device | None = None) -> None:
        device = device if self.frequencies is None else self.frequencies.device
        if self.dim is None or device is None:
            return
        dim = self.dim // self.axes
        f = _frequencies(self.theta, dim, device)
        self.frequencies = f if self.scaling is None else self.scaling.frequencies(self.theta, dim, f)

    def turn(self, q: Tensor, k: Tensor, q_at: Tensor, k_at: Tensor) -> tuple[Tensor, Tensor]:
        angles = self.angles(q_at, q)
        return self.rotate(q, *angles), self.rotate(k, *(angles if k_at is q_at else self.angles(k_at, k)))

    def angles(self, positions: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, [batch|1, 1, tokens, dim / 2], for positions [tokens] or [batch, tokens] (with axes: one axis more)."""
        f = self.frequencies
        if f is None:
            raise RuntimeError("RoPE: fit(heads, head_dim) first, or give dim=")
        if self.axes > 1 and (positions.ndim < 2 or positions.shape[-1] != self.axes):
            raise ValueError(
                f"RoPE: with axes={self.axes}, positions are [.., tokens, {self.axes}]; their shape is {list(positions.shape)}"
            )
        positions = positions.to(f)
        angles = positions.unsqueeze(-1) * f if self.axes == 1 else (positions.unsqueeze(-1) * f).flatten(-2)
        angles = (angles if angles.ndim == 3 else angles[None]).unsqueeze(1)
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        angles = angles.remainder(2 * math.pi).to(dtype)  # in float64 up to here: position 1,000,000 is exact
        scale = 1.0 if self.scaling is None else self.scaling.attention_factor
        return (angles.cos(), angles.sin()) if scale == 1.0 else (angles.cos() * scale, angles.sin() * scale)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The pairs (a, c) of x become (a cos − c sin, c cos + a sin)."""
        # Tokens outermost, as projections leave them: what SDPA makes of that merges without a copy.
        if cos.ndim == x.ndim == 4 and x.shape[2] != 1:
            return self._rotate(x.transpose(1, 2), cos.transpose(1, 2), sin.transpose(1, 2)).transpose(1, 2)
        return self._rotate(x, cos, sin)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        dim = 2 * cos.shape[-1]
        y, rest = x[..., :dim].to(cos.dtype), x[..., dim:]
        a, c = self._pairs(y)
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            both = (torch.addcmul(a * cos, c, sin, value=-1), torch.addcmul(c * cos, a, sin))
            turned = torch.cat(both, -1) if self.layout == "half" else torch.stack(both, -1).flatten(-2)
        else:  # in place, in half the time
            turned = y * (torch.cat([cos, cos], -1) if self.layout == "half" else cos.repeat_interleave(2, -1))
            first, second = self._pairs(turned)
            first.addcmul_(c, sin, value=-1)
            second.addcmul_(a, sin)
        turned = turned.to(x.dtype)
        return turned if rest.shape[-1] == 0 else torch.cat([turned, rest], -1)

    def _pairs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The first and the second features of all pairs, views."""
        if self.layout == "interleaved":
            return x[..., 0::2], x[..., 1::2]
        half = x.shape[-1] // 2
        return x[..., :half], x[..., half:]

    def _check(self, dim: int) -> None:
        if dim < 2 or dim % (2 * self.axes):
            raise ValueError(f"RoPE: the turned features must be a multiple of {2 * self.axes} (pairs × axes); there are {dim}")

    def extra_repr(self) -> str:
        given = {"dim": None if self.whole else self.dim, "layout": self.layout, "axes": self.axes, "scaling": self.scaling}
        usual = {"dim": None, "layout": "half", "axes": 1, "scaling": None}
        return ", ".join([f"theta={self.theta:g}", *(f"{n}={v!r}" for n, v in given.items() if v != usual[n])])


def _frequencies(theta: float, dim: int, device: torch.device) -> Tensor:
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return theta ** -(torch.arange(0, dim, 2, dtype=dtype, device=device) / dim)


# ---- bias -----------------------------------------------------------------------------------------------------------


class ALiBi(Positions):
    """Scores fall with distance: bias = −slope[h] · |q − k| (arXiv 2108.12409).

    slopes  one a head; the paper's geometric series 2^(−8/n), 2^(−16/n), … unless given
    """

    biases = True
    slopes: Tensor | None

    def __init__(self, slopes: list[float] | None = None) -> None:
        super().__init__()
        self.values = slopes
        self.register_buffer("slopes", None, persistent=False)
        if slopes is not None:
            self.derive(torch.device("cpu"))

    def fit(self, heads: int, head_dim: int) -> None:
        if self.values is not None and len(self.values) != heads:
            raise ValueError(f"ALiBi: needs one slope a head; there are {len(self.values)} slopes and {heads} heads")
        if self.values is None:
            self.values = alibi_slopes(heads)
            self.derive(torch.get_default_device())

    def derive(self, device: torch.device | None = None) -> None:
        device = device if self.slopes is None else self.slopes.device
        if self.values is not None and device is not None:
            exact = self.slopes is not None and self.slopes.dtype == torch.float64
            self.slopes = torch.tensor(self.values, dtype=torch.float64 if exact else torch.float32, device=device)

    def bias(self, q_at: Tensor, k_at: Tensor) -> Tensor:
        if self.slopes is None:
            raise RuntimeError("ALiBi: fit(heads, head_dim) first, or give slopes=")
        distance = (_rows(q_at).unsqueeze(-1) - _rows(k_at).unsqueeze(-2)).abs()
        return -self.slopes.view(1, -1, 1, 1) * distance.unsqueeze(1)


def alibi_slopes(heads: int) -> list[float]:
    """The paper's slopes; where heads is not a power of two, every second one of the next power's fills up."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    return slopes if power == heads else slopes + alibi_slopes(2 * power)[0::2][: heads - power]


class RelativeBias(Positions):
    """A learned bias for each head and bucket of distances, as in T5 (arXiv 1910.10683).

    weight  [buckets, heads]; near distances have a bucket each, far ones share logarithmic ones up to max_distance
    bidirectional  keys after the query have buckets of their own; without it they share that of distance 0
    """

    biases = True

    def __init__(
        self,
        heads: int,
        buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        exact = buckets // (4 if bidirectional else 2)
        if exact < 1 or max_distance <= exact:
            raise ValueError(
                "RelativeBias: needs buckets ≥ 2 (4 if bidirectional), and max_distance beyond the distances that have "
                f"a bucket each; buckets is {buckets}, of which {exact} are such, max_distance is {max_distance}"
            )
        self.buckets, self.max_distance, self.bidirectional = buckets, max_distance, bidirectional
        self.weight = nn.Parameter(torch.zeros(buckets, heads, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def fit(self, heads: int, head_dim: int) -> None:
        if self.weight.shape[1] != heads:
            raise ValueError(f"RelativeBias: was made for {self.weight.shape[1]} heads, the layer has {heads}")

    def bias(self, q_at: Tensor, k_at: Tensor) -> Tensor:
        bucket = self.bucket(_rows(k_at).unsqueeze(-2) - _rows(q_at).unsqueeze(-1))
        return self.weight[bucket].movedim(-1, 1)

    def bucket(self, offset: Tensor) -> Tensor:
        """The bucket of each offset k − q."""
        n = self.buckets // 2 if self.bidirectional else self.buckets
        after = (offset > 0).long() * n if self.bidirectional else torch.zeros_like(offset)
        distance = offset.abs() if self.bidirectional else -offset.clamp(max=0)
        exact = n // 2
        far = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.max_distance / exact) * (n - exact)
        return after + torch.where(distance < exact, distance, (exact + far.long()).clamp(max=n - 1))

    def extra_repr(self) -> str:
        return f"buckets={self.buckets}, max_distance={self.max_distance}, bidirectional={self.bidirectional}"


def _rows(positions: Tensor) -> Tensor:
    return positions if positions.ndim == 2 else positions[None]
