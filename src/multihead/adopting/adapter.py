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
from ..masks import Causal, Mask
from . import AdoptionError
from .build import Copied, WithLearnedKeys
from .conventions import pattern
from .drive import Call, Driver, sources
from .reading import Reading
from .search import CLOSE, off

MISSING = inspect.Parameter.empty
CAUSAL = Causal()


@dataclass(frozen=True)
class Returns:
    """What a module returns: the tree of its result (None: a bare tensor), each leaf by its meaning; flat: a plain tuple."""

    tree: Any
    leaves: tuple[str | None, ...]
    flat: bool

    def make(self, found: dict[str | None, Any]) -> Any:
        leaves = [found.get(leaf) for leaf in self.leaves]
        if self.tree is None:
            return leaves[0]
        return tuple(leaves) if self.flat else pytree.tree_unflatten(leaves, self.tree)


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

    def __init__(self, original: nn.Module, reading: Reading, returns: dict[bool | None, Returns]) -> None:
        nn.Module.__init__(self)
        self.layer, self.training = reading.layer, original.training
        own = self.__dict__
        own["original"], own["copied"], own["call"] = original, reading.copied, reading.driver.call
        own["behaviour"], own["turning"], own["returns"] = reading.behaviour, reading.turning, returns
        own["memory"], own["memory_masks"], own["unknown"] = reading.memory, reading.memory_masks, reading.dropouts.unknown
        own["number"] = next(
            (n for n in (getattr(original, a, None) for a in ("layer_idx", "layer_id")) if n is not None), None
        )
        own["dtype"], own["trial"] = next((p.dtype for p in original.parameters()), torch.float32), False
        for name, hooks in vars(original).items():  # one object, so that handles given out go on working
            if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
                own[name] = hooks

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__.get("original")
            if original is None or name.startswith("__"):
                raise
            found = getattr(original, name)
            if isinstance(found, Tensor) and name in vars(original):
                raise AttributeError(
                    f"adopted {type(original).__name__}: {name} was left there by a call of the original, which is not called "
                    "any more; multihead's layers return weights by return_weights=True"
                ) from None
            return found

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "layer" and isinstance(value, nn.Module | nn.Parameter) and hasattr(self.original, name):
            raise AttributeError(
                f"adopted {type(self.original).__name__}: {name} is the original's, which is not called any more; set it on "
                ".layer (query, key, value, out), or restore() first"
            )
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _blank, (type(self.original),), self.__dict__

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the original's."""
        if not self.trial:
            return self._forward(args, kwargs)
        try:
            return self._forward(args, kwargs)
        except RefusedError:
            raise
        except Exception as error:  # adopt() tries an example: whatever fails here goes back to its place
            raise RefusedError(self, f"it failed with {type(error).__name__}: {str(error).splitlines()[0]}") from error

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.training and self.unknown:
            raise RefusedError(self, f"in train() it does what was not understood ({', '.join(self.unknown)})")
        call: Call = self.call
        given = self._bound(args, kwargs)
        tensors = {role: self._take(given, role) for role in ("query", "key", "value", "memory")}
        query, (key, value) = cast(Tensor, tensors["query"]), self._sources(tensors)
        flag = next((bool(given.pop(name)) for name in call.named("weights") if given.get(name) is not None), None)
        returns = self.returns.get(flag)
        if returns is None:
            raise RefusedError(self, f"what it returns for {call.named('weights')[0]}={flag} was not found out")
        weights = any(leaf is not None and "weights" in leaf for leaf in returns.leaves)
        found = self._attend(query, key, value, given, weights, "bias" in returns.leaves)
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

    def _masks(self, given: dict[str, Tensor], sizes: tuple[int, int, int, int]) -> tuple[Mask | None, Tensor | None]:
        """The masks that were given, read by the conventions that were proven. sizes: batch, heads, q_len, kv_len"""
        mask: Mask | None = None
        bias: Tensor | None = None
        readers = self.behaviour.readers
        if len(given) > 1 and not self.behaviour.together:
            raise RefusedError(self, f"{' and '.join(given)} came, and what it does with both was not understood")
        for name, x in given.items():
            found = readers[name].read(x, sizes) if name in readers and isinstance(x, Tensor) else None  # pyright: ignore[reportUnnecessaryIsInstance]
            if found is None:
                known = (
                    f"what was proven is {readers[name]}, and values of such masks"
                    if name in readers
                    else "none was understood"
                )
                raise RefusedError(
                    self, f"cannot read {name}, {_short(x)}, for {sizes[2]} queries and {sizes[3]} keys; {known}"
                )
            mask = found[0] if mask is None else mask if found[0] is None else mask & found[0]
            added = found[1] if found[1] is None or found[1].ndim != 3 else found[1].unsqueeze(1)
            bias = added if bias is None else bias if added is None else bias + added
        return mask, bias

    def _own(self, given: dict[str, Tensor], causal: bool | None) -> Mask | None:
        """The module's own mask as far as it holds beside those given, and as is_causal wants it."""
        if any(self.behaviour.readers[name].takes_place for name in given):
            return None
        if causal is None or (given and self.behaviour.unheard):
            return self.layer.mask
        meant = self.behaviour.causal.get(causal)
        if meant is None or given:
            raise RefusedError(self, f"is_causal={causal} came, and what it does with that was not understood")
        return {"own": self.layer.mask, "none": None, "causal": CAUSAL}[meant]

    def _nothing_left(self, given: dict[str, Any]) -> None:
        """What nobody took must be at its default or without effect."""
        for name, x in given.items():
            if name in self.behaviour.harmless or x is None or (x is False and name not in self.call.parameters):
                continue
            default = self.call.parameters.get(name, MISSING)
            if x is not default and not (isinstance(x, bool | int | float | str) and x == default):
                raise RefusedError(self, f"{name} was not understood when the module was adopted, and {name}={_short(x)} came")

    def _name(self) -> str:
        return f"adopted {type(self.original).__name__}"

    # ---- computing --------------------------------------------------------------------------------------------------

    def _attend(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, given: dict[str, Any], weights: bool, returns_bias: bool
    ) -> dict[str | None, Any]:
        layer, call = self.layer, self.call
        cache, handed, added = (self._one(given, role) for role in ("cache", "angles", "bias"))
        masks = {name: given.pop(name) for name in call.named("mask") if given.get(name) is not None}
        causal = cast("bool | None", self._one(given, "causal") if call.takes("causal") else given.pop("is_causal", None))
        self._nothing_left(given)
        self._check_sources(query, key, cache, masks, added)
        if not (masks or returns_bias) and cache is handed is added is causal is None:
            return _found(layer(query, key, value, return_weights=weights))
        if isinstance(layer, WithLearnedKeys):
            if cache is not None or handed is not None or added is not None:
                raise RefusedError(self, "has learned keys, which take no cache, rotations or bias")
            source = query if key is None else key
            mask, bias = self._masks(masks, (query.shape[0], layer.num_heads, query.shape[1], source.shape[1]))
            return _found(layer(query, key, value, mask=mask, bias=bias, return_weights=weights))
        start = 0 if cache is None else _length(cache, self._number(), key is not None)
        q, k, v = self._projected(query, key, value, cache, handed, start)
        T, S = q.shape[2], k.shape[2]
        mask, bias = self._masks(masks, (q.shape[0], q.shape[1], T, S))
        own = self._own(masks, causal)
        placed = key is None and not masks  # a tensor goes by the columns that there are
        key_start = max(0, start + T - S) if key is None else 0
        mask = mask if own is None else own if mask is None else own & mask
        positions = layer.positions
        if added is None and positions is not None and positions.biases:
            at = torch.arange(max(T + start, S + key_start), device=q.device)
            added = positions.bias(at[start : start + T] if key is None else at[:T], at[key_start : key_start + S])
        if added is not None:
            bias = added if bias is None else added + bias
        found = _found(attention(
            q, k, v, mask=mask, bias=bias, scale=layer.scale, dropout=layer.dropout if layer.training else 0.0,
            softcap=layer.softcap, sinks=layer.sinks, start=start if placed else None, key_start=key_start if placed else 0,
            return_weights=weights,
        ))  # fmt: skip
        if returns_bias:
            found["bias"] = q.new_zeros(1, q.shape[1], T, S) if added is None else added
        return found | {"out": layer.merge(found["out"], query)}

    def _one(self, given: dict[str, Any], role: str) -> Any:
        return next((given.pop(name) for name in self.call.named(role) if given.get(name) is not None), None)

    def _number(self) -> Any:
        if self.number is None:
            raise RefusedError(self, "a cache came, but it does not know its layer's number, layer_idx")
        return self.number

    def _check_sources(
        self, query: Tensor, key: Tensor | None, cache: Any, masks: dict[str, Tensor], added: Tensor | None
    ) -> None:
        if query.ndim != 3:
            raise RefusedError(self, f"was proven for [batch, tokens, dim], but {_short(query)} came")
        if cache is not None and not hasattr(cache, "update"):
            raise RefusedError(self, f"a cache came that is none of transformers', {_short(cache)}")
        if added is not None and not (self.behaviour.bias and added.ndim == 4):
            raise RefusedError(self, f"{self.call.named('bias')[0]} came, {_short(added)}, and was not understood")
        crossed = key is not None and self.call.takes("memory")
        if crossed and masks and not self.memory_masks:
            raise RefusedError(
                self, f"{' and '.join(masks)} came with another text, and what it does with both was not understood"
            )
        if key is not None and not crossed and not self.behaviour.free and key.shape[1] != query.shape[1]:
            raise RefusedError(
                self, f"{query.shape[1]} queries and {key.shape[1]} keys came, and it was proven for equal numbers"
            )

    def _projected(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, cache: Any, handed: Any, start: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as they meet: turned, and with what a cache holds."""
        layer, turning = self.layer, self.turning
        index = None if cache is None else self._number()
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


def _found(result: Tensor | tuple[Tensor, ...]) -> dict[str | None, Any]:
    return {"out": result} if isinstance(result, Tensor) else {"out": result[0], "weights": result[1]}


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


def what_returns(reading: Reading) -> dict[bool | None, Returns]:
    """By what is asked for of weights: nothing (None), False or True; what fails is not there."""
    driver = reading.driver
    found: dict[bool | None, Returns] = {None: _returns(reading, driver, {})}
    for name in driver.call.named("weights"):
        for flag in (False, True):
            try:
                found[flag] = _returns(reading, driver, {name: flag})
            except AdoptionError:
                raise
            except Exception:  # it wants more for that, as Hugging Face's models want eager attention
                continue
    if driver.call.open:
        found.setdefault(False, found[None])
    return found


def _returns(reading: Reading, driver: Driver, extra: dict[str, Any]) -> Returns:
    given = driver.inputs(2, 5, seed=10, size=reading.found.size)
    leaves, tree = pytree.tree_flatten(driver.run(given, extra))
    with torch.no_grad():
        out, weights = reading.exact(*sources(given), return_weights=True)
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
    return Returns(None if tree.is_leaf() else tree, tuple(named), tree.type is tuple and tree.num_children == len(leaves))


def _same(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and (off(x.double(), y) <= CLOSE or bool((x == y).all()))


def _prove(reading: Reading, returns: dict[bool | None, Returns]) -> None:
    """The adapter of the float64 copy against that copy, called alike, results compared leaf by leaf."""
    driver = reading.driver
    made = Adopted.__new__(Adopted)
    Adopted.__init__(made, driver.module, replace(reading, layer=reading.exact, copied=list[Copied]()), returns)
    other = Driver(made, driver.call)
    calls: list[dict[str, Any]] = [{}]
    calls += [{name: flag} for name in driver.call.named("weights") for flag in (False, True) if flag in returns]
    for name, reader in reading.behaviour.readers.items():
        for convention, shape in (several[0] for several in reader.known.values()):
            allowed = pattern(shape, 2, reading.exact.num_heads, 6, 6)
            calls.append({name: convention.write(allowed)})
    for seed, extra in enumerate(calls, start=30):
        given = driver.inputs(2, 6, seed=seed, size=reading.found.size)
        pairs = zip(*(pytree.tree_leaves(d.run(given, extra)) for d in (driver, other)), strict=True)
        for theirs, ours in pairs:
            if isinstance(theirs, Tensor) != isinstance(ours, Tensor):
                raise AdoptionError(
                    f"with {', '.join(extra) or 'nothing more'} it returns something whose meaning was not found"
                )
            if isinstance(theirs, Tensor) and not _same(theirs, ours.double()):
                raise AdoptionError(f"its adapter returns something else: {off(ours.double(), theirs.double()):.2g} apart")
