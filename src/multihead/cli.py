"""The command line: `multihead see [TEXT]`."""

from __future__ import annotations

import argparse
import locale
import os
import re
import sys
from collections.abc import Sequence
from typing import cast

from . import demo
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
    asked = parser.parse_args(arguments)
    lang = cast(Lang, asked.lang or _language(asked.text or ""))
    try:
        picture = demo.see(demo.TEXTS[lang] if asked.text is None else asked.text, lang)
    except ValueError as error:
        print(f"multihead see: {error}", file=sys.stderr)
        return 2
    return _write(picture)


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
