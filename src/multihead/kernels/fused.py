"""torch's own fused attention (SDPA), wherever its meaning equals ours."""

from __future__ import annotations

import math
import weakref
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _functorch as functorch  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue, reportUnknownVariableType]
from torch.autograd import forward_ad

from ..masks import And, Causal, Frame, Mask, evaluate
from ..masks.algebra import Position, extent
from ..masks.tables import Table
from . import products
from .guards import ALIGN, GRID, Call, around, of_sdpa, refusal, surely
from .once import first_order_only
from .spec import Spec, cpu_frame, finite

HALF = (torch.bfloat16, torch.float16)
VECTOR = 16  # keys, at most, that a vector of torch's CPU kernel holds
SOON = 1.5e-4  # seconds that a call takes at which nobody need look closer
FOLD = 16  # up to this many queries, the heads of a kv group become rows of one product: no key is read twice


def refuses(spec: Spec) -> str | None:
    """Why torch's fused kernels cannot do this call, or None."""
    if spec.want_lse:
        return "SDPA does not return the log-sum-exp"
    if spec.softcap is not None:
        return "SDPA has no softcap"
    if spec.sinks is not None:
        return "SDPA has no sinks"
    if not (spec.q_len and spec.kv_len and spec.v_dim and spec.batch):
        return "there is an axis of size 0, for which torch has no fused kernel"
    if spec.dropout:
        if spec.seed is not None:
            return "SDPA draws its own dropout and cannot follow a seed"
        if spec.device.type == "cpu":
            return "on CPU, SDPA with dropout falls to an L×L path of its own"
        if spec.dropout == 1.0:
            return "SDPA divides by zero where dropout is 1"
    if spec.dtype == torch.float64 and spec.device.type == "cuda":
        return "torch has no fused float64 kernel on CUDA"
    if spec.bias is not None and spec.bias.requires_grad and torch.is_grad_enabled():
        return "where a bias needs a gradient, SDPA falls to an L×L path on CPU and fails for some lengths on CUDA"
    if forward_ad._current_level >= 0:  # pyright: ignore[reportPrivateUsage]
        return "torch's fused kernels have no forward-mode derivative"
    if spec.device.type == "cuda" and not torch.compiler.is_compiling() and _vast(spec):
        return refusal(called(spec))
    return None


def _vast(spec: Spec) -> bool:
    """Sizes at which a guard may leave no kernel at all; a cheap look before the close one."""
    return spec.heads > GRID or spec.q_len * (spec.kv_len + ALIGN) > 2**32


def called(spec: Spec) -> Call:
    """What SDPA would be called with, as far as the guards must know."""
    parts, causal, _ = _parts(spec.mask, cpu_frame(spec))
    dense = bool(parts and not causal) or spec.bias is not None or spec.ragged
    grad, half = torch.is_grad_enabled(), spec.dtype in HALF
    return Call(dense, grad, spec.batch, spec.heads, spec.q_len, spec.kv_len, half, spec.dropout)


def quadratic_bytes(spec: Spec) -> int:
    """The dense mask or bias handed to SDPA, which turns it into the dtype of q."""
    if spec.mask is None and spec.bias is None and not spec.ragged:
        return 0
    parts, causal, _ = _parts(spec.mask, cpu_frame(spec))
    if causal or not (parts or spec.bias is not None):
        return 0
    bias = (1, 1, 1) if spec.bias is None else spec.bias.shape[:3]
    if bias[2] == 1 and not any(p.by_query for p in parts):
        return 0
    mask = extent(And(*parts), cpu_frame(spec)) if parts else (1, 1)
    batch, heads = max(bias[0], mask[0]), max(bias[1], mask[1])
    wide = spec.dtype if spec.bias is None else _bias_dtype(spec)
    return batch * heads * spec.q_len * spec.kv_len * (1 + wide.itemsize)


def seconds(spec: Spec) -> float:
    """What a forward is expected to take on a CPU: all pairs are computed, but for SDPA's own causal flag."""
    full = spec.pairs * (spec.head_dim + spec.v_dim) * products.speed(spec.dtype).fused
    if spec.mask is None and spec.bias is None and not spec.ragged:
        return full
    parts, causal, _ = _parts(spec.mask, cpu_frame(spec))
    if causal and spec.bias is None:
        return 0.6 * full
    return full if not (parts or spec.bias is not None) else 1.15 * full


