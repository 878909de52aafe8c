"""Recording: the places where a model attended, and at each the calls that were made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .answers import Answers
from .call import Call
from .growing import Picture
from .statistics import Passed, look

if TYPE_CHECKING:
    from .patterns import Changes, Heads

Tokens = Sequence[str] | Sequence[Sequence[str]]


class Seen(Answers):
    """One place where a model attends. Its questions are about its picture; where it holds several, ask one of them.

    calls     every call, in order;   pictures  the calls that go on from each other, each list as one
    """

    def __init__(self, recording: Recording, number: int, name: str) -> None:
        self.recording, self.number, self.name = recording, number, name
        self.pictures: list[One] = []

    @property
    def calls(self) -> list[One]:
        return [One(self, call) for picture in self.pictures for call in picture.picture.calls]

    @property
    def kind(self) -> str:
        """ "self" or "cross"."""
        return self.pictures[-1]._asked().kind  # pyright: ignore[reportPrivateUsage]

    def add(self, call: Call) -> None:
        if not (self.pictures and self.pictures[-1].picture.extend(call)):
            self.pictures.append(One(self, call))

    def history(self, name: str) -> list[Any]:
        """The same statistic of every call, in order: how it went over the steps of a training loop."""
        return [call.compute(name)[name] for call in self.calls]

    def _asked(self) -> Call:
        if len(self.pictures) != 1:
            raise ValueError(
                f"{self.name}: attended {len(self.pictures)} times, over different keys; ask one of them: "
                f"seen[{self.number}].pictures[i] or .calls[i], or history(name) for all"
            )
        return self.pictures[0]._asked()  # pyright: ignore[reportPrivateUsage]

    def _tokens(self) -> tuple[list[str] | None, list[str] | None]:
        return self.recording.labels(self._asked())

    def __repr__(self) -> str:
        several = "" if len(self.pictures) == 1 else f", {len(self.pictures)} pictures"
        B, H, _, T, S = self.pictures[-1]._asked().sizes  # pyright: ignore[reportPrivateUsage]
        size = f"batch {B}, heads {H}, {T} queries × {S} keys, {len(self.calls)} calls{several}"
        return f"Seen({self.number}, {self.name!r}, {self.kind}: {size})"


class One(Answers):
    """A call, or the picture that several make; it answers as its place does."""

    def __init__(self, place: Seen, call: Call) -> None:
        self.place, self.picture = place, Picture(call)

    def _asked(self) -> Call:
        return self.picture.whole

    def _tokens(self) -> tuple[list[str] | None, list[str] | None]:
        return self.place.recording.labels(self._asked())

    def __getattr__(self, name: str) -> Any:
        if name in ("place", "picture"):
            raise AttributeError(name)
        return getattr(self._asked(), name)  # q, k, mask, sizes, step …

    def __repr__(self) -> str:
        return repr(self._asked())


class Recording:
    """What record() gives: seen[3], seen["encoder.layer.3.attention.self"], len(seen), for place in seen.

    missed  what attended but could not be read, with the reason;   tokens, key_tokens  labels of rows and columns
    """

    def __init__(self, tokens: Tokens | None = None, key_tokens: Tokens | None = None) -> None:
        self.places: dict[tuple[int, int], Seen] = {}
        self.tokens, self.key_tokens = tokens, key_tokens
        self.text: str | None = None
        self.missed: list[str] = []
        self.skipped: dict[int, str] = {}  # numbers of places that were not selected, and by which they are known
        self.left_out: set[tuple[int, int]] = set()
        self.steps = 0

    # ---- places ---------------------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        return [place.name for place in self]

    def __iter__(self) -> Iterator[Seen]:
        return iter(sorted((p for p in self.places.values() if p.pictures), key=lambda p: p.number))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, key: int | str) -> Seen:
        for place in self:
            if key in (place.number, place.name) and not isinstance(key, bool):
                return place
        if isinstance(key, int) and key < 0 and len(self) >= -key:
            return list(self)[key]
        raise (IndexError if isinstance(key, int) else KeyError)(self._absent(key))

    def _absent(self, key: int | str) -> str:
        if not len(self):
            return f"seen[{key!r}]: nothing was recorded; {self._why_nothing()}"
        numbers = [place.number for place in self]
        if key in self.skipped or key in self.skipped.values():
            return f"seen[{key!r}]: was not selected; recorded are {numbers}: {', '.join(self.names)}"
        close = [name for name in self.names if isinstance(key, str) and key in name]
        return f"seen[{key!r}]: there is no such place; recorded are {numbers}: {', '.join(close or self.names)}"

    def _why_nothing(self) -> str:
        if self.missed:
            return "what attended could not be read: " + "; ".join(self.missed)
        if self.skipped:
            return f"{len(self.skipped)} places attended, but none was selected: {', '.join(self.skipped.values())}"
        return (
            "no attention call that torch's functions make was seen inside the block. A scripted or exported model runs "
            "without Python; one compiled inside the block is not seen, compile it before"
        )

    @property
    def nbytes(self) -> int:
        """Bytes kept; masks, which places share, are not counted."""
        return sum(one.picture.nbytes for place in self.places.values() for one in place.pictures)

    # ---- tokens ---------------------------------------------------------------------------------------------------------

    def labels(self, call: Call, batch: int = 0) -> tuple[list[str] | None, list[str] | None]:
        """The tokens of a call's rows and columns, where their numbers fit."""
        _, _, _, T, S = call.sizes
        own, others = _row(self.tokens, batch), _row(self.key_tokens, batch)
        first = call.frame.q_start if isinstance(call.frame.q_start, int) else 0
        if call.kind == "cross":
            return _fit(own, 0, T), _fit(others, 0, S)
        return _fit(own, first, T), _fit(own, 0, S)

    # ---- all places together --------------------------------------------------------------------------------------------

    def rollout(
        self, token: int, *, residual: float = 0.5, layers: Sequence[int] | None = None, progress: bool | None = None
    ) -> Tensor:
        """[batch, tokens]: how much of each first token is in one token at the end, through all layers.

            r ← one(token);   then, from the last layer to the first,
            r[s] ← residual · r[s] + (1 − residual) Σ_t r[t] mean_h w[h,t,s]

        https://arxiv.org/abs/2005.00928, as vector passes: no layer's weights are ever stored.
        layers  numbers of the places to go through, in order; every self-attention with as many keys as the last unless given
        """
        chain = [self[i] for i in layers] if layers is not None else [p for p in self if p.kind == "self"]
        calls = [place._whole("rollout") for place in chain]  # pyright: ignore[reportPrivateUsage]
        if layers is None and calls:
            calls = [c for c in calls if c.sizes[3:] == calls[-1].sizes[3:]]
        if not calls or any(c.sizes[3] != c.sizes[4] or c.sizes[3:] != calls[0].sizes[3:] for c in calls):
            raise ValueError(
                "rollout: goes through self-attention over the same tokens in every layer; there are "
                + (", ".join(f"{c.name} {c.sizes[3]} × {c.sizes[4]}" for c in calls) or "none")
                + ". Name the places to go through with layers="
            )
        T = calls[0].sizes[3]
        if not -T <= token < T:
            raise IndexError(f"rollout: token must be within 0 … {T - 1}; it is {token}")
        x = torch.zeros(calls[-1].sizes[0], T, device=calls[-1].q.device)
        x[:, token] = 1.0
        for call in reversed(calls):
            passed = Passed(call, x)
            stop = int(x.any(0).nonzero().max()) + 1 if residual < 1 else 0
            look(call, [passed], stop=stop, progress=progress, what=f"rollout, {call.name}")
            x = residual * x + (1 - residual) * passed.result().to(x.dtype)
        return x

    def heads(self, *, progress: bool | None = None) -> Heads:
        """A table of all heads: their statistics, and the pattern each comes closest to."""
        from .patterns import heads

        return heads(self, progress=progress)

    def compare(self, other: Recording) -> Changes:
        """The heads that attend most differently in another recording of the same places, the most changed first."""
        from .patterns import compare

        return compare(self, other)

    def save(self, path: Any) -> None:
        """Write all of it to one .safetensors file; load() reads it."""
        from .keeping import save

        save(self, path)

    def __repr__(self) -> str:
        if not len(self):
            return f"Recording(nothing: {self._why_nothing()})"
        lines = "\n".join(f"  {place!r}" for place in self)
        missed = "".join(f"\n  missed: {m}" for m in self.missed)
        return f"Recording({len(self)} places, {self.nbytes / 2**20:.1f} MiB)\n{lines}{missed}"


def _row(tokens: Tokens | None, batch: int) -> list[str] | None:
    if tokens is None or not len(tokens):
        return None
    if isinstance(tokens[0], str):
        return [str(t) for t in tokens]
    return [str(t) for t in tokens[batch]] if batch < len(tokens) else None


def _fit(tokens: list[str] | None, first: int, count: int) -> list[str] | None:
    return None if tokens is None or first < 0 or len(tokens) < first + count else tokens[first : first + count]
