"""Every statistic × mask × dtype × shape against its definition, computed densely in float64; and what it costs in memory."""

import math

import pytest
import torch

import multihead as mh
from multihead.recording.call import Call
from multihead.recording.statistics import STATISTICS, compute
from multihead.testing import Sizes, make

from ..common import MASKS, moved
from . import dense

NUMBERS = {"top": 3, "first": 2, "within": 1, "map": 3}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
LONG = {
    "none": None,
    "causal": mh.Causal(),
    "window": mh.Causal() & mh.Window(70),
    "window_ahead": mh.Window(30, ahead=90),
    "lengths": mh.Lengths([600, 0]),
    "documents": mh.Documents.from_lengths([100, 1, 250, 349]),
    "prefix_lm": mh.Causal() | mh.Prefix(90),
    "sparse": mh.Where(lambda b, h, q, k: (q * 7 + k * 3 + b + h) % 5 != 0),
    "keys": mh.Keys(torch.rand(2, 700, generator=torch.Generator().manual_seed(5)) < 0.5),
    "table": mh.Allowed(torch.rand(2, 1, 700, 700, generator=torch.Generator().manual_seed(6)) < 0.3) & mh.Causal(),
}  # fmt: skip


def compare(call, *, numbers=NUMBERS, **options):
    found = compute(call, list(STATISTICS), numbers, progress=False)
    w, lse = dense.weights(call.q, call.k, mask=call.mask, start=call.start, key_start=call.key_start, **options)
    s = dense.scores(call.q, call.k, mask=call.mask, start=call.start, key_start=call.key_start, **options)
    want = dense.statistics(w, lse, s, dense.positions(call.frame), numbers)
    eps = torch.finfo(torch.float64 if call.q.dtype == torch.float64 else torch.float32).eps
    size = float(s[s.isfinite()].abs().max()) if bool(s.isfinite().any()) else 1.0

    def close(name, actual, expected, scale=1.0):
        torch.testing.assert_close(
            actual.double(), expected, rtol=200 * eps, atol=50 * eps * (1 + size) * scale, msg=lambda m: f"{name}: {m}"
        )

    L = max(call.q.shape[2], call.k.shape[2])
    for name in ("lse", "largest", "first", "within", "effective_keys"):
        close(name, found[name], want[name], scale=L if name == "effective_keys" else 1.0)
    close("entropy", found["entropy"], want["entropy"], scale=4)
    close("received", found["received"], want["received"], scale=math.sqrt(L))
    close("distance", found["distance"], want["distance"], scale=L)
    close("strongest", found["strongest"].weight, want["strongest"])
    key = found["strongest"].key
    close("strongest key", w.gather(3, key.clamp(min=0).unsqueeze(-1)).squeeze(-1), want["strongest"])
    assert torch.equal(key < 0, ~s.isfinite().any(-1))
    top = found["top"]
    close("top", top.weights, want["top"])
    close("top keys", w.gather(3, top.keys.clamp(min=0)) * (top.keys >= 0), want["top"])
    mean, most = want["map"]
    close("map mean", found["map"].mean, mean)
    close("map max", found["map"].max, most)
    mass, offsets = found["offsets"]
    by_offset = dict(zip(offsets.tolist(), mass.unbind(-1), strict=True))
    for d, value in want["offsets"].items():
        if abs(d) < 5 or d % 29 == 0:
            close(f"offset {d}", by_offset[d], value)
    return found


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_mask(mask, dtype, device):
    q, k, _ = make(dtype=dtype, device=device)
    compare(Call(q, k, mask=moved(MASKS[mask], device), scale=q.shape[3] ** -0.5))


@pytest.mark.parametrize("mask", LONG)
def test_many_blocks(mask, device):
    """Several blocks of queries, ragged at every end; more than one head at a time and one alone."""
    for heads, T, head_dim in ((4, 700, 8), (2, 530, 16)):
        if mask in ("table",) and T != 700:
            continue
        q, k, _ = make(Sizes(2, heads, 2, T, 700, head_dim, 8), device=device)
        compare(
            Call(q, k, mask=moved(LONG[mask], device), scale=0.7),
            scale=0.7,
            numbers={**NUMBERS, "map": 13, "within": 40, "first": 65},
        )


@pytest.mark.parametrize("n", [1, 7, 64, 100, 128, 300, 5000])
def test_maps_of_any_size(n):
    q, k, _ = make(Sizes(1, 2, 1, 270, 330, 8, 8), dtype=torch.float64)
    compare(Call(q, k, mask=mh.Window(150, ahead=50), scale=0.5), scale=0.5, numbers={**NUMBERS, "map": n})


