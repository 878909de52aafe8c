"""record(): a mode of torch's functions that sees every attention call of any model, and changes nothing."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..attend import attention
from ..kernels.spec import autocast, autocasts, unbatched
from ..masks import Causal, Mask, Where
from ..masks.algebra import Position
from . import by_hand, torch_layers
from .by_hand import Follower, Scores, Weights
from .call import Call, Score
from .keep import Keeper, Select
from .places import Places
from .recording import Recording, Tokens
from .tensors import Intervals, additive, compact, four, four_mask, heads_of, hide, packs

Keep = Literal["queries", "values", "statistics"]


class Recorder:
    """`with record(…) as seen:`; may be entered again and again, each time being one step of the same recording."""

    def __init__(self, keeper: Keeper, model: nn.Module | None, every: int) -> None:
        self.keeper, self.model, self.every = keeper, model, every
        self.entered = 0
        self.watch: Watch | None = None
        self.closing = ExitStack()

    def __enter__(self) -> Recording:
        if self.watch is not None:
            raise RuntimeError("record: this recorder is recording already; leave its block first, or make another")
        sampled = self.entered % self.every == 0
        self.entered += 1
        if sampled:
            self.keeper.seen.steps += 1
            self.keeper.step = self.entered - 1
            with ExitStack() as stack:
                self.watch = watch = Watch(self.keeper, self.model)
                stack.enter_context(_eagerly())
                stack.enter_context(watch.places)
                watch.__enter__()
                self.closing = stack.pop_all()
        return self.keeper.seen

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        watch, self.watch = self.watch, None
        if watch is None:
            return
        with self.closing:
            watch.leave()
        if kind is None and self.keeper.unsaid:
            said, self.keeper.unsaid = self.keeper.unsaid, []
            warnings.warn("record: attention that could not be read: " + "; ".join(said), UserWarning, stacklevel=2)


@contextmanager
def _eagerly() -> Iterator[None]:
    """Compiled models run uncompiled while they are recorded: there is no Python to see in them otherwise."""
    if sys.modules.get("torch._dynamo") is None:
        yield
        return
    before = list(warnings.filters)
    warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global hooks")
    ours = [one for one in warnings.filters if one not in before]
    try:
        with cast(AbstractContextManager[Any], torch.compiler.set_stance("force_eager")):
            yield
    finally:
        warnings.filters[:] = [one for one in warnings.filters if one not in ours]  # pyright: ignore[reportIndexIssue]


class Watch(TorchFunctionMode):
    """One block's mode. A function that is none of ours costs a look into a dictionary."""

    def __init__(self, keeper: Keeper, model: nn.Module | None) -> None:
        super().__init__()
        self.keeper = keeper
        self.places = Places(model, self._entered, self._left)
        self.follower = Follower(self._by_hand)
        self.guards: list[tuple[nn.Module, Any, int]] = []  # torch's own layers that are running
        self.table: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
            **dict.fromkeys(by_hand.PRODUCTS, self.follower.product),
            **dict.fromkeys(by_hand.CARRIED, self.follower.carry),
            **dict.fromkeys(by_hand.CAT, self.follower.cat),
            F.scaled_dot_product_attention: self._sdpa,
            F.multi_head_attention_forward: self._mha,
            attention: self._ours,
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = self.table.get(func)
        if handler is None:
            if func.__class__ is _FlexType:
                return self._flex(func, args, kwargs or {})
            return func(*args, **kwargs) if kwargs else func(*args)
        return handler(func, args, kwargs or {})

    def leave(self) -> None:
        """Off the stack of modes, wherever it is; others that were entered and not left stay as they were."""
        from torch.overrides import _pop_mode, _push_mode  # pyright: ignore[reportPrivateUsage]

        for _, guard, _ in reversed(self.guards):
            if guard is not None:
                guard.__exit__(None, None, None)
        self.guards = []
        above: list[Any] = []
        while (mode := _pop_mode()) is not self:
            above.append(mode)
        for mode in reversed(above):
            _push_mode(mode)
        if above:
            raise RuntimeError(
                f"record: the block was left while {type(above[0]).__name__}, entered inside of it, was still on; "
                "leave blocks in the opposite order"
            )

    # ---- torch's own layers ---------------------------------------------------------------------------------------------

    def _entered(self, module: nn.Module) -> None:
        if torch_layers.opaque(module):
            alone = all(isinstance(mode, Watch) for mode in _modes())  # another mode keeps torch from its fast path anyway
            guard = None
            if alone and not torch._C._is_torch_function_all_disabled():  # pyright: ignore[reportPrivateUsage]
                guard = torch._C.DisableTorchFunction()  # pyright: ignore[reportPrivateUsage]
                guard.__enter__()
            self.guards.append((module, guard, self.keeper.recorded))

    def _left(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if self.guards and self.guards[-1][0] is module:
            _, guard, before = self.guards.pop()
            try:
                if result is not None:
                    self._read(module, args, kwargs, self.keeper.recorded > before)
            finally:
                if guard is not None:
                    guard.__exit__(None, None, None)
        if result is not None:
            self.keeper.finished(id(module), args, kwargs)

    def _read(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], inner: bool) -> None:
        place = getattr(module, "self_attn", module)  # the same place, whichever way torch takes
        with self.places.muted(), torch._C.DisableTorchFunction(), self.keeper.grad():  # pyright: ignore[reportPrivateUsage]
            if not torch_layers.attends(module, inner):
                return
            at = self.keeper.place(self.places, place)
            if at is not None:
                read = torch_layers.read(module, args, kwargs, self.keeper.memory)
                self.keeper.keep(
                    at, read.q, read.k, read.v, mask=read.mask, bias=read.bias, flat=read.flat, kind=read.kind,
                    scale=read.q.shape[3] ** -0.5, out_proj=read.out_proj,
                )  # fmt: skip

    def _mha(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """torch's function without its layer."""
        result = func(*args, **kwargs)
        at = None if self.guards else self.keeper.place(self.places)
        if at is not None:
            with self.keeper.grad():
                read = torch_layers.of_function(args, kwargs, self.keeper.memory)
                self.keeper.keep(
                    at, read.q, read.k, read.v, mask=read.mask, bias=read.bias, flat=read.flat, kind=read.kind,
                    scale=read.q.shape[3] ** -0.5, out_proj=read.out_proj,
                )  # fmt: skip
        return result

    # ---- fused functions ------------------------------------------------------------------------------------------------

    def _sdpa(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        at = None if self.guards else self.keeper.place(self.places)
        if at is not None:
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            with self.keeper.grad():
                self._fused(at, **{**dict(zip(names, args, strict=False)), **kwargs})
        return result

    def _fused(
        self, at: Select, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> None:  # fmt: skip
        why = _unreadable(query, key, value)
        if why:
            return self.keeper.miss(at, why)
        if autocasts(query.device.type):
            query, key, value = autocast(query, key, value)
        packed = packs(self.places.stack, query, key)
        if packed:
            query = query.reshape(query.shape[0], -1, 1, query.shape[3])
            if attn_mask is not None and attn_mask.ndim == 4 and attn_mask.shape[2] == packed:
                attn_mask = attn_mask.reshape(attn_mask.shape[0], -1, 1, attn_mask.shape[3])
        lead = tuple(query.shape[:-2])
        heads = heads_of(self.places.stack, lead[0]) if len(lead) == 1 else 1
        mask: Mask | None = Causal(align="start") if is_causal else None
        bias = flat = None
        variant = getattr(attn_mask, "variant", None)
        if variant is not None:  # torch.nn.attention.bias
            mask = Causal(align="start" if "UPPER" in variant.name else "end")
        elif attn_mask is not None:
            more, bias, flat = self.keeper.memory.of(
                attn_mask, lambda x: _read_mask(four_mask(x, lead, heads)), f"{lead} {heads}"
            )
            mask = more if mask is None else mask if more is None else mask & more
        q, k, v = (four(x, heads) for x in (query, key, value))
        start: Position | None = 0 if is_causal else _stands(mask, q.shape[2], k.shape[2])
        self.keeper.keep(
            at, q, k, v, mask=mask, bias=bias, flat=_rows(flat, q), start=start,
            scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        )  # fmt: skip
        return None

    def _ours(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """multihead.attention."""
        result = func(*args, **kwargs)
        at = None if self.guards else self.keeper.place(self.places)
        if at is not None:
            q, k, v = args[:3]
            if unbatched(q, k, v):
                q, k, v = q[None], k[None], v[None]
            if autocasts(q.device.type):
                q, k, v = autocast(q, k, v)
            scale, bias = kwargs.get("scale"), kwargs.get("bias")
            with self.keeper.grad():
                if bias is not None:
                    bias = four_mask(bias if bias.ndim != 3 else bias[:, None], (1, 1), 1)
                more, bias, _ = (None, None, None) if bias is None else self.keeper.memory.of(bias, _ours_bias, "ours")
                mask = kwargs.get("mask")
                self.keeper.keep(
                    at, q, k, v, mask=more if mask is None else mask if more is None else mask & more, bias=bias,
                    scale=q.shape[3] ** -0.5 if scale is None else scale, softcap=kwargs.get("softcap"), sinks=kwargs.get("sinks"),
                    start=kwargs.get("start"), key_start=kwargs.get("key_start", 0),
                )  # fmt: skip
        return result

    def _flex(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """FlexAttention's operator: (q, k, v, score_mod, block_mask, scale, …); its functions are kept as they are."""
        result = func(*args, **kwargs)
        at = None if self.guards or func.name() != "flex_attention" else self.keeper.place(self.places)
        if at is not None:
            q, k, v, score_mod, block_mask, scale = args[:6]
            with self.keeper.grad():
                self.keeper.keep(
                    at, q, k, v, mask=_flex_mask(block_mask[-1], q.shape[2], k.shape[2]), score=_flex_score(score_mod), scale=scale,
                    start=0 if q.shape[2] != k.shape[2] else None,
                )  # fmt: skip
        return result

    # ---- by hand --------------------------------------------------------------------------------------------------------

    def _by_hand(self, scores: Scores, weights: Weights, values: Tensor | None) -> None:
        at = None if self.guards else self.keeper.place(self.places)
        if at is None:
            return
        if scores.why:
            return self.keeper.miss(at, scores.why)
        heads = heads_of(self.places.stack, scores.lead[0]) if len(scores.lead) == 1 else 1
        with self.keeper.grad():
            q, k = four(scores.q, heads), four(scores.k, heads)
            mask, bias, flat = _conditions(scores, heads, self.keeper)
            cap = scores.softcap
            call = Call(
                q, k, values if values is None else four(values, heads), mask, bias, scores.scale, cap, scores.sinks,
                _rows(flat, q), start=_stands(mask, q.shape[2], k.shape[2]),
            )  # fmt: skip
            off = difference(call, weights, heads)
            if off:
                return self.keeper.miss(at, off)
            self.keeper.keep(
                at, q, k, call.v, mask=mask, bias=bias, flat=call.flat, scale=scores.scale, softcap=cap, sinks=scores.sinks,
                start=call.start,
            )  # fmt: skip
        return None


_FlexType: Any = type(None)


def _flex_type() -> Any:
    from torch._higher_order_ops.flex_attention import FlexAttentionHOP

    return FlexAttentionHOP


def _modes() -> list[Any]:
    from torch.overrides import _get_current_function_mode_stack  # pyright: ignore[reportPrivateUsage]

    return list(_get_current_function_mode_stack())


def _unreadable(*tensors: Tensor) -> str:
    if any(x.is_nested for x in tensors):
        return "q, k and v are nested tensors; pad them to be recorded"
    if any(torch._C._functorch.is_functorch_wrapped_tensor(x) for x in tensors):  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType, reportAttributeAccessIssue]
        return "it runs inside a transform such as vmap; record outside of it"
    return "its tensors hold no numbers (device meta)" if any(x.is_meta for x in tensors) else ""


def _read_mask(x: Tensor) -> tuple[Mask | None, Tensor | None, Tensor | None]:
    """SDPA's attn_mask, 4-D: True may attend, floats are added."""
    return (compact(x), None, None) if x.dtype == torch.bool else additive(x)


def _ours_bias(bias: Tensor) -> tuple[Mask | None, Tensor | None, Tensor | None]:
    """A bias of ours: only −inf hides."""
    return None, bias.detach().clone(), None


def _rows(flat: Tensor | None, q: Tensor) -> Tensor | None:
    return None if flat is None else flat.expand(-1, -1, q.shape[2])


def _stands(mask: Mask | None, q_len: int, kv_len: int) -> int | None:
    """Where the first query stands, if a mask that was given as a tensor tells: each row's last key is one more than the last's.

    Rows that see nothing, or everything because a finite "−inf" has levelled them, say nothing.
    """
    if not isinstance(mask, Intervals) or mask.start.shape[2] != 1 or mask.end.shape[1] != q_len or q_len == kv_len:
        return None
    ends = mask.end[..., 0]
    last = int(ends[:, -1].max())
    straight = torch.arange(last - q_len + 1, last + 1, device=ends.device)
    silent = (ends <= mask.start[..., 0]) | (ends == kv_len)
    return last - q_len if last >= q_len and bool(((ends == straight) | silent).all()) else None


def _conditions(scores: Scores, heads: int, keeper: Keeper) -> tuple[Mask | None, Tensor | None, Tensor | None]:
    """The masks and biases that were read, as a call has them."""
    lead, mask, bias, flat = scores.lead, None, None, None
    for hidden, value in scores.hidden:
        key = f"fill {value} {lead} {heads}"
        more, level = keeper.memory.of(hidden, lambda x, value=value: hide(four_mask(x, lead, heads), value, True), key)
        mask = more if mask is None else mask if more is None else mask & more
        flat = level if flat is None else flat if level is None else flat | level
    for added, factor in scores.biases:
        key = f"add {factor} {lead} {heads}"
        more, rest, level = keeper.memory.of(added, lambda x, f=factor: additive(four_mask(x, lead, heads) * f), key)
        mask = more if mask is None else mask if more is None else mask & more
        bias = rest if bias is None else bias if rest is None else bias + rest
        flat = level if flat is None else flat if level is None else flat | level
    return mask, bias, flat


def difference(call: Call, weights: Weights, heads: int) -> str:
    """What is wrong with a call, compared with some rows of the model's own softmax; "" where nothing is."""
    from .sight import Sight
    from .stream_cpu import rows

    sample = weights.sample
    if sample is None or not sample.numel():
        return ""
    own = four(sample, heads).float().nan_to_num(0.0)
    sight, worst = Sight(call), 0.0
    with torch.no_grad(), torch.autocast(call.q.device.type, enabled=False):
        for b in range(own.shape[0]):
            for h in range(own.shape[1]):
                for i, t in enumerate(weights.rows):
                    worst = max(worst, float((rows(call, sight, b, h, slice(t, t + 1))[0].float() - own[b, h, i]).abs().max()))
        size = float(
            (call.q[:, :, weights.rows].float().norm(dim=-1).amax() * call.k.float().norm(dim=-1).amax()) * abs(call.scale)
        )
    eps = max(torch.finfo(x.dtype).eps for x in (call.q, sample))
    if worst <= min(0.2, 16 * eps * (1 + size)):
        return ""
    return f"its product, mask and softmax were read, but the weights they give differ by {worst:.2g} from the model's own"


def where_flex(modify: Any) -> Any:
    """A FlexAttention function of single numbers as one of whole index tensors, each varying along its own axis."""

    def broadcast(*given: Tensor) -> Tensor:
        *score, b, h, q, k = given
        shape = torch.broadcast_shapes(*(x.shape for x in (b, h, q, k)))
        run = modify
        outs = [0] * len(score)
        for axis in (3, 2, 1, 0):
            run = torch.vmap(run, in_dims=(*outs, *(0 if i == axis else None for i in range(4))))
        flat = [x.flatten() for x in (b, h, q, k)]
        return run(*(x.expand(shape) if x.ndim == 4 else x.unsqueeze(0).expand(shape) for x in score), *flat)

    return broadcast


def _flex_mask(mask_mod: Any, q_len: int, kv_len: int) -> Mask | None:
    if getattr(mask_mod, "__name__", "") == "noop_mask":
        return None
    frame_q = where_flex(mask_mod)
    return Where(lambda b, h, q, k: frame_q(b, h, q, k))


def _flex_score(score_mod: Any) -> Score | None:
    if score_mod is None or getattr(score_mod, "__name__", "") == "_identity":
        return None
    modify = where_flex(score_mod)
    return lambda s, b, h, q, k: modify(s, b, h, q, k)[0]


def recorder(
    model: nn.Module | None, *, layers: Sequence[int] | None, heads: Sequence[int] | None,
    where: str | Callable[[str], bool] | None, keep: Keep, statistics: Sequence[str], every: int, device: Any, budget: int | None,
    tokens: Tokens | None, key_tokens: Tokens | None, out_proj: str | Tensor | None, differentiable: bool,
) -> Recorder:  # fmt: skip
    """record()."""
    global _FlexType
    if "torch.nn.attention.flex_attention" in sys.modules:
        _FlexType = _flex_type()
    keeper = Keeper(
        Recording(tokens, key_tokens), layers, heads, where, keep, statistics, device, budget, out_proj, differentiable
    )  # fmt: skip
    if not isinstance(every, int) or every < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"record: every must be a whole number ≥ 1; it is {every!r}")
    return Recorder(keeper, model, every)
