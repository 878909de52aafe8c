"""What a module does with its arguments, and where that is not what they say: asked by running it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..layer import MultiHeadAttention
from ..masks import Allowed, Causal, Mask, ValidLens
from .affine import exact_copy
from .conventions import CONVENTIONS, Convention, Reader, Shape, pattern, patterns, soft
from .drive import SIDE, Driver, sources
from .search import CLOSE, off

BATCH, TOKENS, KEYS = 2, 5, 7
EMPTY = "a query that may attend to nothing gets"


@dataclass
class Behaviour:
    """What was found out.

    readers      for each parameter that takes a mask, how to read it
    together     whether two masks at once hold both
    free         whether there may be another number of keys than of queries
    bias         whether a parameter of that role is added to the scores, [batch | 1, heads, q, k]
    causal       what is_causal=True and False stand for where there is no mask: "own" mask, "causal" or "none"
    unheard      whether is_causal is without effect where there is one
    harmless     arguments that change nothing
    differences  sentences: where the module's own code does something else than its arguments say
    worst        the largest difference of what agreed, over the largest value;  compared  how many calls agreed
    """

    readers: dict[str, Reader] = field(default_factory=dict[str, Reader])
    together: bool = True
    free: bool = False
    bias: bool = False
    causal: dict[bool, str] = field(default_factory=dict[bool, str])
    unheard: bool = False
    harmless: set[str] = field(default_factory=set[str])
    differences: list[str] = field(default_factory=list[str])
    worst: float = 0.0
    compared: int = 0


class Probe:
    """Asks one module. `layer` has the module's weights and own mask, `bare` has no mask; all three in float64."""

    def __init__(self, driver: Driver, layer: MultiHeadAttention, bare: MultiHeadAttention, size: float) -> None:
        self.driver, self.layer, self.bare, self.size = driver, layer, bare, size
        self.found = Behaviour()
        self.found.free = self._free()

    def run(self) -> Behaviour:
        for name in self.driver.call.named("mask"):
            reader = Reader(name)
            self._conventions(name, reader)
            self._lengths(name, reader)
            if reader:
                self.found.readers[name] = reader
                self._empty_row(name, reader)
                self._heads_axis(name, reader)
                self._half(name, reader)
        self.found.together = self._together()
        self.found.bias = self._bias()
        self.found.causal = self._causal()
        self.found.unheard = self._unheard()
        self.found.harmless = set(self._harmless())
        return self.found

    # ---- what a parameter means -------------------------------------------------------------------------------------

    def _conventions(self, name: str, reader: Reader) -> None:
        tokens = (TOKENS, KEYS if self.found.free else TOKENS)
        given = self._inputs(BATCH, *tokens)
        for shape, allowed in patterns(BATCH, self.layer.num_heads, *tokens):
            for convention in CONVENTIONS:
                mask, bias = (None, _four(allowed.shape, shape)) if convention.read is None else (shape.wrap(allowed), None)
                if self._agrees(given, {name: convention.write(allowed)}, mask, bias, reader):
                    reader.learn(convention, shape, allowed.ndim)

    def _lengths(self, name: str, reader: Reader) -> None:
        tokens = (TOKENS, KEYS if self.found.free else TOKENS)
        given = self._inputs(BATCH, *tokens)
        for lengths in (torch.tensor([3, 5]), torch.tensor([[3, 1, 4, 5, 2], [2, 5, 1, 3, 4]])):
            if self._agrees(given, {name: lengths}, ValidLens(lengths), None, reader):
                reader.lengths.add(lengths.ndim)

    def _agrees(
        self,
        given: dict[str, Tensor],
        extra: dict[str, Any],
        mask: Mask | None,
        bias: Tensor | None,
        reader: Reader | None = None,
    ) -> bool:
        """Whether the module does with the argument what the layer does with the mask; its own mask may hold as well or not."""
        truth = self._ask(given, extra)
        if truth is None:
            return False
        for layer in (self.layer, self.bare) if self.layer.mask is not None and reader is not None else (self.layer,):
            error = off(predict(layer, given, mask, bias), truth)
            if error <= CLOSE:
                if reader is not None and layer is self.bare and self.layer.mask is not None:
                    reader.takes_place = True
                self.found.worst, self.found.compared = max(self.found.worst, error), self.found.compared + 1
                return True
        return False

    def _together(self) -> bool:
        """Whether the first two masks hold both where both are given."""
        readers = list(self.found.readers.values())[:2]
        if len(readers) < 2:
            return True
        tokens = (TOKENS, KEYS if self.found.free else TOKENS)
        given, extra = self._inputs(BATCH, *tokens), dict[str, Any]()
        both: Mask | None = None
        for reader in readers:
            convention, shape = (
                next((c, s) for several in reader.known.values() for c, s in several) if reader.known else (None, None)
            )
            if convention is None or shape is None or convention.read is None:
                return True
            allowed = pattern(shape, BATCH, self.layer.num_heads, *tokens)
            if extra:  # the second hides what the first does not
                allowed = ~allowed
                allowed[..., 0] = True
            extra[reader.parameter] = convention.write(allowed)
            both = shape.wrap(allowed) if both is None else both & shape.wrap(allowed)
        layer = self.bare if any(reader.takes_place for reader in readers) else self.layer
        truth = self._ask(given, extra)
        return truth is not None and off(predict(layer, given, both), truth) <= CLOSE

    def _bias(self) -> bool:
        names, given = self.driver.call.named("bias"), self._inputs(BATCH, TOKENS, TOKENS)
        if not names:
            return False
        positions, self.layer.positions = self.layer.positions, None  # a bias that is handed over replaces the module's own
        try:
            shapes = [torch.Size((batch, self.layer.num_heads, TOKENS, TOKENS)) for batch in (1, BATCH)]
            return all(self._agrees(given, {names[0]: soft(shape)}, None, soft(shape)) for shape in shapes)
        finally:
            self.layer.positions = positions

    def _causal(self) -> dict[bool, str]:
        """What is_causal stands for where there is no mask."""
        call = self.driver.call
        name = next(iter(call.named("causal")), "is_causal" if call.open else None)
        found: dict[bool, str] = {}
        if name is None:
            return found
        given = self._inputs(BATCH, TOKENS, TOKENS)
        for value in (True, False):
            truth = self._ask(given, {name: value})
            guesses = {"own": (self.layer, None), "none": (self.bare, None), "causal": (self.bare, Causal())}
            right = (
                what
                for what, (layer, mask) in guesses.items()
                if truth is not None and off(predict(layer, given, mask), truth) <= CLOSE
            )
            what = next(right, None)
            if what is not None:
                found[value] = what
        return found

    def _unheard(self) -> bool:
        """Whether is_causal changes nothing beside any of the masks."""
        name = next(iter(self.driver.call.named("causal")), "is_causal")
        given = self._inputs(BATCH, TOKENS, TOKENS)
        for reader in self.found.readers.values():
            for convention, shape in (several[0] for several in reader.known.values()):
                allowed = pattern(shape, BATCH, self.layer.num_heads, TOKENS, TOKENS)
                extra = {reader.parameter: convention.write(allowed)}
                alone, *both = (self._ask(given, extra | more) for more in ({}, {name: True}, {name: False}))
                if alone is None or any(x is None or not torch.equal(x, alone) for x in both):
                    return False
        return True

    def _harmless(self) -> Iterator[str]:
        """Arguments that leave the result as it is, its shape included."""
        call, given = self.driver.call, self._inputs(BATCH, TOKENS, TOKENS)
        want = pytree.tree_leaves(self.driver.run(given))
        for name, value in SIDE.items():
            if name in call.parameters or call.open:
                try:
                    found = pytree.tree_leaves(self.driver.run(given, {name: value(TOKENS)}))
                except Exception:  # it does not take it
                    continue
                if len(found) == len(want) and all(map(_same, found, want)):
                    yield name

    # ---- where its code does something else ---------------------------------------------------------------------------

    def _empty_row(self, name: str, reader: Reader) -> None:
        """What a query gets that may attend to nothing, in float32, where a −1e9 swallows the score it is added to."""
        single = Driver(exact_copy(self.driver.module).float(), self.driver.call)
        given = {role: x.float() for role, x in self._inputs(BATCH, TOKENS, TOKENS).items()}
        for argument, whole_text in _blocked(reader, self.layer.num_heads):
            try:
                out = single(given, {name: argument.float() if argument.is_floating_point() else argument})[0]
            except Exception:  # it does not run in float32
                continue
            row = (out.mean(0) if whole_text else out[0]).double()
            if bool(row.isnan().any()):
                self._differs(f"{EMPTY} NaN from it; here its weights are zero")
            elif float((row - self._mean(given)).abs().max()) <= 1e-4 * float(row.abs().max()):
                self._differs(f"{EMPTY} the mean of all values from it; here its weights are zero")

    def _mean(self, given: dict[str, Tensor]) -> Tensor:
        """What equal weights give to the first text."""
        heads = self.layer.value(sources(given)[2].double())[0].mean(0).view(1, self.layer.kv_heads, 1, -1)
        heads = heads.repeat_interleave(self.layer.num_heads // self.layer.kv_heads, 1)
        return self.layer.merge(heads, given["query"][:1, :1].double())[0, 0]

    def _heads_axis(self, name: str, reader: Reader) -> None:
        """A mask [batch, q, k] against scores [batch, heads, q, k] is put on the heads, if it is not refused."""
        known = next((several[0][0] for (_, n), several in reader.known.items() if n in (2, 4)), None)
        if known is None or known.read is None or (known.kind, 3) in reader.known:
            return
        H = self.layer.num_heads
        given = self._inputs(H, TOKENS, TOKENS)
        allowed = torch.rand(H, TOKENS, TOKENS, generator=torch.Generator().manual_seed(12)) < 0.5
        allowed[..., 0] = True
        truth = self._ask(given, {name: known.write(allowed)})
        layer = self.bare if reader.takes_place else self.layer
        if truth is not None and off(predict(layer, given, Allowed(allowed[None])), truth) <= CLOSE:
            self._differs(
                f"a mask [batch, q, k] lands on its heads where batch is {H}, and fails elsewhere; here it holds for its batch"
            )

    def _half(self, name: str, reader: Reader) -> None:
        """What a −1e9 does in float16."""
        known = (pair for several in reader.known.values() for pair in several if pair[0].kind != "float")
        convention, shape = next(known, (None, None))
        if convention is None or shape is None:
            return
        allowed = pattern(shape, BATCH, self.layer.num_heads, TOKENS, TOKENS)
        half = Driver(exact_copy(self.driver.module).half(), self.driver.call)
        given = {role: x.half() for role, x in self._inputs(BATCH, TOKENS, TOKENS).items()}
        try:
            half(given)
        except Exception:  # it does not run in float16 at all, which is not the mask's fault
            return
        try:
            out = half(given, {name: convention.write(allowed)})
        except RuntimeError as error:
            self._differs(f"with a mask it fails in float16 ({str(error).splitlines()[0]}); here it does not")
            return
        if bool(out.isnan().any()):
            self._differs("with a mask it gives NaN in float16; here it does not")

    def _differs(self, said: str) -> None:
        if said not in self.found.differences:
            self.found.differences.append(said)

    # ---- asking ---------------------------------------------------------------------------------------------------------

    def _inputs(self, batch: int, q_len: int, kv_len: int) -> dict[str, Tensor]:
        return self.driver.inputs(batch, q_len, kv_len, seed=6, size=self.size)

    def _ask(self, given: dict[str, Tensor], extra: dict[str, Any]) -> Tensor | None:
        try:
            return self.driver(given, extra)
        except Exception:  # it does not take such an argument
            return None

    def _free(self) -> bool:
        """Whether there may be more keys than queries, and fewer."""
        if self.driver.call.fed == ("query",):
            return False
        for q_len, kv_len in ((TOKENS, KEYS), (KEYS, TOKENS)):
            given = self._inputs(BATCH, q_len, kv_len)
            truth = self._ask(given, {})
            if truth is None:
                self._differs("it takes as many keys as queries only; here there may be any number")
                return False
            if off(predict(self.layer, given), truth) > CLOSE:
                self._differs("where keys are more or fewer than queries it aligns them otherwise than here, at their ends")
                return False
        return True


def predict(
    layer: MultiHeadAttention, given: dict[str, Tensor], mask: Mask | None = None, bias: Tensor | None = None
) -> Tensor:
    """What the layer gives for tensors by role."""
    query, key, value = sources(given)
    long = query.shape[1] > 64
    return layer(query, key, value, mask=mask, bias=bias, kernel="auto" if long else "reference")


def _four(shape: torch.Size, of: Shape) -> Tensor:
    """Soft numbers in the shape of a mask argument, as the layer takes a bias."""
    x = soft(shape)
    return x[:, None, None] if of.name == "[batch, k]" else x


def _same(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x.shape == y.shape and bool(torch.allclose(x.double(), y.double(), rtol=1e-9, atol=1e-12, equal_nan=True))
    return type(x) is type(y) and (isinstance(x, Tensor) or x == y)


def _blocked(reader: Reader, heads: int) -> Iterator[tuple[Tensor, bool]]:
    """Arguments that hide every key from the first query of the first text, and whether from its other queries as well."""
    pairs: list[tuple[Convention, Shape]] = list(itertools.chain.from_iterable(reader.known.values()))
    for convention, shape in pairs:
        allowed = torch.ones(shape.sizes(BATCH, heads, TOKENS, TOKENS), dtype=torch.bool)
        by_query = "q" in shape.name
        if shape.name == "[q, k]" or not by_query:
            allowed[0] = False
        else:
            allowed[0, ..., 0, :] = False
        written = convention.write(allowed)
        if convention.read is None:
            written = torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, -torch.inf)
        yield written, not by_query
    if 1 in reader.lengths:
        yield torch.tensor([0, TOKENS]), True
