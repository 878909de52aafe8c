"""The kernel "blocked" as operators of torch, so that torch.compile and torch.export see one node and look no further.

    multihead::blocked(q, k, v, …) → out, lse
    multihead::blocked_backward(dout, dlse, …, q, k, v, …) → dq, dk, dv, dbias, dsinks

A mask travels as a text that names its kinds and options, and a list of its tensors.
"""

from __future__ import annotations

import ast
import functools
from typing import Any, cast

import torch
from torch import Tensor

from .. import masks
from ..masks import Allowed, Mask, Where, evaluate
from . import blocked
from .spec import Spec

ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? sinks, Tensor? seed, Tensor? start, Tensor? key_start, "
    "Tensor[] leaves, str mask, SymInt? first, SymInt first_key, float scale, float? softcap, float dropout, bool want_lse"
)
_library = torch.library.Library("multihead", "DEF")
_library.define(f"blocked({ARGUMENTS}) -> (Tensor, Tensor)")
_library.define(
    f"blocked_backward(Tensor dout, Tensor? dlse, bool need_bias, bool need_sinks, {ARGUMENTS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def call(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> tuple[Tensor, Tensor | None]:
    """A checked call, as one node of a graph."""
    leaves: list[Tensor] = []
    text = "" if spec.mask is None else encode(_without_functions(spec.mask, spec), leaves)
    seed = torch.full((), spec.seed, dtype=torch.int64) if isinstance(spec.seed, int) else spec.seed
    starts = [x if isinstance(x, Tensor) else None for x in (spec.start, spec.key_start)]
    first = None if isinstance(spec.start, Tensor) else spec.start
    first_key = 0 if isinstance(spec.key_start, Tensor) else spec.key_start
    out, lse = torch.ops.multihead.blocked(
        q, k, v, spec.bias, spec.sinks, seed, *starts, leaves, text, first, first_key, spec.scale, spec.softcap, spec.dropout,
        spec.want_lse,
    )  # fmt: skip
    return out, lse if spec.want_lse else None


# ---- masks as text ------------------------------------------------------------------------------------------------------


def encode(value: Any, leaves: list[Tensor]) -> str:
    """A mask as a Python literal; its tensors are added to `leaves` and named by their number there."""
    if isinstance(value, Mask):
        parts = [encode(getattr(value, n), leaves) for n in value.tensors + value.options]
        return f"('{type(value).__name__}', [{', '.join(parts)}])"
    if isinstance(value, Tensor):
        leaves.append(value)
        return f"('#', {len(leaves) - 1})"
    if isinstance(value, list):
        return f"('[]', [{', '.join(encode(x, leaves) for x in cast('list[Any]', value))}])"
    return repr(value)


def decode(text: str, leaves: list[Tensor]) -> Mask | None:
    """The mask that was encoded."""
    return _built(_parsed(text), leaves) if text else None


@functools.lru_cache(256)
def _parsed(text: str) -> Any:
    return ast.literal_eval(text)


def _built(value: Any, leaves: list[Tensor]) -> Any:
    if not isinstance(value, tuple):
        return value
    name, inner = cast("tuple[str, list[Any] | int]", value)
    if name == "#":
        return leaves[cast(int, inner)]
    parts = [_built(x, leaves) for x in cast("list[Any]", inner)]
    if name == "[]":
        return parts
    kind = getattr(masks, name)
    mask = object.__new__(kind)
    for attribute, part in zip(kind.tensors + kind.options, parts, strict=True):
        object.__setattr__(mask, attribute, part)
    return mask


def _without_functions(mask: Mask, spec: Spec) -> Mask:
    """Where's function cannot be written down: the mask becomes the table that it makes."""
    if any(isinstance(atom, Where) for atom in mask.atoms()):
        return Allowed(evaluate(mask, spec.frame).expand(-1, -1, spec.q_len, spec.kv_len))
    return mask


# ---- what they do -------------------------------------------------------------------------------------------------------


def _spec(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, seed: Tensor | None, start: Tensor | None,
    key_start: Tensor | None, leaves: list[Tensor], mask: str, first: int | None, first_key: int, scale: float,
    softcap: float | None, dropout: float, want_lse: bool,
) -> Spec:  # fmt: skip
    return Spec(
        q, k, v, decode(mask, leaves), bias, scale, dropout, seed, softcap, sinks, want_lse,
        first if start is None else start, first_key if key_start is None else key_start,
    )  # fmt: skip


def _forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return blocked.forward(q, k, v, _spec(q, k, v, *rest))


def _backward(dout: Tensor, dlse: Tensor | None, need_bias: bool, need_sinks: bool, *call: Any) -> tuple[Tensor, ...]:
    q, k, v = call[:3]
    found = blocked.backward(dout, dlse, q, k, v, _spec(*call), need_bias, need_sinks)
    return tuple(cast(Tensor, q.new_empty(0)) if x is None else x for x in found)


def _shapes(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    del k
    B, H, T, _ = q.shape
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = q.new_empty((B, H, T) if rest[-1] else (0,), dtype=exact)
    return q.new_empty(B, T, H, v.shape[3]).transpose(1, 2), lse


def _shapes_back(dout: Tensor, dlse: Tensor | None, need_bias: bool, need_sinks: bool, *call: Any) -> tuple[Tensor, ...]:
    del dout, dlse
    q, k, v, bias, sinks = call[:5]
    last = (torch.empty_like(x) if need else q.new_empty(0) for x, need in ((bias, need_bias), (sinks, need_sinks)))
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), *last


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    del output
    tensors, others = inputs[:8], inputs[9:]
    ctx.save_for_backward(*tensors, *inputs[8])
    ctx.others = others
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    tensors, leaves = ctx.saved_tensors[:8], ctx.saved_tensors[8:]
    q, _, v = tensors[:3]
    if dout is None:
        dout = q.new_zeros(*q.shape[:3], v.shape[3])
    need_bias, need_sinks = ctx.needs_input_grad[3], ctx.needs_input_grad[4]
    found = torch.ops.multihead.blocked_backward(dout, dlse, need_bias, need_sinks, *tensors, list(leaves), *ctx.others)
    asked = (True, True, True, need_bias, need_sinks)
    grads = (x if need else None for x, need in zip(found, asked, strict=True))
    return *grads, None, None, None, [None] * len(leaves), *(None,) * len(ctx.others)


def _no_second(ctx: Any, *grads: Any) -> Any:
    del ctx, grads
    raise NotImplementedError(
        'attention: kernel="blocked" can be differentiated once; for second derivatives write kernel="reference"'
    )


_library.impl("blocked", _forward, "CPU")
_library.impl("blocked_backward", _backward, "CPU")
torch.library.register_fake("multihead::blocked", _shapes, lib=_library)
torch.library.register_fake("multihead::blocked_backward", _shapes_back, lib=_library)
torch.library.register_autograd("multihead::blocked", _gradients, setup_context=_keep, lib=_library)
torch.library.register_autograd("multihead::blocked_backward", _no_second, lib=_library)
