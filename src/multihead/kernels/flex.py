"""FlexAttention on CUDA: whatever is block-sparse, computed block by block, with softcap and a differentiable log-sum-exp.

Blocks come from arithmetic on intervals of columns (masks/blocks.py); only what has none is looked at, some rows at a time.
Inside the partial blocks one and the same function decides for every mask that intervals can say: is the column between the
bounds of its row? So a window, packed documents and a prefix share one compiled kernel, and neither a new length nor a new mask
needs another.

The unfused path, which torch takes without a word where nothing is compiled, is an error here.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from ..masks import Frame, Mask
from ..masks.blocks import Spans, split
from .flexmods import Mod, inside, lower
from .guards import Call, holding
from .memo import Memo, on_host
from .once import refuse
from .spec import Spec, cpu_frame

DEVICES = ("cuda",)
SIZE = 128  # queries and keys of a block
LOOK = 2**26  # pairs that are looked at together
BACKEND = "inductor"


def refuses(spec: Spec) -> str | None:
    """Why FlexAttention cannot do this call, or None."""
    if spec.device.type not in DEVICES:
        return "FlexAttention is fused on CUDA only"
    if spec.dtype == torch.float64:
        return "FlexAttention has no fused float64 kernel"
    if spec.bias is not None:
        return "a bias is L×L numbers that FlexAttention would fetch one by one"
    if spec.sinks is not None:
        return "FlexAttention has no sinks"
    if spec.dropout:
        return "FlexAttention has no dropout"
    if not (spec.q_len and spec.kv_len and spec.v_dim and spec.batch):
        return "there is an axis of size 0"
    if forward_ad._current_level >= 0:  # pyright: ignore[reportPrivateUsage]
        return "FlexAttention has no forward-mode derivative"
    if torch.compiler.is_compiling():
        return "its block mask is made outside of a compiled graph"
    return None


def quadratic_bytes(spec: Spec) -> int:
    """None: per query the bounds of its intervals, per pair of blocks a few bytes."""
    del spec
    return 0


def computed(spec: Spec) -> int:
    """The pairs of all blocks in which any is left."""
    frame, lens = cpu_frame(spec), (spec.q_len, spec.kv_len)
    said, rest = split(spec.mask, frame)
    if said is None or rest is not None:
        return spec.pairs
    some, _ = _grids(said, spec.q_len, lens)
    return int(some.sum()) * SIZE**2 * spec.heads * (spec.batch if some.shape[0] == 1 else 1)


def peak_bytes(spec: Spec) -> int:
    """What a forward holds at once beside its arguments: the output, and a few bytes for each pair of blocks."""
    return spec.out_bytes + spec.batch * -(-spec.q_len // SIZE) * -(-spec.kv_len // SIZE) * 16


def route(spec: Spec) -> str:
    """What must be said of it before it runs."""
    del spec
    return "compiled at the first call of a kind, in seconds; another length or another mask of its kind compiles nothing"


def run(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> tuple[Tensor, Tensor | None]:
    """out [batch, heads, q_len, v_dim]; lse [batch, heads, q_len] in float32, if wanted."""
    lens = _lengths(spec)
    low = _memo.get(spec, functools.partial(_lower, spec, lens))
    if low.lens != lens:
        low = _lower(spec, lens)
    if low.rows is not None:  # 0 · NaN is NaN in the products of a gradient
        q = q.masked_fill(~low.rows.unsqueeze(-1), 0.0)
    if low.columns is not None:
        hidden = ~low.columns[:, None, :, None]
        k, v = k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)
    q, k, v = _pad(q, lens[0]), _pad(k, lens[1]), _pad(v, lens[1], spec.v_dim)
    if spec.head_dim < 16:  # below, there is no kernel
        q, k = F.pad(q, (0, 16 - spec.head_dim)), F.pad(k, (0, 16 - spec.head_dim))
    out, lse = _call(q, k, v, low, spec)
    out = refuse(out, "flex")
    if out.shape[2:] != (spec.q_len, spec.v_dim):
        out = out[:, :, : spec.q_len, : spec.v_dim]
    return out, None if lse is None else lse[:, :, : spec.q_len]


def _pad(x: Tensor, tokens: int, dim: int = 16) -> Tensor:
    """Zeros up to whole blocks where a guard asks for them, and up to 16 columns of v."""
    more = max(0, 16 - dim), tokens - x.shape[2]
    return F.pad(x, (0, more[0], 0, more[1])) if any(more) else x


def _lengths(spec: Spec) -> tuple[int, int]:
    """q_len and kv_len, rounded up to whole blocks where FlexAttention is known to be wrong otherwise."""
    lens = spec.q_len, spec.kv_len
    grad, capped = torch.is_grad_enabled(), spec.softcap is not None
    call = Call(False, grad, spec.batch, spec.heads, *lens, score_mod=capped)
    if holding(call, kernels=("flex",)):
        return _up(lens[0]), _up(lens[1])
    return lens


def _up(n: int) -> int:
    return -(-n // SIZE) * SIZE


# ---- the compiled kernel ------------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """What a kernel is compiled for: no length and no number of the mask.

    special  sizes that torch compiles for by themselves: one batch entry, few queries, a single block
    """

    scale: float
    softcap: float | None
    want_lse: bool
    dims: tuple[int, ...]
    dtype: torch.dtype
    grad: tuple[bool, ...]
    mod: object
    special: tuple[bool, ...]


def _call(q: Tensor, k: Tensor, v: Tensor, low: Lowered, spec: Spec) -> tuple[Tensor, Tensor | None]:
    dims = spec.heads, spec.kv_heads, q.shape[3], v.shape[3]
    grad = torch.is_grad_enabled(), *(x.requires_grad for x in (q, k, v))
    special = spec.batch == 1, q.shape[2] < SIZE, q.shape[2] <= SIZE, k.shape[2] <= SIZE
    kind = Kind(spec.scale, spec.softcap, spec.want_lse, dims, spec.dtype, grad, low.kind, special)
    fresh, attend = kind not in _met, _compiled(kind)
    _met.add(kind)
    try:
        with _distinct() if fresh else nullcontext():
            return attend(q, k, v, low.block_mask)
    except Exception as error:
        if type(error).__name__ != "FailOnRecompileLimitHit":
            raise
        raise RuntimeError(
            "attention: FlexAttention was compiled for more shapes than torch._dynamo.config.recompile_limit allows, and would "
            'run unfused from now on; raise that limit, or write kernel="fused"'
        ) from error


_met: set[Kind] = set()


def _distinct() -> AbstractContextManager[object]:
    """Sizes equal by chance, such as heads and blocks, are symbols of their own: else the next length would compile anew."""
    from torch.fx.experimental import _config

    return cast(Any, _config).patch(use_duck_shape=False)


@functools.cache
def _compiled(kind: Kind) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """flex_attention compiled for one kind: with symbolic sizes, so that a new length costs nothing, and with a code object of
    its own, since torch counts recompilations by code object, over all kinds and whatever else the process compiles."""
    from torch.nn.attention import flex_attention as flex

    call = cast(Callable[..., Any], flex.flex_attention)

    options: dict[str, Any] = {"enable_gqa": kind.dims[0] != kind.dims[1]}
    scale = repr(kind.scale)  # as text: of a captured float torch makes a symbol, which no kernel takes
    if kind.softcap is not None:
        options["score_mod"] = _capped(kind.softcap)
    if holding(Call(False, False, 1, 1, 1, 1), kernels=("flex FLASH",)):
        options["kernel_options"] = {"BACKEND": "TRITON"}
    if kind.want_lse:
        options["return_aux"] = flex.AuxRequest(lse=True)

    def attend(q: Tensor, k: Tensor, v: Tensor, block_mask: Any) -> tuple[Tensor, Tensor | None]:
        if not torch.compiler.is_compiling():
            raise RuntimeError(
                "attention: torch.compile is switched off or gave up, and FlexAttention would run unfused, with L×L scores; "
                'switch it on, or write kernel="fused"'
            )
        found = call(q, k, v, block_mask=block_mask, scale=float(scale), **options)
        return (found[0], found[1].lse) if kind.want_lse else (found, None)

    code = attend.__code__.replace(co_name=f"flex_{_compiled.cache_info().misses}")
    own = types.FunctionType(code, attend.__globals__, code.co_name, attend.__defaults__, attend.__closure__)
    return torch.compile(own, dynamic=True, fullgraph=True, backend=BACKEND)


def _capped(softcap: float) -> Callable[..., Tensor]:
    most = repr(softcap)

    def cap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        del b, h, q, k
        return float(most) * torch.tanh(score / float(most))

    return cap


# ---- the mask -----------------------------------------------------------------------------------------------------------


class Lowered(NamedTuple):
    """A mask as FlexAttention wants it.

    rows     bool [batch | 1, heads | 1, q_len], queries that see anything; None where all are known to
    columns  bool [batch | 1, kv_len], keys that any query of the batch entry sees; None where all are known to be
    kind     what of mask_mod is compiled
    """

    block_mask: Any
    rows: Tensor | None
    columns: Tensor | None
    kind: object
    lens: tuple[int, int]


_memo: Memo[Lowered] = Memo()


def _lower(spec: Spec, lens: tuple[int, int]) -> Lowered:
    """On the host where the mask's numbers are there, so that nothing waits for the device; else on the device."""
    if spec.mask is None and not spec.ragged and lens == (spec.q_len, spec.kv_len):
        return Lowered(None, None, None, None, lens)
    if spec.mask is not None:
        spec.mask.check(spec.frame)
    frame = _frame(spec, torch.device("cpu") if on_host(spec) else spec.device)
    said, rest = split(spec.mask, frame)
    if rest is not None:
        frame = spec.frame
        mod, kind = lower(cast(Mask, spec.mask), frame, _up(lens[0]))
        some, full, rows, columns = _look(spec, lens)
    else:
        every = torch.zeros(1, 1, 1, dtype=torch.int64, device=frame.device)
        said = Spans(every, every + spec.kv_len, spec.kv_len) if said is None else said
        some, full = _grids(said, spec.q_len, lens)
        rows, columns = _seen(said, spec.q_len)
        mod, kind = inside(said, spec.q_len, _up(lens[0]), spec.device)
        rows, columns = (None if _all(x) else x.to(spec.device, non_blocking=True) for x in (rows, columns))
    kind = kind, some.shape[0] > 1, some.shape[1] > 1
    return Lowered(_block_mask(some, full, mod, lens, spec.device), rows, columns, kind, lens)


