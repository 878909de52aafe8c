"""plan() says what attention() does: the kernel, the work left, the memory, each other kernel's reason."""

import dataclasses
import re
import subprocess
import sys

import pytest
import torch

import multihead as mh
from multihead.kernels import cutting, fused, products, reference
from multihead.plan import KERNELS, choose
from multihead.testing import Sizes, make
from tests.common import B, H, S, T

ELSEWHERE = {"packed": "varlen attention runs on CUDA only", "flex": "FlexAttention is fused on CUDA only"}


def test_plan_says_which_and_why_not():
    q, k, v = make()
    plan = mh.plan(q, k, v, mask=mh.Causal())
    assert plan.kernel == "fused"
    assert plan.refusals["reference"] == "keeps L×L scores and weights"
    assert plan.refusals["blocked"].startswith("could do this call, and is expected to take")
    assert ELSEWHERE.items() <= plan.refusals.items()
    assert (plan.pairs, plan.allowed) == (B * H * T * S, B * H * int(mh.Causal().dense(T, S).sum()))
    assert plan.share == plan.allowed / plan.pairs
    plan = mh.plan(q, k, v, softcap=3.0)
    assert (plan.kernel, plan.refusals["fused"]) == ("reference", "SDPA has no softcap")
    assert plan.refusals["blocked"] == "could do this call, but the definition is done sooner for so few pairs"
    plan = mh.plan(q, k, v, kernel="reference")
    assert plan.refusals == dict.fromkeys(("fused", "blocked"), "could do this call, but another was asked for") | ELSEWHERE


def test_print(torchs_products):
    q, k, v = make(Sizes(q_len=2000, kv_len=2000))
    plan = mh.plan(q, k, v, mask=mh.Window(100), dropout=0.1)
    assert str(plan) == (
        "kernel         blocked\n"
        f"pairs          2,340,600 of 48,000,000 (4.9%) may attend; {plan.computed / 48e6:.1%} are computed\n"
        f"work           {plan.flops / 1e6:.3g} MFLOP, 3 MiB at least to be moved\n"
        f"memory         {plan.peak_bytes / 2**20:.0f} MiB at once, 0 B of it L×L\n"
        "route          torch in float32, as asked\n"
        "not fused      on CPU, SDPA with dropout falls to an L×L path of its own\n"
        "not reference  keeps L×L scores and weights\n"
        "not packed     varlen attention runs on CUDA only\n"
        "not flex       FlexAttention is fused on CUDA only\n"
        'note           second derivatives and forward-mode AD need kernel="reference"'
    )
    assert 2_340_600 < plan.computed < 3 * 2_340_600
    assert plan.flops == 2 * plan.computed * (q.shape[3] + v.shape[3])
    assert plan.bytes == sum(x.nbytes for x in (q, k, v)) + B * H * 2000 * v.shape[3] * 4


@pytest.fixture
def torchs_products():
    """A plan that is the same on every machine."""
    before = products.use("torch")
    yield
    products.use(before)


PEAK = """
import torch, multihead as mh
from multihead.kernels import products
products.use("torch")
q = torch.randn(1, 8, 4096, 64)
mask = {mask}
def read(key):
    return int(next(line for line in open("/proc/self/status") if line.startswith(key)).split()[1]) * 1024
mh.attention(q[:, :, :64], q[:, :, :64], q[:, :, :64], mask=mask, kernel="blocked")
open("/proc/self/clear_refs", "w").write("5")
before = read("VmRSS")
mh.attention(q, q, q, mask=mask, kernel="blocked")
print(read("VmHWM") - before, mh.plan(q, q, q, mask=mask, kernel="blocked").peak_bytes)
"""


@pytest.mark.parametrize("mask", ["None", "mh.Window(64)", "mh.Causal()"])
def test_peak_memory_is_what_a_call_takes(mask):
    """The resident memory of a fresh process grows by no more than what the plan says and torch's libraries keep for themselves."""
    run = subprocess.run([sys.executable, "-c", PEAK.format(mask=mask)], check=True, capture_output=True, text=True)
    took, said = map(int, run.stdout.split())
    assert said / 4 < took < said + 48 * 2**20 < 8 * 4096**2 * 4


@pytest.mark.parametrize("mask", [None, mh.Causal(), mh.Window(32)], ids=repr)
def test_the_sooner_kernel_is_taken(mask, monkeypatch):
    """By what this machine was measured to do: each kernel is chosen where the other is slow."""
    q = torch.randn(1, 8, 1024, 64)
    measured = products.speed(torch.float32)
    for factor, kernel in ((100.0, "blocked"), (0.01, "fused")):
        monkeypatch.setattr(products, "speed", lambda dtype, f=factor: dataclasses.replace(measured, fused=measured.fused * f))
        cutting._memo.clear()
        plan = mh.plan(q, q, q, mask=mask)
        assert plan.kernel == kernel
        other = {"blocked": "fused", "fused": "blocked"}[kernel]
        assert re.fullmatch(r"could do this call, and is expected to take [\d.]+ × the time", plan.refusals[other])


