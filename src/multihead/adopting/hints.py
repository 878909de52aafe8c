"""What a module says of itself: numbers on it, on its parts and in its configuration. They only order the search."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, cast

from torch import nn

CONFIGS = ("config", "args", "cfg", "hparams", "params", "configuration", "model_args")


class Hints:
    """The numbers of a module by name, most telling first."""

    def __init__(self, module: nn.Module) -> None:
        self.values = list(dict.fromkeys(_values(module)))

    def whole(self, pattern: str, without: str = r"$^") -> list[int]:
        """Whole numbers whose name matches, each once, in the order of the module's own, its parts', its configuration's."""
        return list(dict.fromkeys(int(v) for _, v in self._named(pattern, without) if v == int(v) and v > 0))

    def real(self, pattern: str, without: str = r"$^") -> list[float]:
        return list(dict.fromkeys(v for _, v in self._named(pattern, without)))

    def _named(self, pattern: str, without: str) -> Iterator[tuple[str, float]]:
        for name, value in self.values:
            if re.search(pattern, name) and not re.search(without, name):
                yield name, value

    @property
    def heads(self) -> list[int]:
        """Numbers of query heads."""
        return self.whole(r"head|^n?_?h$|头", without=r"dim|size|kv|key_value|group|scale|mask")

    @property
    def kv_heads(self) -> list[int]:
        return self.whole(r"(kv|key_value|group).*head|head.*(kv|group)|num_kv|n_kv", without=r"dim|size|_groups$")

    @property
    def head_dims(self) -> list[int]:
        return self.whole(r"head.*(dim|size)|(dim|size).*head|^d_?[kqv]$|^d_kv$|key_value_proj_dim|^head_dim$")

    @property
    def windows(self) -> list[int]:
        return self.whole(r"window|max_attend_past|local|band")


def _values(module: nn.Module) -> Iterator[tuple[str, float]]:
    for sub in module.modules():
        yield from _numbers(vars(sub))
    for sub in module.modules():
        for name in CONFIGS:
            config: Any = getattr(sub, name, None)
            if config is None or isinstance(config, nn.Module | int | float | str):
                continue
            if isinstance(config, dict):
                yield from _numbers(cast("dict[str, Any]", config))
            else:
                yield from _numbers(
                    {**_plain(cast("type[object]", type(config))), **cast("dict[str, Any]", getattr(config, "__dict__", {}))}
                )


def _plain(kind: type[object]) -> dict[str, Any]:
    """The defaults a configuration class gives its fields."""
    return {n: v for base in reversed(kind.__mro__) for n, v in vars(base).items() if not n.startswith("_")}


def _numbers(values: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield str(name).lower(), value
        elif isinstance(value, dict) and not str(name).startswith("_"):
            yield from _numbers(cast("dict[str, Any]", value))
