"""Which kernel runs, how much work the mask leaves it, and why not the others."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import Tensor

from .kernels import fused, lazily, products, reference
from .kernels.spec import Spec, autocast, autocasts, cpu_frame, unbatched
from .masks import Causal, Mask, Where
from .masks.algebra import Position, count

blocked = lazily("blocked")

# behind the reference, which never refuses, stand those that "auto" takes on no device yet: nobody has measured them
KERNELS: dict[str, ModuleType] = {
    "fused": fused,
    "blocked": blocked,
    "reference": reference,
    "packed": lazily("packed"),
    "flex": lazily("flex"),
}
QUIET = 16 * 2**20  # L×L tensors of up to this many bytes trouble no one; above it, "auto" says that it needs them
SMALL = 2**15  # pairs up to which the definition is done before another kernel has begun


class QuadraticMemoryWarning(UserWarning):
    """`kernel="auto"` had to choose a path whose memory grows with q_len × kv_len."""


def choose(spec: Spec, kernel: str = "auto") -> ModuleType:
    """The kernel to run. Raises where the one asked for cannot do the call; warns where "auto" must use O(L²) memory."""
    if _listening:
        _tell(spec, kernel)
    if kernel != "auto":
        _require(spec, kernel)
        return KERNELS[kernel]
    module = KERNELS[_auto(spec)]
    if torch.compiler.is_compiling():  # a size compared here would become a guard of the graph
        return module
    square = module is reference or spec.mask is not None or spec.bias is not None or spec.ragged
    most = 3 * spec.pairs * 8  # no kernel keeps more; what is small needs no closer look
    if square and most > QUIET and module.quadratic_bytes(spec) > QUIET:
        _warn(spec, module)
    return module


def _auto(spec: Spec) -> str:
    """The kernel that "auto" takes: torch's own, unless ours can do what it cannot or is expected to be done sooner."""
    fusable = fused.refuses(spec) is None
    if spec.device.type in ("cpu", "meta") and _ours(spec, fusable):
        return "blocked"
    return "fused" if fusable else "reference"


def _ours(spec: Spec, fusable: bool) -> bool:
    if torch.compiler.is_compiling():
        return not torch.compiler.is_exporting() and _worth_an_operator(spec, fusable)
    if not fusable:
        return spec.pairs > SMALL and blocked.refuses(spec) is None
    if spec.pairs * (spec.head_dim + spec.v_dim) * 1e-11 < fused.SOON or spec.q_len <= fused.FOLD:
        return False
    return blocked.refuses(spec) is None and blocked.seconds(spec) < fused.seconds(spec)


def _worth_an_operator(spec: Spec, fusable: bool) -> bool:
    """In a compiled graph, where sizes may not be asked: what torch's own kernel cannot do, or does at the price of all pairs.

    An exported graph keeps to torch's operators, so that it runs where this package is not.
    """
    atoms = [] if spec.mask is None else spec.mask.atoms()
    if any(isinstance(atom, Where) for atom in atoms) or blocked.refuses(spec) is not None:
        return False
    return not fusable or any(atom.by_query and not isinstance(atom, Causal) for atom in atoms)


