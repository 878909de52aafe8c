"""RoPE, ALiBi and relative bias against their papers' formulas and their laws."""

import copy
import math

import pytest
import torch

import multihead as mh
from multihead.positions import NTK, Linear, Llama3, YaRN, alibi_slopes

SCALINGS = [None, Linear(4.0), NTK(4.0), YaRN(4.0, 32), Llama3(8.0, 64)]


def rotate(rope, x, positions):
    return rope.rotate(x, *rope.angles(positions, x))


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotation_by_complex_numbers(layout):
    """Each pair is a complex number times e^(i p θ^(−2j/d))."""
    d, p = 8, torch.tensor([0, 1, 5, 1000])
    x = torch.randn(1, 1, 4, d, dtype=torch.float64)
    pairs = (
        torch.complex(x[..., : d // 2], x[..., d // 2 :])
        if layout == "half"
        else torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    )
    angles = p[:, None] * 10_000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    want = torch.cat([turned.real, turned.imag], -1) if layout == "half" else torch.view_as_real(turned).flatten(-2)
    torch.testing.assert_close(rotate(mh.RoPE(dim=d, layout=layout), x, p), want)


@pytest.mark.parametrize("scaling", SCALINGS, ids=repr)
@pytest.mark.parametrize("dim", [4, 8])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_scores_depend_on_the_distance_only(scaling, dim, layout):
    rope = mh.RoPE(dim=dim, layout=layout, scaling=scaling)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    scores = [
        (rotate(rope, q, torch.tensor([p + 3])) * rotate(rope, k, torch.tensor([p]))).sum() for p in (0, 7, 123_456, 10_000_000)
    ]
    torch.testing.assert_close(torch.stack(scores), scores[0].expand(4), rtol=1e-7, atol=1e-7)


def test_far_positions_lose_nothing_in_half_precision():
    rope = mh.RoPE(dim=8)
    q, k = torch.randn(2, 1, 1, 1, 8).bfloat16()
    near = (rotate(rope, q, torch.tensor([3])).float() * rotate(rope, k, torch.tensor([0])).float()).sum()
    far = (rotate(rope, q, torch.tensor([1_000_003])).float() * rotate(rope, k, torch.tensor([1_000_000])).float()).sum()
    torch.testing.assert_close(near, far, rtol=0, atol=0.05)


def test_partial_rotation_leaves_the_rest():
    x = torch.randn(2, 3, 5, 8)
    turned = rotate(mh.RoPE(dim=4), x, torch.arange(5))
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert not torch.equal(turned[..., :4], x[..., :4])


def test_two_axes():
    """Half of the pairs turn by the row, half by the column; each half is RoPE of its own."""
    rope, one = mh.RoPE(dim=8, axes=2, layout="interleaved"), mh.RoPE(dim=4, layout="interleaved")
    x, rc = torch.randn(1, 2, 6, 8), torch.tensor([[r, c] for r in range(2) for c in range(3)])
    turned = rotate(rope, x, rc)
    torch.testing.assert_close(turned[..., :4], rotate(one, x[..., :4], rc[:, 0]))
    torch.testing.assert_close(turned[..., 4:], rotate(one, x[..., 4:], rc[:, 1]))
    layer = mh.MultiHeadAttention(16, 2, positions=mh.RoPE(axes=2))
    y = torch.randn(2, 6, 16)
    torch.testing.assert_close(layer(y, position_ids=rc), layer(y, position_ids=rc.expand(2, -1, -1) + 5), rtol=1e-4, atol=1e-5)


def test_scalings_by_their_definitions():
    d, f = 8, 10_000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    torch.testing.assert_close(mh.RoPE(dim=d, scaling=Linear(4.0)).frequencies, f / 4)
    torch.testing.assert_close(
        mh.RoPE(dim=d, scaling=NTK(4.0)).frequencies,
        (10_000.0 * 4 ** (8 / 6)) ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8),
    )
    llama = mh.RoPE(theta=500_000.0, dim=128, scaling=Llama3(8.0, 8192)).frequencies
    plain = mh.RoPE(theta=500_000.0, dim=128).frequencies
    wavelength = 2 * math.pi / plain
    torch.testing.assert_close(llama[wavelength > 8192], plain[wavelength > 8192] / 8)
    torch.testing.assert_close(llama[wavelength < 2048], plain[wavelength < 2048])
    assert bool(((llama <= plain) & (llama >= plain / 8)).all())
    yarn = mh.RoPE(dim=64, scaling=YaRN(4.0, 2048))
    base = mh.RoPE(dim=64).frequencies
    torch.testing.assert_close(yarn.frequencies[0], base[0])
    torch.testing.assert_close(yarn.frequencies[-1], base[-1] / 4)
    assert YaRN(4.0, 2048).attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    x = torch.randn(1, 1, 1, 64)
    torch.testing.assert_close(rotate(yarn, x, torch.tensor([0])), x * (0.1 * math.log(4) + 1))


def test_constants_survive_every_move():
    """A half-precision layer keeps exact frequencies; a layer brought up from the meta device has them too."""
    layer = mh.MultiHeadAttention(16, 2, positions=mh.RoPE())
    want = layer.positions.frequencies.clone()
    assert torch.equal(copy.deepcopy(layer).to(torch.bfloat16).positions.frequencies, want)
    assert torch.equal(copy.deepcopy(layer).half().float().positions.frequencies, want)
    with torch.device("meta"):
        born = mh.MultiHeadAttention(16, 2, positions=mh.RoPE())
    assert born.positions.frequencies.device.type == "meta"
    assert torch.equal(born.to_empty(device="cpu").positions.frequencies, want)
    alibi = mh.MultiHeadAttention(16, 2, positions=mh.ALiBi(), device="meta")
    assert alibi.to_empty(device="cpu").positions.slopes.tolist() == [2**-4, 2**-8]
    assert "positions" not in " ".join(layer.state_dict())


def test_position_ids_of_packed_and_left_padded_batches():
    layer = mh.MultiHeadAttention(16, 2, positions=mh.RoPE(), mask=mh.Causal()).eval()
    a, b = torch.randn(1, 3, 16), torch.randn(1, 5, 16)
    docs = mh.Documents.from_lengths([3, 5])
    packed = layer(torch.cat([a, b], 1), mask=docs, position_ids=docs.positions())
    torch.testing.assert_close(packed, torch.cat([layer(a), layer(b)], 1), rtol=1e-4, atol=1e-6)
    padded = torch.cat([torch.cat([torch.randn(1, 2, 16), a], 1), b])
    ids = torch.tensor([[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]])
    real = torch.tensor([[False, False, True, True, True], [True] * 5])
    out = layer(padded, mask=mh.Keys(real), position_ids=ids)
    torch.testing.assert_close(out[0, 2:], layer(a)[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(out[1], layer(b)[0], rtol=1e-4, atol=1e-6)


def test_cross_attention_positions():
    layer = mh.MultiHeadAttention(16, 2, positions=mh.RoPE())
    x, m = torch.randn(2, 3, 16), torch.randn(2, 5, 16)
    want = layer(x, m)
    torch.testing.assert_close(layer(x, m, position_ids=torch.arange(2, 5), key_position_ids=torch.arange(5)), want)
    assert not torch.allclose(layer(x, m, position_ids=torch.arange(3)), want)


def test_position_ids_hold_for_the_keys_of_self_attention_however_it_is_called():
    layer = mh.MultiHeadAttention(16, 2, positions=mh.RoPE())
    x, ids = torch.randn(2, 3, 16), torch.tensor([0, 4, 9])
    torch.testing.assert_close(layer(x, x, x, position_ids=ids), layer(x, position_ids=ids))
    assert not torch.allclose(layer(x, key_position_ids=ids), layer(x))


def test_alibi():
    assert alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(12)[8:] == [2.0 ** (-0.5 * i) for i in (1, 3, 5, 7)]
    layer = mh.MultiHeadAttention(16, 4, positions=mh.ALiBi(), mask=mh.Causal())
    x = torch.randn(2, 5, 16)
    i = torch.arange(5)
    bias = -torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]).view(1, 4, 1, 1) * (i[:, None] - i).abs()
    bare = copy.deepcopy(layer)
    bare.positions = None
    torch.testing.assert_close(layer(x), bare(x, bias=bias))
    extra = torch.randn(5, 5)
    torch.testing.assert_close(layer(x, bias=extra), bare(x, bias=bias + extra))
    custom = mh.MultiHeadAttention(16, 4, positions=mh.ALiBi([0.0] * 4))
    plain = mh.MultiHeadAttention(16, 4)
    plain.load_state_dict(custom.state_dict())
    torch.testing.assert_close(custom(x), plain(x))


def t5_bucket(offset, bidirectional, buckets, far):
    """T5's rule, one offset at a time."""
    bucket = 0
    if bidirectional:
        buckets //= 2
        bucket += buckets if offset > 0 else 0
        distance = abs(offset)
    else:
        distance = max(-offset, 0)
    exact = buckets // 2
    if distance < exact:
        return bucket + distance
    return bucket + min(exact + int(math.log(distance / exact) / math.log(far / exact) * (buckets - exact)), buckets - 1)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "far"), [(32, 128), (8, 20)])
