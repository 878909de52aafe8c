"""What a mistake is: a small change to the right way, with what a person must know about it, in two languages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from ...adopting.layouts import Layout
from ...masks.algebra import Lang
from ..ways import Way

Level = Literal["wrong", "risk", "note"]


@dataclass(frozen=True)
class Text:
    """One text in English and in Chinese."""

    en: str
    zh: str

    def __getitem__(self, lang: Lang) -> str:
        return self.zh if lang == "zh" else self.en


@dataclass(frozen=True, eq=False)
class Mistake:
    """One entry of the catalogue.

    title, why  what it is, and why it is wrong
    bad, good   the smallest code that has it, and the same without
    level       "wrong"; "risk", where it bites under some condition; "note", where it is unusual and may be meant
    at          which step of the computation holds it: a name that trace.Steps.at knows
    swaps       (pattern, replacement): what makes a line of the author's right
    change      the ways that differ from a given one by this mistake alone; nothing where no way shows it
    """

    name: str
    title: Text
    why: Text
    bad: str
    good: str
    level: Level = "wrong"
    at: str = ""
    swaps: tuple[tuple[str, str], ...] = ()
    change: Callable[[Way, Layout], Iterable[Way]] | None = None


def ways(**fields: Iterable[Any]) -> Callable[[Way, Layout], Iterable[Way]]:
    """Ways that differ in one field, in each of these values."""

    def change(way: Way, layout: Layout) -> Iterable[Way]:
        del layout
        for name, values in fields.items():
            yield from (replace(way, **{name: value}) for value in values if getattr(way, name) != value)

    return change
