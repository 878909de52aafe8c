"""kernels/packed.py: which masks are packed and how, proven on a CPU with varlen attention replaced by its documented meaning.

The stand-in is as unkind as the kernel may be: rows that belong to no sequence are NaN in the output and in the gradients, and
a row without keys has a log-sum-exp of +inf.
"""

import math

import pytest
import torch

import multihead as mh
from multihead.kernels import packed
from multihead.kernels.packed import refuses, route
from multihead.kernels.runs import Band, bands, group
from multihead.kernels.spec import Spec
from multihead.masks import Frame
from multihead.plan import KERNELS
from multihead.testing import Sizes, check, cotangent, make, naive, oracle
from tests.common import MASKS, H, S, T, moved

LONG = Sizes(q_len=37, kv_len=41)
SELF = Sizes(q_len=41, kv_len=41)
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


class Poison(torch.autograd.Function):
    """The identity, whose gradient is NaN from row `used` on: what a kernel leaves in memory that it does not write."""

    @staticmethod
    def forward(ctx, x, used):
        ctx.used = used
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        grad[ctx.used :] = math.nan
        return grad, None


def one_sequence(q, k, v, scale, window):
    """[n, heads, dim], dense; the last query is aligned with the last key."""
    (n, heads, _), (m, kv_heads, _) = q.shape, k.shape
    k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    i, j = torch.arange(n)[:, None] + m - n, torch.arange(m)
    left, right = window
    seen = torch.ones(n, m, dtype=torch.bool)
    seen &= (j >= i - left) if left >= 0 else True
    seen &= (j <= i + right) if right >= 0 else True
    s = torch.einsum("nhd,mhd->hnm", q * scale, k).masked_fill(~seen, -math.inf)
    empty = ~seen.any(-1)
    w = s.masked_fill(empty[:, None], 0.0).softmax(-1).masked_fill(empty[:, None], 0.0)
    return torch.einsum("hnm,mhd->nhd", w, v), s.logsumexp(-1).masked_fill(empty, math.inf)


class Varlen:
    """varlen_attn as torch documents it, and a record of its calls."""

    def __init__(self, grouped):
        self.grouped, self.calls = grouped, []

    def __call__(
        self, q, k, v, cu_q, cu_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1), enable_gqa=False
    ):
        assert cu_q.dtype == cu_k.dtype == torch.int32
        assert q.shape[2] == k.shape[2] == v.shape[2]
        assert q.shape[2] % 8 == 0
        assert enable_gqa == (self.grouped and q.shape[1] != k.shape[1])
        assert enable_gqa or q.shape[1] == k.shape[1]
        assert type(window_size) is tuple
        assert max(cu_q.diff()) <= max_q
        assert max(cu_k.diff()) <= max_k
        self.calls.append((cu_q.tolist(), cu_k.tolist(), q.shape[0], k.shape[0], window_size))
        used_q, used_k = int(cu_q[-1]), int(cu_k[-1])
        q, k, v = Poison.apply(q, used_q), Poison.apply(k, used_k), Poison.apply(v, used_k)
        outs, lses = [q[:0]], [q.new_zeros(q.shape[1], 0)]
        for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
            out, lse = one_sequence(q[a:b], k[c:d], v[c:d], scale, window_size)
            outs.append(out)
            lses.append(lse)
        tail = q.new_full((q.shape[0] - used_q, *q.shape[1:]), math.nan)
        out = torch.cat([*outs, tail])
        lse = torch.cat([*lses, tail.new_full((q.shape[1], tail.shape[0]), math.nan)], 1)
        return (out, lse) if return_aux is not None and return_aux.lse else out


