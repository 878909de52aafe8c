"""The command line: `multihead see [TEXT]`, `multihead plan …`."""

from __future__ import annotations

import argparse
import locale
import os
import re
import sys
from collections.abc import Callable, Sequence
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
    planning.add_to(
        commands.add_parser("plan", help="say which kernel a call would run, the work left, and why not the others")
    )
    asked = parser.parse_args(arguments)
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
