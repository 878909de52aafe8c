"""Which line is wrong: a checker that names the mistake in anyone's attention. Its rooms are entered on the first call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..masks.algebra import Lang
    from .report import Report, Reports


def check(target: Any, *, init: str | dict[str, Any] | None = None, lang: Lang | None = None) -> Report | Reports:
    """Say what is wrong with an attention module, class, function or file, and prove it.

        report = check(MyAttention)              # or an instance, or a function attention(q, k, v, …)
        report = check("my_attention.py")        # or "my_attention.py:Name", or "package.module:Name"
        print(report)                            # report.ok, report.findings, report.html(), report.json()

    init  arguments of the constructor, "d_model=64, num_heads=4" or a dict; found by their names unless given
    lang  "en" or "zh"; that of the system unless given
    A diagnosis is proven by reproduction: the module's own weights in a reference with exactly that mistake give its output.
    A file is imported in a process of its own, whose time and memory are watched.
    """
    from .entry import run

    return run(target, init, lang)
