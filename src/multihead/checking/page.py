"""The report as a page: the same lines for a terminal, a notebook and a file of HTML."""

from __future__ import annotations

import html as escape
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..masks.algebra import Lang
from .mistakes import CATALOGUE, Text
from .report import Finding, Report

MARKS = {"ok": "✓", "wrong": "✗", "risk": "!", "note": "·", "open": "?"}
ANSI = {
    "ok": "32", "wrong": "31;1", "risk": "33;1", "note": "36", "open": "35", "title": "1", "dim": "2", "-": "31", "+": "32",
}  # fmt: skip
WORDS = {
    "right": Text("nothing wrong was found", "没有发现错误"),
    "wrong": Text("wrong", "处错误"),
    "risk": Text("at risk", "处隐患"),
    "same": Text("gives the same numbers here, and cannot be told apart: ", "在这里数值完全相同、无法区分的还有："),
    "seen": Text("seen", "证据"),
    "why": Text("why", "原因"),
    "fix": Text("fix", "改法"),
    "example": Text("for example", "例如"),
    "adopt": Text("put ours in its place", "换成本库的层"),
    "seconds": Text("s", "秒"),
    "unsure": Text(" (not proven)", "（未证实）"),
}
Span = tuple[str, str]
Line = list[Span]

STYLE = """body{font:15px/1.5 system-ui,"PingFang SC","Microsoft YaHei",sans-serif;max-width:60em;margin:2em auto;padding:0 1em}
pre{font:13px/1.5 ui-monospace,Consolas,monospace;white-space:pre-wrap}.ok{color:#1a7f37}.wrong{color:#c1121f;font-weight:600}
.risk{color:#9a6700;font-weight:600}.note{color:#0969da}.open{color:#8250df}.title{font-weight:700}.dim{color:#667}
.minus{color:#c1121f;background:#ffebe9}.plus{color:#1a7f37;background:#e6ffec}
@media(prefers-color-scheme:dark){body{background:#0d1117;color:#e6edf3}.minus{background:#3c1618}.plus{background:#12331e}
.dim{color:#8b949e}.ok,.plus{color:#3fb950}.wrong,.minus{color:#ff7b72}.risk{color:#d29922}.note{color:#58a6ff}}"""


def lines(report: Report, lang: Lang) -> Iterator[Line]:
    """The page as lines of (style, text)."""
    at = f"  {report.file}" if report.file else ""
    yield [("title", report.name), ("dim", at)]
    for check in report.checks:
        yield [(check.mark, f"  {MARKS[check.mark]} "), ("plain", check.text[lang])]
    for finding in report.findings:
        yield []
        yield from _finding(finding, lang)
    if report.about:
        yield []
    for name, said in report.about:
        yield [("dim", f"  {_wide(name[lang], 12)}"), ("plain", said[lang])]
    if report.adopt:
        yield [
            ("dim", f"  {_wide(WORDS['adopt'][lang], 12)}"),
            ("plain", f"  {report.adopt}" if lang == "en" else report.adopt),
        ]
    yield []
    yield _verdict(report, lang)


def _verdict(report: Report, lang: Lang) -> Line:
    wrong, risk = len(report.wrong), sum(f.level == "risk" for f in report.findings)
    parts = [
        (f"{n} {WORDS[k][lang]}" if lang == "en" else f"{n} {WORDS[k].zh}") for n, k in ((wrong, "wrong"), (risk, "risk")) if n
    ]
    said = ("，" if lang == "zh" else ", ").join(parts) if wrong else WORDS["right"][lang] + ("".join(f"; {p}" for p in parts))
    return [
        ("wrong" if wrong else "ok", f"  {MARKS['wrong' if wrong else 'ok']} {said}"),
        ("dim", f"  {report.seconds:.1f} {WORDS['seconds'][lang]}"),
    ]


def _finding(finding: Finding, lang: Lang) -> Iterator[Line]:
    mistake, place = CATALOGUE[finding.name], finding.place
    unsure = "" if finding.certain else WORDS["unsure"][lang]
    yield [(finding.level, f"  {MARKS[finding.level]} {mistake.title[lang]}{unsure}"), ("dim", f"  {finding.name}")]
    if place is not None:
        yield [("dim", f"    {Path(place.file).name}:{place.line}")]
        for i, row in enumerate(place.text.splitlines()):
            yield [("dim", f"    {place.line + i:>4} │ "), ("plain", row)]
    yield [("dim", f"    {_wide(WORDS['seen'][lang], 6)}"), ("plain", finding.evidence[lang])]
    if finding.level == "note":
        return
    yield [("dim", f"    {_wide(WORDS['why'][lang], 6)}"), ("plain", mistake.why[lang])]
    if finding.fix:
        yield [("dim", f"    {WORDS['fix'][lang]}")]
        yield from ([(row[0], f"      {row}")] for row in finding.fix.splitlines())
    elif mistake.bad and mistake.good:
        yield [("dim", f"    {WORDS['example'][lang]}")]
        yield from ([("-", f"      - {row}")] for row in mistake.bad.splitlines())
        yield from ([("+", f"      + {row}")] for row in mistake.good.splitlines())
    if finding.instead:
        others = ", ".join(f"{name} ({CATALOGUE[name].title[lang]})" for name in finding.instead)
        yield [("dim", f"    {WORDS['same'][lang]}"), ("plain", others)]


def _wide(text: str, width: int) -> str:
    """Padded to a width in which a Chinese character counts two."""
    taken = sum(2 if ord(c) > 0x2E80 else 1 for c in text)
    return text + " " * max(1, width - taken)


def terminal(reports: Sequence[Report], lang: Lang, colour: bool) -> str:
    def shown(span: Span) -> str:
        return f"\x1b[{ANSI[span[0]]}m{span[1]}\x1b[0m" if colour and span[0] != "plain" else span[1]

    pages = ["\n".join("".join(map(shown, line)).rstrip() for line in lines(report, lang)) for report in reports]
    return "\n\n".join(pages)


def body(reports: Sequence[Report], lang: Lang) -> str:
    names = {"-": "minus", "+": "plus"}
    rows: list[str] = []
    for report in reports:
        for line in [*lines(report, lang), []]:
            rows.append("".join(f'<span class="{names.get(s, s)}">{escape.escape(t)}</span>' for s, t in line))
    return f"<style>{STYLE}</style><pre>" + "\n".join(rows) + "</pre>"


def html(reports: Sequence[Report], lang: Lang) -> str:
    """One file that needs no other."""
    title = escape.escape(", ".join(r.name for r in reports))
    code = "zh-CN" if lang == "zh" else "en"
    head = f'<!doctype html><html lang="{code}"><meta charset="utf-8"><title>multihead check: {title}</title>'
    return f'{head}<meta name="viewport" content="width=device-width">{body(reports, lang)}</html>\n'
