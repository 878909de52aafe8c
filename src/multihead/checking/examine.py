"""One module, examined: explained first, then asked for everything else that can be wrong with it."""

from __future__ import annotations

import difflib
import time
import warnings
from typing import Any

import torch
from torch import nn

from ..adopting import AdoptionError
from ..adopting.reading import Reading, read
from .caching import check_cache
from .case import Case
from .comparing import compare
from .conditions import check_conditions
from .diagnose import Explanation
from .faults import fault
from .laws import check_laws
from .masking import Masks
from .mistakes import CATALOGUE, Level, Mistake, Text
from .report import Report
from .source import Source

SCALES = {"scale_d_k", "scale_twice"}
MOST = 1500  # hypotheses of adopting's own search, where ours found nothing


def examine(module: nn.Module, name: str = "", function: Any = None, timed: bool = True) -> Report:
    """The report on one module. function: where the module is a wrapper that we made around one."""
    start = time.perf_counter()
    source = Source(module, function)
    report = Report(name or type(module).__name__, next(iter(sorted(source.files)), ""))
    with warnings.catch_warnings(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        try:
            case = Case(module, source)
            report.checks, report.findings, report.about = case.checks, case.findings, case.about
            if not _misspelt(case):
                _examine(case, report, timed)
        except AdoptionError as error:
            report.findings.append(_plain("call_fails", str(error)))
    order = {"wrong": 0, "risk": 1, "note": 2}
    report.findings.sort(key=lambda f: order[f.level])
    report.seconds = time.perf_counter() - start
    return report


def _examine(case: Case, report: Report, timed: bool) -> None:
    case.ask()
    if not case.callers:
        _not_callable(case)
        return
    e = case.explanation
    if e is not None:
        _explained(case, e)
    for place in case.source.discarded():
        case.found("result_discarded", Text(place.text.strip(), place.text.strip()), place=place)
    check_laws(case)
    if e is not None:
        case.each(lambda c: Masks(c, e).run())
    check_conditions(case)
    case.each(check_cache)
    reading: Reading | None = None
    if e is None or not e.mistakes:
        try:
            reading = read(case.module, MOST)
        except (AdoptionError, TypeError):
            reading: Reading | None = None
    if e is None:
        _unexplained(case, reading)
    _about(case, report, reading)
    if timed:
        case.each(lambda c: compare(c, reading))


def _misspelt(case: Case) -> bool:
    """A class without a forward, and with a method that looks like one."""
    kind = type(case.module)
    if kind.forward is not nn.Module.forward:
        return False
    own = [n for n in vars(kind) if callable(getattr(kind, n)) and not n.startswith("_")]
    near = difflib.get_close_matches("forward", own, 1, 0.6)
    name = near[0] if near else ""
    place = case.source.definition(name) if name else case.source.definition(kind.__name__)
    said = Text(f"its methods are {', '.join(own) or 'none'}", f"它的方法有：{'、'.join(own) or '无'}")
    case.found("forward_misspelt", said, place=place)
    if not name:
        return True
    setattr(kind, "forward", getattr(kind, name))  # noqa: B010
    return False


def _not_callable(case: Case) -> None:
    """The likeliest call's own error."""
    errors = [e for e in case.errors if fault(e, case.source)[2] is not None] or case.errors
    telling = [e for e in errors if fault(e, case.source)[0] != "call_fails"]
    if not errors:
        case.findings.append(_plain("call_fails", "its forward takes no tensors"))
        return
    name, evidence, place, fix = fault((telling or errors)[0], case.source)
    case.found(name, evidence, place=place)
    if fix:
        from dataclasses import replace

        case.findings[-1] = replace(case.findings[-1], fix=fix)


def _plain(name: str, said: str) -> Any:
    from .report import Finding

    return Finding(name, CATALOGUE[name].level, True, Text(said, said))


def _explained(case: Case, e: Explanation) -> None:
    """What the explanation says: right, or which mistakes, and what else would give the same numbers."""
    if not e.mistakes:
        case.check(
            "ok",
            f"its weights in the reference give its output: {e.compared} comparisons, largest difference {e.error:.1e}",
            f"把它的权重放进参考实现，输出一致：比较 {e.compared} 次，最大差 {e.error:.1e}",
        )
        return
    chosen, instead = _told_apart(case, e)
    for mistake in chosen:
        others = tuple(dict.fromkeys(m.name for several in instead for m in several if m not in chosen))
        same = _alike(e, mistake)
        case.found(
            mistake.name,
            Text(
                f"with {'this mistake' if len(chosen) == 1 else 'these mistakes together'} the reference gives its output: "
                f"{e.compared} comparisons, largest difference {e.error:.1e}{same}",
                f"带上{'这个错误' if len(chosen) == 1 else '这几个错误'}，参考实现与它的输出一致："
                f"比较 {e.compared} 次，最大差 {e.error:.1e}{same}",
            ),
            level=_level(e, mistake),
            instead=others,
        )


def _level(e: Explanation, mistake: Mistake) -> Level | None:
    """What may be meant: T5 has no scale beside its bias; k and v repeated alike are a renaming until weights are loaded."""
    if mistake.name == "no_scale" and e.core.bias is not None:
        return "note"
    return "risk" if mistake.name == "gqa_order" and e.way.tiled == "kv" else None


def _alike(e: Explanation, mistake: Mistake) -> str:
    """The numbers of a mistake about the scale."""
    if not mistake.name.startswith(("scale", "no_scale")) or e.way.scale is None:
        return ""
    return f"; {e.way.scale:.4g} ≠ 1/√{e.layout.head_dim} = {e.layout.head_dim**-0.5:.4g}"


def _told_apart(case: Case, e: Explanation) -> tuple[tuple[Mistake, ...], list[tuple[Mistake, ...]]]:
    """Of explanations with the same numbers, the one that the lines show: scaled once by d_k, or twice by √d_k."""
    several = [e.mistakes, *e.instead]
    if case.steps is None or len(several) == 1:
        return e.mistakes, e.instead
    d, heads = e.layout.head_dim, e.layout.heads
    roots = [n for s in case.steps.all("scale") for n in s.numbers if s.name != "scaled_dot_product_attention"]
    roots += [
        d**-0.5
        for s in case.steps.all("scale")
        if s.name == "scaled_dot_product_attention" and not any(abs(n - 1 / d) < 1e-9 for n in s.numbers)
    ]
    twice = sum(any(abs(n - r) < 1e-6 for r in (d**0.5, d**-0.5)) for n in roots) >= 2
    del heads
    for chosen in several:
        names = {m.name for m in chosen}
        if names & SCALES and ("scale_twice" in names) == twice:
            rest = [x for x in several if x is not chosen and not ({m.name for m in x} ^ names) <= SCALES]
            return chosen, rest
    return e.mistakes, e.instead


def _unexplained(case: Case, reading: Reading | None) -> None:
    if reading is not None:
        core, head_dim = reading.found.core, reading.found.layout.head_dim
        if core.scale is not None and core.bias is None:
            said = f"{core.scale:.4g} ≠ 1/√{head_dim} = {head_dim**-0.5:.4g}"
            case.found("scale_odd", Text(said, said))
        case.findings[:] = [f for f in case.findings if f.name != "permutation"]  # it has positions of its own
        case.check("ok", "read and rebuilt as ours, with the same output", "可以读出并重建为本库的层，输出一致")
    elif not any(f.level == "wrong" for f in case.findings):
        case.found(
            "unexplained",
            Text("it is not said to be wrong; what was seen stands above", "这不表示它是错的；观察到的现象列在上面"),
            certain=False,
        )
    else:
        case.check("open", "what it computes was not reproduced", "没有能重现它的计算")


def _about(case: Case, report: Report, reading: Reading | None) -> None:
    call, e = case.caller.call, case.explanation
    fed = ", ".join(call.named(role)[0] for role in call.fed)
    kind = (
        Text("self-attention", "自注意力")
        if call.fed == ("query",)
        else Text("self- and cross-attention", "自注意力与交叉注意力")
    )
    case.about.append((Text("kind", "类型"), Text(f"{kind.en} of {fed}", f"{kind.zh}，输入 {fed}")))
    if e is not None:
        case.about.append((Text("projections", "投影"), Text(repr(e.layout), repr(e.layout))))
        case.about.append((Text("between", "中间"), Text(repr(e.core), repr(e.core).replace("nothing unusual", "无特别之处"))))
    if reading is not None and not report.wrong:
        report.adopt = f"layer = multihead.from_module({report.name[:1].lower() + report.name[1:]})"