def _frame(spec: Spec, device: torch.device) -> Frame:
    start, key_start = spec.start, spec.key_start
    return Frame(spec.batch, spec.heads, spec.q_len, spec.kv_len, q_start=start, k_start=key_start, device=device)


def _all(x: Tensor) -> bool:
    """Whether all is known to be true; on a device nobody looks."""
    return x.device.type == "cpu" and bool(x.all())


def _grids(said: Spans, q_len: int, lens: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """bool [batch | 1, 1, blocks of queries, blocks of keys] each: some pair is allowed; the block is whole and all are."""
    blocks = said.blocks(SIZE, q_len)
    first = torch.arange(0, _up(lens[1]), SIZE, device=said.start.device)
    start, end = (x.unsqueeze(-1) for x in (blocks.some.start, blocks.some.end))
    some = ((start < first + SIZE) & (end > first) & (end > start)).any(2)
    start, end = (x.unsqueeze(-1) for x in (blocks.every.start, blocks.every.end))
    full = ((start <= first) & (end >= first + SIZE)).any(2)
    if q_len % SIZE:
        full[:, -1] = False
    return some.unsqueeze(1), full.unsqueeze(1)


def _seen(said: Spans, q_len: int) -> tuple[Tensor, Tensor]:
    """Which rows see anything, and which columns are seen, counting how many intervals begin and end before each."""
    rows = (said.end > said.start).any(-1).expand(-1, q_len).unsqueeze(1)
    edges = said.start.new_zeros(said.start.shape[0], said.kv_len + 1)
    for at, step in ((said.start, 1), (said.end, -1)):
        at = at.flatten(1)
        edges.scatter_add_(1, at, torch.full_like(at, step))
    return rows, edges.cumsum(1)[:, :-1] > 0


def _look(spec: Spec, lens: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same of a mask that has no intervals, from its predicate, some blocks of rows at a time."""
    mask, frame, there = cast(Mask, spec.mask), spec.frame, spec.frame.there()
    some: list[Tensor] = []
    full: list[Tensor] = []
    rows: list[Tensor] = []
    columns: Tensor | None = None
    step = max(1, LOOK // (spec.batch * spec.heads * lens[1] * SIZE)) * SIZE
    for first in range(0, spec.q_len, step):
        q = frame.q.narrow(2, first, min(step, spec.q_len - first))
        allowed = mask.predicate(frame.b, frame.h, q, frame.k, frame)
        allowed = allowed if there is None else allowed & there
        allowed = allowed.expand(-1, -1, q.shape[2], spec.kv_len)
        rows.append(allowed.any(3))
        seen = allowed.any(2).any(1)
        columns = seen if columns is None else columns | seen
        allowed = F.pad(allowed, (0, _up(lens[1]) - spec.kv_len, 0, -q.shape[2] % SIZE))
        B, H, T, S = allowed.shape
        tiles = allowed.view(B, H, T // SIZE, SIZE, S // SIZE, SIZE).transpose(3, 4).flatten(4)
        some.append(tiles.any(4))
        full.append(tiles.all(4))
    return torch.cat(some, 2), torch.cat(full, 2), torch.cat(rows, 2), cast(Tensor, columns)


def _block_mask(some: Tensor, full: Tensor, mod: Mod, lens: tuple[int, int], device: torch.device) -> Any:
    """BlockMask from two grids of blocks, which travel to the device in one copy."""
    from torch.nn.attention.flex_attention import BlockMask

    grids = torch.stack([some & ~full, full])
    grids = grids.pin_memory() if device.type == "cuda" and grids.device.type == "cpu" else grids
    number, order = _ordered(grids.to(device, non_blocking=True))
    return BlockMask.from_kv_blocks(
        number[0], order[0], number[1], order[1], BLOCK_SIZE=SIZE, mask_mod=mod, seq_lengths=lens
    )  # fmt: skip


def _ordered(grid: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of each row are marked, and their numbers, those first."""
    grid = grid.to(torch.int8)
    return grid.sum(-1, dtype=torch.int32), grid.argsort(dim=-1, descending=True, stable=True).int()
