"""Matrix products on a CPU by the library that is faster on this machine, found out once a process by a short measurement.

torch hands float32 products to MKL, which runs at half speed on AMD; oneDNN is in every build too, behind an operator of
its own. `use("torch")`, or MULTIHEAD_PRODUCTS=torch in the environment, leaves all products to torch and measures nothing.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Library = Literal["measure", "onednn", "torch"]
LIBRARIES = ("measure", "onednn", "torch")
HALF = (torch.bfloat16, torch.float16)
PACKING = 60  # a product copies one of its sides to where it wants it, which costs as much as so many more rows
_linear: Any = getattr(getattr(getattr(torch.ops, "mkldnn", None), "_linear_pointwise", None), "default", None)
_lock = threading.RLock()


@dataclass(frozen=True)
class Speed:
    """What one dtype costs here, in seconds.

    library   which one `nt` uses for it
    nt, bmm   a multiplication and addition in a large product of two matrices, in a batch of small ones
    softmax   an element of a softmax in place
    fused     a multiplication and addition in torch's own fused attention
    """

    library: str
    nt: float
    bmm: float
    softmax: float
    fused: float
    gain: float = 1.0  # torch's time for a product over the library's


def _chosen() -> Library:
    said = os.environ.get("MULTIHEAD_PRODUCTS", "measure")
    if said not in LIBRARIES:
        raise ValueError(f"MULTIHEAD_PRODUCTS must be one of {', '.join(LIBRARIES)}; it is {said!r}")
    return said


_library: Library | None = None


def use(library: Library) -> Library:
    """Which library computes products: "measure" (the faster one here), "onednn" or "torch"; returns what it was before."""
    global _library
    if library not in LIBRARIES:
        raise ValueError(f"products.use: library must be one of {', '.join(LIBRARIES)}; it is {library!r}")
    if library == "onednn" and not has_onednn():
        raise ValueError('products.use: this build of torch has no oneDNN; use("torch")')
    before, _library = asked(), library
    speed.cache_clear()
    return before


def asked() -> Library:
    """What was asked for, by `use` or by the environment."""
    global _library
    _library = _library or _chosen()
    return _library


def has_onednn() -> bool:
    """Whether oneDNN's product is there to be called."""
    return _linear is not None and torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)  # pyright: ignore[reportUnknownMemberType, reportAttributeAccessIssue]


def nt(x: Tensor, w: Tensor) -> Tensor:
    """x [m, k] · wᵀ → [m, n]; w [n, k] must be dense by rows or by columns, or oneDNN becomes 500 times slower."""
    if speed(x.dtype).library == "onednn":
        return _onednn(x, w)
    return torch.mm(x, w.t())


def affine(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """x · wᵀ + bias, of float32, by oneDNN."""
    return _linear(x, w, bias, "none", [], "")


def _onednn(x: Tensor, w: Tensor) -> Tensor:
    return _linear(x, w, None, "none", [], "")


@functools.cache
def speed(dtype: torch.dtype) -> Speed:
    """What this dtype costs here: measured once a process, in about ten milliseconds; typical figures unless asked to."""
    library = asked()
    if library == "torch":
        return Speed("torch", 1e-11, 1e-11, 2e-10, 1e-11)
    with _lock, torch.no_grad(), torch.inference_mode(False):
        return _measure(dtype, library)


@functools.cache
def computed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a kernel computes: halves in float32 where the processor multiplies them no faster."""
    if dtype == torch.float16:
        return torch.float32
    if dtype != torch.bfloat16 or asked() == "torch":
        return dtype
    return dtype if speed(dtype).nt < speed(torch.float32).nt else torch.float32


def _measure(dtype: torch.dtype, library: Library) -> Speed:
    keep_pages()
    x, w, many = (_ramp(shape, dtype) for shape in ((256, 64), (1024, 64), (16, 128, 64)))
    s, q = _ramp((256, 1024), dtype), _ramp((1, 2, 512, 64), dtype)
    both = has_onednn() and dtype in (torch.float32, torch.bfloat16)
    times = _fastest(
        {
            "torch": lambda: torch.mm(x, w.t()),
            **({"onednn": lambda: _onednn(x, w)} if both else {}),
            "bmm": lambda: torch.bmm(many, many.mT),
            "softmax": lambda: torch.softmax(s, -1),
            "fused": lambda: F.scaled_dot_product_attention(q, q, q),
        }
    )
    name = "onednn" if both and times["onednn"] * 1.05 < times["torch"] else "torch"
    name = name if library == "measure" or not both else library
    return Speed(
        name,
        times[name] / ((256 + PACKING) * 64 * 1024),
        times["bmm"] / (16 * (128 + PACKING) * 64 * 128),
        times["softmax"] / s.numel(),
        times["fused"] / (2 * 512 * 512 * 128),
        times["torch"] / times[name],
    )


def _ramp(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Ordinary numbers that touch no generator."""
    size = 1
    for n in shape:
        size *= n
    return torch.linspace(-1, 1, size, device="cpu", dtype=torch.float32).view(shape).to(dtype)


def _fastest(calls: dict[str, Callable[[], object]], rounds: int = 6) -> dict[str, float]:
    """The shortest time of each, in rounds, so that whatever else the machine does meets all of them."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - begin)
    return best


def keep_pages() -> None:
    """Let the C library keep memory that is freed and taken again for every block.

    glibc maps large blocks afresh until it has seen one of 32 MB freed; fresh pages cost 2 GB/s, up to half of a kernel's time.
    """
    del_me = torch.empty(2**25 - 2**16, dtype=torch.uint8, device="cpu")
    del del_me


def describe(dtype: torch.dtype) -> str:
    """In a few words, for a plan: which library, and what was measured."""
    inner = computed_in(dtype)
    found, name = speed(inner), str(inner).removeprefix("torch.")
    if asked() != "measure":
        return f"{'oneDNN' if found.library == 'onednn' else 'torch'} in {name}, as asked"
    if found.library == "torch":
        return f"torch in {name}, the faster one here"
    return f"oneDNN in {name}, measured {found.gain:.1f} × as fast as torch's own here"
