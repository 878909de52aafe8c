"""The command line: `multihead see [TEXT]`, `multihead check FILE[:NAME]`, `multihead plan …`."""

from __future__ import annotations

import argparse
import locale
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from . import demo, planning
from .masks.algebra import Lang


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="multihead", description="Multi-head attention you can use, see and check.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    see = commands.add_parser("see", help="look at what a layer attends to in a text")
    see.add_argument("text", nargs="?", help="the text; a line of English or Chinese unless given")
    see.add_argument(
        "--lang", choices=("en", "zh"), help="language of the output (default: that of the text, or of the system)"
    )
    _add_check(commands.add_parser("check", help="say which line of an attention module is wrong"))
    planning.add_to(
        commands.add_parser("plan", help="say which kernel a call would run, the work left, and why not the others")
    )
    asked = parser.parse_args(arguments)
    if asked.command == "check":
        return _check(asked)
    if asked.command == "plan":
        return _print_or_say("plan", lambda: planning.show(asked))
    lang = cast(Lang, asked.lang or _language(asked.text or ""))
    return _print_or_say("see", lambda: demo.see(demo.TEXTS[lang] if asked.text is None else asked.text, lang))


def _print_or_say(command: str, make: Callable[[], str]) -> int:
    """Prints what is made; what cannot be is one sentence and exit status 2."""
    try:
        text = make()
    except (TypeError, ValueError) as error:
        print(f"multihead {command}: {error}", file=sys.stderr)
        return 2
    return _write(text)


def _add_check(check: argparse.ArgumentParser) -> None:
    check.add_argument("target", metavar="FILE[:NAME]", help="FILE.py, FILE.py:Name, or package.module:Name")
    check.add_argument("--init", help='arguments of the constructor: "d_model=64, num_heads=4"')
    check.add_argument("--lang", choices=("en", "zh"), help="language of the report (default: that of the system)")
    check.add_argument("--json", action="store_true", help="print the report as JSON")
    check.add_argument("--html", metavar="PATH", help="write the report as one HTML file")
    check.add_argument("--seconds", type=float, default=60.0, help="end the check after so long (default: 60)")
    check.add_argument("--gib", type=float, default=2.0, help="end the check at so much resident memory (default: 2)")
    check.epilog = (
        "The file is run, in a process of its own; the limits are against accidents, and no sandbox. Exit status: 0 nothing "
        "wrong, 1 something wrong, 2 nothing could be checked."
    )


def _check(asked: argparse.Namespace) -> int:
    """0: nothing wrong; 1: something is; 2: nothing could be checked."""
    from .checking.build import parse_init
    from .checking.entry import language
    from .checking.runner import run_file

    try:
        init = parse_init(asked.init) if asked.init else None
        reports = run_file(asked.target, init, asked.seconds, asked.gib)
    except ValueError as error:
        print(f"multihead {error}", file=sys.stderr)
        return 2
    lang = cast(Lang, asked.lang or language())
    if asked.html:
        Path(asked.html).write_text(reports.html(lang), encoding="utf-8")
    _write(reports.json() if asked.json else reports.text(lang, colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ))
    if not any(report.checks for report in reports):
        return 2 if reports.ok else 1
    return 0 if reports.ok else 1


def _write(text: str) -> int:
    """To the terminal, whatever its encoding; a reader that goes away, as head does, is no error."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _language(text: str) -> Lang:
    if text.strip():  # kana tell that Chinese characters are Japanese
        return "zh" if re.search(r"[\u4e00-\u9fff]", text) and not re.search(r"[\u3040-\u30ff]", text) else "en"
    return "zh" if (locale.getlocale()[0] or "").lower().startswith(("zh", "chinese")) else "en"