@dataclass(frozen=True)
class Plan:
    """What a call would do.

    kernel           the kernel that would run
    refusals         every other kernel, with the reason why it was passed over
    pairs, allowed   all (query, key) pairs of the call, and how many the mask leaves
    computed         how many the kernel computes: those allowed, and what shares a block with them
    flops            multiplications and additions of a forward
    bytes            the least that a forward must move: q, k, v and the output
    peak_bytes       what a forward holds at once beside its arguments
    quadratic_bytes  bytes of the L×L tensors the kernel needs; 0 where memory grows with L
    route            the way the kernel takes, where it has several: the library of its products, how sequences are packed
    notes            what this kernel promises less than the reference
    """

    kernel: str
    refusals: dict[str, str]
    pairs: int
    allowed: int
    computed: int
    flops: int
    bytes: int
    peak_bytes: int
    quadratic_bytes: int
    route: str = ""
    notes: list[str] = field(default_factory=list[str])

    @property
    def share(self) -> float:
        """The share of the pairs that the mask leaves."""
        return self.allowed / self.pairs if self.pairs else 0.0

    def __str__(self) -> str:
        done = self.computed / self.pairs if self.pairs else 0.0
        rows = [
            ("kernel", self.kernel),
            ("pairs", f"{self.allowed:,} of {self.pairs:,} ({self.share:.1%}) may attend; {done:.1%} are computed"),
            ("work", f"{_metric(self.flops)}FLOP, {_bytes(self.bytes)} at least to be moved"),
            ("memory", f"{_bytes(self.peak_bytes)} at once, {_bytes(self.quadratic_bytes)} of it L×L"),
            *([("route", self.route)] if self.route else []),
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
    asked = kernel != "auto"
    if asked:
        _require(spec, kernel)
    else:
        kernel = _auto(spec)
    module = KERNELS[kernel]
    others = {name: reason or _unneeded(name, kernel, spec, asked) for name, reason in reasons.items() if name != kernel}
    quadratic, notes = module.quadratic_bytes(spec), _notes(kernel, spec)
    if return_weights:
        quadratic += reference.quadratic_bytes(spec) if kernel != "reference" else 0
        notes.append("the weights are L×L, computed beside the output")
    done = module.computed(spec)
    return Plan(
        kernel=kernel,
        refusals=others,
        pairs=spec.pairs,
        allowed=count(spec.mask, cpu_frame(spec)),
        computed=done,
        flops=2 * done * (spec.head_dim + spec.v_dim),
        bytes=spec.bytes,
        peak_bytes=module.peak_bytes(spec) + quadratic - module.quadratic_bytes(spec),
        quadratic_bytes=quadratic,
        route=route(spec) if (route := getattr(module, "route", None)) else "",
        notes=notes,
    )


def _notes(kernel: str, spec: Spec) -> list[str]:
    notes: list[str] = []
    if kernel == "fused" and spec.mask is not None:
        notes.append("NaN or inf in a key hidden from only some queries can reach their gradients (IEEE: 0 · NaN is NaN)")
    if kernel == "blocked" and products.computed_in(spec.dtype) == torch.bfloat16:
        notes.append("scores are rounded to bfloat16 before the softmax, as by hand")
    if kernel != "reference":
        notes.append('second derivatives and forward-mode AD need kernel="reference"')
    return notes


# ---- listening ----------------------------------------------------------------------------------------------------------

_listening: list[list[Plan]] = []


@contextmanager
def plans() -> Generator[list[Plan]]:
    """Collects the plan of every call made inside, in their order: `with plans() as seen: model(x)`.

    Layers take their long way meanwhile, which computes the same; calls inside a compiled graph are planned when it is traced.
    """
    found: list[Plan] = []
    _listening.append(found)
    try:
        yield found
    finally:
        _listening.remove(found)


def listening() -> bool:
    """Whether somebody collects plans, for which the short ways must be left."""
    return bool(_listening)


def _tell(spec: Spec, kernel: str) -> None:
    made = explain(spec, kernel)
    for found in _listening:
        found.append(made)


# ---- reasons ------------------------------------------------------------------------------------------------------------


def _require(spec: Spec, kernel: str) -> None:
    if kernel not in KERNELS:
        raise ValueError(f'attention: there is no kernel {kernel!r}; the kernels are "auto", {_names(KERNELS)}')
    reason = KERNELS[kernel].refuses(spec)
    if reason is not None:
        able = [name for name, module in KERNELS.items() if module.refuses(spec) is None]
        raise ValueError(f'attention: kernel="{kernel}" cannot do this: {reason}; kernels that can here: {", ".join(able)}')


def _unneeded(name: str, chosen: str, spec: Spec, asked: bool) -> str:
    if name == "reference":
        return "keeps L×L scores and weights"
    if chosen == "reference" and not asked:
        return "could do this call, but the definition is done sooner for so few pairs"
    if {name, chosen} == {"fused", "blocked"} and not asked and spec.device.type in ("cpu", "meta"):
        ratio = KERNELS[name].seconds(spec) / max(KERNELS[chosen].seconds(spec), 1e-12)
        return f"could do this call, and is expected to take {ratio:.1f} × the time"
    return "could do this call, but another was asked for"


def _warn(spec: Spec, module: ModuleType) -> None:
    name = module.__name__.rpartition(".")[2]
    why = "SDPA takes such a mask or bias only as a dense tensor"
    if module is reference:
        why = "; ".join(reason for other in (fused, blocked) if (reason := other.refuses(spec)))
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


def _metric(n: float) -> str:
    for unit in ("", "k", "M", "G"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:,.3g} T"


def _names(kernels: dict[str, ModuleType]) -> str:
    return ", ".join(f'"{name}"' for name in kernels)
