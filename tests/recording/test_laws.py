"""Laws of the statistics for any sizes and masks, and what they take at 131,072 tokens."""

import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import multihead as mh
from multihead.recording.call import Call
from multihead.recording.statistics import compute
from multihead.recording.tensors import compact

from ..test_laws import calls

ROOT = Path(__file__).parent.parent.parent


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def ask(call, *wanted, **numbers):
    return compute(call, wanted, numbers)


@given(calls())
def test_received_sums_to_the_queries_that_see_anything(drawn):
    q, k, _, mask = drawn
    found = ask(Call(q, k, mask=mask), "received", "lse")
    close(found["received"].sum(-1), found["lse"].isfinite().sum(-1).double())


@given(calls())
def test_entropy_is_at_most_ln_of_the_allowed_keys(drawn):
    q, k, _, mask = drawn
    found = ask(Call(q, k, mask=mask), "entropy", "effective_keys", "strongest")
    allowed = mask.dense(q.shape[2], k.shape[2], batch=q.shape[0], heads=q.shape[1]).sum(-1)
    assert bool((found["entropy"] <= allowed.clamp(min=1).double().log() + 1e-9).all())
    assert bool((found["entropy"] >= 0).all())
    assert bool((found["strongest"].weight * allowed >= (allowed > 0).double() - 1e-9).all())
    assert torch.equal(found["effective_keys"] > 0.5, allowed > 0)


@given(calls(), st.integers(1, 25))
def test_a_map_holds_all_mass(drawn, n):
    q, k, _, mask = drawn
    call = Call(q, k, mask=mask)
    found = ask(call, "map", "received", "strongest", map=n)
    mean, most, r, c = found["map"]
    rows = torch.tensor([min(r, q.shape[2] - i * r) for i in range(mean.shape[2])])
    columns = torch.tensor([min(c, k.shape[2] - i * c) for i in range(mean.shape[3])])
    pooled = torch.nn.functional.pad(found["received"], (0, len(columns) * c - k.shape[2])).unflatten(-1, (-1, c)).sum(-1)
    close((mean * rows[:, None] * columns).sum(2), pooled)
    close(most.amax((-1, -2)), found["strongest"].weight.amax(-1))
    assert bool((mean <= most + 1e-12).all())
    assert max(mean.shape[2:]) <= n


@given(calls(), st.randoms(use_true_random=False))
def test_permuting_heads_permutes_answers(drawn, random):
    q, k, _, mask = drawn
    H, G = q.shape[1], k.shape[1]
    k = k.repeat_interleave(H // G, 1)
    order = list(range(H))
    random.shuffle(order)
    allowed = mh.Allowed(mask.dense(q.shape[2], k.shape[2], batch=q.shape[0], heads=H))
    shuffled = mh.Allowed(allowed.tensor[:, order])
    names = ("entropy", "received", "distance", "lse", "largest", "first", "within")
    plain, moved = ask(Call(q, k, mask=allowed), *names), ask(Call(q[:, order], k[:, order], mask=shuffled), *names)
    for name in names:
        close(moved[name], plain[name][:, order])


@given(calls())
def test_profile_and_nearness_agree(drawn):
    q, k, _, mask = drawn
    found = ask(Call(q, k, mask=mask), "offsets", "within", "lse", "distance", within=3)
    mass, offsets = found["offsets"]
    live = found["lse"].isfinite().sum(-1).clamp(min=1)
    close(mass[..., offsets.abs() <= 3].sum(-1), found["within"].sum(-1) / live)
    close((mass * offsets.abs()).sum(-1), found["distance"].sum(-1) / live)


@given(calls())
def test_asked_together_or_alone(drawn):
    q, k, _, mask = drawn
    call, names = Call(q, k, mask=mask), ("map", "received", "entropy", "top")
    together = ask(call, *names)
    for name in names:
        torch.testing.assert_close(ask(call, name)[name], together[name], rtol=1e-12, atol=1e-12)


@given(calls())
def test_a_mask_made_compact_says_the_same(drawn):
    q, k, _, mask = drawn
    allowed = mask.dense(q.shape[2], k.shape[2], batch=q.shape[0], heads=q.shape[1])
    kept = compact(allowed)
    again = torch.ones_like(allowed) if kept is None else kept.dense(q.shape[2], k.shape[2], batch=q.shape[0], heads=q.shape[1])
    assert torch.equal(again, allowed)
    close(ask(Call(q, k, mask=kept), "received")["received"], ask(Call(q, k, mask=mask), "received")["received"])


# ---- length ---------------------------------------------------------------------------------------------------------

PEAK = """
import torch, multihead as mh
torch.set_num_threads(1)
L = {length}
q, k, v = (torch.randn(1, 1, L, 16) for _ in range(3))
read = lambda key: int(next(l for l in open("/proc/self/status") if l.startswith(key)).split()[1]) // 1024
with torch.no_grad(), mh.record() as seen:
    torch.nn.functional.scaled_dot_product_attention(q[:, :, :512], k[:, :, :512], v[:, :, :512])
seen[0].compute("entropy", "received", "distance", "strongest", "map")
with torch.no_grad(), mh.record() as seen:
    {call}
assert seen.nbytes == q.nbytes + k.nbytes
open("/proc/self/clear_refs", "w").write("5")
before = read("VmRSS")
found = seen[0].compute("entropy", "received", "distance", "strongest", "map", "top", "offsets", top=5, offsets=100, progress=False)
assert float(found["received"].sum()) - L < 1, found["received"].sum()
w = seen[0].weights(queries=[0, L // 2, L - 1])
for i, t in enumerate((0, L // 2, L - 1)):
    assert abs(float(found["entropy"][0, 0, t]) + float(torch.xlogy(w[0, 0, i], w[0, 0, i]).sum())) < 1e-4
print(read("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    ("length", "call", "most"),
    [
        (131_072, "windowed(q, k, v)", 96),
        (16_384, "torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)", 128),
    ],
)
def test_memory_is_bounded(length, call, most):
    """A dense matrix of weights would take 64 GiB at 131,072 tokens, 1 GiB at 16,384."""
    code = (WINDOWED if "windowed" in call else "") + PEAK.format(length=length, call=call)
    peak = int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT).stdout)
    assert peak < most, f"{peak} MiB"


WINDOWED = """
import sys, torch, multihead as mh
from types import SimpleNamespace
mask = mh.Causal() & mh.Window(600)

def run(q, k, v, spec):  # a kernel that skips what the window hides
    parts = []
    for i in range(0, q.shape[2], 256):
        part, keys = slice(i, i + 256), slice(max(0, i - 600), i + 256)
        parts.append(mh.attention(q[:, :, part], k[:, :, keys], v[:, :, keys], mask=mask, kernel="reference"))
    return torch.cat(parts, 2), None

sys.modules["multihead.plan"].KERNELS["skips"] = SimpleNamespace(refuses=lambda spec: None, run=run, quadratic_bytes=lambda spec: 0)

def windowed(q, k, v):
    return mh.attention(q, k, v, mask=mask, kernel="skips")
"""
