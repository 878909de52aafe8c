"""Packed sequences on CUDA: torch's varlen_attn over the tokens that a mask leaves, and no others.

Tokens that see or are seen are copied side by side, [tokens, heads, head_dim], and put back afterwards; where they lie so
already, as packed documents do, nothing is copied. Padding is never touched, whatever it holds.

Nothing waits for the device. Where the mask's numbers are on the host (lists, CPU tensors), buffers hold exactly the tokens
left; where only the device knows them, buffers hold as many tokens as there are and the device says how many count.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from ..masks import Frame
from ..masks.algebra import count
from .memo import Memo, on_host
from .once import mark
from .runs import Runs, group
from .spec import Spec, cpu_frame, present

DEVICES = ("cuda",)
HALF = (torch.bfloat16, torch.float16)
WIDEST = 256  # head_dim


def refuses(spec: Spec) -> str | None:
    """Why varlen attention cannot do this call, or None."""
    if spec.device.type not in DEVICES:
        return "varlen attention runs on CUDA only"
    if spec.dtype not in HALF:
        return "varlen attention takes float16 and bfloat16 only"
    if max(spec.head_dim, spec.v_dim) > WIDEST:
        return f"varlen attention takes head_dim and v_dim up to {WIDEST}"
    for name in ("bias", "softcap", "sinks"):
        if getattr(spec, name) is not None:
            return f"varlen attention has no {name}"
    if spec.dropout:
        return "varlen attention has no dropout"
    if spec.want_lse and torch.is_grad_enabled():
        return "the log-sum-exp of varlen attention has no gradient; ask for it under torch.no_grad()"
    if not (spec.q_len and spec.kv_len and spec.v_dim and spec.batch):
        return "there is an axis of size 0"
    if forward_ad._current_level >= 0:  # pyright: ignore[reportPrivateUsage]
        return "varlen attention has no forward-mode derivative"
    if spec.q_len == 1:
        return "there is one query a text: packing would copy all keys for it"
    found = _groups(spec)
    return found if isinstance(found, str) else None


def quadratic_bytes(spec: Spec) -> int:
    """None: what is kept grows with the tokens."""
    del spec
    return 0


def computed(spec: Spec) -> int:
    """The pairs that are left; varlen attention computes blocks of its own around them."""
    return count(spec.mask, cpu_frame(spec))


def peak_bytes(spec: Spec) -> int:
    """What a forward holds at once beside its arguments: the output, and q, k, v and it again, packed."""
    return 2 * spec.out_bytes + spec.bytes


def route(spec: Spec) -> str:
    """How the call is packed, in one sentence."""
    found = _groups(spec)
    if isinstance(found, str):
        return f"not packed: {found}"
    calls = "one call" if len(found) == 1 else f"{len(found)} calls"
    if not on_host(spec):
        return (
            f"lengths on the device alone: {calls} over buffers of all {spec.batch * spec.q_len:,} tokens, of which the device "
            "counts those that are there; nothing waits for it"
        )
    sequences, tokens = sum(g.q.sequences for g in found), sum(g.q.total for g in found)
    copied = "where they lie" if all(g.q.pack is None and g.k.pack is None for g in found) else "packed"
    return (
        f"lengths on the host: {calls} over {sequences:,} sequences with {tokens:,} of {spec.batch * spec.q_len:,} queries, "
        f"{copied}; nothing waits for the device"
    )


def run(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> tuple[Tensor, Tensor | None]:
    """out [batch, heads, q_len, v_dim]; lse [batch, heads, q_len], float32, if wanted."""
    groups = _groups(spec)
    if isinstance(groups, str):
        raise ValueError(f"attention: varlen attention cannot do this: {groups}")
    scale = spec.scale
    if not scale > 0:  # the kernel takes the largest score before it scales
        q, scale = (-q, -scale) if scale else (torch.zeros_like(q), 1.0)
    wide = -(-max(spec.head_dim, spec.v_dim) // 8) * 8
    q, k, v = (_tokens(x, wide) for x in (q, k, v))
    out, lse = None, None
    for g in groups:
        part, its_lse = _attend(_take(q, g.q), _take(k, g.k), _take(v, g.k), g, scale, spec)
        part = _put(part, g.q)
        out = part if out is None else out + part  # each token is in one group and zero in the others
        if its_lse is not None:
            its_lse = _put(its_lse, g.q, -torch.inf)
            lse = its_lse if lse is None else torch.maximum(lse, its_lse)
    out = _nothing(q, k, v) if out is None else out
    shape = spec.batch, spec.q_len, spec.heads
    out = out.view(*shape, wide)[..., : spec.v_dim].transpose(1, 2)
    if not spec.want_lse:
        return out, None
    lse = torch.full(shape, -torch.inf, device=out.device) if lse is None else lse.view(shape)
    return out, lse.transpose(1, 2)


def _tokens(x: Tensor, wide: int) -> Tensor:
    """[batch, heads, tokens, dim] → [batch · tokens, heads, wide], filled up with zeros; a view where x lies token by token."""
    B, H, T, D = x.shape
    x = F.pad(x, (0, wide - D)) if wide > D else x
    return x.transpose(1, 2).reshape(B * T, H, wide)


def _nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Zeros of q's shape, where no query sees anything; gradients zero, whatever is in the tensors."""
    everything = torch.ones((), dtype=torch.bool, device=q.device)
    return q.masked_fill(everything, 0.0) + (k.sum() + v.sum()).masked_fill(everything, 0.0)


