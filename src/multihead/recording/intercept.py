"""record(): a mode of torch's functions that sees every attention call of any model, and changes nothing."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..attend import attention
from ..kernels.spec import autocast, autocasts, four_axes
from . import by_hand, torch_layers
from .by_hand import Follower, Scores, Weights
from .call import Call
from .keep import Keeper, Select
from .places import Places
from .reading import conditions, difference, each_row, flex_mask, flex_score, sdpa_masks, stands, unreadable
from .recording import Recording, Tokens
from .tensors import four, heads_of, packs

Keep = Callable[[Select, tuple[Any, ...], dict[str, Any]], None]
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


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


class _Eagerly:
    """Compiled models run uncompiled while they are recorded: there is no Python to see in them otherwise.

    Torch's stance is one for all, and blocks may be left in any order: the first to begin sets it, the last takes it back.
    """

    def __init__(self) -> None:
        self.blocks, self.lock, self.stance = 0, threading.Lock(), ExitStack()

    @contextmanager
    def __call__(self) -> Generator[None]:
        if sys.modules.get("torch._dynamo") is None:
            yield
            return
        with self.lock:
            self.blocks += 1
            if self.blocks == 1:
                self._begin()
        try:
            yield
        finally:
            with self.lock:
                self.blocks -= 1
                if not self.blocks:
                    self.stance.close()

    def _begin(self) -> None:
        before = list(warnings.filters)
        warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global hooks")
        ours = [one for one in warnings.filters if one not in before]

        def restore() -> None:
            warnings.filters[:] = [one for one in warnings.filters if one not in ours]  # pyright: ignore[reportIndexIssue]

        self.stance.callback(restore)
        self.stance.enter_context(cast(AbstractContextManager[Any], torch.compiler.set_stance("force_eager")))


_eagerly = _Eagerly()


class Watch(TorchFunctionMode):
    """One block's mode. A function that is none of ours costs a look into a dictionary."""

    def __init__(self, keeper: Keeper, model: nn.Module | None) -> None:
        super().__init__()
        self.keeper = keeper
        self.places = Places(model, self._entered, self._left)
        self.follower = Follower(self._by_hand)
        self.guards: list[tuple[nn.Module, Any, int]] = []  # torch's own layers that are running
        self.table: dict[Any, Handler] = {
            **dict.fromkeys(by_hand.PRODUCTS, self.follower.product),
            **dict.fromkeys(by_hand.CARRIED, self.follower.carry),
            **dict.fromkeys(by_hand.CAT, self.follower.cat),
            F.scaled_dot_product_attention: self._then(self._sdpa),
            F.multi_head_attention_forward: self._then(self._mha),  # noqa: TID251 - it is looked at, not called
            attention: self._then(self._ours),
        }
        self.flex = self._then(self._flex)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = self.table.get(func)
        if handler is None:
            if func.__class__ is _FlexType:
                return self.flex(func, args, kwargs or {})
            return func(*args, **kwargs) if kwargs else func(*args)
        return handler(func, args, kwargs or {})

    def _then(self, keep: Keep) -> Handler:
        """The function itself, untouched, and then what it was given, where the place was selected."""

        def handle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            result = func(*args, **kwargs)
            at = None if self.guards else self.keeper.place(self.places)
            if at is not None:
                with self.keeper.grad():
                    keep(at, args, kwargs)
            return result

        return handle

    def leave(self) -> None:
        """Off the stack of modes, wherever it is; others that were entered and not left stay as they were."""
        from torch.overrides import _pop_mode, _push_mode  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]

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
            self.keeper.finished(module, self.places.stack, args, kwargs)

    def _read(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], inner: bool) -> None:
        place = getattr(module, "self_attn", module)  # the same place, whichever way torch takes
        with self.places.muted(), torch._C.DisableTorchFunction(), self.keeper.grad():  # pyright: ignore[reportPrivateUsage]
            if not torch_layers.attends(module, inner):
                return
            at = self.keeper.place(self.places, place)
            if at is not None:
                self._keep_read(at, torch_layers.read(module, args, kwargs, self.keeper.memory))

    def _mha(self, at: Select, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """torch's function without its layer."""
        self._keep_read(at, torch_layers.of_function(args, kwargs, self.keeper.memory))

    def _keep_read(self, at: Select, read: torch_layers.Read) -> None:
        call = Call(read.q, read.k, read.v, read.mask, read.bias, read.q.shape[3] ** -0.5, flat=read.flat)
        self.keeper.keep(at, call, read.kind, read.out_proj)

    # ---- fused functions ------------------------------------------------------------------------------------------------

    def _sdpa(self, at: Select, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        q, k, v, x = given["query"], given["key"], given["value"], given.get("attn_mask")
        why = unreadable(q, k, v)
        if why:
            self.keeper.miss(at, why)
            return
        if autocasts(q.device.type):
            q, k, v = autocast(q, k, v)
        packed = packs(self.places.stack, q, k)
        if packed:
            q = q.reshape(q.shape[0], -1, 1, q.shape[3])
            x = x.reshape(x.shape[0], -1, 1, x.shape[3]) if x is not None and x.shape[-2] == packed else x
        lead = tuple(q.shape[:-2])
        heads = heads_of(self.places.stack, lead[0]) if len(lead) == 1 else 1
        causal = bool(given.get("is_causal"))
        mask, bias, flat = sdpa_masks(x, causal, lead, heads, self.keeper.memory)
        q, k, v = (four(x, heads) for x in (q, k, v))
        start = 0 if causal else stands(mask, q.shape[2], k.shape[2])
        scale = q.shape[3] ** -0.5 if given.get("scale") is None else float(given["scale"])
        self.keeper.keep(at, Call(q, k, v, mask, bias, scale, flat=each_row(flat, q), start=start))

    def _ours(self, at: Select, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """multihead.attention, which was checked when it ran."""
        q, k, v = (x[None] if x.ndim == 3 else x for x in args[:3])
        why = unreadable(q, k, v)
        if why:
            self.keeper.miss(at, why)
            return
        if autocasts(q.device.type):
            q, k, v = autocast(q, k, v)
        scale, bias = kwargs.get("scale"), kwargs.get("bias")
        if bias is not None:
            bias = self.keeper.memory.of(bias, lambda x: four_axes(x).detach().clone(), "ours")
        self.keeper.keep(at, Call(
            q, k, v, kwargs.get("mask"), bias, q.shape[3] ** -0.5 if scale is None else float(scale), kwargs.get("softcap"),
            kwargs.get("sinks"), start=kwargs.get("start"), key_start=kwargs.get("key_start", 0),
        ))  # fmt: skip

    def _flex(self, at: Select, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        """FlexAttention's operator: (q, k, v, score_mod, block_mask, scale, …); its functions are kept as they are."""
        q, k, v, score_mod, block_mask, scale = args[:6]
        start = 0 if q.shape[2] != k.shape[2] else None
        self.keeper.keep(
            at, Call(q, k, v, flex_mask(block_mask[-1]), scale=scale, score=flex_score(score_mod), start=start)
        )  # fmt: skip

    # ---- by hand --------------------------------------------------------------------------------------------------------

    def _by_hand(self, scores: Scores, weights: Weights, values: Tensor | None) -> None:
        at = None if self.guards else self.keeper.place(self.places)
        if at is None:
            return
        off = scores.why
        if not off:
            heads = heads_of(self.places.stack, scores.lead[0]) if len(scores.lead) == 1 else 1
            with self.keeper.grad():
                q, k, v = four(scores.q, heads), four(scores.k, heads), None if values is None else four(values, heads)
                mask, bias, flat = conditions(scores, heads, self.keeper.memory)
                call = Call(
                    q, k, v, mask, bias, scores.scale, scores.softcap, scores.sinks, each_row(flat, q),
                    start=stands(mask, q.shape[2], k.shape[2]),
                )  # fmt: skip
                off = difference(call, weights, heads)
                if not off:
                    self.keeper.keep(at, call)
        if off:
            self.keeper.miss(at, off)


_FlexType: Any = type(None)


def _flex_type() -> Any:
    from torch._higher_order_ops.flex_attention import FlexAttentionHOP

    return FlexAttentionHOP


def _modes() -> list[Any]:
    from torch.overrides import _get_current_function_mode_stack  # pyright: ignore[reportPrivateUsage]

    return list(_get_current_function_mode_stack())


def recorder(
    model: nn.Module | None, *, layers: Sequence[int] | None, heads: Sequence[int] | None,
    where: str | Callable[[str], bool] | None, keep: str, statistics: Sequence[str], every: int, device: Any,
    budget: int | None,
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