def computed(spec: Spec) -> int:
    """All pairs, hidden ones included; half of them under SDPA's own causal flag."""
    causal = spec.mask is not None and spec.bias is None and _parts(spec.mask, cpu_frame(spec))[1]
    return spec.pairs * (spec.q_len + 1) // (2 * spec.q_len) if causal else spec.pairs


def peak_bytes(spec: Spec) -> int:
    """What a forward holds at once beside its arguments, the blocks of torch's own kernel apart."""
    return spec.out_bytes + quadratic_bytes(spec)


def run(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> tuple[Tensor, None]:
    """out [batch, heads, q_len, v_dim]; SDPA keeps its log-sum-exp to itself."""
    mask, causal, empty = None, False, None
    if spec.mask is not None or spec.bias is not None or spec.ragged:
        q, k, v, mask, causal, empty = _lower(q, k, v, spec)
    if spec.head_dim != spec.v_dim or spec.device.type == "cuda":
        q, k, v = _pad(q, k, v, spec)
    scale = spec.scale
    if not scale > 0:  # kernels take the largest score before they scale
        q, scale = (-q, -scale) if scale else (torch.zeros_like(q), 1.0)
    if not q.stride(3) == k.stride(3) == v.stride(3) == 1:  # torch would leave its fused kernel without a word
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = _grouped(q, k, v, mask, causal, spec, scale)
    out = out if out.shape[3] == spec.v_dim else out[..., : spec.v_dim]
    return (out if empty is None else out.masked_fill(empty, 0.0)), None


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None, dropout: float, gqa: bool = False
) -> Tensor:  # fmt: skip
    """The call itself, its gradient marked as one that cannot be differentiated again."""
    if q.is_cuda and (mask is not None or dropout or _oversized(q)):
        out = _guarded(q, k, v, mask, causal, scale, dropout, gqa)
    else:
        out = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=gqa)
    if torch.compiler.is_compiling():
        return out
    if out.requires_grad and out.grad_fn is not None:
        out.grad_fn.register_hook(first_order_only("fused"))
    few = mask is None and k.shape[2] < VECTOR and q.is_cpu
    return _keep_nan(out, q, k) if few and not _wrapped(out) else out


def _oversized(q: Tensor) -> bool:
    """Whether CUDA cannot launch a grid for so many batch entries; a size compared in a traced graph would become a guard."""
    return not torch.compiler.is_compiling() and q.shape[0] > GRID


def _guarded(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None, dropout: float, gqa: bool
) -> Tensor:  # fmt: skip
    """SDPA without the kernels that are known to be wrong here, and in as many calls as its grids need."""
    if _oversized(q):
        n = q.shape[0]
        wide = None if mask is None else mask.expand(n, -1, -1, -1)
        cuts = [slice(i, i + GRID) for i in range(0, n, GRID)]
        parts = [(q[c], k[c], v[c], None if wide is None else wide[c]) for c in cuts]
        return torch.cat([_guarded(*part, causal, scale, dropout, gqa) for part in parts])
    with around(of_sdpa(q, k, v, mask, dropout)):
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=gqa)


def _wrapped(x: Tensor) -> bool:
    """Whether x is inside a transform such as vmap, where nobody can look at its numbers."""
    return bool(functorch.is_functorch_wrapped_tensor(x))  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]