def _attend(q: Tensor, k: Tensor, v: Tensor, g: Group, scale: float, spec: Spec) -> tuple[Tensor, Tensor | None]:
    """out [tokens, heads, dim] and, if wanted, lse [tokens, heads] of one group."""
    varlen, aux, grouped = _varlen()
    options: dict[str, Any] = {"return_aux": aux(lse=True)} if spec.want_lse else {}
    repeats = spec.heads // spec.kv_heads
    if repeats > 1 and grouped:
        options["enable_gqa"] = True
    elif repeats > 1:
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    found = varlen(q, k, v, g.q.cu, g.k.cu, g.q.longest, g.k.longest, scale=scale, window_size=g.window, **options)
    return (found[0], found[1].mT) if spec.want_lse else (mark(found, "packed"), None)


@functools.cache
def _varlen() -> tuple[Callable[..., Any], Callable[..., Any], bool]:
    """varlen_attn, its request for a log-sum-exp, and whether it knows grouped heads, as it does from torch 2.12 on."""
    from torch.nn.attention import varlen

    return varlen.varlen_attn, varlen.AuxRequest, "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters


# ---- what is packed where ---------------------------------------------------------------------------------------------


class Way(NamedTuple):
    """Which row to take for each place; `missing` marks the places that get none, None where all get one."""

    rows: Tensor
    missing: Tensor | None


class Side(NamedTuple):
    """The queries or the keys of a group.

    cu         int32 [sequences + 1]: where each sequence begins among the packed tokens, and where the last one ends
    pack       the token at each packed place; unpack: the place of each token; both None where that is its own
    longest, total  of one sequence, of all; upper bounds where only the device knows
    """

    cu: Tensor
    pack: Way | None
    unpack: Way | None
    longest: int
    total: int
    sequences: int


class Group(NamedTuple):
    q: Side
    k: Side
    window: tuple[int, int]


_memo: Memo[list[Group] | str] = Memo()


def _groups(spec: Spec) -> list[Group] | str:
    return _memo.get(spec, functools.partial(_lower, spec))


def _lower(spec: Spec) -> list[Group] | str:
    host = on_host(spec)
    where = "cpu" if host else present(spec.device)
    frame = Frame(spec.batch, spec.heads, spec.q_len, spec.kv_len, q_start=spec.start, k_start=spec.key_start, device=where)
    found = group(spec.mask, frame, host)
    return found if isinstance(found, str) else [_group(runs, spec, host) for runs in found]


def _group(runs: Runs, spec: Spec, host: bool) -> Group:
    q = _side(runs.b, runs.q0, runs.q1, spec.batch, spec.q_len, present(spec.device), host)
    k = _side(runs.b, runs.k0, runs.k1, spec.batch, spec.kv_len, present(spec.device), host)
    return Group(q, k, runs.window)


def _side(b: Tensor, first: Tensor, last: Tensor, batch: int, tokens: int, device: torch.device, host: bool) -> Side:
    """Where b · tokens + first … b · tokens + last − 1 are packed, one run behind the other."""
    n = last - first
    cu, begin = F.pad(n.cumsum(0), (1, 0)), b * tokens + first
    sequences, longest, total = b.shape[0], tokens, batch * tokens
    if host:
        longest, total = int(n.max()), int(cu[-1])
        whole = total == batch * tokens and bool((begin == cu[:-1]).all())
        cu, begin = _send(cu, F.pad(begin, (0, 1)), device)
        if whole:
            return Side(cu.int(), None, None, longest, total, sequences)
    place = torch.arange(total, device=device)
    run = torch.searchsorted(cu[1:], place, right=True).clamp(max=sequences - 1)  # an empty run is never found
    token = begin[run] + place - cu[run]
    tail = None if host else place >= cu[-1]
    token = token if tail is None else token.masked_fill(tail, batch * tokens)
    back = torch.full((batch * tokens + 1,), total, device=device)  # one more, for places without a token
    back[token] = place
    back = back[:-1]
    missing = back == total
    unpack = Way(back.masked_fill(missing, 0), missing)
    return Side(cu.int(), Way(token if tail is None else token.masked_fill(tail, 0), tail), unpack, longest, total, sequences)


def _send(a: Tensor, b: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two rows to the device in one copy that nobody waits for."""
    both = torch.stack([a, b])
    a, b = (both.pin_memory() if device.type == "cuda" else both).to(device, non_blocking=True).unbind()
    return a, b


class _Take(torch.autograd.Function):
    """Rows by number. Its gradient takes by the numbers of the way back: nothing is added up, nothing is left undefined."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Way, back: Way, fill: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.there, ctx.back = there, back
        taken = x.index_select(0, there.rows)
        if there.missing is not None:
            taken.masked_fill_(there.missing.view(-1, *(1,) * (x.ndim - 1)), fill)
        return taken

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Take.apply(grad, ctx.back, ctx.there, 0.0), None, None, None


def _take(x: Tensor, side: Side) -> Tensor:
    """Tokens → packed places."""
    return x if side.pack is None else cast(Tensor, _Take.apply(x, side.pack, side.unpack, 0.0))


def _put(x: Tensor, side: Side, fill: float = 0.0) -> Tensor:
    """Packed places → tokens."""
    return x if side.pack is None else cast(Tensor, _Take.apply(x, side.unpack, side.pack, fill))
