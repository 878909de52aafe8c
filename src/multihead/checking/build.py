"""A class that looks like attention, constructed: sizes by the names of its parameters, or as --init says."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

from torch import nn

MISSING = inspect.Parameter.empty
# d_model, heads, kv_heads: no two of heads, head_dim, their roots and d_model alike, so that scales can be told apart
SIZES = ((24, 4, 2), (32, 4, 2), (48, 6, 3), (64, 4, 4), (24, 4, 4))
NAMES: tuple[tuple[str, Callable[[int, int, int], Any]], ...] = (
    (r"^(n_?|num_?)?(kv|key_value)_?(n_?|num_?)?heads?$|^n(um)?_?(local_)?kv_?heads?$|groups$", lambda d, h, g: g),
    (
        r"^(n|num|nr|number_of|attention|num_attention|attn)?_?(local_)?(q_)?(query_)?heads?(_num|_count|_number|s)?$"
        r"|^h$|^nhead$|^n_?h$|^heads_num$|^头数$",
        lambda d, h, g: h,
    ),
    (
        r"head_?(dim|size|width)|(dim|size)_?(per_|of_)?head|^d_?head$|^d_?[kqv]$|^(q|k|v|key|value|query)_dim_per_head$|每头",
        lambda d, h, g: d // h,
    ),
    (r"drop|^p$|_p$|prob", lambda d, h, g: 0.1),
    (r"bias", lambda d, h, g: True),
    (r"rope_?theta|^theta$|^base$", lambda d, h, g: 10_000.0),
    (r"max|block|seq|context|ctx|length|window|positions|^t$|^l$", lambda d, h, g: 64),
    (r"causal|mask", lambda d, h, g: True),
    (r"batch|^b$", lambda d, h, g: 2),
    (r"layer|depth|idx|index", lambda d, h, g: 1),
    (r"eps", lambda d, h, g: 1e-5),
    (
        r"model|hidden|embed|emb|dim|width|size|channels|features|units|inner|^d|^c$|^n_?state|in_|out_|query|key|value|维|模型",
        lambda d, h, g: d,
    ),
)
CONFIG = re.compile(r"(?i)^(config|cfg|args?|hparams|params|conf|options|model_args|configuration)$")


class Anything:
    """A configuration that has whatever is asked for, by its name."""

    def __init__(self, sizes: tuple[int, int, int], given: dict[str, Any] | None = None) -> None:
        self.__dict__.update(given or {})
        self.__dict__["_sizes"] = sizes

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = guess(name, self.__dict__["_sizes"])
        if found is MISSING:
            raise AttributeError(name)
        return found

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


def guess(name: str, sizes: tuple[int, int, int]) -> Any:
    """A value for a parameter of this name; MISSING where the name says nothing."""
    return next((value(*sizes) for pattern, value in NAMES if re.search(pattern, name.lower())), MISSING)


def parse_init(text: str) -> dict[str, Any]:
    """ "d_model=64, num_heads=4" as a dict."""
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError
        return {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise ValueError(f'check: --init must be "name=value, name=value" with plain values; it is {text!r}') from error


def construct(kind: type[nn.Module], init: dict[str, Any] | None = None) -> tuple[nn.Module | None, Exception | None]:
    """An instance, or why there is none: the error of the likeliest try."""
    first: Exception | None = None
    for arguments in _tries(kind, init or {}):
        try:
            return kind(**arguments), None
        except Exception as error:
            first = first or error
    return None, first


def _tries(kind: type[nn.Module], init: dict[str, Any]) -> Iterator[dict[str, Any]]:
    try:
        parameters = inspect.signature(kind).parameters
    except (TypeError, ValueError):
        parameters = cast("dict[str, inspect.Parameter]", {})
    named = {n: p for n, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    if not named:
        yield dict(init)
        return
    for sizes, rest in itertools.product(SIZES, (True, False)):
        arguments = {n: v for n, p in named.items() if (v := _value(n, p, sizes, rest, init, kind)) is not MISSING}
        yield {**arguments, **{n: v for n, v in init.items() if n in named}}
    yield {n: v for n, v in init.items() if n in named}


def _value(
    name: str, p: inspect.Parameter, sizes: tuple[int, int, int], rest: bool, init: dict[str, Any], kind: type[nn.Module]
) -> Any:
    """The value of one parameter: sizes always by name, so that they are ours; others keep their defaults."""
    if CONFIG.match(name):
        return _config(p, sizes, init, kind) if p.default is MISSING or p.default is None else MISSING
    found = guess(name, sizes)
    if p.default is MISSING:
        return 1 if found is MISSING else found
    size = (
        isinstance(p.default, int) and not isinstance(p.default, bool) and isinstance(found, int) and found not in (True, 1, 64)
    )
    return found if size and rest else MISSING


def _config(p: inspect.Parameter, sizes: tuple[int, int, int], init: dict[str, Any], kind: type[nn.Module]) -> Any:
    """An object of the annotated class with our sizes in its fields, or one that has whatever is asked for."""
    said = cast("object", p.annotation)
    made: Any = vars(sys.modules[kind.__module__]).get(said) if isinstance(said, str) else said
    if dataclasses.is_dataclass(made):
        flags = {f.name for f in dataclasses.fields(made) if isinstance(f.default, bool | str)}
        values = {f.name: guess(f.name, sizes) for f in dataclasses.fields(made) if f.name not in flags}
        values = {n: v for n, v in values.items() if v is not MISSING} | init
        try:
            return cast(Any, made)(**values)
        except TypeError:
            return Anything(sizes, init)
    if p.annotation is dict:
        return {
            n: guess(n, sizes)
            for n in ("d_model", "emb_dim", "n_heads", "num_heads", "hidden_size", "dropout", "context_length")
        } | init
    return Anything(sizes, init)
