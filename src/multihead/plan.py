"""Which kernel runs, and why not the others."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import Tensor

from .kernels import fused, lazily, reference
from .kernels.spec import Spec, autocast, autocasts, unbatched
from .masks import Frame, Mask
from .masks.algebra import Position, count

# "auto" takes the first that does not refuse; behind the reference, which never does, stand those that must be asked for
KERNELS: dict[str, ModuleType] = {"fused": fused, "reference": reference, "packed": lazily("packed"), "flex": lazily("flex")}
QUIET = 16 * 2**20  # L×L tensors of up to this many bytes trouble no one; above it, "auto" says that it needs them


class QuadraticMemoryWarning(UserWarning):
    """`kernel="auto"` had to choose a path whose memory grows with q_len × kv_len."""


def choose(spec: Spec, kernel: str = "auto") -> ModuleType:
    """The kernel to run. Raises where the one asked for cannot do the call; warns where "auto" must use O(L²) memory."""
    if kernel != "auto":
        _require(spec, kernel)
        return KERNELS[kernel]
    module = fused if fused.refuses(spec) is None else reference
    if torch.compiler.is_compiling():  # a size compared here would become a guard of the graph
        return module
    square = module is reference or spec.mask is not None or spec.bias is not None or spec.ragged
    most = 3 * spec.pairs * 8  # no kernel keeps more; what is small needs no closer look
    if square and most > QUIET and module.quadratic_bytes(spec) > QUIET:
        _warn(spec, module)
    return module


@dataclass(frozen=True)
class Plan:
    """What a call would do.

    kernel           the kernel that would run
    refusals         every other kernel, with the reason why it was passed over
    pairs, allowed   all (query, key) pairs of the call, and how many the mask leaves
    quadratic_bytes  bytes of the L×L tensors the kernel needs; 0 where memory grows with L
    notes            what this kernel promises less than the reference
    """

    kernel: str
    refusals: dict[str, str]
    pairs: int
    allowed: int
    quadratic_bytes: int
    notes: list[str] = field(default_factory=list[str])

    @property
    def share(self) -> float:
        """The share of the pairs that the mask leaves."""
        return self.allowed / self.pairs if self.pairs else 0.0

    def __str__(self) -> str:
        rows = [
            ("kernel", self.kernel),
            ("pairs", f"{self.allowed:,} of {self.pairs:,} ({self.share:.1%}) may attend"),
            ("L×L memory", _bytes(self.quadratic_bytes)),
            *((f"not {name}", reason) for name, reason in self.refusals.items()),
            *(("note", note) for note in self.notes),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    start: Position | None = None,
    key_start: Position = 0,
    return_lse: bool = False,
    return_weights: bool = False,
    kernel: str = "auto",
) -> Plan:
    """Which kernel `attention` would run for this call, the pairs left to compute, and each other kernel's refusal.

    Tensors on the meta device will do: a plan needs their shapes, and the numbers of the mask alone.
    """
    if unbatched(q, k, v):
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    if autocasts(q.device.type):
        q, k, v = autocast(q, k, v)
    spec = Spec(q, k, v, mask, bias, scale, dropout, seed, softcap, sinks, return_lse, start, key_start)
    return explain(spec, kernel, return_weights)


def explain(spec: Spec, kernel: str = "auto", return_weights: bool = False) -> Plan:
    """The plan of a checked call."""
    reasons: dict[str, str | None] = {name: module.refuses(spec) for name, module in KERNELS.items()}
    if kernel == "auto":
        kernel = next(name for name, reason in reasons.items() if reason is None)
    else:
        _require(spec, kernel)
    others = {name: reason or _unneeded(name, kernel) for name, reason in reasons.items() if name != kernel}
    notes: list[str] = []
    if kernel != "reference" and spec.mask is not None:
        notes.append("NaN or inf in a key hidden from only some queries can reach their gradients (IEEE: 0 · NaN is NaN)")
    if kernel != "reference":
        notes.append('second derivatives and forward-mode AD need kernel="reference"')
    quadratic = KERNELS[kernel].quadratic_bytes(spec)
    if return_weights:
        quadratic += reference.quadratic_bytes(spec) if kernel != "reference" else 0
        notes.append("the weights are L×L, computed beside the output")
    return Plan(kernel, others, spec.pairs, count(spec.mask, _here(spec)), quadratic, notes)


def _here(spec: Spec) -> Frame:
    """The frame to count in: where the mask's numbers are, if the call itself has none."""
    frame = spec.frame
    if spec.device.type == "meta":
        frame.device = torch.device("cpu")
    return frame


def _require(spec: Spec, kernel: str) -> None:
    if kernel not in KERNELS:
        raise ValueError(f'attention: there is no kernel {kernel!r}; the kernels are "auto", {_names(KERNELS)}')
    reason = KERNELS[kernel].refuses(spec)
    if reason is not None:
        able = [name for name, module in KERNELS.items() if module.refuses(spec) is None]
        raise ValueError(f'attention: kernel="{kernel}" cannot do this: {reason}; kernels that can here: {", ".join(able)}')


def _unneeded(name: str, chosen: str) -> str:
    if list(KERNELS).index(name) < list(KERNELS).index(chosen):
        return "could do this call, but another was asked for"
    return "keeps L×L scores and weights" if name == "reference" else "not needed"


def _warn(spec: Spec, module: ModuleType) -> None:
    name = module.__name__.rpartition(".")[2]
    why = fused.refuses(spec) if module is reference else "SDPA takes such a mask or bias only as a dense tensor"
    warnings.warn(
        f'attention: "auto" runs kernel "{name}" with {_bytes(module.quadratic_bytes(spec))} of L×L tensors, because {why}; '
        "print(multihead.plan(…)) tells more",
        QuadraticMemoryWarning,
        stacklevel=_outside(),
    )


def _outside() -> int:
    """The stacklevel of the first caller outside of this package and of torch: the line that can be changed."""
    level, frame = 1, sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("multihead", "torch"):
        level, frame = level + 1, frame.f_back
    return level


def _bytes(n: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} {unit}"
        n /= 1024
    return f"{n:.1f} GiB"


def _names(kernels: dict[str, ModuleType]) -> str:
    return ", ".join(f'"{name}"' for name in kernels)
