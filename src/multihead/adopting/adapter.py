"""Stands where another project's module stood: takes its arguments, computes by our layer, returns what it returned."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..attend import attention
from ..layer import MultiHeadAttention
from ..masks import Mask
from . import AdoptionError
from .build import Copied, WithLearnedKeys
from .conventions import kind_of
from .drive import HARMLESS, Call, Driver
from .reading import Reading
from .search import CLOSE, off

MISSING = inspect.Parameter.empty


@dataclass(frozen=True)
class Returns:
    """What a module returns: the tree of its result, None for a bare tensor; each leaf's meaning, None for None."""

    tree: Any
    leaves: tuple[str | None, ...]

    def make(self, found: dict[str | None, Any]) -> Any:
        leaves = [found.get(leaf) for leaf in self.leaves]
        return leaves[0] if self.tree is None else pytree.tree_unflatten(leaves, self.tree)


class RefusedError(TypeError):
    """An adopted module got what its original may understand and it does not; nothing was computed."""

    def __init__(self, module: Adopted, said: str) -> None:
        super().__init__(f"adopted {type(module.original).__name__}: {said}; restore() brings the original back")
        self.module, self.said = module, said


class Adopted(nn.Module):
    """An adopted module: `layer` computes; `original`, which stood here, is kept for restore() and out of parameters().

    Calls are the original's; what it was never seen to take is refused by name instead of left unheard.
    """

    layer: MultiHeadAttention

    def __init__(self, original: nn.Module, reading: Reading, returns: dict[bool, Returns]) -> None:
        nn.Module.__init__(self)
        self.layer = reading.layer
        own = self.__dict__
        own["original"], own["copied"], own["call"] = original, reading.copied, reading.driver.call
        own["readers"], own["takes_place"] = reading.readers, reading.masks.takes_place
        own["turning"] = reading.turning
        own["memory"], own["returns"] = reading.memory or "memory" in reading.driver.call.fed, returns
        for name, hooks in vars(original).items():  # one object, so that handles given out go on working
            if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
                own[name] = hooks
        self.train(original.training)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__.get("original")
            if original is None or name.startswith("__"):
                raise
            return getattr(original, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _blank, (type(self.original),), self.__dict__

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the original's."""
        call: Call = self.call
        given = self._bound(args, kwargs)
        tensors = {role: self._take(given, role) for role in ("query", "key", "value", "memory")}
        query, (key, value) = cast(Tensor, tensors["query"]), self._sources(tensors)
        mask, bias = self._masks(given)
        wants = any(bool(given.pop(name)) for name in call.named("weights") if given.get(name) is not None)
        returns = self.returns[wants and True in self.returns]
        weights = any(leaf is not None and "weights" in leaf for leaf in returns.leaves)
        found = self._attend(query, key, value, mask, bias, given, weights, "bias" in returns.leaves)
        self._nothing_left(given)
        out = found["out"]
        found["out"] = out if call.batch_first else out.transpose(0, 1)
        if weights:
            found["mean weights"] = found["weights"].mean(1)
        return returns.make(found)

    # ---- arguments --------------------------------------------------------------------------------------------------

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by name, without those at their default."""
        names: list[str] = list(self.call.parameters)
        if len(args) > len(names):
            raise TypeError(f"{self._name()}: takes {len(names)} arguments; got {len(args)}")
        given = dict(zip(names, args, strict=False))
        for name, x in kwargs.items():
            if name in given:
                raise TypeError(f"{self._name()}: got {name} twice")
            if name not in self.call.parameters and not self.call.open:
                raise TypeError(f"{self._name()}: takes no {name}; it takes {', '.join(names)}")
            given[name] = x
        for name, default in self.call.parameters.items():
            if name not in given and default is MISSING:
                raise TypeError(f"{self._name()}: {name} is missing")
        return given

    def _take(self, given: dict[str, Any], role: str) -> Tensor | None:
        for name in self.call.named(role):
            x = given.pop(name, None)
            if x is not None:
                return x if self.call.batch_first else x.transpose(0, 1)
        return None

    def _sources(self, tensors: dict[str, Tensor | None]) -> tuple[Tensor | None, Tensor | None]:
        memory = tensors["memory"]
        if memory is None:
            return tensors["key"], tensors["value"]
        if not self.memory:
            raise RefusedError(self, f"was proven as self-attention only, but {self.call.named('memory')[0]} came")
        return memory, memory

    def _masks(self, given: dict[str, Any]) -> tuple[Mask | None, Tensor | None]:
        mask: Mask | None = None
        bias: Tensor | None = None
        for name in self.call.named("mask"):
            x = given.pop(name, None)
            if x is None:
                continue
            found = self.readers[name].read(x) if name in self.readers and isinstance(x, Tensor) else None
            if found is None:
                came = f"{kind_of(x)} tensor of shape {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
                known = f"what was proven is {self.readers[name]}" if name in self.readers else "none was understood"
                raise RefusedError(self, f"cannot read {name}, a {came}; {known}")
            mask = found[0] if mask is None else mask if found[0] is None else mask & found[0]
            bias = found[1] if bias is None else bias if found[1] is None else bias + found[1]
        return mask, bias

    def _nothing_left(self, given: dict[str, Any]) -> None:
        """What nobody took must be at its default or without effect."""
        for name, x in given.items():
            if name in HARMLESS or x is None or name not in self.call.parameters:
                continue
            default = self.call.parameters[name]
            if x is not default and not (isinstance(x, bool | int | float | str) and x == default):
                raise RefusedError(self, f"{name} was not understood when the module was adopted, and {name}={_short(x)} came")

    def _name(self) -> str:
        return f"adopted {type(self.original).__name__}"

    # ---- computing --------------------------------------------------------------------------------------------------

    def _attend(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, mask: Mask | None, bias: Tensor | None,
        given: dict[str, Any], weights: bool, returns_bias: bool,
    ) -> dict[str | None, Any]:  # fmt: skip
        layer, call = self.layer, self.call
        cache = next((given.pop(n) for n in call.named("cache") if given.get(n) is not None), None)
        handed = next((given.pop(n) for n in call.named("angles") if given.get(n) is not None), None)
        added = next((given.pop(n) for n in call.named("bias") if given.get(n) is not None), None)
        if cache is handed is added is None and not returns_bias and not (self.takes_place and mask is not None):
            found = layer(query, key, value, mask=mask, bias=bias, return_weights=weights)
            return {"out": found} if isinstance(found, Tensor) else {"out": found[0], "weights": found[1]}
        if isinstance(layer, WithLearnedKeys):
            raise RefusedError(self, "has learned keys, which take no cache, rotations or bias")
        start = 0 if cache is None else _length(cache, self.original.layer_idx, key is not None)
        q, k, v = self._projected(query, key, value, cache, handed, start)
        T, S = q.shape[2], k.shape[2]
        key_start = max(0, start + T - S) if key is None else 0
        given_mask = mask
        own = None if self.takes_place and mask is not None else layer.mask
        mask = mask if own is None else own if mask is None else own & mask
        placed = key is None and given_mask is None  # a tensor goes by the columns that there are
        positions = layer.positions
        if added is None and positions is not None and positions.biases:
            at = torch.arange(max(T + start, S), device=q.device)
            added = positions.bias(at[start : start + T] if key is None else at[:T], at[:S] + key_start)
        if added is not None:
            added = added[..., added.shape[-1] - S :] if added.shape[-1] > S else added
            bias = added if bias is None else added + (bias if bias.ndim == 4 else bias.unsqueeze(-3))
        result = attention(
            q, k, v, mask=mask, bias=bias, scale=layer.scale, dropout=layer.dropout if layer.training else 0.0,
            softcap=layer.softcap, sinks=layer.sinks, start=start if placed else None, key_start=key_start if placed else 0,
            return_weights=weights,
        )  # fmt: skip
        out, found = (result, {}) if isinstance(result, Tensor) else (result[0], {"weights": result[1]})
        if returns_bias:
            found["bias"] = q.new_zeros(1, q.shape[1], T, S) if added is None else added
        return {"out": layer.merge(out, query), **found}

    def _projected(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, cache: Any, handed: Any, start: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as they meet: turned, and with what a cache holds."""
        layer, turning = self.layer, self.turning
        index = None if cache is None else self.original.layer_idx
        kept = None if cache is None or key is None else _crossed(cache, index)
        if kept is not None:
            q, _, _, _ = layer.project(query, query.new_zeros(query.shape[0], 1, layer.key_dim), None)
            return q, *kept
        q, k, v, _ = layer.project(query, key, value)
        positions = layer.positions
        if handed is not None:
            if turning is None:
                raise RefusedError(self, f"{self.call.named('angles')[0]} came, but how it turns by rotations was not found")
            cos, sin = (x.unsqueeze(1) for x in turning.form.read(handed))
            q, k = turning.rope.rotate(q, cos, sin), turning.rope.rotate(k, cos, sin)
        elif positions is not None and positions.turns:
            at = torch.arange(start, start + q.shape[2], device=q.device)
            q, k = positions.turn(q, k, at, at)
        if cache is not None:
            k, v = _update(cache, k, v, index, key is not None)
        return q, k, v


# ---- Hugging Face's caches ------------------------------------------------------------------------------------------


def _length(cache: Any, index: int, cross: bool) -> int:
    """The tokens that a cache has seen."""
    part = getattr(cache, "self_attention_cache", cache)
    return 0 if cross else int(part.get_seq_length(index))


def _crossed(cache: Any, index: Any) -> tuple[Tensor, Tensor] | None:
    """Keys and values of the other text, if an earlier step has projected them."""
    if not hasattr(cache, "is_updated") or not cache.is_updated.get(index):
        return None
    layer = cache.cross_attention_cache.layers[index]
    return layer.keys, layer.values


def _update(cache: Any, k: Tensor, v: Tensor, index: Any, cross: bool) -> tuple[Tensor, Tensor]:
    if hasattr(cache, "is_updated"):
        if cross:
            cache.is_updated[index] = True
        cache = cache.cross_attention_cache if cross else cache.self_attention_cache
    return cache.update(k, v, index)


def _short(x: Any) -> str:
    return f"a tensor of shape {list(x.shape)}" if isinstance(x, Tensor) else f"{x!r:.40}"


# ---- making -----------------------------------------------------------------------------------------------------------


def adapter(original: nn.Module, reading: Reading) -> Adopted:
    """An Adopted that is also an instance of the original's class, for those who ask by class."""
    returns = what_returns(reading)
    made = _blank(type(original))
    Adopted.__init__(made, original, reading, returns)
    _prove(reading, returns)
    return made


def _blank(kind: type[nn.Module]) -> Adopted:
    made = type(f"Adopted{kind.__name__}", (Adopted, kind), {"__module__": Adopted.__module__})
    return cast(Adopted, made.__new__(made))


def what_returns(reading: Reading) -> dict[bool, Returns]:
    """Without weights asked for, and with, as far as the module knows of that."""
    driver = reading.driver
    found = {False: _returns(reading, driver, {})}
    for name in driver.call.named("weights"):
        try:
            found[True] = _returns(reading, driver, {name: True})
        except AdoptionError:
            raise
        except Exception:  # it wants more for that, as Hugging Face's models want eager attention
            continue
    return found


def _returns(reading: Reading, driver: Driver, extra: dict[str, Any]) -> Returns:
    given = driver.inputs(2, 5, seed=10, size=reading.found.size)
    leaves, tree = pytree.tree_flatten(driver.run(given, extra))
    query = given["query"]
    key = given.get("key", given.get("memory", query))
    with torch.no_grad():
        out, weights = reading.exact(query, key, given.get("value", given.get("memory", key)), return_weights=True)
        out = out if driver.call.batch_first else out.transpose(0, 1)
        positions = reading.exact.positions
        at = torch.arange(5)
        bias = positions.bias(at, at) if positions is not None and positions.biases else torch.zeros_like(weights[:1])
    known = {"out": out, "weights": weights, "mean weights": weights.mean(1), "bias": bias}
    named: list[str | None] = []
    for leaf in leaves:
        if leaf is None:
            named.append(None)
            continue
        name = next((n for n, x in known.items() if isinstance(leaf, Tensor) and _same(leaf, x)), MISSING)
        if name is MISSING:
            came = f"a tensor of shape {list(leaf.shape)}" if isinstance(leaf, Tensor) else f"{leaf!r:.40}"
            raise AdoptionError(f"it also returns {came}, whose meaning was not found")
        named.append(cast(str, name))
    if "out" not in named:
        raise AdoptionError("its output was not found in what it returns")
    return Returns(None if tree.is_leaf() else tree, tuple(named))


def _same(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and (off(x.double(), y) <= CLOSE or bool((x == y).all()))


def _prove(reading: Reading, returns: dict[bool, Returns]) -> None:
    """The adapter of the float64 copy against that copy, called alike, results compared leaf by leaf."""
    driver = reading.driver
    made = Adopted.__new__(Adopted)
    Adopted.__init__(made, driver.module, replace(reading, layer=reading.exact, copied=list[Copied]()), returns)
    other = Driver(made.eval(), driver.call)
    calls: list[dict[str, Any]] = [{}]
    if True in returns:
        calls += [{name: True} for name in driver.call.named("weights")]
    for seed, extra in enumerate(calls, start=30):
        given = driver.inputs(2, 6, seed=seed, size=reading.found.size)
        pairs = zip(*(pytree.tree_leaves(d.run(given, extra)) for d in (driver, other)), strict=True)
        for theirs, ours in pairs:
            if isinstance(theirs, Tensor) and not _same(theirs, ours.double()):
                raise AdoptionError(f"its adapter returns something else: {off(ours.double(), theirs.double()):.2g} apart")
