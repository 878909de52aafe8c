"""Tables of heads: rows that print, sort and convert."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

if TYPE_CHECKING:
    from pandas import DataFrame  # pyright: ignore[reportMissingImports, reportUnknownVariableType]

Row = dict[str, Any]


class Table:
    """Rows with named columns; str() shows as many as fit a screen."""

    shown: tuple[str, ...] = ()
    most: ClassVar[int] = 40

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = list(rows)

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __getitem__(self, i: int | slice | str) -> Any:
        """A row, some rows as a table, or a column as a list."""
        if isinstance(i, str):
            self._known(i)
            return [row.get(i, math.nan) for row in self.rows]
        return self._part(self.rows[i]) if isinstance(i, slice) else self.rows[i]

    def sort(self, column: str, descending: bool = True) -> Self:
        """By a column; rows without it last."""
        self._known(column)

        def key(row: Row) -> tuple[bool, Any]:
            value: Any = row.get(column)
            absent = value is None or (isinstance(value, float) and math.isnan(value))
            if absent or isinstance(value, str) or not descending:
                return absent, 0 if absent else value
            return absent, -cast(float, value)

        made = self._part(sorted(self.rows, key=key))
        made.shown = self.shown if column in self.shown else (*self.shown, column)
        return made

    def where(self, test: Callable[[Row], bool]) -> Self:
        """The rows for which a function says True."""
        return self._part([row for row in self.rows if test(row)])

    def _part(self, rows: list[Row]) -> Self:
        made = type(self)(rows)
        made.shown = self.shown
        return made

    def to_pandas(self) -> DataFrame:  # pyright: ignore[reportUnknownParameterType]
        try:
            import pandas  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ImportError("to_pandas: pandas must be installed: pip install pandas; .rows is a list of dicts") from error
        return pandas.DataFrame(self.rows)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]

    def _known(self, column: str) -> None:
        if column not in self.columns:
            raise KeyError(f"there is no column {column!r}; there are {', '.join(self.columns)}")

    def __str__(self) -> str:
        names = [name for name in self.shown if name in self.columns]
        lines = [names, *([_cell(row.get(name)) for name in names] for row in self.rows[: self.most])]
        wide = [max(len(line[i]) for line in lines) for i in range(len(names))]
        numeric = [all(not isinstance(row.get(name), str) for row in self.rows) for name in names]
        text = [
            "  ".join(c.rjust(w) if n else c.ljust(w) for c, w, n in zip(line, wide, numeric, strict=True)).rstrip()
            for line in lines
        ]
        rest = len(self.rows) - self.most
        return "\n".join(text + ([f"… {rest} more"] if rest > 0 else []))

    __repr__ = __str__


class Heads(Table):
    """A row a head: layer (the number of its place), head, its statistics, how far it follows each pattern, and the best."""

    shown = ("layer", "head", "name", "pattern", "score", "entropy", "effective_keys", "distance", "strongest", "sink")


class Changes(Table):
    """A row a head: how much it changed between two recordings, and by what that was measured."""

    shown = ("layer", "head", "name", "change", "by")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if isinstance(value, float) else str(value)
