"""Every kernel × mask × dtype against the oracle: values, log-sum-exp, and gradients from random cotangents."""

import pytest
import torch

import multihead as mh
from multihead.kernels.spec import Spec
from multihead.plan import KERNELS
from multihead.testing import Sizes, check, cotangent, make, naive, oracle
from tests.common import MASKS, B, G, H, S, T, moved

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SIZES = {
    "grouped": Sizes(),
    "equal": Sizes(kv_heads=6, v_dim=11),
    "multi_query": Sizes(kv_heads=1, v_dim=8, head_dim=16),
    "many_queries": Sizes(q_len=37, kv_len=41, v_dim=5),
}


def attend(kernel, q, k, v, **options):
    asked = {("want_lse" if n == "return_lse" else n): x for n, x in options.items() if n != "return_weights"}
    spec = Spec(q, k, v, **asked)
    reason = KERNELS[kernel].refuses(spec)
    if reason:
        with pytest.raises(ValueError, match="cannot do this"):
            mh.attention(q, k, v, kernel=kernel, **options)
        pytest.skip(f"{kernel} refuses, and says so: {reason}")
    return mh.attention(q, k, v, kernel=kernel, **options)


def plainly(q, k, v, mask, dout):
    """What a kernel's error is compared with: naive and its gradients, with the keys in three orders."""
    outs, grads = [], []
    table = (
        torch.ones(1, 1, T, S, dtype=torch.bool, device=q.device)
        if mask is None
        else mask.dense(T, S, batch=B, heads=H, device=q.device)
    )
    for order in (torch.arange(S), torch.arange(S).flip(0), torch.arange(S).roll(3)):
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        order = order.to(q.device)
        out = naive(leaves[0], leaves[1][:, :, order], leaves[2][:, :, order], mask=mh.Allowed(table[..., order]))
        outs.append(out.detach())
        grads.append(torch.autograd.grad((out * dout).sum(), leaves))
    return outs, list(zip(*grads, strict=True))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_values_and_gradients(kernel, dtype, name, device):
    q, k, v = make(dtype=dtype, device=device, requires_grad=True)
    mask = moved(MASKS[name], device)
    out = attend(kernel, q, k, v, mask=mask)
    dout = cotangent(out)
    grads = torch.autograd.grad((out * dout).sum(), (q, k, v))
    exact = oracle(q, k, v, mask=mask, dout=dout)
    plain, plain_grads = plainly(q, k, v, mask, dout)
    seen = torch.ones(B, H, T, S, dtype=torch.bool) if mask is None else MASKS[name].dense(T, S, batch=B, heads=H)
    empty, unseen = ~seen.any(3).to(device), ~seen.unflatten(1, (G, -1)).any(3).any(2).to(device)
    check(out.detach(), exact.out, plain, zero=empty)
    for got, n, other in zip(grads, "qkv", plain_grads, strict=True):
        check(got, exact.grads[n], other, f"d{n}", zero=empty if n == "q" else unseen)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["none", "causal", "causal_start", "window", "prefix"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sizes(kernel, size, name, dtype, device):
    q, k, v = make(SIZES[size], dtype=dtype, device=device)
    mask = MASKS[name]
    check(attend(kernel, q, k, v, mask=mask), oracle(q, k, v, mask=mask).out, naive(q, k, v, mask=mask))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", [(T, S), (B, T, S), (B, H, T, S), (1, H, 1, S), (B, 1, T, 1)])
@pytest.mark.parametrize("name", ["none", "causal", "lengths_empty"])
def test_bias(kernel, shape, name, device):
    q, k, v = make(device=device, requires_grad=True)
    bias = torch.randn(shape, device=device)
    mask = moved(MASKS[name], device)
    out = attend(kernel, q, k, v, mask=mask, bias=bias)
    dout = cotangent(out)
    grads = torch.autograd.grad((out * dout).sum(), (q, k, v))
    exact = oracle(q, k, v, mask=mask, bias=bias, dout=dout)
    four = bias[None, None] if bias.ndim == 2 else bias[:, None] if bias.ndim == 3 else bias
    check(out.detach(), exact.out, naive(q, k, v, mask=mask, bias=four).detach())
    for got, n in zip(grads, "qkv", strict=True):
        torch.testing.assert_close(got, exact.grads[n].float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", ["reference", "auto"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_float32_bias_keeps_its_digits(kernel, dtype):
    """Biases near 200 would lose a half in bfloat16; −1e9 is no −inf and 1e5 no infinity in float16."""
    q, k, v = make(Sizes(kv_heads=6, v_dim=11), dtype=dtype)
    for bias in (200.3 + torch.randn(T, S), torch.full((T, S), -1e9), torch.full((T, S), 1e5)):
        got, exact = mh.attention(q, k, v, bias=bias, kernel=kernel), oracle(q, k, v, bias=bias).out
        size = 1e-2 if abs(bias[0, 0]) < 1e3 else 2.5  # the sum itself is float32, where 1e9 leaves nothing of a score
        torch.testing.assert_close(got.double(), exact, rtol=size, atol=size)
        assert bool(got.any(-1).all())


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradient_into_the_bias(kernel, device):
    q, k, v = make(device=device)
    bias = torch.randn(1, H, T, S, device=device, requires_grad=True)
    out = attend(kernel, q, k, v, mask=mh.Causal(), bias=bias)
    dout = cotangent(out)
    (grad,) = torch.autograd.grad((out * dout).sum(), bias)
    torch.testing.assert_close(
        grad, oracle(q, k, v, mask=mh.Causal(), bias=bias, dout=dout).grads["bias"].float(), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("extra", ["softcap", "sinks", "both"])
def test_softcap_and_sinks(kernel, extra, device):
    q, k, v = make(device=device, requires_grad=True)
    options = {"softcap": 0.8, "sinks": torch.randn(H, device=device, requires_grad=True)}
    options = options if extra == "both" else {extra: options[extra]}
    out = attend(kernel, q, k, v, mask=mh.Causal(), **options)
    dout = cotangent(out)
    exact = oracle(q, k, v, mask=mh.Causal(), dout=dout, **options)
    leaves = {"q": q, "k": k, "v": v} | ({"sinks": options["sinks"]} if "sinks" in options else {})
    torch.testing.assert_close(out.detach(), exact.out.float(), rtol=1e-5, atol=1e-6)
    for n, got in zip(leaves, torch.autograd.grad((out * dout).sum(), list(leaves.values())), strict=True):
        torch.testing.assert_close(got, exact.grads[n].float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["none", "causal", "lengths_empty", "where"])
def test_lse_and_its_gradient(kernel, name, device):
    q, k, v = make(device=device, requires_grad=True)
    mask = moved(MASKS[name], device)
    out, lse = attend(kernel, q, k, v, mask=mask, return_lse=True)
    dout, dlse = cotangent(out), cotangent(lse, seed=2)
    exact = oracle(q, k, v, mask=mask, dout=dout, dlse=dlse)
    torch.testing.assert_close(lse.detach(), exact.lse.float())
    total = (out * dout).sum() + torch.where(lse.isfinite(), lse * dlse, 0.0).sum()
    for n, got in zip("qkv", torch.autograd.grad(total, (q, k, v)), strict=True):
        torch.testing.assert_close(got, exact.grads[n].float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", MASKS)
def test_weights(kernel, name, device):
    """The weights come beside the output, which is the fast kernel's; their rows sum to one or to zero."""
    q, k, v = make(device=device)
    mask = moved(MASKS[name], device)
    out, weights = attend(kernel, q, k, v, mask=mask, return_weights=True)
    assert torch.equal(out, mh.attention(q, k, v, mask=mask, kernel=kernel))
    allowed = torch.ones(B, H, T, S, dtype=torch.bool) if mask is None else MASKS[name].dense(T, S, batch=B, heads=H)
    assert torch.equal(weights.cpu() != 0, allowed)
    torch.testing.assert_close(weights.sum(-1).cpu(), allowed.any(-1).float())
    torch.testing.assert_close(weights @ v.repeat_interleave(2, 1), out, rtol=1e-4, atol=1e-5)


def test_weights_are_differentiable():
    q, k, v = make(requires_grad=True)
    out, weights = mh.attention(q, k, v, return_weights=True)
    entropy = -(weights * weights.log()).sum()
    assert all(g.abs().sum() > 0 for g in torch.autograd.grad(out.sum() + entropy, (q, k, v)))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["none", "causal", "lengths_empty", "where"])
def test_unbatched(kernel, name, device):
    q, k, v = make(Sizes(batch=1), device=device)
    mask = mh.Lengths([5]) if name == "lengths_empty" else moved(MASKS[name], device)
    whole = attend(kernel, q, k, v, mask=mask, return_weights=True)
    single = mh.attention(q[0], k[0], v[0], mask=mask, return_weights=True, kernel=kernel)
    for a, b in zip(whole, single, strict=True):
        assert torch.equal(a[0], b)


@pytest.mark.parametrize("empty", ["q_len", "kv_len", "batch", "v_dim"])
def test_empty_axes(empty, device):
    q, k, v = make(Sizes()._replace(**{empty: 0}), device=device, requires_grad=True)
    out, lse = mh.attention(q, k, v, return_lse=True)
    assert out.shape == (*q.shape[:3], v.shape[3])
    assert not out.any()
    assert empty != "kv_len" or bool((lse == -torch.inf).all())
    assert all(not g.any() for g in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize("kernel", KERNELS)
def test_strides_do_not_matter(kernel, device):
    q, k, v = make(Sizes(kv_heads=6, v_dim=11, q_len=7), device=device)
    want = attend(kernel, q, k, v, mask=mh.Causal())
    turned = [x.mT.contiguous().mT for x in (q, k, v)]
    spread = [torch.stack([x, x * torch.nan], -1)[..., 0] for x in (q, k, v)]
    for other in (turned, spread):
        assert other[0].stride(3) != 1
        torch.testing.assert_close(attend(kernel, *other, mask=mh.Causal()), want)


@pytest.mark.parametrize("options", [{}, {"bias": True}, {"softcap": 0.9, "sinks": True}, {"dropout": 0.4, "seed": 7}], ids=str)
@pytest.mark.parametrize("name", ["none", "causal_padded", "lengths_empty"])
def test_gradcheck(options, name):
    sizes = Sizes(q_len=2, kv_len=3, heads=2, kv_heads=1, head_dim=3, v_dim=2)
    q, k, v = make(sizes, dtype=torch.float64, requires_grad=True)
    parts = {
        n: torch.randn((1, 2, 2, 3) if n == "bias" else 2, dtype=torch.float64, requires_grad=True)
        for n in ("bias", "sinks")
        if n in options
    }
    mask = {"none": None, "causal_padded": mh.Causal() & mh.Lengths([2, 3]), "lengths_empty": mh.Lengths([0, 2])}[name]
    fixed = {n: x for n, x in options.items() if n not in parts}

    def call(q, k, v, *rest):
        out, lse = mh.attention(
            q, k, v, mask=mask, return_lse=True, kernel="reference", **fixed, **dict(zip(parts, rest, strict=True))
        )
        return out, lse.masked_fill(lse.isinf(), 0.0)

    leaves = (q, k, v, *parts.values())
    assert torch.autograd.gradcheck(call, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, leaves)


@pytest.mark.parametrize("kernel", KERNELS)
def test_fused_gradcheck(kernel):
    q, k, v = make(Sizes(q_len=3, kv_len=4, heads=2, kv_heads=1, head_dim=3, v_dim=2), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *x: attend(kernel, *x, mask=mh.Causal() & mh.Lengths([2, 4])), (q, k, v))


@pytest.mark.parametrize("kernel", KERNELS)
def test_uninitialised_memory_never_shows(kernel, device):
    """torch.empty filled with NaN: an output that is not written fails."""
    q, k, v = make(device=device)
    want = attend(kernel, q, k, v, mask=moved(MASKS["lengths_empty"], device))
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        got = mh.attention(q, k, v, mask=moved(MASKS["lengths_empty"], device), kernel=kernel)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(got, want)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", [None, mh.Causal(), mh.Window(100), mh.Causal() & mh.Lengths([3000])], ids=repr)
@pytest.mark.parametrize(
    "size",
    [Sizes(1, 16, 16, 4096, 4096, 64, 64), Sizes(1, 16, 4, 4096, 4096, 64, 64), Sizes(1, 16, 16, 4096, 4096, 70, 40)],
    ids=str,
)
def test_fused_on_cuda_never_takes_the_square_path(dtype, mask, size):
    """L×L scores of 16 heads would be 512 MiB in bf16; a mask is 32 to 64 MiB, tensors and their gradients are small."""
    q, k, v = make(size, dtype=dtype, device="cuda", requires_grad=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = mh.attention(q, k, v, mask=None if mask is None else mask.to("cuda"), kernel="fused")
    out.backward(torch.ones_like(out))
    assert torch.cuda.max_memory_allocated() - before < 400 * 2**20
