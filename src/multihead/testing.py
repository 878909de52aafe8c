"""What we test attention with, shipped because people who write kernels need it too: sizes, an oracle, a tolerance.

    q, k, v = make(dtype=torch.bfloat16)
    exact = oracle(q, k, v, mask=Causal())
    check(my_kernel(q, k, v), exact.out, naive(q, k, v, mask=Causal()))

The tolerance is not a number: a kernel may be at most twice as wrong as the naive computation in the same dtype, both
measured against float64, in every row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .kernels import reference
from .kernels.spec import Spec
from .masks import Frame, Mask, evaluate


class Sizes(NamedTuple):
    """Pairwise distinct, so that a swapped axis cannot hide."""

    batch: int = 2
    heads: int = 6
    kv_heads: int = 3
    q_len: int = 5
    kv_len: int = 7
    head_dim: int = 11
    v_dim: int = 13


class Exact(NamedTuple):
    """float64 results: out [batch, heads, q_len, v_dim], lse [batch, heads, q_len], gradients by name."""

    out: Tensor
    lse: Tensor
    grads: dict[str, Tensor]


def make(
    sizes: Sizes | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    requires_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normal q, k, v of the given sizes."""
    n, random = sizes or Sizes(), torch.Generator().manual_seed(seed)
    shapes = (
        (n.batch, n.heads, n.q_len, n.head_dim),
        (n.batch, n.kv_heads, n.kv_len, n.head_dim),
        (n.batch, n.kv_heads, n.kv_len, n.v_dim),
    )
    q, k, v = (torch.randn(shape, generator=random, dtype=torch.float64).to(device, dtype) for shape in shapes)
    return q.requires_grad_(requires_grad), k.requires_grad_(requires_grad), v.requires_grad_(requires_grad)


def cotangent(like: Tensor, seed: int = 1) -> Tensor:
    """A random gradient to send back: a sum or a mean hides what it weights equally."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=random, dtype=torch.float64).to(like.device, like.dtype)


def oracle(q: Tensor, k: Tensor, v: Tensor, *, dout: Tensor | None = None, dlse: Tensor | None = None, **options: Any) -> Exact:
    """The definition in float64; with dout (and dlse) also the gradients of q, k, v and of bias and sinks where given."""
    leaves = {name: _double(x) for name, x in {"q": q, "k": k, "v": v}.items()}
    for name in ("bias", "sinks"):
        if options.get(name) is not None:
            leaves[name] = options[name] = _double(options[name])
    with torch.enable_grad():
        spec = Spec(leaves["q"], leaves["k"], leaves["v"], want_lse=True, **options)
        out, lse = reference.run(leaves["q"], leaves["k"], leaves["v"], spec)
        if lse is None:
            raise RuntimeError("the reference gave no log-sum-exp")
        grads: dict[str, Tensor] = {}
        if dout is not None:
            total = (out * dout.double()).sum()
            if dlse is not None:
                total = total + torch.where(lse.isfinite(), lse * dlse.double(), 0.0).sum()
            found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
            grads = dict(zip(leaves, found, strict=True))
    return Exact(out.detach(), lse.detach(), grads)


def naive(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Mask | None = None, bias: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """What people write by hand, in the dtype of q: matmul, scale, mask, softmax, matmul. The measure of what is wrong."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.mT * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        allowed = evaluate(mask, Frame(q.shape[0], q.shape[1], q.shape[2], k.shape[2], device=q.device))
        scores = scores.masked_fill(~allowed, -math.inf)
        return scores.softmax(-1).masked_fill(~allowed.any(-1, keepdim=True), 0.0) @ v
    return scores.softmax(-1) @ v


def check(
    actual: Tensor, exact: Tensor, plain: Tensor | Sequence[Tensor], what: str = "out", zero: Tensor | None = None
) -> None:
    """Raise AssertionError where a row (the last axis) of actual is more than twice as wrong as the worst row of plain.

    plain may be several computations that differ in rounding only (other orders of the keys): their worst error counts.
    A few roundings of the largest value are free: 2 in half precision; 8 in float32 and float64, where a kernel has no
    wider type to keep its log-sum-exp in. Rows marked in zero, [...] of the rows, must be exactly zero. NaN is wrong
    wherever exact has none, and so is infinity.
    """
    if actual.shape != exact.shape:
        raise AssertionError(f"{what}: shape {list(actual.shape)} instead of {list(exact.shape)}")
    exact, step = (
        exact.double(),
        torch.finfo(actual.dtype).eps * (8 if actual.dtype.itemsize >= 4 else 2),
    )
    several = [plain] if isinstance(plain, Tensor) else plain
    if not exact.numel():
        return
    off = [(p.double() - exact).abs() for p in several]
    error = torch.stack([x.masked_fill(~x.isfinite(), 0.0).max() for x in off]).max()  # an overflow excuses nothing
    bound = 2 * error + step * exact.abs().nan_to_num(0.0, 0.0, 0.0).max()
    wrong = torch.where(actual.double() == exact, 0.0, (actual.double() - exact).abs())
    wrong = torch.where(actual.isnan() & exact.isnan(), 0.0, wrong.nan_to_num(math.inf, math.inf, math.inf))
    row = wrong.amax(-1) if wrong.ndim else wrong
    limit = bound.expand_as(row) if zero is None else torch.where(zero, 0.0, bound).expand_as(row)
    if bool((row > limit).any()):
        at = [int(i) for i in torch.unravel_index((row - limit).argmax(), row.shape)]
        got, want = actual[tuple(at)], exact[tuple(at)]
        raise AssertionError(
            f"{what}: row {at} is off by {row[tuple(at)].item():.3g}, allowed is {limit[tuple(at)].item():.3g} "
            f"(twice as wrong as plain torch in {actual.dtype}); "
            f"got {got.tolist()}, exact is {want.tolist()}"
        )


def assert_attention(module: Any, **options: Any) -> None:
    """Raise AssertionError, with the report, where multihead.check finds something wrong in an attention module.

        def test_attention():
            assert_attention(MyAttention(64, 4))      # or the class, or a function

    options  as for multihead.check
    """
    from .checking import check as examined

    report = examined(module, **options)
    if not report.ok:
        raise AssertionError(f"assert_attention: {', '.join(f.name for f in report.findings if f.level == 'wrong')}\n{report}")


def _double(x: Tensor) -> Tensor:
    return x.detach().double().requires_grad_()
