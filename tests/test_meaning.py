"""The meaning, stated once: each row of the README's table is a test here, for every path."""

import itertools
import math
import warnings

import pytest
import torch

import multihead as mh
from multihead.plan import KERNELS
from multihead.testing import Sizes, cotangent, make
from tests.common import MASKS, B, G, H, S, T, moved

PATHS = [*KERNELS, "auto"]
HALF = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float64: 1e-12}
DTYPES = list(HALF)


@pytest.fixture(params=PATHS)
def kernel(request):
    return request.param


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


def call(kernel, q, k, v, **options):
    """attention(), skipped where the kernel says that it cannot do this dtype here; those for CUDA refuse more."""
    try:
        return mh.attention(q, k, v, kernel=kernel, **options)
    except ValueError as error:
        if "no fused float64 kernel" in str(error) or (kernel in ("packed", "flex") and "cannot do this" in str(error)):
            pytest.skip(str(error))
        raise


def test_layout(kernel, device, dtype):
    """[batch, heads, tokens, head_dim] in the function, [batch, tokens, dim] in the layer."""
    q, k, v = make(device=device, dtype=dtype)
    assert call(kernel, q, k, v).shape == (B, H, T, v.shape[3])
    layer = mh.MultiHeadAttention(12, 3, device=device, dtype=dtype)
    y, weights = layer(
        torch.randn(2, 5, 12, device=device, dtype=dtype),
        torch.randn(2, 7, 12, device=device, dtype=dtype),
        return_weights=True,
    )
    assert y.shape == (2, 5, 12)
    assert weights.shape == (2, 3, 5, 7)


