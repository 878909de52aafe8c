"""Small enough to check with a pencil, and the same definition once more as plain Python loops."""

import math

import pytest
import torch

import multihead as mh
from multihead.kernels import dropping, reference
from multihead.testing import make
from tests.common import MASKS, B, E, H, S, T
from tests.masks.test_kinds import PLAIN

KERNELS = ["reference", "auto"]


def two_keys(**options):
    """One query, two keys with logits 0 and 1, values 0 and 1."""
    q, k, v = torch.tensor([1.0, 0.0]), torch.tensor([[0.0, 9.0], [1.0, 9.0]]), torch.tensor([[0.0], [1.0]])
    return mh.attention(q.view(1, 1, 1, 2), k.view(1, 1, 2, 2), v.view(1, 1, 2, 1), scale=1.0, **options)


@pytest.mark.parametrize("kernel", KERNELS)
def test_two_keys(kernel):
    e = math.e
    assert two_keys(kernel=kernel).item() == pytest.approx(e / (1 + e))
    assert two_keys(kernel=kernel, softcap=2.0).item() == pytest.approx(1 / (1 + math.exp(-2 * math.tanh(0.5))))
    assert two_keys(kernel=kernel, bias=torch.tensor([[3.0, 0.0]])).item() == pytest.approx(1 / (1 + e**2))
    assert two_keys(kernel=kernel, sinks=torch.tensor([2.0])).item() == pytest.approx(e / (1 + e + e**2))
    out, lse = two_keys(kernel=kernel, return_lse=True)
    assert lse.item() == pytest.approx(math.log(1 + e))
    out, weights = two_keys(kernel=kernel, return_weights=True)
    assert weights.flatten().tolist() == pytest.approx([1 / (1 + e), e / (1 + e)])
    assert two_keys(kernel=kernel, mask=mh.Prefix(1)).item() == 0.0
    assert two_keys(kernel=kernel, mask=~mh.Prefix(1)).item() == 1.0
    out, lse, weights = two_keys(kernel=kernel, mask=mh.Prefix(0), return_lse=True, return_weights=True)
    assert (out.item(), lse.item(), weights.sum().item()) == (0.0, -math.inf, 0.0)


def test_the_default_scale_is_one_over_the_root_of_head_dim():
    q = torch.full((1, 1, 1, 4), 2.0)
    out = mh.attention(q, torch.cat([q * 0, q], 2), torch.tensor([[[[0.0], [1.0]]]]))
    assert out.item() == pytest.approx(1 / (1 + math.exp(-16 / 2)))


def loops(q, k, v, allows, scale, softcap, bias, sinks, keep):
    """The formula, element by element, in Python floats."""
    out, lse = torch.zeros(B, H, T, E, dtype=torch.float64), torch.full((B, H, T), -math.inf, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            g = h // (H // k.shape[1])
            for t in range(T):
                scores = {}
                for s in range(S):
                    if allows(b, h, t, s):
                        x = scale * sum((q[b, h, t] * k[b, g, s]).tolist())
                        x = softcap * math.tanh(x / softcap) if softcap else x
                        scores[s] = x + (bias[b, h, t, s].item() if bias is not None else 0.0)
                if not scores:
                    continue
                total = sum(math.exp(x) for x in scores.values()) + (math.exp(sinks[h].item()) if sinks is not None else 0.0)
                lse[b, h, t] = math.log(total)
                for s, x in scores.items():
                    out[b, h, t] += math.exp(x) / total * v[b, g, s] * keep(b, h, t, s)
    return out, lse


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("extras", ["plain", "all"])
def test_reference_is_the_formula(name, extras):
    q, k, v = make(dtype=torch.float64)
    full = {"scale": 0.7, "softcap": 1.5, "bias": torch.randn(B, H, T, S).double(), "sinks": torch.randn(H).double()}
    options = full if extras == "all" else {"scale": 0.3, "softcap": None, "bias": None, "sinks": None}
    dropout = {"dropout": 0.3, "seed": 2**40 + 5} if extras == "all" else {}
    frame = mh.masks.Frame(B, H, T, S)
    kept = reference.kept(2**40 + 5, 0.3, frame.b, frame.h, frame.q, frame.k)
    out, lse = mh.attention(q, k, v, mask=MASKS[name], return_lse=True, kernel="reference", **options, **dropout)
    want = loops(q, k, v, PLAIN.get(name, lambda *_: True), keep=lambda *i: kept[i].item() / 0.7 if dropout else 1.0, **options)
    torch.testing.assert_close(out, want[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, want[1], rtol=1e-12, atol=1e-12)


def test_the_hash_of_dropout_by_hand():
    """Pinned by a second writing in Python integers: other kernels and other machines must agree for years."""

    def mix(x):
        x &= 0xFFFFFFFF
        x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
        x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
        return x ^ (x >> 16)

    def kept(seed, p, b, h, q, k):
        start = mix(mix((seed & 0xFFFFFFFF) + 0x9E3779B9) + (seed >> 32))
        row = mix(mix(start + b * 0x85EBCA6B + h * 0xC2B2AE35) + q * 0x27D4EB2F)
        x = row ^ mix(k * 0x165667B1 + 0x9E3779B9)
        x = (x * (2 * x + 1)) & 0xFFFFFFFF
        return x - (x >> 31 << 32) >= round(p * 2**32) - 2**31

    for seed in (0, 1, 12345, 2**62 + 99):
        b, h, q, k = (
            torch.tensor(x).view([-1 if i == a else 1 for i in range(4)])
            for a, x in enumerate([[0, 3], [0, 7], [0, 5, 10**6], [0, 1, 10**6]])
        )
        found = dropping.kept(seed, 0.4, b, h, q, k)
        want = [
            [[[kept(seed, 0.4, x, y, z, w) for w in k.flatten().tolist()] for z in q.flatten().tolist()] for y in (0, 7)]
            for x in (0, 3)
        ]
        assert found.tolist() == want