def _keep_nan(out: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Over fewer keys than a vector holds, torch's CPU kernel gives zeros where every score of a row is NaN.

    That is where the query is not finite, or where the first key is NaN, which every row sees if there is no mask but causal.
    """
    if finite(q, k):
        return out
    keys = k.isnan().any(3, keepdim=True)[:, :, :1].repeat_interleave(q.shape[1] // k.shape[1], 1)
    return out.masked_fill(~q.isfinite().all(3, keepdim=True) | keys, math.nan)


def quick(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, scale: float | None, start: Position | None, key_start: Position
) -> Tensor | None:  # fmt: skip
    """The short way for the most frequent calls, on which SDPA needs no help; None where the long way must be taken.

    These are self-attention of equal shapes, plain or causal, and one query over all keys of a cache. Behind large products
    the interpreter's own code and data are out of every cache, and the long way costs 90 µs where it costs 10 in a loop
    (B 4, S 128, d 512, bf16: 4 % of the layer).
    """
    queries, keys = q.shape, k.shape
    if torch.compiler.is_compiling() or len(queries) != 4 or len(keys) != 4 or keys != v.shape:
        return None
    B, H, T, D = queries
    Bk, G, S, Dk = keys
    if not (B and D and T and S) or Bk != B or Dk != D or not q.stride(3) == k.stride(3) == v.stride(3) == 1:
        return None
    if not suits(q, D):
        return None
    try:
        if T == S and H == G and start is None and type(key_start) is int and key_start >= 0:
            if not brief(q, B * H * T * S, 2 * D):
                return None
            return _sdpa(q, k, v, None, mask is not None, scale, 0.0)
        if T != 1 or not G or H % G or type(key_start) is not int or key_start < 0:
            return None
        if start is not None and (type(start) is not int or (mask is not None and start < key_start + S - 1)):
            return None
        return _sdpa(q.reshape(B, G, H // G, D), k, v, None, False, scale, 0.0).view(queries)
    except RuntimeError:  # what torch refuses, the long way can explain or do otherwise
        return None


def brief(x: Tensor, pairs: int, dims: int) -> bool:
    """Whether torch's kernel is done before another could be chosen; elsewhere than on a CPU there is none."""
    return not x.is_cpu or pairs * dims * 1e-11 < SOON


def suits(x: Tensor, head_dim: int) -> bool:
    """Whether SDPA is fused for this device, dtype and head_dim as they are, nothing padded."""
    if forward_ad._current_level >= 0:  # pyright: ignore[reportPrivateUsage]
        return False
    return x.is_cpu or (x.is_cuda and x.dtype in HALF and head_dim % 8 == 0)


def whole(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
    """Self-attention of equal shapes but for shared kv heads, known to suit()."""
    return _sdpa(q, k, v, None, causal, scale, 0.0, q.shape[1] != k.shape[1])


def step(q: Tensor, k: Tensor, v: Tensor, scale: float | None, kv_len: int) -> Tensor:
    """One token that sees every key, its heads folded to [batch, kv_heads, group, head_dim]; shapes are known to fit."""
    out = F.scaled_dot_product_attention(q, k, v, scale=scale)
    return _keep_nan(out, q, k) if kv_len < VECTOR and q.is_cpu else out


# ---- the mask -------------------------------------------------------------------------------------------------------


def _parts(mask: Mask | None, frame: Frame) -> tuple[list[Mask], bool, bool]:
    """The parts of the mask that hide anything here; whether they are SDPA's is_causal; whether every key is seen."""
    parts = mask.parts if isinstance(mask, And) else [] if mask is None else [mask]
    parts = [part.within(frame) for part in parts if not part.full(frame)]
    parts = [part for i, part in enumerate(parts) if not (isinstance(part, Causal) and part in parts[:i])]
    shift = frame.shift
    square = shift is not None and surely(frame.q_len == frame.kv_len) and surely(shift == 0)
    causal = len(parts) == 1 and isinstance(parts[0], Causal) and square and parts[0].aligned(frame)
    return parts, causal, square and all(part.diagonal for part in parts)


def _lower(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> tuple[Tensor, Tensor, Tensor, Tensor | None, bool, Tensor | None]:
    """q, k, v without what no one may see, since 0 · NaN is NaN in a product; SDPA's mask; is_causal; rows to be zeroed.

    A row that may attend to nothing is let attend to everything and zeroed afterwards: of torch's kernels some return zero
    for it, cuDNN returns the mean of v. On a CPU, where looking costs no waiting, what is not there is not dealt with.
    """
    frame = spec.frame
    if spec.mask is not None:
        spec.mask.check(frame)
    parts, causal, seen = _parts(spec.mask, frame)
    if causal and spec.bias is None:
        return q, k, v, None, True, None
    allowed, empty = evaluate(parts[0] if len(parts) == 1 else And(*parts), frame) if parts else frame.there(), None
    if allowed is not None and not seen:
        look = q.is_cpu and not torch.compiler.is_compiling() and not any(map(_wrapped, (q, k, v, allowed)))
        rows, columns, no_row, no_column = _gaps(allowed, parts, frame, look)
        if not (look and (no_column or finite(k, v))):
            k, v = k.masked_fill(~columns, 0.0), v.masked_fill(~columns, 0.0)
        if not no_row:
            empty = ~rows
            q, allowed = q.masked_fill(empty, 0.0), allowed | empty
    if spec.bias is not None:
        bias = _bias(spec)
        allowed = bias if allowed is None else torch.where(allowed, bias, -math.inf)
    if allowed is not None and allowed.shape[3] == 1:
        allowed = allowed.expand(-1, -1, -1, spec.kv_len).contiguous()  # CUDA wants its last axis whole
    return q, k, v, allowed, False, empty


def _gaps(allowed: Tensor, parts: list[Mask], frame: Frame, look: bool) -> tuple[Tensor, Tensor, bool, bool]:
    """Which rows see anything, which columns are seen by any, and whether all do and are, as far as one may look.

    The layers of a model share one mask: what was seen of a caller's own tensor is kept as long as that is the same.
    """
    global _seen
    part, at = parts[0] if parts else None, (frame.q_start, frame.k_start)
    keeps = look and len(parts) == 1 and isinstance(part, Table) and not any(isinstance(x, Tensor) for x in at)
    if not keeps or not isinstance(part, Table) or part.tensor.is_inference():
        return _look(allowed, look)
    key = type(part), part.absolute, at, part.tensor._version, allowed.shape  # pyright: ignore[reportPrivateUsage]
    if _seen is None or _seen[0]() is not part.tensor or _seen[1] != key:
        _seen = weakref.ref(part.tensor), key, _look(allowed, look)
    return _seen[2]


def _look(allowed: Tensor, look: bool) -> tuple[Tensor, Tensor, bool, bool]:
    rows, columns = allowed.any(3, keepdim=True), allowed.any(2, keepdim=True).any(1, keepdim=True).mT
    return rows, columns, look and bool(rows.all()), look and bool(columns.all())


_seen: tuple[weakref.ref[Tensor], tuple[object, ...], tuple[Tensor, Tensor, bool, bool]] | None = None


def _bias_dtype(spec: Spec) -> torch.dtype:
    """CPU kernels add a float32 bias to half-precision scores; CUDA's want q's dtype, and CPU's float64 wants float64."""
    return torch.float32 if spec.device.type == "cpu" and spec.dtype in HALF else spec.dtype


def _bias(spec: Spec) -> Tensor:
    """The bias in the dtype that the kernel takes; what is finite stays finite."""
    bias, dtype = cast(Tensor, spec.bias), _bias_dtype(spec)
    if torch.finfo(bias.dtype).max <= torch.finfo(dtype).max:
        return bias.to(dtype)
    most = torch.finfo(dtype).max
    return bias.clamp(-most, most).to(dtype).masked_fill(bias.isinf() & (bias < 0), -math.inf)


# ---- what SDPA does badly by itself ---------------------------------------------------------------------------------


def _pad(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> tuple[Tensor, Tensor, Tensor]:
    """Zeros up to the sizes for which torch has fused kernels: equal on CPU, multiples of 8 on CUDA. They change nothing."""
    D = E = max(spec.head_dim, spec.v_dim)
    if spec.device.type == "cuda":
        D, E = -(-spec.head_dim // 8) * 8, -(-spec.v_dim // 8) * 8
    if spec.head_dim != D:
        q, k = F.pad(q, (0, D - spec.head_dim)), F.pad(k, (0, D - spec.head_dim))
    return q, k, v if spec.v_dim == E else F.pad(v, (0, E - spec.v_dim))


def _grouped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, spec: Spec, scale: float) -> Tensor:
    """SDPA; where several query heads share a kv head, without repeating the keys if torch allows it."""
    B, H, T, D = q.shape
    G, R = spec.kv_heads, H // spec.kv_heads
    few = T == 1 if torch.compiler.is_compiling() else T <= FOLD  # a compiled graph must hold for every length above 1
    if R > 1 and few and not causal:
        if mask is not None and mask.shape[1:3] != (1, 1):
            mask = mask.expand(-1, H, T, -1).reshape(mask.shape[0], G, R * T, -1)
        return _sdpa(q.reshape(B, G, R * T, D), k, v, mask, False, scale, spec.dropout).reshape(B, H, T, -1)
    if R > 1 and spec.device.type == "cuda" and (mask is not None or spec.dtype == torch.float32):
        k, v = k.repeat_interleave(R, 1), v.repeat_interleave(R, 1)  # enable_gqa would take the L×L path
        R = 1
    shared = True if R > 1 else False  # noqa: SIM210 - torch wants a bool; in a traced graph R > 1 is a symbol
    return _sdpa(q, k, v, mask, causal, scale, spec.dropout, shared)
