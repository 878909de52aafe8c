"""What a check found, as data: printed in the terminal or a notebook, as JSON, as one HTML file, in English or Chinese."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ..masks.algebra import Lang
from .mistakes import CATALOGUE, Level, Mistake, Text
from .source import Place

Mark = Literal["ok", "wrong", "risk", "note", "open"]


@dataclass(frozen=True)
class Finding:
    """One mistake in one place.

    name      its name in the catalogue;  level  "wrong", "risk" or "note"
    certain   whether it is proven: the mistake switched on gives the module's output, or the wrong effect was seen itself
    evidence  what was measured;  place  the author's line;  fix  that line put right, as a diff
    instead   mistakes that would give the same numbers and cannot be told apart from it here
    """

    name: str
    level: Level
    certain: bool
    evidence: Text
    place: Place | None = None
    fix: str | None = None
    instead: tuple[str, ...] = ()

    @property
    def mistake(self) -> Mistake:
        return CATALOGUE[self.name]


@dataclass(frozen=True)
class Check:
    """One line of the report: what was asked, and how it came out."""

    mark: Mark
    text: Text


@dataclass
class Report:
    """What was found out about one module; print it, or ask .ok, .findings, .json(), .html().

    name      of the module, class, function or file;  file  where it stands
    checks    what was verified, one line each;  findings  what was found;  about  what it is
    adopt     the line that replaces it by ours, where that was proven
    """

    name: str
    file: str = ""
    checks: list[Check] = field(default_factory=list[Check])
    findings: list[Finding] = field(default_factory=list[Finding])
    about: list[tuple[Text, Text]] = field(default_factory=list[tuple[Text, Text]])
    adopt: str | None = None
    seconds: float = 0.0
    lang: Lang = "en"

    @property
    def wrong(self) -> list[Finding]:
        return [f for f in self.findings if f.level == "wrong"]

    @property
    def ok(self) -> bool:
        """Whether nothing wrong was found."""
        return not self.wrong

    @property
    def names(self) -> list[str]:
        """The mistakes that are wrong, by name."""
        return [f.name for f in self.wrong]

    def text(self, lang: Lang | None = None, colour: bool = False) -> str:
        from .page import terminal

        return terminal([self], lang or self.lang, colour)

    def html(self, lang: Lang | None = None) -> str:
        from .page import html

        return html([self], lang or self.lang)

    def json(self) -> str:
        return json.dumps(self.data(), ensure_ascii=False, indent=1)

    def data(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "file": self.file,
            "ok": self.ok,
            **{k: v for k, v in asdict(self).items() if k not in ("name", "file")},
        }

    @classmethod
    def of(cls, data: dict[str, Any]) -> Report:
        """From data()."""
        findings = [
            Finding(
                f["name"], f["level"], f["certain"], Text(**f["evidence"]), Place(**f["place"]) if f["place"] else None,
                f["fix"], tuple(f["instead"]),
            )
            for f in data["findings"]
        ]  # fmt: skip
        checks = [Check(c["mark"], Text(**c["text"])) for c in data["checks"]]
        about = [(Text(**a), Text(**b)) for a, b in data["about"]]
        return cls(data["name"], data["file"], checks, findings, about, data["adopt"], data["seconds"], data["lang"])

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"Report({self.name!r}, ok={self.ok}, findings={[f.name for f in self.findings]})"

    def _repr_html_(self) -> str:
        from .page import body

        return body([self], self.lang)


@dataclass
class Reports(Sequence[Report]):
    """The reports on several modules of a file."""

    reports: list[Report]
    lang: Lang = "en"

    def __len__(self) -> int:
        return len(self.reports)

    def __getitem__(self, i: Any) -> Any:
        return self.reports[i]  # pyright: ignore[reportUnknownVariableType]

    def __iter__(self) -> Iterator[Report]:
        return iter(self.reports)

    @property
    def ok(self) -> bool:
        return all(r.ok for r in self.reports)

    @property
    def findings(self) -> list[Finding]:
        return [f for r in self for f in r.findings]

    def text(self, lang: Lang | None = None, colour: bool = False) -> str:
        from .page import terminal

        return terminal(self.reports, lang or self.lang, colour)

    def html(self, lang: Lang | None = None) -> str:
        from .page import html

        return html(self.reports, lang or self.lang)

    def json(self) -> str:
        return json.dumps([r.data() for r in self.reports], ensure_ascii=False, indent=1)

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        from .page import body

        return body(self.reports, self.lang)