@pytest.fixture(params=[True, False], ids=["gqa", "repeat"])
def varlen(request, monkeypatch):
    """packed.py on a CPU and in every dtype, over the stand-in, with and without enable_gqa (torch 2.12 and 2.11)."""
    from torch.nn.attention.varlen import AuxRequest

    stand_in = Varlen(request.param)
    monkeypatch.setattr(packed, "DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(packed, "HALF", (torch.bfloat16, torch.float16, torch.float32, torch.float64))
    monkeypatch.setattr(packed, "_varlen", lambda: (stand_in, AuxRequest, request.param))
    return stand_in


@pytest.fixture
def as_device(monkeypatch):
    """The mask's numbers are read as if only a device had them."""
    monkeypatch.setattr(packed, "on_host", lambda _: False)
    packed._memo.clear()
    yield
    packed._memo.clear()


def attend(q, k, v, **options):
    spec = Spec(q, k, v, **options)
    assert refuses(spec) is None
    return packed.run(q, k, v, spec)


def agrees(sizes, mask, start=None, key_start=0, dtype=torch.float64):
    """Output and gradients against the oracle, then the log-sum-exp."""
    q, k, v = make(sizes, dtype=dtype, requires_grad=True)
    options = {"mask": mask, "start": start, "key_start": key_start}
    out, _ = attend(q, k, v, **options)
    dout = cotangent(out)
    grads = torch.autograd.grad((out * dout).sum(), (q, k, v))
    exact = oracle(q, k, v, dout=dout, **options)
    torch.testing.assert_close(out.detach(), exact.out.to(dtype))
    for got, n in zip(grads, "qkv", strict=True):
        torch.testing.assert_close(got, exact.grads[n].to(dtype), msg=lambda m, n=n: f"d{n}: {m}")
    with torch.no_grad():
        out, lse = attend(q, k, v, want_lse=True, **options)
        torch.testing.assert_close((out.double(), lse.double()), (exact.out, exact.lse))


PACKED = [
    *("none", "causal", "causal_start", "window", "window_ahead", "lengths", "lengths_empty", "keys_left", "documents"),
    *("documents_cross", "prefix", "valid_lens_1d", "causal_padded", "causal_window_documents", "nothing"),
]


@pytest.mark.parametrize("name", MASKS)
def test_every_mask_is_packed_or_refused(name, varlen):
    reason = refuses(Spec(*make(), MASKS[name]))
    assert (reason is None) == (name in PACKED), reason
    if reason is None:
        agrees(Sizes(), MASKS[name])


BIG = {
    "two calls": mh.Causal() & mh.Lengths([29, 41]),
    "both lengths": mh.Causal() & mh.Lengths([29, 41], [29, 41]),
    "nothing in one": mh.Lengths([0, 17], [41, 9]),
    "left padding": mh.Causal() & mh.Keys(torch.arange(41).expand(2, -1) >= torch.tensor([[0], [13]])),
    "documents": mh.Documents.from_lengths([[7, 20, 14], [1, 40]]),
    "some tokens in none": mh.Documents.from_lengths([[7, 20], [1, 30, 10]]),
    "causal documents": mh.Causal() & mh.Documents.from_lengths([[7, 20, 14], [1, 40]]),
    "window": mh.Window(6),
    "window ahead": mh.Window(6, ahead=3) & mh.Documents.from_lengths([[7, 20, 14], [1, 40]]),
    "window of documents": mh.Causal() & mh.Window(9, ahead=2) & mh.Documents.from_lengths([[7, 20, 14], [1, 40]]),
    "causal prefix": mh.Causal() & mh.Prefix([3, 11]),
    "wide window over lengths": mh.Causal() & mh.Window(60) & mh.Lengths([29, 35]),
    "ahead of lengths": mh.Window(60, ahead=2) & mh.Lengths([29, 41]),
}


@pytest.mark.parametrize(
    "sizes", [SELF, Sizes(q_len=41, kv_len=41, kv_heads=6, v_dim=8), Sizes(q_len=41, kv_len=41, kv_heads=1)]
)
@pytest.mark.parametrize("name", BIG)
def test_longer_ones(name, sizes, varlen):
    agrees(sizes, BIG[name])


@pytest.mark.parametrize("lens", [(37, 41), (41, 37), (2, 41)], ids=str)
@pytest.mark.parametrize(
    "mask",
    [mh.Causal(), mh.Causal(align="start"), mh.Window(6), mh.Window(50, ahead=1), mh.Causal() & mh.Lengths([33, 9])],
    ids=repr,
)
def test_queries_and_keys_of_different_number(mask, lens, varlen):
    agrees(Sizes(q_len=lens[0], kv_len=lens[1]), mask)


@pytest.mark.parametrize("start", [0, 3, torch.tensor([4, 0])], ids=str)
@pytest.mark.parametrize("mask", [mh.Causal(), mh.Window(6), mh.Causal() & mh.Lengths([33, 9])], ids=repr)
def test_positions(mask, start, varlen):
    agrees(LONG, mask, start=start)
    agrees(LONG, mask, start=start, key_start=2)


def test_a_ragged_cache(varlen):
    for mask in (None, mh.Causal()):
        agrees(LONG, mask, key_start=torch.tensor([-5, 0]))


DEVICE = {
    "lengths": mh.Lengths([29, 41]),
    "both": mh.Lengths([29, 41], [41, 29]),
    "nothing": mh.Lengths([0, 17], [41, 9]),
    "none at all": mh.Lengths([0, 0]),
    "prefix": mh.Prefix([3, 11]),
    "valid lens": mh.ValidLens([41, 1]),
    "causal": mh.Causal() & mh.Lengths([29, 41]),
    "causal both": mh.Causal() & mh.Lengths([29, 0], [29, 41]),
    "ahead": mh.Window(99, ahead=2) & mh.Lengths([29, 41]),
}


@pytest.mark.usefixtures("as_device")
@pytest.mark.parametrize("name", [n for n in DEVICE if n != "ahead"])
def test_lengths_that_only_the_device_knows(name, varlen):
    """Buffers hold as many tokens as there are; what the kernel leaves in their tails reaches nothing."""
    agrees(SELF, DEVICE[name])
    assert all((call[2], call[3]) == (2 * 41, 2 * 41) for call in varlen.calls)
    assert all(type(call[4][0]) is int for call in varlen.calls)


@pytest.mark.usefixtures("as_device")
def test_what_only_the_device_knows_is_refused_where_it_would_have_to_be_read(varlen):
    q, k, v = make(SELF)
    window = "a window over lengths that only the device knows; give them as a list or a CPU tensor"
    unknown = "only the device knows where its runs of queries end; give the mask's numbers as a list or a CPU tensor"
    assert refuses(Spec(q, k, v, DEVICE["ahead"])) == window
    for mask in (BIG["documents"], BIG["left padding"], mh.ValidLens(torch.ones(2, 41).long()), ~mh.Lengths([3, 4])):
        assert refuses(Spec(q, k, v, mask)) == unknown


def test_nothing_is_read_on_the_meta_device(varlen, monkeypatch):
    """Reading a number of a meta tensor raises, as reading one of a CUDA tensor waits: the whole lowering reads none."""
    for name, mask in DEVICE.items():
        q, k, v = make(SELF, device="meta")
        spec = Spec(q, k, v, mask.to("meta"))
        frame = spec.frame
        found = group(spec.mask, frame, host=False)
        if name == "ahead":
            assert isinstance(found, str)
            continue
        for runs in found:
            packed._group(runs, spec, host=False)


def test_whole_rows_are_not_copied(varlen):
    q, k, v = make(SELF)
    for mask in (None, mh.Causal(), BIG["documents"], BIG["causal documents"]):
        (only,) = packed._groups(Spec(q, k, v, mask))
        assert only.q.pack is only.q.unpack is only.k.pack is None
    x = torch.randn(2, 41, 6, 16).transpose(1, 2)  # as a layer makes it
    assert packed._tokens(x, 16).data_ptr() == x.data_ptr()


def test_work_is_that_of_the_tokens_left(varlen):
    q, k, v = make(SELF)
    attend(q, k, v, mask=mh.Lengths([10, 20], [10, 20]))
    assert varlen.calls == [([0, 10, 30], [0, 10, 30], 30, 30, (-1, -1))]
    varlen.calls.clear()
    attend(q, k, v, mask=mh.Causal() & mh.Lengths([10, 20]))
    assert varlen.calls == [
        ([0, 10, 30], [0, 10, 30], 30, 30, (-1, 0)),
        ([0, 31, 52], [0, 10, 30], 52, 30, (-1, -1)),
    ]
    varlen.calls.clear()
    attend(q, k, v, mask=mh.Window(5) & BIG["documents"])
    assert varlen.calls == [([0, 7, 27, 41, 42, 82], [0, 7, 27, 41, 42, 82], 82, 82, (4, 0))]


def test_padding_is_never_touched(varlen):
    for mask in (mh.Lengths([10, 20]), mh.Causal() & mh.Lengths([10, 20], [10, 20]), BIG["left padding"]):
        hidden = ~mask.dense(41, 41, batch=2, heads=1).any(2)[..., None]
        empty = ~mask.dense(41, 41, batch=2, heads=1).any(3)[..., None]
        q, k, v = make(SELF)
        leaves = [x.masked_fill(m, math.nan).requires_grad_() for x, m in ((q, empty), (k, hidden), (v, hidden))]
        out, _ = attend(*leaves, mask=mask)
        want, _ = attend(q, k, v, mask=mask)
        assert torch.equal(out, want)
        assert all(bool(g.isfinite().all()) for g in torch.autograd.grad((out * cotangent(out)).sum(), leaves))


def test_nothing_seen_with_nan_everywhere(varlen):
    leaves = [(x * math.nan).requires_grad_() for x in make()]
    out, _ = attend(*leaves, mask=MASKS["nothing"])
    assert not out.any()
    assert not any(g.any() for g in torch.autograd.grad(out.sum(), leaves))


@pytest.mark.parametrize("scale", [-0.7, 0.0, 0.3])
def test_scales(scale, varlen):
    q, k, v = make(dtype=torch.float64)
    got, _ = attend(q, k, v, mask=mh.Causal(), scale=scale)
    torch.testing.assert_close(got, oracle(q, k, v, mask=mh.Causal(), scale=scale).out)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dtype": torch.float32}, "varlen attention takes float16 and bfloat16 only"),
        ({"sizes": Sizes(head_dim=257)}, "varlen attention takes head_dim and v_dim up to 256"),
        ({"sizes": Sizes(v_dim=300)}, "varlen attention takes head_dim and v_dim up to 256"),
        ({"sizes": Sizes(q_len=1)}, "there is one query a text: packing would copy all keys for it"),
        ({"sizes": Sizes(batch=0)}, "there is an axis of size 0"),
        ({"bias": torch.zeros(T, S)}, "varlen attention has no bias"),
        ({"softcap": 2.0}, "varlen attention has no softcap"),
        ({"sinks": torch.zeros(H)}, "varlen attention has no sinks"),
        ({"dropout": 0.1}, "varlen attention has no dropout"),
        ({"want_lse": True}, "the log-sum-exp of varlen attention has no gradient; ask for it under torch.no_grad()"),
        ({"mask": MASKS["where"]}, "Where must be looked at pair by pair"),
        ({"mask": MASKS["allowed_2d"] & MASKS["blocked_3d"]}, "And must be looked at pair by pair"),
        ({"mask": MASKS["prefix_lm"]}, "its queries do not fall into runs that see the same keys"),
        ({"mask": MASKS["not_window"]}, "the keys of one query lie in several runs"),
        ({"mask": mh.Keys(torch.tensor([[True, False] * 3 + [True]] * 2))}, "the keys of one query lie in several runs"),
        (
            {"mask": mh.Causal(align="start"), "start": torch.tensor([1, 2])},
            'Causal(align="start") counts from a position that differs between texts',
        ),
        (
            {"mask": mh.Window(4) & mh.Lengths([5, 3]), "sizes": Sizes(q_len=7)},
            "its sequences end at 3 different places of the window, each of which would be a call of its own",
        ),
    ],
    ids=str,
)
def test_reasons(change, why, monkeypatch):
    monkeypatch.setattr(packed, "DEVICES", ("cuda", "cpu"))
    sizes, dtype = change.pop("sizes", None), change.pop("dtype", torch.bfloat16)
    assert refuses(Spec(*make(sizes, dtype=dtype), **change)) == why
    change |= {"sizes": sizes, "dtype": dtype}