@pytest.mark.parametrize("mask", ["none", "causal", "causal_padded", "allowed_4d"])
def test_bias_softcap_and_sinks(mask, device):
    q, k, _ = make(device=device)
    bias = torch.randn(2, 6, 5, 7, device=device)
    for options in (
        {"bias": bias},
        {"bias": bias[:1, :, :1]},
        {"softcap": 0.9},
        {"sinks": torch.randn(6, device=device)},
        {"bias": bias, "softcap": 2.0, "sinks": torch.randn(6, device=device), "scale": -0.4},
    ):
        scale = options.get("scale", q.shape[3] ** -0.5)
        compare(Call(q, k, mask=moved(MASKS[mask], device), **{**options, "scale": scale}), **options)


def test_a_bias_of_minus_infinity_hides():
    q, k, _ = make(dtype=torch.float64)
    bias = torch.zeros(1, 1, 5, 7, dtype=torch.float64)
    bias[..., 3:] = -math.inf
    bias[..., 2, :] = -math.inf
    call = Call(q, k, bias=bias, scale=1.0)
    want = compute(Call(q, k, mask=mh.Allowed(bias == 0), scale=1.0), ["lse", "received", "entropy", "strongest"])
    found = compute(call, ["lse", "received", "entropy", "strongest"])
    for name in want:
        torch.testing.assert_close(found[name], want[name])


@pytest.mark.parametrize(
    "positions",
    [{"start": 0}, {"start": 9, "key_start": 4}, {"start": torch.tensor([3, 6]), "key_start": torch.tensor([-2, 1])}],
)
def test_positions(positions, device):
    q, k, _ = make(dtype=torch.float64, device=device)
    compare(Call(q, k, mask=mh.Causal() & mh.Window(4), scale=0.5, **positions), scale=0.5)


@pytest.mark.parametrize(
    "sizes",
    [Sizes(1, 1, 1, 1, 1, 1, 1), Sizes(1, 2, 1, 300, 3, 5, 5), Sizes(2, 3, 3, 1, 500, 5, 5), Sizes(1, 3, 1, 513, 513, 64, 64)],
)
def test_sizes(sizes):
    q, k, _ = make(sizes)
    compare(Call(q, k, mask=mh.Causal(), scale=1.0), scale=1.0)
    compare(Call(q, k, scale=1.0), scale=1.0)


def test_nothing_to_look_at():
    for sizes in (Sizes(0, 2, 1, 3, 4), Sizes(2, 2, 1, 0, 4), Sizes(2, 2, 1, 3, 0)):
        q, k, _ = make(sizes)
        found = compute(Call(q, k, mask=mh.Causal(), scale=1.0), list(STATISTICS))
        assert found["entropy"].shape == (sizes.batch, 2, sizes.q_len)
        assert found["received"].shape == (sizes.batch, 2, sizes.kv_len)


def test_levelled_rows_attend_to_all_alike():
    q, k, _ = make(dtype=torch.float64)
    flat = torch.tensor([False, True, False, False, True]).view(1, 1, 5)
    w = compute(Call(q, k, flat=flat, scale=1.0), ["largest", "effective_keys"])
    torch.testing.assert_close(w["effective_keys"][:, :, [1, 4]], torch.full((2, 6, 2), 7.0, dtype=torch.float64))
    assert bool((w["effective_keys"][:, :, [0, 2, 3]] < 6.99).all())


def test_no_gradient_no_autocast_no_generator():
    q, k, _ = make(requires_grad=True)
    state = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16):
        found = compute(Call(q, k, scale=1.0), ["entropy", "map"])
    exact = compute(Call(q.double(), k.double(), scale=1.0), ["entropy"])
    assert not found["entropy"].requires_grad
    assert torch.is_grad_enabled()
    torch.testing.assert_close(found["entropy"].double(), exact["entropy"], rtol=1e-5, atol=1e-5)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("wanted", "arguments", "match"),
    [
        (["entropie"], {}, "compute: there is no statistic 'entropie'; there are lse, largest, entropy"),
        (["top"], {"top": 0}, "top: needs a whole number ≥ 1; it is 0"),
        (["map"], {"map": 2.5}, "map: needs a whole number ≥ 1; it is 2.5"),
        (["within"], {"within": True}, "within: needs a whole number ≥ 0; it is True"),
    ],
)
def test_errors(wanted, arguments, match):
    q, k, _ = make()
    with pytest.raises(ValueError, match=match):
        compute(Call(q, k), wanted, arguments)
