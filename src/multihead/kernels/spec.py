"""What a kernel is asked to do: every shape and option checked once, up front and by name."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor
from torch._C import _functorch as functorch  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue, reportUnknownVariableType]

from ..masks import Frame, Mask
from ..masks.algebra import Position

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Spec:
    """One attention call, checked. Kernels read it and never check again.

    q [batch, heads, q_len, head_dim]   k [batch, kv_heads, kv_len, head_dim]   v [batch, kv_heads, kv_len, v_dim]
    bias is None or 4-D, broadcastable to [batch, heads, q_len, kv_len]; sinks is None or [heads]
    """

    __slots__ = (
        *("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "v_dim", "dtype", "device"),
        *("mask", "bias", "scale", "dropout", "seed", "softcap", "sinks", "want_lse"),
        *("start", "key_start"),
    )

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | None = None,
        bias: Tensor | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
        seed: int | Tensor | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        want_lse: bool = False,
        start: Position | None = None,
        key_start: Position = 0,
    ) -> None:
        try:
            B, H, T, D = q.shape
            Bk, G, S, Dk = k.shape
            Bv, Gv, Sv, E = v.shape
        except (ValueError, AttributeError, RuntimeError):  # the last from a nested tensor
            raise _explain(q, k, v) from None
        dtype, device = q.dtype, q.device
        fits = B == Bk == Bv and Dk == D and Gv == G and Sv == S and G and H % G == 0 and D
        if not (fits and dtype == k.dtype == v.dtype and device == k.device == v.device and dtype in DTYPES):
            raise _explain(q, k, v)
        self.batch, self.heads, self.kv_heads, self.q_len, self.kv_len, self.head_dim, self.v_dim = B, H, G, T, S, D, E
        self.dtype, self.device = dtype, device
        if scale is not None or softcap is not None:
            check_numbers("attention", scale, softcap)
        self.scale = 1.0 / math.sqrt(D) if scale is None else float(scale)
        self.mask, self.bias, self.sinks = mask, bias, sinks
        self.dropout, self.seed, self.softcap, self.want_lse = dropout, seed, softcap, want_lse
        self.start, self.key_start = start, key_start
        if mask is not None and not isinstance(mask, Mask):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise _bare_mask(mask)
        if bias is not None:
            self.bias = check_bias(bias, (B, H, T, S), device)
        if sinks is not None:
            _check_sinks(sinks, H, device)
        if dropout != 0.0 or seed is not None:
            _check_dropout(dropout, seed)
        if start is not None and type(start) is not int:
            _check_start("start", start, B)
        if type(key_start) is not int:
            _check_start("key_start", key_start, B)
        elif key_start < 0:  # no key stands before 0: what a ragged cache says with a tensor
            self.key_start = torch.full((B,), key_start, device=device)

    def with_tensors(self, bias: Tensor | None, sinks: Tensor | None) -> Spec:
        """The same call with other tensors: what autograd keeps for backward, it hands back itself."""
        other = copy.copy(self)
        other.bias, other.sinks = bias, sinks
        return other

    @property
    def frame(self) -> Frame:
        """Where the mask is looked at."""
        return Frame(
            self.batch,
            self.heads,
            self.q_len,
            self.kv_len,
            q_start=self.start,
            k_start=self.key_start,
            device=self.device,
        )

    @property
    def ragged(self) -> bool:
        """Batch entries hold different numbers of keys: some columns hold none."""
        return isinstance(self.key_start, Tensor)

    @property
    def out_bytes(self) -> int:
        return self.batch * self.heads * self.q_len * self.v_dim * self.dtype.itemsize

    @property
    def bytes(self) -> int:
        """What must be moved at least: q, k, v read once, the output written once."""
        q = self.batch * self.heads * self.q_len * self.head_dim
        kv = self.batch * self.kv_heads * self.kv_len * (self.head_dim + self.v_dim)
        return (q + kv) * self.dtype.itemsize + self.out_bytes

    @property
    def pairs(self) -> int:
        """All (query, key) pairs, hidden ones included."""
        return self.batch * self.heads * self.q_len * self.kv_len


def cpu_frame(spec: Spec) -> Frame:
    """Where the mask is looked at; of a call on a device that is not there, meta or a GPU to be planned for, on the CPU."""
    frame = spec.frame
    frame.device = torch.device("cpu") if spec.device.type == "meta" else present(spec.device)
    return frame


def present(device: torch.device) -> torch.device:
    """The device, or the CPU for a GPU that is only planned for."""
    return torch.device("cpu") if device.type == "cuda" and not torch.cuda.is_available() else device


def finite(*tensors: Tensor) -> bool:
    """True only where no number is NaN or infinite; costs less than a copy. float16 is summed in float32, lest it overflow."""
    sums = (x.detach().sum(dtype=torch.float32 if x.dtype == torch.float16 else None) for x in tensors)
    return all(math.isfinite(x.item()) for x in sums)


def transformed() -> bool:
    """Whether a transform of torch.func is at work, inside which nobody can look at numbers."""
    return functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportUnknownMemberType]


def unbatched(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether all three come without a batch axis."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise _explain(q, k, v)
    return q.dim() == k.dim() == v.dim() == 3


def autocasts(kind: str) -> bool:
    """Whether autocast is on for this kind of device; torch raises where it knows none for it."""
    return kind != "meta" and torch.is_autocast_enabled(kind)


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """What autocast does to the arguments of SDPA, here for every kernel alike."""
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return tuple(x.to(dtype) if x.dtype == torch.float32 else x for x in tensors)


_AXES = {
    "q": "[batch, heads, q_len, head_dim]",
    "k": "[batch, kv_heads, kv_len, head_dim]",
    "v": "[batch, kv_heads, kv_len, v_dim]",
}


def _explain(q: Tensor, k: Tensor, v: Tensor) -> Exception:
    """Why q, k and v do not go together, in one sentence that names what came."""
    named = {"q": q, "k": k, "v": v}
    for name, t in named.items():
        if not isinstance(t, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            return TypeError(f"attention: {name} must be a tensor {_AXES[name]}; it is a {type(t).__name__}")
        if t.is_nested:
            return TypeError(
                f"attention: {name} is a nested tensor; pad it (x.to_padded_tensor(0)) and pass mask=Lengths(…), or pack it "
                "and pass mask=Documents.from_lengths(…)"
            )
    came = "; ".join(f"{name} {_AXES[name]} has shape {list(t.shape)}" for name, t in named.items())
    if any(t.ndim != 4 for t in named.values()):
        return ValueError(f"attention: q, k and v must all have 4 axes, or all 3 (no batch); {came}")
    if any(t.dtype != q.dtype or t.dtype not in DTYPES for t in named.values()):
        dtypes = ", ".join(f"{name} {t.dtype}" for name, t in named.items())
        return TypeError(f"attention: q, k and v must share one of float32, bfloat16, float16, float64; they are {dtypes}")
    if any(t.device != q.device for t in named.values()):
        return ValueError(f"attention: q, k and v must be on one device; they are on {q.device}, {k.device}, {v.device}")
    for axis, (a, x), (b, y) in (
        ("batch", ("q", q.shape[0]), ("k", k.shape[0])),
        ("batch", ("q", q.shape[0]), ("v", v.shape[0])),
        ("head_dim", ("q", q.shape[3]), ("k", k.shape[3])),
        ("kv_heads", ("k", k.shape[1]), ("v", v.shape[1])),
        ("kv_len", ("k", k.shape[2]), ("v", v.shape[2])),
    ):
        if x != y:
            return ValueError(f"attention: {axis} is {x} in {a} but {y} in {b}; {came}")
    if not q.shape[3]:
        return ValueError(f"attention: head_dim must be at least 1; {came}")
    return ValueError(f"attention: heads ({q.shape[1]}) must be a multiple of kv_heads ({k.shape[1]}); {came}")


def _bare_mask(mask: object) -> TypeError:
    if isinstance(mask, Tensor):
        kind = "bool" if mask.dtype == torch.bool else str(mask.dtype).removeprefix("torch.")
        advice = (
            "write Allowed(m) if True may attend, Blocked(m) if True may not"
            if mask.dtype == torch.bool
            else "write masks.from_additive(m) if it is added to the scores, masks.from_zeros(m) if 0 blocks, "
            "masks.from_ones(m) if 1 blocks"
        )
        return TypeError(f"attention: mask is a bare {kind} tensor, which libraries read in opposite ways; {advice}")
    return TypeError(f"attention: mask must be a multihead mask such as Causal(); it is a {type(mask).__name__}")


def four_axes(x: Tensor) -> Tensor:
    """A bias [q, k], [batch, q, k] or [batch, heads, q, k] with all four: three axes never mean the heads."""
    return x[None, None] if x.ndim == 2 else x[:, None] if x.ndim == 3 else x


def check_numbers(where: str, scale: object, softcap: object) -> None:
    for name, value in (("scale", scale), ("softcap", softcap)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value)):
            raise TypeError(f"{where}: {name} must be a finite number; it is {value!r}")
    if isinstance(softcap, int | float) and not softcap > 0:
        raise ValueError(f"{where}: softcap must be > 0 (scores become softcap · tanh(score / softcap)); it is {softcap}")


def check_bias(bias: Tensor, want: tuple[int, ...], device: torch.device) -> Tensor:
    """The bias with four axes, broadcastable to want = [batch, heads, q_len, kv_len]."""
    if not isinstance(bias, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"attention: bias must be a float tensor that is added to the scores; it is a {type(bias).__name__}")
    four = four_axes(bias)
    if four.ndim != 4 or any(n != 1 and n != m for n, m in zip(four.shape, want, strict=True)):
        raise ValueError(
            "attention: bias must be [q_len, kv_len], [batch, q_len, kv_len] or [batch, heads, q_len, kv_len], size 1 where "
            f"it does not vary; its shape is {list(bias.shape)}, the call is {list(want)}"
        )
    if not bias.dtype.is_floating_point:
        raise TypeError(
            f"attention: bias is added to the scores and must be a float tensor; its dtype is {bias.dtype}. "
            "A bool tensor is a mask: mask=Allowed(m) or mask=Blocked(m)"
        )
    if bias.device != device:
        raise ValueError(f"attention: bias is on {bias.device} but q is on {device}")
    return four


def _check_sinks(sinks: Tensor, heads: int, device: torch.device) -> None:
    if not isinstance(sinks, Tensor) or not sinks.is_floating_point():  # pyright: ignore[reportUnnecessaryIsInstance]
        came = f"dtype {sinks.dtype}" if isinstance(sinks, Tensor) else f"a {type(sinks).__name__}"  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"attention: sinks must be a float tensor [heads] = [{heads}]; it is {came}")
    if sinks.shape != (heads,) or sinks.device != device:
        raise ValueError(
            f"attention: sinks must hold one logit a head, [heads] = [{heads}] on {device}; "
            f"its shape is {list(sinks.shape)} on {sinks.device}"
        )


def _check_dropout(dropout: float, seed: int | Tensor | None) -> None:
    if not isinstance(dropout, int | float) or not 0.0 <= dropout <= 1.0:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"attention: dropout is the probability to drop a weight, 0 … 1; it is {dropout!r}")
    if isinstance(seed, Tensor) and seed.dtype == torch.int64 and not seed.ndim:  # drawn by a kernel itself
        return
    if seed is not None and not (isinstance(seed, int) and 0 <= seed < 2**63):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"attention: seed must be a whole number, 0 … 2⁶³ − 1; it is {seed!r}")


def _check_start(name: str, start: object, batch: int) -> None:
    if isinstance(start, torch.SymInt):
        return
    if not isinstance(start, Tensor):
        raise TypeError(f"attention: {name} must be a whole number or an integer tensor [batch] = [{batch}]; it is {start!r}")
    if start.shape != (batch,) or start.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"attention: {name} must be a number or an integer tensor [batch] = [{batch}]; "
            f"it is {start.dtype} of shape {list(start.shape)}"
        )
