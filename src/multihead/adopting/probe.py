"""What a module does with the masks it is given, and where that is not what they say: asked by running it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..layer import MultiHeadAttention
from ..masks import Allowed, Mask, ValidLens
from .affine import exact_copy
from .conventions import CONVENTIONS, Reader, patterns
from .drive import Driver
from .search import CLOSE, off

BATCH, TOKENS, KEYS = 2, 5, 7
EMPTY = "a query that may attend to nothing gets"


@dataclass
class Masks:
    """What was found out.

    readers      for each parameter that takes a mask, how to read it
    takes_place  whether a mask that is given takes the place of the module's own (Hugging Face's causal one)
    differences  sentences: where the module's own code does something else than its masks say
    worst        the largest difference of what agreed, over the largest value
    compared     how many masks agreed
    """

    readers: dict[str, Reader] = field(default_factory=dict[str, Reader])
    takes_place: bool = False
    differences: list[str] = field(default_factory=list[str])
    worst: float = 0.0
    compared: int = 0


class Probe:
    """Asks one module. `layer` has the module's weights and own mask, `bare` has no mask; all three in float64."""

    def __init__(self, driver: Driver, layer: MultiHeadAttention, bare: MultiHeadAttention, size: float) -> None:
        self.driver, self.layer, self.bare, self.size = driver, layer, bare, size
        self.found = Masks()
        self.free = self._free()

    def run(self) -> Masks:
        for name in self.driver.call.named("mask"):
            reader = Reader(name)
            self._conventions(name, reader)
            self._lengths(name, reader)
            if reader:
                self.found.readers[name] = reader
                self._empty_row(name, reader)
                self._heads_axis(name, reader)
                self._half(name, reader)
        if not self.free and self.driver.call.fed != ("query",):
            self.found.differences.append("it takes as many keys as queries only; here there may be any number")
        return self.found

    # ---- what a parameter means -------------------------------------------------------------------------------------

    def _conventions(self, name: str, reader: Reader) -> None:
        tokens = (TOKENS, KEYS if self.free else TOKENS)
        given = self._inputs(BATCH, *tokens)
        for shape, allowed in patterns(BATCH, self.layer.num_heads, *tokens):
            for convention in CONVENTIONS:
                if self._agrees(given, name, convention.write(allowed), shape.wrap(allowed)):
                    reader.learn(convention, shape, allowed.ndim)

    def _lengths(self, name: str, reader: Reader) -> None:
        tokens = (TOKENS, KEYS if self.free else TOKENS)
        given = self._inputs(BATCH, *tokens)
        for lengths in (torch.tensor([3, 5]), torch.tensor([[3, 1, 4, 5, 2], [2, 5, 1, 3, 4]])):
            if self._agrees(given, name, lengths, ValidLens(lengths)):
                reader.lengths.add(lengths.ndim)

    def _agrees(self, given: dict[str, Tensor], name: str, argument: Tensor, mask: Mask) -> bool:
        """Whether the module does with the argument what the layer does with the mask; its own mask may hold as well or not."""
        truth = self._ask(given, {name: argument})
        if truth is None:
            return False
        for layer in (self.layer, self.bare) if self.layer.mask is not None else (self.layer,):
            error = off(predict(layer, given, mask), truth)
            if error <= CLOSE:
                self.found.takes_place |= layer is self.bare and self.layer.mask is not None
                self.found.worst, self.found.compared = max(self.found.worst, error), self.found.compared + 1
                return True
        return False

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
                self._differs("a query that may attend to nothing gets NaN from it; here its weights are zero")
            elif float((row - self._mean(given)).abs().max()) <= 1e-4 * float(row.abs().max()):
                self._differs(
                    "a query that may attend to nothing gets the mean of all values from it; here its weights are zero"
                )

    def _mean(self, given: dict[str, Tensor]) -> Tensor:
        """What equal weights give to the first text."""
        value = given.get("value", given.get("memory", given.get("key", given["query"]))).double()
        heads = self.layer.value(value)[0].mean(0).view(1, self.layer.kv_heads, 1, -1)
        heads = heads.repeat_interleave(self.layer.num_heads // self.layer.kv_heads, 1)
        return self.layer.merge(heads, given["query"][:1, :1].double())[0, 0]

    def _heads_axis(self, name: str, reader: Reader) -> None:
        """A mask [batch, q, k] against scores [batch, heads, q, k] is put on the heads, if it is not refused."""
        known = next((c for (_, n), (c, _) in reader.by_shape.items() if n in (2, 4)), None)
        if known is None or (known.kind, 3) in reader.by_shape:
            return
        H = self.layer.num_heads
        given = self._inputs(H, TOKENS, TOKENS)
        allowed = torch.rand(H, TOKENS, TOKENS, generator=torch.Generator().manual_seed(12)) < 0.5
        allowed[..., 0] = True
        truth = self._ask(given, {name: known.write(allowed)})
        layer = self.bare if self.found.takes_place else self.layer
        if truth is not None and off(predict(layer, given, Allowed(allowed[None])), truth) <= CLOSE:
            self._differs(
                f"a mask [batch, q, k] lands on its heads where batch is {H}, and fails elsewhere; here it holds for its batch"
            )

    def _half(self, name: str, reader: Reader) -> None:
        """What a −1e9 does in float16."""
        convention, shape = next(((c, s) for c, s in reader.by_shape.values() if c.kind != "float"), (None, None))
        if convention is None or shape is None:
            return
        allowed = next(a for s, a in patterns(BATCH, self.layer.num_heads, TOKENS, TOKENS) if s is shape)
        half = Driver(_half_of(self.driver.module), self.driver.call)
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

    def _ask(self, given: dict[str, Tensor], extra: dict[str, Tensor]) -> Tensor | None:
        try:
            return self.driver(given, extra)
        except Exception:  # it does not take such a mask
            return None

    def _free(self) -> bool:
        """Whether there may be more keys than queries."""
        if self.driver.call.fed == ("query",):
            return False
        given = self._inputs(BATCH, TOKENS, KEYS)
        truth = self._ask(given, {})
        return truth is not None and off(predict(self.layer, given, None), truth) <= CLOSE


def predict(layer: MultiHeadAttention, given: dict[str, Tensor], mask: Mask | None) -> Tensor:
    """What the layer gives for tensors by role."""
    query = given["query"]
    key = given.get("key", given.get("memory", query))
    with torch.no_grad():
        return layer(query, key, given.get("value", given.get("memory", key)), mask=mask, kernel="reference")


def _blocked(reader: Reader, heads: int) -> Iterator[tuple[Tensor, bool]]:
    """Arguments that hide every key from the first query of the first text, and whether from its other queries as well."""
    for convention, shape in reader.by_shape.values():
        allowed = torch.ones(shape.sizes(BATCH, heads, TOKENS, TOKENS), dtype=torch.bool)
        by_query = "q" in shape.name
        if shape.name == "[q, k]" or not by_query:
            allowed[0] = False
        else:
            allowed[0, ..., 0, :] = False
        yield convention.write(allowed), not by_query
    if 1 in reader.lengths:
        yield torch.tensor([0, TOKENS]), True


def _half_of(module: nn.Module) -> nn.Module:
    return exact_copy(module).half()