def test_plans_of_a_model():
    """Every call, in its order, with the short ways left aside; nothing is collected outside."""
    layer = mh.MultiHeadAttention(16, 2, mask=mh.Causal())
    x = torch.randn(1, 5, 16)
    with mh.plans() as seen:
        y = layer(x)
        mh.attention(x[None], x[None], x[None])
        with mh.plans() as inner:
            layer(x, mask=mh.Lengths([3]), kernel="reference")
    assert torch.equal(y, layer(x))
    assert [p.kernel for p in seen] == ["fused", "fused", "reference"]
    assert [p.allowed for p in seen] == [30, 25, 24]
    assert seen[2:] == inner
    with pytest.raises(ValueError, match="no kernel 'other'"), mh.plans() as seen:
        layer(x, kernel="other")
    assert seen == []


def test_deterministic_mode_is_honoured():
    """Two runs give the same bits, forward and backward, and torch's mode is refused nothing."""
    torch.use_deterministic_algorithms(True)
    try:
        for options in ({}, {"mask": mh.Window(9)}, {"dropout": 0.2, "seed": 4}, {"bias": torch.randn(1, 1, 1, 300)}):
            results = []
            for _ in range(2):
                q, k, v = make(Sizes(q_len=300, kv_len=300), requires_grad=True)
                out = mh.attention(q, k, v, **options)
                results.append((out, *torch.autograd.grad(out.sum(), (q, k, v))))
            assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("mask", "size"),
    [
        (None, 0),
        (mh.Causal(), 0),
        (mh.Window(999), 0),
        (mh.Lengths([3, 5]), 0),
        (mh.Prefix(3) & mh.Keys(torch.ones(B, 100) > 0), 0),
        (mh.Window(3), 100 * 100 * 5),
        (mh.Causal() & mh.Lengths([3, 5]), B * 100 * 100 * 5),
        (mh.Allowed(torch.ones(B, H, 100, 100) > 0), B * H * 100 * 100 * 5),
        (mh.ValidLens(torch.ones(B, 100).long()), B * 100 * 100 * 5),
    ],
    ids=repr,
)
def test_memory_of_masks(mask, size):
    q, k, v = make(Sizes(q_len=100, kv_len=100))
    assert mh.plan(q, k, v, mask=mask).quadratic_bytes == size


def test_memory_of_masks_that_vary_without_saying_so():
    """A predicate that looks at b or h, and positions that differ between texts."""
    q, k, v = make(Sizes(q_len=100, kv_len=100))
    for mask, size in (
        (mh.Where(lambda b, h, q, k: (q + k + b + h) % 3 != 0), B * H),
        (mh.Where(lambda b, h, q, k: (q + k + h) % 3 != 0), H),
        (mh.Where(lambda b, h, q, k: (q + k) % 3 != 0), 1),
    ):
        assert mh.plan(q, k, v, mask=mask).quadratic_bytes == size * 100 * 100 * 5
    table = torch.rand(B, 1, 100, 100) < 0.5
    assert mh.plan(q, k, v, mask=mh.Allowed(table)).quadratic_bytes == B * 100 * 100 * 5
    ragged = mh.plan(q, k, v, mask=mh.Causal(), start=torch.tensor([0, 5]))
    assert ragged.quadratic_bytes == B * 100 * 100 * 5


def test_plan_is_the_calls_plan():
    q, k, v = make()
    with torch.autocast("cpu", torch.bfloat16):
        assert mh.plan(q, k.bfloat16(), v, mask=mh.Window(2)).quadratic_bytes == T * S * 3
    empty = mh.plan(q, k, v, key_start=torch.tensor([-2, 0]), start=torch.tensor([0, 2]))
    assert empty.allowed == H * T * (S - 2 + S)
    on_meta = mh.plan(*(x.to("meta") for x in (q, k, v)), mask=mh.Causal() & mh.Lengths([3, 4]))
    assert on_meta == mh.plan(q, k, v, mask=mh.Causal() & mh.Lengths([3, 4]))
    plan = mh.plan(q, k, v, return_weights=True)
    assert plan.kernel == "fused"
    assert plan.quadratic_bytes == B * H * T * S * 3 * 4