def test_refuses_without_cuda_and_in_forward_mode(monkeypatch):
    q, k, v = make(dtype=torch.bfloat16)
    assert refuses(Spec(q, k, v)) == "varlen attention runs on CUDA only"
    with pytest.raises(
        ValueError, match='kernel="packed" cannot do this: varlen attention runs on CUDA only; kernels that can'
    ):
        mh.attention(q, k, v, kernel="packed")
    monkeypatch.setattr(packed, "DEVICES", ("cpu",))
    with torch.autograd.forward_ad.dual_level():
        assert refuses(Spec(q, k, v)) == "varlen attention has no forward-mode derivative"
    with pytest.raises(ValueError, match="varlen attention cannot do this: Where must be looked at"):
        packed.run(q, k, v, Spec(q, k, v, MASKS["where"]))


class OneNode(torch.autograd.Function):
    """A function of q, k and v as one node of the graph, as a custom operator is."""

    @staticmethod
    def forward(ctx, function, *qkv):
        ctx.function = function
        ctx.save_for_backward(*qkv)
        return function(*qkv)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            return None, *torch.autograd.grad(ctx.function(*ctx.saved_tensors), ctx.saved_tensors, grad, create_graph=True)


def test_second_derivatives_are_refused(varlen, monkeypatch):
    def one_node(q, k, v, *rest, **options):
        return OneNode.apply(lambda *qkv: varlen(*qkv, *rest, **options), q, k, v)

    monkeypatch.setattr(packed, "_varlen", lambda: (one_node, None, varlen.grouped))
    for mask in (mh.Causal(), mh.Lengths([3, 4])):
        q, k, v = make(requires_grad=True)
        out, _ = attend(q, k, v, mask=mask)
        (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
        with pytest.raises(
            NotImplementedError, match='kernel="packed" can be differentiated once; for second derivatives write'
        ):
            torch.autograd.grad(grad.sum(), k)


def test_route(varlen, monkeypatch):
    q, k, v = make(SELF)
    assert route(Spec(q, k, v, mh.Lengths([10, 20], [10, 20]))) == (
        "lengths on the host: one call over 2 sequences with 30 of 82 queries, packed; nothing waits for the device"
    )
    assert route(Spec(q, k, v, BIG["documents"])) == (
        "lengths on the host: one call over 5 sequences with 82 of 82 queries, where they lie; nothing waits for the device"
    )
    assert route(Spec(q, k, v, MASKS["where"])) == "not packed: Where must be looked at pair by pair"
    monkeypatch.setattr(packed, "on_host", lambda _: False)
    packed._memo.clear()
    assert route(Spec(q, k, v, mh.Causal() & mh.Lengths([10, 20]))) == (
        "lengths on the device alone: 2 calls over buffers of all 82 tokens, of which the device counts those that are there; "
        "nothing waits for it"
    )


def test_a_mask_is_worked_out_once(varlen, monkeypatch):
    made = []
    original = packed._lower
    monkeypatch.setattr(packed, "_lower", lambda spec: made.append(spec) or original(spec))
    q, k, v = make(SELF)
    ids = torch.zeros(2, 41, dtype=torch.int64)
    mask = mh.Documents(ids)
    for _ in range(3):
        attend(q, k, v, mask=mh.Causal() & mask)  # a new And of the same parts, as a layer makes it
    assert len(made) == 1
    for _ in range(3):
        for other in (mh.Window(3), mh.Window(4), mh.Causal(), mask):
            attend(q, k, v, mask=other)  # as layers of several kinds in turn
    assert len(made) == 5
    del made[2:]
    first = attend(q, k, v, mask=mask)[0]
    ids[:, 20:] = 1
    second = attend(q, k, v, mask=mask)[0]
    assert len(made) == 3
    assert not torch.equal(first, second)
    attend(q[:, :, :30], k, v, mask=mask, start=0)
    attend(q[:, :, :30], k, v, mask=mask, start=11)
    assert len(made) == 5
    with torch.inference_mode():
        fresh = mh.Documents(torch.zeros(2, 41, dtype=torch.int64))
        attend(q, k, v, mask=fresh)
        attend(q, k, v, mask=fresh)
    assert len(made) == 9  # an inference tensor does not say when it is written to: refuses and run both look


def test_bands():
    frame = Frame(2, 1, 5, 7)
    assert bands(None, frame) == (Band(), None)
    assert bands(mh.Causal(), frame) == (Band(high=0), None)
    assert bands(mh.Causal() & mh.Window(3, ahead=2) & mh.Window(9), frame) == (Band(-2, 0), None)
    assert bands(mh.Causal(align="start") & mh.Lengths([1, 2]), frame) == (Band(high=-2), mh.Lengths([1, 2]))


def test_the_real_one_takes_what_the_stand_in_takes():
    """The stand-in's arguments, bound to torch's own signature."""
    import inspect

    function, aux, grouped = packed._varlen()
    options = {"return_aux": aux(lse=True), "scale": 1.0, "window_size": (-1, 0)} | ({"enable_gqa": True} if grouped else {})
    inspect.signature(function).bind(1, 2, 3, 4, 5, 6, 7, **options)


# ---- on a device ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("place", ["host", "device"])
@pytest.mark.parametrize("name", [*BIG, *DEVICE])
def test_on_cuda(name, place, dtype, device):
    sizes = Sizes(q_len=41, kv_len=41, head_dim=64, v_dim=64)
    mask = BIG.get(name) or DEVICE[name]
    mask = mask if place == "host" else moved(mask, device)
    q, k, v = make(sizes, dtype=dtype, device=device, requires_grad=True)
    reason = refuses(Spec(q, k, v, mask))
    if reason:
        pytest.skip(reason)
    dense = moved(mask, device)
    out = mh.attention(q, k, v, mask=mask, kernel="packed")
    dout = cotangent(out)
    grads = torch.autograd.grad((out * dout).sum(), (q, k, v))
    exact = oracle(q, k, v, mask=dense, dout=dout)
    plain = naive(q, k, v, mask=dense)
    plain_grads = torch.autograd.grad((plain * dout).sum(), (q, k, v))
    check(out.detach(), exact.out, plain.detach())
    for got, n, other in zip(grads, "qkv", plain_grads, strict=True):
        check(got, exact.grads[n], other, f"d{n}")
    with torch.no_grad():
        lse = mh.attention(q, k, v, mask=mask, kernel="packed", return_lse=True)[1]
    torch.testing.assert_close(lse.double(), exact.lse, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("mask", [mh.Lengths([900, 77]), mh.Causal() & mh.Lengths([900, 77])], ids=repr)
@pytest.mark.parametrize("place", ["host", "device"])
def test_nothing_waits_for_the_device(mask, place):
    mask = mask if place == "host" else moved(mask, "cuda")
    q, k, v = make(Sizes(2, 4, 2, 1024, 1024, 64, 64), dtype=torch.bfloat16, device="cuda", requires_grad=True)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        mh.attention(q, k, v, mask=mask, kernel="packed").sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_it_is_the_kernel_named():
    assert KERNELS["packed"] is packed
    q, k, v = make(Sizes(2, 4, 2, 1024, 1024, 64, 64), dtype=torch.bfloat16, device="cuda")
    assert mh.plan(q, k, v, mask=mh.Lengths([900, 77]), kernel="packed").quadratic_bytes == 0
