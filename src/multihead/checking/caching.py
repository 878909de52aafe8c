"""A text decoded token by token through a module's cache, against the whole of it."""

from __future__ import annotations

import re
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .case import Case
from .faults import fault
from .mistakes import Text
from .ways import far


def check_cache(case: Case) -> None:
    """Where it takes a cache and gives one back: prefill, then token by token, equals the whole."""
    call = case.caller.call
    names = call.named("cache")
    if not names or call.fed != ("query",):
        return
    given = case.inputs(1, case.tokens, seed=60)
    whole = _causal(case, given)
    try:
        out = _decode(case, given, names[0])
    except _NoCacheError:
        return
    except Exception as error:
        _, evidence, place, _ = fault(error, case.source)
        cat = case.steps.at("cat") if case.steps else None
        case.found(
            "cache_axis",
            Text(
                f"with its own cache the next token fails: {evidence.en}", f"用它自己的缓存处理下一个词元时报错：{evidence.zh}"
            ),
            place=_cat_place(case) or cat or place,
        )
        return
    error = far(out, whole)
    if error <= 1e-6:
        case.check("ok", "decoding with its cache gives what the whole text gives", "用缓存逐个解码与整段计算一致")
        return
    e = case.explanation
    turned = e is not None and e.core.turn is not None
    name = "rope_position" if turned else "cache_differs"
    case.found(
        name,
        Text(
            f"decoded token by token the output is off by {error:.2g} of the largest value",
            f"逐个词元解码，输出相差最大值的 {error:.2g}",
        ),
        certain=not turned or error > 1e-3,
        place=None if turned else _cat_place(case),
    )


class _NoCacheError(Exception):
    pass


def _causal(case: Case, given: dict[str, Tensor]) -> Tensor:
    """The whole text, each token seeing those before: its own prefixes, the last token of each."""
    rows = [case.caller({"query": given["query"][:, : t + 1]})[:, -1:] for t in range(given["query"].shape[1])]
    return torch.cat(rows, 1)


def _decode(case: Case, given: dict[str, Tensor], name: str) -> Tensor:
    """Token by token; the cache is whatever came back beside the output."""
    x, rows = given["query"], list[Tensor]()
    cache: Any = None
    more: dict[str, Any] = {n: True for n in ("use_cache",) if n in case.caller.call.parameters}
    for t in range(x.shape[1]):
        result = case.caller.run({"query": x[:, t : t + 1]}, more | ({name: cache} if cache is not None else {}))
        rows.append(pytree.tree_leaves(result)[case.caller.call.out])
        several = cast("tuple[Any, ...]", result) if isinstance(result, tuple) else ()
        cache = next((x for x in several if type(x) in (tuple, list, dict)), None)
        if cache is None:
            raise _NoCacheError
    return torch.cat(rows, 1)


def _cat_place(case: Case) -> Any:
    found = case.source.grep(r"torch\.(cat|concat)\w*\(")
    return next((p for p in found if re.search(r"past|cache|prev|history", p.text)), next(iter(found), None))