def test_a_warning_points_at_the_callers_line():
    q, layer = torch.zeros(1, 1, 3000, 8), mh.MultiHeadAttention(8, 1, softcap=3.0)
    calls = (
        lambda: mh.attention(q, q, q, softcap=5.0),
        lambda: mh.attention(q, q, q, softcap=5.0, return_lse=True),
        lambda: mh.attention(q[0], q[0], q[0], softcap=5.0),
        lambda: layer(torch.zeros(1, 3000, 8)),
    )
    for call in calls:
        with pytest.warns(mh.QuadraticMemoryWarning) as found, torch.autograd.forward_ad.dual_level():
            call()
        assert found[0].filename == __file__


def test_memory_of_a_bias_and_of_the_reference():
    q, k, v = make()
    assert mh.plan(q, k, v, bias=torch.zeros(H, T, S)[None]).quadratic_bytes == H * T * S * 5
    assert mh.plan(q, k, v, bias=torch.zeros(1, S)).quadratic_bytes == 0
    assert mh.plan(q, k, v, kernel="reference").quadratic_bytes == B * H * T * S * 3 * 4
    assert mh.plan(q[0], k[0], v[0]).pairs == H * T * S


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"return_lse": True}, "SDPA does not return the log-sum-exp"),
        ({"sinks": torch.zeros(H)}, "SDPA has no sinks"),
        ({"dropout": 0.1, "seed": 3}, "SDPA draws its own dropout and cannot follow a seed"),
        ({"bias": torch.zeros(T, S, requires_grad=True)}, "where a bias needs a gradient, SDPA falls to an L×L path on CPU"),
    ],
    ids=str,
)
def test_reasons(options, why):
    q, k, v = make()
    assert mh.plan(q, k, v, **options).refusals["fused"].startswith(why)


def test_every_kernel_has_the_same_three_functions():
    for module in KERNELS.values():
        assert all(callable(getattr(module, name)) for name in ("refuses", "quadratic_bytes", "run"))


def test_auto_takes_the_first_that_does_not_refuse():
    from multihead.kernels.spec import Spec

    q, k, v = make()
    assert choose(Spec(q, k, v)) is fused
    assert choose(Spec(q, k, v, softcap=1.0)) is reference
    assert list(KERNELS)[:3] == ["fused", "blocked", "reference"]  # which never refuses: what comes after it must be asked for


@pytest.mark.parametrize("name", ["layer", "function"])
@pytest.mark.parametrize("mask", [None, mh.Causal(), mh.Causal(align="start"), mh.Window(2)], ids=repr)
@pytest.mark.parametrize(
    "options", [{}, {"kv_heads": 2}, {"scale": -0.5}, {"softcap": 2.0}, {"gate": True}, {"value_head_dim": 5}], ids=str
)
def test_the_short_way_is_the_long_way(name, mask, options, monkeypatch):
    """The layer and attention() decide the most frequent calls by a shorter way; it must give what the long way gives."""
    torch.manual_seed(1)
    layer = mh.MultiHeadAttention(24, 4, mask=mask, positions=mh.RoPE(), **options).double()
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    if name == "layer":

        def call():
            with torch.no_grad():
                cache = layer.new_cache(2, 9)
                return layer(x), torch.cat([layer(t, cache=cache) for t in x.split(1, 1)], 1) if mask != mh.Causal(
                    align="start"
                ) else x
    else:
        q, k, v = (torch.randn(2, 3, n, 8, dtype=torch.float64) for n in (7, 7, 7))

        def call():
            return mh.attention(q, k, v, mask=mask), mh.attention(q[:, :, -1:], k, v, mask=mask)

    short = call()
    monkeypatch.setattr(mh.MultiHeadAttention, "_short", lambda *_: None)
    monkeypatch.setattr("multihead.attend.quick", lambda *_: None)
    torch.testing.assert_close(short, call())


def test_the_short_way_is_taken(monkeypatch):
    """Else the figures of benchmarks/layer.py would be those of another path."""
    taken = []
    original = mh.MultiHeadAttention._short
    monkeypatch.setattr(mh.MultiHeadAttention, "_short", lambda *a: taken.append((out := original(*a)) is not None) or out)
    x = torch.randn(1, 1, 24)
    for mask in (None, mh.Causal(), mh.Window(3), mh.Causal() & mh.Window(3)):
        layer = mh.MultiHeadAttention(24, 4, mask=mask, positions=mh.RoPE(), qk_norm=True)
        with torch.no_grad():
            layer(x, cache=layer.new_cache(1, 9))
    assert taken == [True] * 4
    layer = mh.MultiHeadAttention(24, 4, mask=mh.Causal())
    layer(torch.randn(2, 7, 24)).sum().backward()
    assert taken[4:] == [True]
