"""Kernels of others that are known to be wrong, as data: where, since when, why, and what runs instead.

holding(call)     the guards that hold for a call on CUDA
refusal(call)     why no fused kernel of SDPA is left for it, or None
around(call)      a context in which SDPA cannot choose what the guards exclude
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

Version = tuple[int, int]
MAJOR, MINOR = torch.__version__.split(".")[:2]
VERSION: Version = (int(MAJOR), int(MINOR))
GRID = 65_535  # the most blocks that CUDA launches along the second and third axis of a grid
ALIGN = 16  # columns to which torch pads a dense mask
ALWAYS: tuple[Version, Version] = ((2, 11), (1_000, 0))


class Call(NamedTuple):
    """One call as a kernel of torch sees it, after the mask has been lowered.

    dense       a mask or bias is handed over as a tensor
    grad        a gradient will be asked for
    score_mod   FlexAttention is given a function of the scores
    capability  of the device, (9, 0) for an H200; None where nobody can look, which counts as every device
    """

    dense: bool
    grad: bool
    batch: int
    heads: int
    q_len: int
    kv_len: int
    half: bool = True
    dropout: float = 0.0
    score_mod: bool = False
    capability: tuple[int, int] | None = None


@dataclass(frozen=True)
class Guard:
    """A kernel known to be wrong.

    kernel     whose kernel it is; backend is its name in torch.nn.attention.SDPBackend, where SDPA chooses it
    versions   of torch: from the first, up to but not including the second
    condition  where it is wrong; `why` says how, `url` who found it, `instead` what runs then
    """

    kernel: str
    versions: tuple[Version, Version]
    condition: Callable[[Call], bool]
    why: str
    url: str
    instead: str
    backend: str | None = None

    def holds(self, call: Call, version: Version) -> bool:
        return self.versions[0] <= version < self.versions[1] and self.condition(call)


def surely(fact: bool) -> bool:
    """The fact; in a traced graph only if it holds for all sizes, since an exported program forgets what was assumed."""
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import statically_known_true  # heavy, and there already when tracing

        return statically_known_true(fact)
    return fact


def _tail(call: Call) -> bool:
    """Half a tile of 128 keys is left at the end, or may be."""
    return call.dense and call.grad and call.capability in (None, (9, 0)) and not surely(call.kv_len % 128 != 64)


def _overflow(call: Call) -> bool:
    return (call.dense or call.dropout > 0) and call.q_len * (-(-call.kv_len // ALIGN) * ALIGN) > 2**32


def _ragged(call: Call) -> bool:
    return call.score_mod and call.grad and bool(call.q_len % 128 or call.kv_len % 128)


GUARDS = (
    Guard(
        "cuDNN",
        ALWAYS,
        _tail,
        "with a dense mask and kv_len % 128 == 64, dq is NaN in rows whose log-sum-exp is below −88.7 (on sm90)",
        "https://github.com/pytorch/pytorch/issues/196678",
        "another kernel of SDPA",
        "CUDNN_ATTENTION",
    ),
    Guard(
        "efficient",
        ((2, 11), (2, 15)),
        _overflow,
        "the offset of a row in a mask overflows 32 bits, so that rows past 2³² / kv_len are silently wrong",
        "https://github.com/pytorch/pytorch/issues/162588",
        "cuDNN in half precision, else another kernel of ours",
        "EFFICIENT_ATTENTION",
    ),
    Guard(
        "SDPA",
        ALWAYS,
        lambda call: call.batch > GRID or call.heads > GRID,
        "its kernels launch a grid with one row a batch entry and one a head, of which CUDA allows 65,535",
        "https://github.com/pytorch/pytorch/issues/142228",
        "calls of at most 65,535 batch entries; more heads than that, no kernel of SDPA",
    ),
    Guard(
        "flex FLASH",
        ((2, 11), (2, 14)),
        lambda _: True,
        "blocks that a block mask leaves out are computed where its mask_mod is trivial",
        "https://github.com/pytorch/pytorch/issues/188322",
        "BACKEND=TRITON",
    ),
    Guard(
        "flex",
        ALWAYS,
        _ragged,
        "gradients are NaN where a score_mod and a block mask meet a length that 128 does not divide",
        "https://github.com/pytorch/pytorch/issues/153799",
        "q, k and v padded to whole blocks, the padding masked",
    ),
)


def holding(call: Call, version: Version | None = None, kernels: tuple[str, ...] | None = None) -> list[Guard]:
    """The guards that hold for a call on CUDA, all or those of the kernels named."""
    version = version or VERSION
    return [guard for guard in GUARDS if (kernels is None or guard.kernel in kernels) and guard.holds(call, version)]


def refusal(call: Call, version: Version | None = None) -> str | None:
    """Why SDPA has no fused kernel left for this call, in one sentence, or None."""
    if call.heads > GRID:
        return f"no kernel of SDPA takes more than {GRID:,} heads (pytorch#142228)"
    left = {"EFFICIENT_ATTENTION"}
    if call.half:
        left |= {"CUDNN_ATTENTION"} if call.dense else {"CUDNN_ATTENTION", "FLASH_ATTENTION"}
    held = [guard for guard in holding(call, version) if guard.backend in left]
    if left - {guard.backend for guard in held}:
        return None
    return "; ".join(f"SDPA's {guard.kernel} kernel is wrong here: {guard.why} ({_thread(guard.url)})" for guard in held)


def of_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> Call:
    """The call that SDPA is about to get."""
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    looks = q.is_cuda and not torch.compiler.is_compiling()
    capability = torch.cuda.get_device_capability(q.device) if looks and mask is not None else None
    half = q.dtype.itemsize == 2
    return Call(mask is not None, grad, q.shape[0], q.shape[1], q.shape[2], k.shape[2], half, dropout, False, capability)


def around(call: Call, version: Version | None = None) -> AbstractContextManager[object]:
    """A context in which SDPA cannot choose what the guards exclude; it costs nothing where none holds."""
    held = [guard for guard in _certain(call, version) if guard.backend is not None]
    if not held:
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    wrong = {guard.backend for guard in held}
    left: list[SDPBackend] = [getattr(SDPBackend, name) for name in _enabled() if name not in wrong]
    if not left:
        raise RuntimeError(
            f"attention: every kernel that is switched on in torch.backends.cuda is wrong here: {held[0].why} "
            f'({held[0].url}); switch another one on, or write kernel="reference"'
        )
    return cast(AbstractContextManager[object], sdpa_kernel(left))


def _certain(call: Call, version: Version | None) -> list[Guard]:
    """While tracing, a size compared would become a condition of the graph: only what does without is asked."""
    return holding(call, version, ("cuDNN",) if torch.compiler.is_compiling() else None)


def _enabled() -> tuple[str, ...]:
    """What the user has left switched on."""
    cuda = torch.backends.cuda
    switches = {
        "CUDNN_ATTENTION": cuda.cudnn_sdp_enabled(),
        "FLASH_ATTENTION": cuda.flash_sdp_enabled(),
        "EFFICIENT_ATTENTION": cuda.mem_efficient_sdp_enabled(),
        "MATH": cuda.math_sdp_enabled(),
    }
    return tuple(name for name, on in switches.items() if on)


# Read while tracing, not traced: what torch.compiler.assume_constant_result says, but its import costs a second.
_enabled._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def _thread(url: str) -> str:
    """pytorch#196678"""
    *_, repository, _, number = url.split("/")
    return f"{repository}#{number}"
