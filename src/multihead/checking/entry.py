"""check(): what a target is, and the report on it."""

from __future__ import annotations

import inspect
import locale
from collections.abc import Callable
from typing import Any, cast

from torch import nn

from ..adopting.affine import named
from ..masks.algebra import Lang
from .build import construct, parse_init
from .examine import examine
from .faults import fault
from .mistakes import CATALOGUE, Text
from .report import Finding, Report, Reports
from .source import Source
from .wrap import wrapped


def run(target: Any, init: str | dict[str, Any] | None, lang: Lang | None) -> Report | Reports:
    """As check() says."""
    if lang not in (None, "en", "zh"):  # pyright: ignore[reportUnnecessaryContains]
        raise ValueError(f'check: lang must be "en" or "zh"; it is {lang!r}')
    chosen: Lang = lang or language()
    given = parse_init(init) if isinstance(init, str) else init
    if isinstance(target, str):
        from .runner import run_file

        found: Report | Reports = run_file(target, given)
    elif isinstance(target, nn.Module):
        found = check_module(target)
    elif inspect.isroutine(target):
        found = check_function(target)
    elif isinstance(target, type) and issubclass(target, nn.Module):
        found = check_class(target, given)
    else:
        raise TypeError(
            "check: needs an nn.Module, a class of one, a function attention(q, k, v, …) or the name of a file; got a "
            f"{type(cast(object, target)).__name__}"
        )
    found.lang = chosen
    return found


def language() -> Lang:
    """That of the system."""
    return "zh" if (locale.getlocale()[0] or "").lower().startswith(("zh", "chinese")) else "en"


def check_module(module: nn.Module, name: str = "", timed: bool = True) -> Report:
    """An instance; of a whole model its first attention layer that can be read."""
    report = examine(module, name, timed=timed)
    if report.checks and not any(f.name == "unexplained" for f in report.findings):
        return report
    inner = [(n, m) for n, m in named(module) if n and looks_like_attention(type(m))]
    for n, m in inner[:4]:
        other = examine(m, f"{name or type(module).__name__}.{n}", timed=timed)
        if other.checks:
            return other
    return report


def check_class(kind: type[nn.Module], init: dict[str, Any] | None = None, timed: bool = True) -> Report:
    """A class, constructed with sizes of ours."""
    module, error = construct(kind, init)
    if module is None:
        report = Report(kind.__name__)
        source = Source(nn.Module(), kind)
        said = "its constructor takes no known arguments"
        name, evidence, place, _ = fault(error, source) if error is not None else ("not_built", Text(said, said), None, None)
        name = name if name in ("unknown_name", "undefined") else "not_built"
        report.file = next(iter(source.files), "")
        report.findings.append(Finding(name, CATALOGUE[name].level, True, evidence, place))
        return report
    return check_module(module, kind.__name__, timed)


def check_function(function: Callable[..., Any], timed: bool = True) -> Report:
    """A function, with right projections and heads around it."""
    reports: list[Report] = []
    for module in wrapped(function):
        report = examine(module, function.__name__, function, timed)
        if report.checks and not any(f.name == "unexplained" for f in report.findings):
            return _bare(report)
        reports.append(report)
    if not reports:
        said = f"its parameters are ({', '.join(inspect.signature(function).parameters)})"
        return Report(function.__name__, findings=[Finding("call_fails", "wrong", True, Text(said, said))])
    return _bare(next((r for r in reports if r.checks), reports[0]))


def _bare(report: Report) -> Report:
    """A function has no layer to be replaced, and our projections are no news."""
    report.adopt = None
    report.about = [(a, b) for a, b in report.about if a.en != "projections"]
    return report


def looks_like_attention(kind: type) -> bool:
    """By its name, or by what stands in its source."""
    if any(word in kind.__name__.lower() for word in ("attention", "attn", "mha", "注意力")):
        return True
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):
        return False
    return any(word in source.lower() for word in ("softmax", "attention", "注意力"))
