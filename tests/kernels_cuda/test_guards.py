"""The guard list: where each holds, what SDPA is kept from, and that nothing is paid where none holds."""

import math
from contextlib import nullcontext

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import multihead as mh
from multihead.kernels import fused, guards
from multihead.kernels.guards import GUARDS, Call, around, holding, refusal
from multihead.kernels.spec import Spec
from multihead.testing import Sizes, check, make, naive, oracle

PLAIN = Call(dense=False, grad=False, batch=2, heads=3, q_len=704, kv_len=704, capability=(9, 0))
FUSED = ("cuDNN", "efficient", "SDPA")
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def held(version=(2, 13), **changed):
    return [guard.kernel for guard in holding(PLAIN._replace(**changed), version, (*FUSED, "flex"))]


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({}, []),
        ({"dense": True, "grad": True}, ["cuDNN"]),
        ({"dense": True, "grad": True, "capability": None}, ["cuDNN"]),
        ({"dense": True, "grad": True, "capability": (10, 0)}, []),
        ({"dense": True}, []),
        ({"grad": True}, []),
        ({"dense": True, "grad": True, "kv_len": 703}, []),
        ({"dense": True, "grad": True, "kv_len": 640}, []),
        ({"dense": True, "grad": True, "q_len": 640}, ["cuDNN"]),
        ({"dense": True, "q_len": 65_536, "kv_len": 65_536}, []),
        ({"dense": True, "q_len": 65_537, "kv_len": 65_537}, ["efficient"]),
        ({"dense": True, "q_len": 65_537, "kv_len": 65_535}, ["efficient"]),  # whose rows torch pads to 65,536
        ({"dense": True, "q_len": 1, "kv_len": 2**20}, []),
        ({"q_len": 65_537, "kv_len": 65_537}, []),
        ({"dropout": 0.1, "q_len": 65_537, "kv_len": 65_537}, ["efficient"]),
        ({"batch": 65_535}, []),
        ({"batch": 65_536}, ["SDPA"]),
        ({"heads": 65_536}, ["SDPA"]),
        ({"score_mod": True, "grad": True}, ["flex"]),
        ({"score_mod": True, "grad": True, "q_len": 640, "kv_len": 640}, []),
        ({"score_mod": True}, []),
    ],
    ids=str,
)
def test_where_each_guard_holds(changed, names):
    assert held(**changed) == names


def test_versions():
    flash = next(guard for guard in GUARDS if guard.kernel == "flex FLASH")
    assert [flash.holds(PLAIN, version) for version in ((2, 11), (2, 13), (2, 14))] == [True, True, False]
    vast = {"dense": True, "q_len": 65_537, "kv_len": 65_537}
    assert held((2, 14), **vast) == ["efficient"]
    assert held((2, 15), **vast) == []
    assert torch.__version__.startswith("{}.{}.".format(*guards.VERSION))


def test_every_guard_says_where_it_comes_from():
    for guard in GUARDS:
        assert guard.url.startswith("https://github.com/")
        assert guard.why
        assert guard.instead
        assert guard.backend is None or hasattr(SDPBackend, guard.backend)


def test_refusal():
    vast = PLAIN._replace(dense=True, q_len=65_600, kv_len=65_600)
    assert refusal(PLAIN) is None
    assert refusal(vast, (2, 13)) is None  # cuDNN is left
    assert refusal(vast._replace(half=False), (2, 13)).startswith("SDPA's efficient kernel is wrong here: the offset of a row")
    assert refusal(vast._replace(half=False), (2, 15)) is None
    assert refusal(vast._replace(dense=False, dropout=0.1), (2, 13)) is None  # flash and cuDNN are left
    assert "2³² / kv_len" in refusal(vast._replace(dense=False, dropout=0.1, half=False), (2, 13))
    both = refusal(vast._replace(grad=True), (2, 13))
    assert "pytorch#196678" in both
    assert "pytorch#162588" in both
    assert refusal(PLAIN._replace(heads=70_000)) == "no kernel of SDPA takes more than 65,535 heads (pytorch#142228)"


def test_around_costs_nothing_where_no_guard_holds():
    assert isinstance(around(PLAIN), nullcontext)
    assert isinstance(around(PLAIN._replace(batch=70_000)), nullcontext)  # cut into parts instead


def test_around_excludes_one_and_keeps_what_the_user_switched_off():
    call = PLAIN._replace(dense=True, grad=True)
    switches = torch.backends.cuda
    with around(call):
        assert not switches.cudnn_sdp_enabled()
        assert switches.flash_sdp_enabled()
        assert switches.mem_efficient_sdp_enabled()
        assert switches.math_sdp_enabled()
    assert switches.cudnn_sdp_enabled()
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        with around(call):
            assert not switches.cudnn_sdp_enabled()
            assert switches.mem_efficient_sdp_enabled()
            assert not switches.math_sdp_enabled()
        assert switches.cudnn_sdp_enabled()
    with (
        sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
        pytest.raises(RuntimeError, match=r"every kernel that is switched on .* is wrong here: .*196678.*kernel=\"reference\""),
    ):
        around(call)