def test_relative_bias_buckets_are_t5s(bidirectional, buckets, far):
    bias = mh.RelativeBias(3, buckets, far, bidirectional)
    offsets = [o for o in range(-300, 301) if abs(o) not in (16, 32, 64)]  # on a boundary float32 and float64 may differ
    assert bias.bucket(torch.tensor(offsets)).tolist() == [t5_bucket(o, bidirectional, buckets, far) for o in offsets]


def test_relative_bias_is_learned():
    layer = mh.MultiHeadAttention(16, 4, positions=mh.RelativeBias(4))
    with torch.no_grad():
        layer.positions.weight.normal_()
    x = torch.randn(2, 5, 16)
    weights = layer(x, return_weights=True)[1]
    layer.zero_grad()
    (weights * torch.randn_like(weights)).sum().backward()
    assert layer.positions.weight.grad.abs().sum() > 0
    bare = copy.deepcopy(layer)
    bare.positions = None
    i = torch.arange(5)
    bias = layer.positions.weight[layer.positions.bucket(i - i[:, None])].permute(2, 0, 1)[None]
    torch.testing.assert_close(layer(x), bare(x, bias=bias))


def share(rope):
    mh.MultiHeadAttention(8, 2, positions=rope)
    mh.MultiHeadAttention(8, 1, positions=rope)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: mh.RoPE(layout="paired"), ValueError, 'layout must be "half" or "interleaved"; it is \'paired\''),
        (lambda: mh.RoPE(dim=5), ValueError, "must be a multiple of 2 .*there are 5"),
        (lambda: mh.RoPE(dim=6, axes=2), ValueError, "must be a multiple of 4 .*there are 6"),
        (lambda: mh.RoPE(theta=0.0), ValueError, "theta must be a finite number > 1 and axes ≥ 1; they are 0.0 and 1"),
        (lambda: mh.RoPE(scaling="yarn"), TypeError, "an object with its numbers; it is 'yarn'"),
        (lambda: mh.RoPE(scaling=mh.positions.Linear), TypeError, "an object with its numbers"),
        (lambda: mh.positions.YaRN(4.0, 0), ValueError, "YaRN: original must be a finite number > 0; it is 0"),
        (lambda: mh.positions.Linear(0.0), ValueError, "Linear: factor must be a finite number > 0; it is 0.0"),
        (lambda: mh.positions.Llama3(low=4.0), ValueError, "low must be below high; they are 4.0 and 4.0"),
        (lambda: mh.RoPE(dim=2, scaling=mh.positions.NTK(2.0)), ValueError, "only one pair of features turns; use Linear"),
        (lambda: mh.RoPE(dim=4, axes=2).angles(torch.arange(3), torch.ones(1)), ValueError, r"positions are \[.., tokens, 2\]; their shape is \[3\]"),
        (
            lambda: mh.MultiHeadAttention(8, 2, positions=mh.RoPE(dim=6)),
            ValueError,
            "dim is 6 but a head has only 4 features",
        ),
        (lambda: mh.MultiHeadAttention(8, 2, positions=mh.ALiBi([0.5])), ValueError, "there are 1 slopes and 2 heads"),
        (
            lambda: mh.MultiHeadAttention(8, 2, positions=mh.RelativeBias(3)),
            ValueError,
            "made for 3 heads, the layer has 2",
        ),
        (lambda: mh.RelativeBias(2, 3), ValueError, "buckets is 3, of which 0 are such"),
        (
            lambda: mh.RoPE().angles(torch.arange(3), torch.ones(1)),
            RuntimeError,
            r"fit\(heads, head_dim\) first, or give dim=",
        ),
        (lambda: mh.ALiBi().bias(torch.arange(3), torch.arange(3)), RuntimeError, "or give slopes="),
    ],
)  # fmt: skip
def test_errors(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_positions_of_a_picture_must_be_given():
    layer, x = mh.MultiHeadAttention(16, 2, positions=mh.RoPE(axes=2)), torch.randn(2, 2, 16)
    with pytest.raises(ValueError, match=r"needs to be told where tokens stand: position_ids=\[.., tokens, 2\]$"):
        layer(x)
    with pytest.raises(ValueError, match=r"and key_position_ids=\[.., tokens, 2\]"):
        layer(x, x + 1, position_ids=torch.zeros(2, 2))
    for ids in (torch.zeros(2), torch.zeros(2, 3), torch.zeros(2, 2, 1)):
        with pytest.raises(ValueError, match=r"here \[2, 2\] or \[2, 2, 2\]; its shape is"):
            layer(x, position_ids=ids)
    line = mh.MultiHeadAttention(16, 2, positions=mh.RoPE())
    with pytest.raises(ValueError, match=r"here \[2\] or \[2, 2\]; its shape is \[2, 1\]"):
        line(x, position_ids=torch.zeros(2, 1))
    with pytest.raises(ValueError, match=r"position_ids must be a tensor .* it is a list"):
        line(x, position_ids=[0, 1])
    with pytest.raises(ValueError, match="the layer has no positions= to use them"):
        mh.MultiHeadAttention(16, 2)(x, position_ids=torch.arange(2))


@pytest.mark.parametrize("positions", [mh.RoPE, mh.ALiBi])
def test_position_ids_of_one_unbatched_tensor(positions):
    layer, x, ids = mh.MultiHeadAttention(16, 2, positions=positions()), torch.randn(3, 16), torch.tensor([0, 5, 9])
    torch.testing.assert_close(layer(x, x, x, position_ids=ids), layer(x[None], position_ids=ids)[0])


def test_alibi_in_float64_is_exact():
    layer = mh.MultiHeadAttention(24, 12, positions=mh.ALiBi(), dtype=torch.float64)
    exact = torch.tensor(mh.positions.alibi_slopes(12), dtype=torch.float64)
    assert torch.equal(layer.positions.slopes, exact)
    assert torch.equal(layer.half().double().positions.slopes, exact)
    assert layer.half().positions.slopes.dtype == torch.float32


def test_reset_parameters_resets_every_part():
    layer = mh.MultiHeadAttention(16, 4, qk_norm=True, sinks=True, positions=mh.RelativeBias(4))
    for p in layer.parameters():
        torch.nn.init.constant_(p, float("nan"))
    layer.reset_parameters()
    assert all(bool(p.isfinite().all()) for p in layer.parameters())


def test_position_ids_of_a_bias_do_not_go_with_a_cache():
    layer = mh.MultiHeadAttention(8, 2, positions=mh.ALiBi())
    with pytest.raises(ValueError, match="ALiBi takes distances from the cache's own positions; leave position_ids out"):
        layer(torch.randn(1, 3, 8), cache=layer.new_cache(1, 8), position_ids=torch.arange(3))
