"""plan() says what attention() does: the kernel, the work left, the memory, each other kernel's reason."""

import pytest
import torch

import multihead as mh
from multihead.kernels import fused, reference
from multihead.plan import KERNELS, choose
from multihead.testing import Sizes, make
from tests.common import B, H, S, T

ELSEWHERE = {"packed": "varlen attention runs on CUDA only", "flex": "FlexAttention is fused on CUDA only"}


def test_plan_says_which_and_why_not():
    q, k, v = make()
    plan = mh.plan(q, k, v, mask=mh.Causal())
    assert plan.kernel == "fused"
    assert plan.refusals == {"reference": "keeps L×L scores and weights"} | ELSEWHERE
    assert (plan.pairs, plan.allowed) == (B * H * T * S, B * H * int(mh.Causal().dense(T, S).sum()))
    assert plan.share == plan.allowed / plan.pairs
    plan = mh.plan(q, k, v, softcap=3.0)
    assert (plan.kernel, plan.refusals) == ("reference", {"fused": "SDPA has no softcap"} | ELSEWHERE)
    plan = mh.plan(q, k, v, kernel="reference")
    assert plan.refusals == {"fused": "could do this call, but another was asked for"} | ELSEWHERE


def test_print():
    q, k, v = make(Sizes(q_len=2000, kv_len=2000))
    assert str(mh.plan(q, k, v, mask=mh.Causal(), dropout=0.1)) == (
        "kernel      reference\n"
        "pairs       24,012,000 of 48,000,000 (50.0%) may attend\n"
        "L×L memory  549 MiB\n"
        "not fused   on CPU, SDPA with dropout falls to an L×L path of its own\n"
        "not packed  varlen attention runs on CUDA only\n"
        "not flex    FlexAttention is fused on CUDA only"
    )


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
        with pytest.warns(mh.QuadraticMemoryWarning) as found:
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
    assert list(KERNELS)[:2] == ["fused", "reference"]  # which never refuses: what comes after it must be asked for


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