def test_a_traced_length_can_be_any():
    """In a graph for all lengths no size may be compared; cuDNN is left out wherever it could be wrong."""

    def attend(q, mask):
        with around(guards.of_sdpa(q, q, q, mask, 0.0)):
            return F.scaled_dot_product_attention(q, q, q, mask)

    for dynamic, lengths in ((True, (70, 192, 300)), (False, (70, 192))):
        counter = torch._dynamo.testing.EagerAndRecordGraphs()
        compiled = torch.compile(attend, dynamic=dynamic, fullgraph=True, backend=counter)
        for length in lengths:
            q, mask = torch.randn(1, 2, length, 8, requires_grad=True), torch.rand(1, 1, length, length) < 0.9
            torch.testing.assert_close(compiled(q, mask), F.scaled_dot_product_attention(q, q, q, mask))
        assert len(counter.graphs) == len(lengths) ** (not dynamic)
        targets = [str(node.target) for node in counter.graphs[0].graph.nodes]
        assert any("sdpa_kernel" in target for target in targets) == dynamic  # the first fixed length is 70
        torch._dynamo.reset()


def test_the_call_that_sdpa_gets():
    q, k, v = make(requires_grad=True)
    call = guards.of_sdpa(q, k, v, None, 0.5)
    assert call == Call(False, True, 2, 6, 5, 7, False, 0.5)
    with torch.no_grad():
        assert not guards.of_sdpa(q, k, v, q, 0.0).grad
    for mask, dense in ((None, False), (mh.Causal(align="start"), True), (mh.Window(2), True)):
        assert fused.called(Spec(q, k, v, mask)).dense == dense
    assert fused.called(Spec(q[:, :, :1], k, v, mh.Causal())).dense is False
    assert fused.called(Spec(q, k, v, bias=torch.zeros(5, 7))).dense


def test_fused_refuses_where_nothing_is_left(monkeypatch):
    q = torch.empty(1, 1, 70_000, 8, device="meta")
    spec = Spec(q, q, q, mh.Window(5))
    assert fused.refuses(spec) is None
    spec.device = torch.device("cuda")
    assert "pytorch#162588" in fused.refuses(spec) or guards.VERSION >= (2, 15)
    assert fused.refuses(Spec(q, q, q, mh.Causal())) is None


def test_oversized_batches_are_cut(monkeypatch):
    """The cut itself is plain arithmetic, shown here with a grid of three."""
    monkeypatch.setattr(fused, "GRID", 3)
    seen = []
    sdpa = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, *a, **o: seen.append(q.shape[0]) or sdpa(q, *a, **o))
    q, k, v = make(Sizes(batch=8, heads=3))
    for mask in (None, torch.rand(8, 1, 5, 7) < 0.7, torch.rand(1, 3, 5, 7) < 0.7):
        got = fused._guarded(q, k, v, mask, False, None, 0.0, False)
        torch.testing.assert_close(got, sdpa(q, k, v, mask))
    assert seen == [3, 3, 2] * 3


# ---- on a device ----------------------------------------------------------------------------------------------------


def massive(length, dtype, device="cuda"):
    """Every score about −120, so that every row's log-sum-exp is below −88.7 (the inputs of pytorch#196678)."""
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, length, 64, generator=random) for _ in range(3))
    q, k = q * 0.1, k * 0.1
    q[..., 0], k[..., 0] = 1.0, -120 * math.sqrt(64)
    return [x.to(device, dtype).requires_grad_() for x in (q, k, v)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("length", [64, 192, 640, 704, 768, 1088])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU), "cpu"])
def test_gradients_of_very_low_scores(length, dtype, device):
    q, k, v = massive(length, dtype, device)
    out = mh.attention(q, k, v, mask=mh.Causal() & mh.Keys(torch.ones(1, length, dtype=torch.bool, device=device)))
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert all(bool(g.isfinite().all()) for g in grads)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cudnn_is_still_wrong():
    """Fails on the day that cuDNN is right: then the guard can go for that version."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("pytorch#196678 is about sm90")
    q, k, v = massive(704, torch.bfloat16)
    mask = torch.ones(704, 704, dtype=torch.bool, device="cuda").tril()[None, None]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, mask)
        (dq,) = torch.autograd.grad(out, q, torch.ones_like(out))
    assert not dq.isfinite().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_grids_over_65535_run(dtype):
    q, k, v = make(Sizes(70_000, 2, 2, 3, 4, 16, 16), dtype=dtype, device="cuda")
    for mask in (None, mh.Causal(), mh.Window(2)):
        got = mh.attention(q, k, v, mask=mask)
        check(got[-100:], oracle(q[-100:], k[-100:], v[-100:], mask=mask).out, naive(q[-100:], k[-100:], v[-100:], mask=mask))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("heads", [(8, 2), (16, 1), (6, 6)], ids=str)
@pytest.mark.parametrize("queries", [1, 3, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_folded_decoding_with_a_mask(heads, queries, dtype):
    """A kv group's query heads become rows of one product, and the mask's rows with them."""
    q, k, v = make(Sizes(3, *heads, queries, 300, 64, 64), dtype=dtype, device="cuda")
    table = torch.rand(3, heads[0], queries, 300, device="cuda") < 0.5
    lengths = mh.Lengths(torch.tensor([300, 7, 64], device="cuda"))
    for mask in (mh.Window(50), lengths, mh.Causal() & lengths, mh.Allowed(table), mh.Allowed(table[:, :1])):
        check(mh.attention(q, k, v, mask=mask, kernel="fused"), oracle(q, k, v, mask=mask).out, naive(q, k, v, mask=mask))