def test_true_means_may_attend(kernel, device, dtype):
    q, k, v = make(device=device, dtype=dtype)
    allowed = torch.zeros(T, S, dtype=torch.bool, device=device)
    allowed[:, 2] = True
    only = v[:, :, 2:3].repeat_interleave(H // G, 1).expand(-1, -1, T, -1)
    for mask in (mh.Allowed(allowed), mh.Blocked(~allowed)):
        torch.testing.assert_close(call(kernel, q, k, v, mask=mask), only)


def test_a_bare_tensor_is_never_a_mask(kernel, device):
    q, k, v = make(device=device)
    for mask, advice in (
        (
            torch.ones(T, S, dtype=torch.bool, device=device),
            r"write Allowed\(m\) if True may attend, Blocked\(m\) if True may not",
        ),
        (torch.zeros(T, S, device=device), r"masks.from_additive\(m\) if it is added to the scores"),
        (torch.ones(T, S, dtype=torch.int64, device=device), r"masks.from_zeros\(m\) if 0 blocks"),
    ):
        with pytest.raises(TypeError, match=advice):
            mh.attention(q, k, v, mask=mask, kernel=kernel)
    with pytest.raises(TypeError, match="MultiHeadAttention: mask must be a multihead mask"):
        mh.MultiHeadAttention(8, 2, mask=torch.ones(3, 3) > 0)


@pytest.mark.parametrize("lens", [(T, S), (1, S), (S, S), (S, T)], ids=str)
def test_causal_is_aligned_at_the_end(kernel, device, dtype, lens):
    q, k, v = make(Sizes(q_len=lens[0], kv_len=lens[1]), device=device, dtype=dtype)
    weights = call(kernel, q, k, v, mask=mh.Causal(), return_weights=True)[1]
    i, j = torch.arange(lens[0])[:, None], torch.arange(lens[1])
    assert torch.equal((weights != 0)[0, 0].cpu(), j <= i + lens[1] - lens[0])
    start = call(kernel, q, k, v, mask=mh.Causal(align="start"), return_weights=True)[1]
    assert torch.equal((start != 0)[0, 0].cpu(), j <= i)
    dense = {"end": j <= i + lens[1] - lens[0], "start": j <= i}
    for align, allowed in dense.items():
        got = call(kernel, q, k, v, mask=mh.Causal(align=align))
        want = call(kernel, q, k, v, mask=mh.Allowed(allowed.to(device)))
        torch.testing.assert_close(got, want, rtol=HALF[dtype], atol=HALF[dtype])


def test_positions_are_absolute(kernel, device, dtype):
    """A chunk of queries with its start gives the rows of the whole, for every mask over positions."""
    q, k, v = make(Sizes(q_len=S), device=device, dtype=dtype)
    for mask in (
        mh.Causal(),
        mh.Window(3),
        mh.Window(2, ahead=2),
        mh.Causal() | mh.Prefix(3),
        mh.Where(lambda b, h, q, k: (q * k) % 3 != 1),
    ):
        whole = call(kernel, q, k, v, mask=mask)
        chunk = call(kernel, q[:, :, 2:5], k, v, mask=mask, start=2)
        torch.testing.assert_close(chunk, whole[:, :, 2:5], rtol=HALF[dtype], atol=HALF[dtype])
        ragged = call(kernel, q[:, :, 2:5], k, v, mask=mask, start=torch.tensor([2, 2]))
        torch.testing.assert_close(ragged, whole[:, :, 2:5], rtol=HALF[dtype], atol=HALF[dtype])


def test_window_counts_its_own_key(kernel, device, dtype):
    q, k, v = make(Sizes(q_len=S), device=device, dtype=dtype)
    weights = call(kernel, q, k, v, mask=mh.Window(3), return_weights=True)[1]
    assert (weights != 0)[0, 0].sum(-1).tolist() == [1, 2, 3, 3, 3, 3, 3]
    ahead = call(kernel, q, k, v, mask=mh.Window(3, ahead=1), return_weights=True)[1]
    assert (ahead != 0)[0, 0].sum(-1).tolist() == [2, 3, 4, 4, 4, 4, 3]


def test_masks_from_the_layer_and_from_the_call_both_hold(kernel, device):
    call(kernel, *make(device=device))  # skips where the kernel cannot run at all
    layer = mh.MultiHeadAttention(12, 3, mask=mh.Causal(), device=device)
    x = torch.randn(2, 5, 12, device=device)
    weights = layer(x, mask=mh.Window(2), return_weights=True, kernel=kernel)[1]
    both = (mh.Causal() & mh.Window(2)).dense(5, 5, device=device)
    assert torch.equal((weights != 0)[1, 2], both)


@pytest.mark.parametrize("name", ["lengths_empty", "valid_lens_2d", "nothing", "documents", "bias"])
def test_a_row_that_may_attend_to_nothing_is_zero(kernel, device, dtype, name):
    """Output 0, weights 0, log-sum-exp −inf, gradients 0 – even where the row's own query is NaN."""
    q, k, v = make(device=device, dtype=dtype)
    mask, bias = moved(MASKS.get(name), device), None
    if name == "bias":
        bias = torch.zeros(B, 1, T, S, device=device, dtype=dtype)
        bias[0, :, 1] = -math.inf
    allowed = (bias[:, 0] == 0) if bias is not None else mask.dense(T, S, batch=B, heads=1, device=device)[:, 0]
    empty = ~allowed.any(-1)
    assert empty.any()
    if bias is None:
        q = q.masked_fill(empty[:, None, :, None], math.nan)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, weights = call(kernel, q, k, v, mask=mask, bias=bias, return_weights=True)
    assert not out[empty[:, None].expand(B, H, T)].any()
    assert not weights[empty[:, None].expand(B, H, T)].any()
    dq, dk, dv = torch.autograd.grad((out * cotangent(out)).sum(), (q, k, v))
    assert not dq[empty[:, None].expand(B, H, T)].any()
    assert all(bool(x.isfinite().all()) for x in (out, dq, dk, dv))
    if kernel != "fused":
        lse = call(kernel, q, k, v, mask=mask, bias=bias, return_lse=True)[1]
        assert torch.equal(lse == -math.inf, empty[:, None].expand(B, H, T))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "mask",
    [
        mh.Lengths([3, 5]),
        mh.Causal() & mh.Lengths([3, 5]),
        mh.Causal(align="start"),
        mh.Where(lambda b, h, q, k: k < 3 + 2 * b),
    ],
    ids=repr,
)
def test_what_no_query_may_see_has_no_influence(kernel, device, dtype, mask, value):
    """NaN and inf in padding reach neither the output nor dq, dk, dv."""
    q, k, v = make(device=device, dtype=dtype)
    hidden = ~mask.to(device).dense(T, S, batch=B, heads=1, device=device).any(2)[..., None]
    assert hidden.any()

    def results(k, v):
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        out = call(kernel, *leaves, mask=mask.to(device))
        return [out.detach(), *torch.autograd.grad((out * cotangent(out)).sum(), leaves)]

    for got, want in zip(results(k.masked_fill(hidden, value), v.masked_fill(hidden, value)), results(k, v), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("kv_len", [1, 3, 7, 15, 16, 33])
@pytest.mark.parametrize("mask", [None, mh.Causal()], ids=repr)
def test_a_query_that_is_nan_gets_nan(kernel, device, dtype, kv_len, mask):
    """Zeros say that there is nothing to attend to, and only that; torch's CPU kernel says it of NaN over few keys."""
    q, k, v = make(Sizes(q_len=kv_len, kv_len=kv_len), device=device, dtype=dtype)
    q = q.clone()
    q[:, :, 0] = math.nan
    out = call(kernel, q, k, v, mask=mask)
    assert bool(out[:, :, 0].isnan().all())
    assert bool(out[:, :, 1:].isfinite().all())
    layer = mh.MultiHeadAttention(12, 3, mask=mask, device=device, dtype=dtype)
    layer.query.weight.data.fill_(math.nan)
    x = torch.randn(1, kv_len, 12, device=device, dtype=dtype)
    assert bool(layer(x, kernel=kernel).isnan().all())
    with torch.no_grad():
        cache = layer.new_cache(1, kv_len)
        assert all(bool(layer(token, cache=cache, kernel=kernel).isnan().all()) for token in x.split(1, 1))


def test_negative_key_start_is_no_key(kernel, device):
    """Columns below position 0 hold no key, said by a number or by a tensor."""
    q, k, v = make(device=device)
    k, v = k.clone(), v.clone()
    k[:, :, :2], v[:, :, :2] = math.nan, math.inf
    for mask in (None, mh.Causal(), mh.Keys(torch.ones(B, S, device=device) > 0)):
        got = call(kernel, q, k, v, mask=mask, key_start=-2, start=1)
        assert torch.equal(got, call(kernel, q, k, v, mask=mask, key_start=torch.full((B,), -2, device=device), start=1))
        want = call(kernel, q, k[:, :, 2:], v[:, :, 2:], mask=mask if isinstance(mask, mh.Causal) else None, start=1)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", ["reference", "blocked"])
def test_what_some_queries_may_not_see_has_no_influence_on_them(device, dtype, kernel):
    """Hidden from only some queries: promised by the reference and our own; the plan of other kernels says that they do not."""
    if kernel == "blocked" and device != "cpu":
        pytest.skip("blocked is for CPU")
    q, k, v = make(Sizes(q_len=S), device=device, dtype=dtype)
    k, v = k.clone(), v.clone()
    k[:, :, 4], v[:, :, 4] = math.nan, math.inf  # seen by queries 4 and 5
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = mh.attention(*leaves, mask=mh.Window(2), kernel=kernel)
    free = [0, 1, 2, 3, 6]
    assert bool(out[:, :, free].isfinite().all())
    assert not bool(out[:, :, 4:6].isfinite().any())
    dq, dk, dv = torch.autograd.grad((out * cotangent(out)).sum(), leaves)
    assert bool(dq[:, :, free].isfinite().all())
    unshared = [0, 1, 2, 6]  # keys that queries 4 and 5 do not see
    assert bool(dk[:, :, unshared].isfinite().all())
    assert bool(dv[:, :, unshared].isfinite().all())
    plan = mh.plan(q, k, v, mask=mh.Causal(), kernel="fused") if dtype != torch.float64 or device == "cpu" else None
    assert plan is None or any("NaN or inf in a key hidden from only some queries" in note for note in plan.notes)


def test_kv_head_of_a_query_head(kernel, device, dtype):
    """h // (heads // kv_heads): grouped attention is attention with each kv head repeated."""
    q, k, v = make(device=device, dtype=dtype)
    wide = [x.repeat_interleave(H // G, 1) for x in (k, v)]
    for mask in (None, mh.Causal()):
        got, want = call(kernel, q, k, v, mask=mask), call(kernel, q, *wide, mask=mask)
        torch.testing.assert_close(got, want, rtol=HALF[dtype], atol=HALF[dtype])


def test_scale(kernel, device, dtype):
    q, k, v = make(device=device, dtype=dtype)
    torch.testing.assert_close(call(kernel, q, k, v), call(kernel, q, k, v, scale=11**-0.5))
    backwards = call(kernel, q, k, v, scale=-0.5)
    torch.testing.assert_close(backwards, call(kernel, -q, k, v, scale=0.5), rtol=HALF[dtype], atol=HALF[dtype])
    flat = call(kernel, q, k, v, scale=0.0)
    mean = v.double().mean(2, keepdim=True).repeat_interleave(H // G, 1).expand_as(flat)
    torch.testing.assert_close(flat.double(), mean, rtol=HALF[dtype], atol=HALF[dtype])


def dropping(kernel, q, k, v, **options):
    if kernel == "fused" and (q.device.type == "cpu" or "seed" in options or options["dropout"] == 1.0):
        with pytest.raises(
            ValueError, match=r'kernel="fused" cannot do this: .*dropout.*kernels that can here: (blocked, )?reference'
        ):
            mh.attention(q, k, v, kernel=kernel, **options)
        pytest.skip("says that it cannot")
    return call(kernel, q, k, v, **options)


def test_dropout_falls_on_the_weights(kernel, device):
    """Rate, scale and reproducibility from torch's generator; weights are dropped, not scores and not outputs."""
    q, k = torch.zeros(1, 1, 400, 8, device=device), torch.zeros(1, 1, 400, 8, device=device)
    v = torch.eye(400, device=device)[None, None]
    torch.manual_seed(5)
    out = dropping(kernel, q, k, v, dropout=0.25)
    torch.manual_seed(5)
    assert torch.equal(out, dropping(kernel, q, k, v, dropout=0.25))
    assert not torch.equal(out, dropping(kernel, q, k, v, dropout=0.25))
    kept = out != 0
    assert kept.float().mean().item() == pytest.approx(0.75, abs=0.01)
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], 1 / 400 / 0.75))


def test_dropout_with_a_seed_is_a_hash(kernel, device):
    """Chunks of queries, of keys and of heads drop what the whole drops; rate and independence of seeds hold."""
    q, k = torch.zeros(2, 3, 64, 8, device=device), torch.zeros(2, 3, 64, 8, device=device)
    v = torch.eye(64, device=device).expand(2, 3, -1, -1)
    whole = dropping(kernel, q, k, v, dropout=0.5, seed=11)
    assert torch.equal(whole, dropping(kernel, q, k, v, dropout=0.5, seed=11))
    other = dropping(kernel, q, k, v, dropout=0.5, seed=12)
    agree = ((whole != 0) == (other != 0)).float().mean().item()
    assert agree == pytest.approx(0.5, abs=0.02)
    assert (whole != 0).float().mean().item() == pytest.approx(0.5, abs=0.02)
    torch.testing.assert_close(dropping(kernel, q[:, :, 7:20], k, v, dropout=0.5, seed=11, start=7), whole[:, :, 7:20])
    tail = dropping(kernel, q, k[:, :, 32:], v[:, :, 32:], dropout=0.5, seed=11, start=0, key_start=32)
    assert torch.equal(tail[..., 32:] != 0, whole[..., 32:] != 0)


def test_dropout_of_everything_is_zero(kernel, device):
    q, k, v = make(device=device)
    assert not dropping(kernel, q, k, v, dropout=1.0).any()


def test_the_layer_drops_in_train_only(device):
    layer = mh.MultiHeadAttention(12, 3, dropout=0.5, out_dropout=0.5, device=device)
    x = torch.randn(2, 5, 12, device=device)
    assert not torch.equal(layer(x), layer(x))
    assert torch.equal(layer.eval()(x), layer(x))
    layer.train().out_dropout = 0.0
    assert torch.equal(layer(x, seed=3), layer(x, seed=3))
    assert not torch.equal(layer(x, seed=3), layer(x, seed=4))


def test_second_derivatives_are_the_references(device):
    q, k, v = make(device=device, requires_grad=True)
    for kernel in ("auto", "fused"):
        (grad,) = torch.autograd.grad(mh.attention(q, k, v, kernel=kernel).sum(), q, create_graph=True)
        with pytest.raises(
            NotImplementedError, match='can be differentiated once; for second derivatives write kernel="reference"'
        ):
            torch.autograd.grad(grad.sum(), k)
    (grad,) = torch.autograd.grad(mh.attention(q, k, v, kernel="reference").square().sum(), q, create_graph=True)
    assert torch.autograd.grad(grad.sum(), k)[0].isfinite().all()


def test_forward_mode_is_the_references(device):
    q, k, v = make(device=device)
    with pytest.raises(ValueError, match="have no forward-mode derivative; kernels that can here: reference"):
        torch.func.jvp(lambda q: mh.attention(q, k, v, kernel="fused"), (q,), (q,))
    q, k, v = make(device=device, dtype=torch.float64)
    for kernel in ("auto", "reference"):
        tangent = torch.func.jvp(lambda q: mh.attention(q, k, v, kernel=kernel), (q,), (q,))[1]  # noqa: B023
        step = 1e-5
        slope = (mh.attention(q * (1 + step), k, v) - mh.attention(q * (1 - step), k, v)) / (2 * step)
        torch.testing.assert_close(tangent, slope, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["none", "causal", "lengths_empty", "where"])
def test_modes_do_not_change_the_numbers(device, dtype, name):
    """train(), eval(), no_grad(), inference_mode(), weights asked for or not."""
    layer = mh.MultiHeadAttention(12, 3, kv_heads=1, device=device, dtype=dtype)
    x = torch.randn(B, S, 12, device=device, dtype=dtype)
    mask = moved(MASKS[name], device)
    mask = mh.Lengths([0, 5]) if name == "lengths_empty" else mask
    want = layer(x, mask=mask, kernel="reference")
    for mode, weights in itertools.product((layer.train, layer.eval), (False, True)):
        mode()
        for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with context():
                got = layer(x, mask=mask, return_weights=weights)
                torch.testing.assert_close(got[0] if weights else got, want, rtol=HALF[dtype], atol=HALF[dtype])


def test_a_kernel_that_cannot_says_why(device):
    q, k, v = make(device=device)
    for options, why in (
        ({"softcap": 2.0}, "SDPA has no softcap"),
        ({"sinks": torch.zeros(H, device=device)}, "SDPA has no sinks"),
        ({"return_lse": True}, "SDPA does not return the log-sum-exp"),
        ({"dropout": 0.1, "seed": 1}, "SDPA draws its own dropout and cannot follow a seed"),
    ):
        able = "blocked, reference" if device == "cpu" else "reference"
        with pytest.raises(ValueError, match=f'kernel="fused" cannot do this: {why}; kernels that can here: {able}'):
            mh.attention(q, k, v, kernel="fused", **options)
    with pytest.raises(
        ValueError, match='there is no kernel \'flash\'; the kernels are "auto", "fused", "blocked", "reference"'
    ):
        mh.attention(q, k, v, kernel="flash")


@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented the batching rule")
def test_auto_warns_when_it_must_use_quadratic_memory(device):
    """On a CPU only where torch.func's transforms leave nothing else."""
    q = torch.zeros(1, 1, 3000, 8, device=device)

    def attend(q, **options):
        if device == "cpu":
            return torch.func.vmap(lambda x: mh.attention(x, x, x, **options))(q[None])
        return mh.attention(q, q, q, **options)

    with pytest.warns(
        mh.QuadraticMemoryWarning,
        match='"auto" runs kernel "reference" with 103 MiB of L×L tensors, because SDPA has no softcap',
    ):
        attend(q, softcap=5.0)
    with pytest.warns(
        mh.QuadraticMemoryWarning, match='kernel "fused" with 43 MiB of L×L tensors, because SDPA takes such a mask'
    ):
        attend(q, mask=mh.Window(7))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "There is a performance drop because we have not yet implemented the batching rule")
        attend(q, mask=mh.Causal())
        attend(q, mask=mh.Lengths([2000]))
        attend(q, softcap=5.0, kernel="reference")  # asked for by name
        attend(q[:, :, :100], softcap=5.0)
        if device == "cpu":
            mh.attention(q, q, q, mask=mh.Window(7), softcap=5.0, dropout=0.1)
