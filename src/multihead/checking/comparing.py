"""How a module compares with ours in time, and in L×L tensors that it makes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..adopting.affine import exact_copy
from .case import Case
from .mistakes import Text

TOKENS, SECONDS = 512, 0.12


def compare(case: Case, reading: Any) -> None:
    """Both on one text of 512 tokens, or as many as it takes, interleaved; the better of several runs each."""
    if reading is None:
        return
    theirs = case.caller.of(exact_copy(case.module).float())
    ours = reading.exact.float()
    for tokens in (TOKENS, 128, 40):
        given = {role: x.float() for role, x in case.inputs(1, tokens).items()}
        try:
            theirs(given)
        except Exception:
            continue
        break
    else:
        return
    square = [_squares(run, tokens) for run in (lambda: theirs(given), lambda: _ours(ours, given))]
    times = _interleaved(lambda: theirs(given), lambda: _ours(ours, given))
    (n, large), (m, small) = square
    case.about.append(
        (
            Text("compared", "对比"),
            Text(
                f"{tokens} tokens: {times[0] * 1e3:.1f} ms, ours {times[1] * 1e3:.1f} ms; "
                f"tensors of L×L: {n} ({large:.1f} MiB), ours {m} ({small:.1f} MiB)",
                f"{tokens} 个词元：{times[0] * 1e3:.1f} 毫秒，本库 {times[1] * 1e3:.1f} 毫秒；"
                f"L×L 张量：{n} 个（{large:.1f} MiB），本库 {m} 个（{small:.1f} MiB）",
            ),
        )
    )


class _Squares(TorchFunctionMode):
    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens, self.sizes = tokens, list[int]()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        square = isinstance(found, Tensor) and found.ndim >= 3 and found.shape[-2:] == (self.tokens, self.tokens)
        if square and found._base is None:  # pyright: ignore[reportPrivateUsage]
            self.sizes.append(found.numel() * found.element_size())
        return found


def _squares(run: Callable[[], Any], tokens: int) -> tuple[int, float]:
    """How many tensors [.., tokens, tokens] a call makes, and their MiB."""
    with _Squares(tokens) as squares:
        run()
    return len(squares.sizes), sum(squares.sizes) / 2**20


def _ours(layer: Any, given: dict[str, torch.Tensor]) -> Any:
    from ..adopting.drive import sources

    return layer(*sources(given))


def _interleaved(a: Any, b: Any) -> tuple[float, float]:
    best, ends = [float("inf"), float("inf")], time.perf_counter() + SECONDS
    while time.perf_counter() < ends:
        for i, run in enumerate((a, b)):
            start = time.perf_counter()
            run()
            best[i] = min(best[i], time.perf_counter() - start)
    return best[0], best[1]
