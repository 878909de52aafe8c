"""Decoding with a cache is the full forward, for every position, mask, grouping, chunking and length."""

import copy

import pytest
import torch

import multihead as mh

D, H, TOKENS = 48, 6, 19
POSITIONS = {
    "none": lambda: None,
    "rope": mh.RoPE,
    "rope_interleaved": lambda: mh.RoPE(layout="interleaved", dim=4),
    "alibi": mh.ALiBi,
    "relative": lambda: mh.RelativeBias(H, bidirectional=False),
}
MASKS = {
    "causal": mh.Causal(),
    "window": mh.Causal() & mh.Window(4),
    "window_alone": mh.Window(3),
    "window_one": mh.Window(1),
    "wide_window": mh.Window(100),
    "prefix": mh.Causal() | mh.Prefix(2),
    "table": mh.Causal() & mh.Allowed((torch.arange(25)[:, None] + torch.arange(25)) % 3 != 1, absolute=True),
    "documents": mh.Causal() & mh.Documents.from_lengths([7, 12]),
}


def make(position, mask, kv_heads=2, **options):
    torch.manual_seed(0)
    layer = mh.MultiHeadAttention(D, H, kv_heads=kv_heads, positions=POSITIONS[position](), mask=MASKS[mask], **options).eval()
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return layer


def decode(layer, x, chunks, cache=None):
    cache = cache or layer.new_cache(x.shape[0], x.shape[1])
    return torch.cat([layer(part, cache=cache) for part in x.split(chunks, 1)], 1)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("chunks", [[1] * TOKENS, [5] + [1] * 14, [7, 1, 2, 9]], ids=["one by one", "prefill", "chunks"])
@torch.no_grad()
def test_cached_is_full(position, mask, chunks):
    layer, x = make(position, mask), torch.randn(2, TOKENS, D)
    if mask == "prefix" and chunks[0] == 1:  # the first query sees the whole prefix, which must be there
        chunks = [2, *chunks[2:]]
    torch.testing.assert_close(decode(layer, x, chunks), layer(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kv_heads", [1, 3, 6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@torch.no_grad()
def test_groups_and_dtypes(kv_heads, dtype):
    layer, x = make("rope", "causal", kv_heads, value_head_dim=5).to(dtype), torch.randn(2, TOKENS, D).to(dtype)
    tolerance = 1e-10 if dtype == torch.float64 else 0.1
    torch.testing.assert_close(decode(layer, x, [4] + [1] * 15), layer(x), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("mask", ["causal", "window", "prefix"])
@torch.no_grad()
def test_texts_of_different_lengths(position, mask):
    """A padded prefill, cropped to each text's own length, then decoded together: each text as if it were alone."""
    layer, x, n = make(position, mask), torch.randn(3, TOKENS, D), [4, 7, 2]
    full, cache = layer(x), layer.new_cache(3, TOKENS)
    layer(x[:, :7], cache=cache)
    if mask == "window":  # what the longest has dropped, the shortest would need
        for step in range(9):
            layer(x[:, 7 + step : 8 + step], cache=cache)
        with pytest.raises(ValueError, match="tokens need keys that a window of 4 has dropped; the oldest kept are at"):
            cache.crop(n)
        return
    cache.crop(n)
    assert cache.lengths == n
    for step in range(5):
        tokens = torch.stack([x[b, n[b] + step] for b in range(3)])[:, None]
        want = torch.stack([full[b, n[b] + step] for b in range(3)])[:, None]
        torch.testing.assert_close(layer(tokens, cache=cache), want, rtol=1e-4, atol=1e-4)
    cache.crop([6, 9, 3])  # drafted tokens taken back
    tokens = torch.stack([x[b, i : i + 2] for b, i in enumerate([6, 9, 3])])
    want = torch.stack([full[b, i : i + 2] for b, i in enumerate([6, 9, 3])])
    torch.testing.assert_close(layer(tokens, cache=cache), want, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_different_lengths_in_a_rolling_cache():
    layer, x = make("rope", "window"), torch.randn(2, 30, D)
    full, cache = layer(x), layer.new_cache(2, 30)
    layer(x[:, :5], cache=cache)
    cache.crop([5, 4])
    for step in range(20):
        tokens = torch.stack([x[0, 5 + step], x[1, 4 + step]])[:, None]
        want = torch.stack([full[0, 5 + step], full[1, 4 + step]])[:, None]
        torch.testing.assert_close(layer(tokens, cache=cache), want, rtol=1e-4, atol=1e-4)
    assert cache.lengths == [25, 24]


@torch.no_grad()
def test_a_call_mask_with_a_cache_goes_by_position():
    """Left padding: the padded keys stay hidden at every step, by their position in the cache."""
    layer, x = make("rope", "causal"), torch.randn(2, 9, D)
    real = torch.ones(2, 9, dtype=torch.bool)
    real[0, :3] = False
    mask = mh.Keys(real)
    cache = layer.new_cache(2, 9)
    parts = [layer(part, cache=cache, mask=mask) for part in x.split([4, 1, 1, 1, 2], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), layer(x, mask=mask), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_beam_search_reorders():
    layer, x = make("rope", "causal"), torch.randn(2, TOKENS, D)
    cache = layer.new_cache(2, TOKENS)
    layer(x[:, :5], cache=cache)
    cache.crop([5, 3])
    cache.reorder([1, 1, 0])
    assert cache.lengths == [3, 3, 5]
    full = layer(x)
    tokens = torch.stack([x[1, 3], x[1, 3], x[0, 5]])[:, None]
    want = torch.stack([full[1, 3], full[1, 3], full[0, 5]])[:, None]
    torch.testing.assert_close(layer(tokens, cache=cache), want, rtol=1e-4, atol=1e-4)


def test_gradients_flow_through_a_cache():
    layer, x = make("rope", "causal"), torch.randn(2, 6, D)
    want = torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
    got = torch.autograd.grad(decode(layer, x, [3, 1, 2]).square().sum(), list(layer.parameters()))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)


@torch.no_grad()
def test_memory_of_a_rolling_cache_does_not_grow():
    layer = make("none", "window")
    cache = layer.new_cache(1, 10_000)
    assert cache.nbytes == 2 * 2 * 8 * (2 * 4) * 4  # k and v, kv heads, head_dim, twice the window, float32
    before = cache._k.data_ptr()
    for _ in range(50):
        layer(torch.randn(1, 3, D), cache=cache)
    assert cache._k.data_ptr() == before
    assert cache.lengths == [150]


@torch.no_grad()
def test_writes_are_in_place_and_reset_keeps_the_buffer():
    layer = make("none", "causal")
    cache = layer.new_cache(1, 8)
    before = cache._k.data_ptr()
    x = torch.randn(1, 8, D)
    first = decode(layer, x, 1, cache)
    cache.reset()
    assert cache.lengths == [0]
    assert torch.equal(decode(layer, x, 1, cache), first)
    assert cache._k.data_ptr() == before


@torch.no_grad()
def test_crop_to_nothing_and_copies():
    layer, x = make("rope", "causal"), torch.randn(2, 6, D)
    cache = layer.new_cache(2, 8)
    layer(x, cache=cache)
    other = copy.deepcopy(cache)
    cache.crop(0)
    torch.testing.assert_close(decode(layer, x, 6, cache), layer(x), rtol=1e-4, atol=1e-4)
    other.crop(torch.tensor([0, 6]))
    tokens = torch.stack([x[0, :1], x[1, :1]])
    out = layer(tokens, cache=other)
    torch.testing.assert_close(out[0], layer(x)[0, :1], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_autocast():
    layer, x = make("rope", "causal", qk_norm=True), torch.randn(2, 6, D)
    with torch.autocast("cpu", torch.bfloat16):
        cache = layer.new_cache(2, 6)
        assert "bfloat16" in repr(cache)
        torch.testing.assert_close(decode(layer, x, [3, 1, 1, 1], cache), layer(x), rtol=0.05, atol=0.05)


@torch.no_grad()
@pytest.mark.parametrize("position", ["rope", "alibi"])
@pytest.mark.parametrize("mask", ["causal", "window"])
def test_a_call_that_raises_leaves_the_cache_as_it_was(position, mask):
    layer, x = make(position, mask), torch.randn(1, TOKENS, D)
    full, cache = layer(x), layer.new_cache(1, TOKENS)
    for step in range(TOKENS):
        token = x[:, step : step + 1]
        for wrong in (
            {"mask": torch.ones(1, 1) > 0},
            {"kernel": "no"},
            {"bias": torch.ones(3, 3)},
            {"mask": mh.Keys(torch.ones(1, 99) > 0) & mh.Lengths([1, 2])},
        ):
            with pytest.raises((TypeError, ValueError)):
                layer(token, cache=cache, **wrong)
        torch.testing.assert_close(layer(token, cache=cache), full[:, step : step + 1], rtol=1e-4, atol=1e-4)
    assert cache.lengths == [TOKENS]


@torch.no_grad()
def test_what_a_window_dropped_stays_dropped():
    layer, x = make("none", "window_alone"), torch.randn(2, 20, D)
    cache = layer.new_cache(2, 16)
    for part in (x[:, :8], x[:, 8:10]):
        layer(part, cache=cache)
    cache.crop([9, 10])
    with pytest.raises(ValueError, match=r"a window of 3 has dropped; the oldest kept are at \[6, 6\]"):
        cache.crop([7, 10])
    tokens, want = torch.stack([x[0, 9:10], x[1, 10:11]]), layer(x)
    torch.testing.assert_close(layer(tokens, cache=cache)[0], want[0, 9:10], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_reorder_gives_room_back():
    layer, x = make("rope", "causal"), torch.randn(2, 12, D)
    full, cache = layer(x), layer.new_cache(2, 8)
    layer(x[:, :7], cache=cache)
    cache.crop([7, 2])
    cache.reorder([1, 1])
    assert cache.lengths == [2, 2]
    for step in range(2, 8):
        tokens = x[1:, step : step + 1].expand(2, -1, -1)
        torch.testing.assert_close(layer(tokens, cache=cache)[1], full[1, step : step + 1], rtol=1e-4, atol=1e-4)


def test_gradients_through_a_cache_where_only_the_query_learns():
    layer, x = make("none", "causal"), torch.randn(2, 6, D)
    layer.key.requires_grad_(False)
    layer.value.requires_grad_(False)
    leaves = [layer.query.weight, layer.out.weight]
    want = torch.autograd.grad(layer(x).square().sum(), leaves)
    torch.testing.assert_close(
        torch.autograd.grad(decode(layer, x, [3, 1, 2]).square().sum(), leaves), want, rtol=1e-4, atol=1e-3
    )


def test_caches_of_layers_with_adapters():
    class Adapter(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x)

    layer = make("rope", "causal").double()
    layer.key = Adapter(layer.key)
    assert "float64 on cpu" in repr(layer.new_cache(1, 4))


def test_crop_in_inference_mode():
    layer, x = make("rope", "causal"), torch.randn(2, 6, D)
    cache = layer.new_cache(2, 8)
    with torch.inference_mode():
        layer(x, cache=cache)
        cache.crop([5, 3])
        cache.reorder([1, 0])
    with torch.no_grad():
        layer(x[:, :1], cache=cache)
    assert cache.lengths == [4, 6]


def test_a_cache_of_another_layer_is_refused():
    wide, narrow = make("none", "causal"), make("none", "window_alone")
    x = torch.randn(1, 2, D)
    with pytest.raises(ValueError, match="the cache keeps the last 3 keys but a query of this layer sees every key before it"):
        wide(x, cache=narrow.new_cache(1, 8))
    with pytest.raises(ValueError, match="keeps the last 3 keys but a query of this layer sees 4 keys"):
        make("none", "window")(x, cache=narrow.new_cache(1, 8))
    narrow(x, cache=wide.new_cache(1, 8))
    with pytest.raises(ValueError, match="for cross-attention pass the whole memory and no cache"):
        wide(x, x + 1, cache=wide.new_cache(1, 8))


def test_repr():
    cache = make("none", "window").new_cache(2, 100)
    assert repr(cache) == "KVCache(rolling, window 4: lengths 0, batch 2, kv_heads 2, columns 8, head_dim 8, float32 on cpu)"


def fill(tokens, *, mask="causal", batch=2, **options):
    layer = make("none", mask)
    cache = layer.new_cache(batch, 8, **options)
    with torch.no_grad():
        layer(torch.randn(2, tokens, D), cache=cache)
    return cache


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: fill(9), ValueError, "holds 8 tokens, 0 are there and 9 more came; make it with max_tokens ≥ 9"),
        (lambda: fill(9, mask="wide_window"), ValueError, "holds 8 tokens, 0 are there and 9 more came"),
        (
            lambda: fill(3, batch=3),
            ValueError,
            r"batch, kv_heads, head_dim, v_dim = \[3, 2, 8, 8\]; k has shape \[2, 2, 3, 8\]",
        ),
        (
            lambda: fill(3, dtype=torch.bfloat16),
            ValueError,
            "holds torch.bfloat16 on cpu but torch.float32 on cpu came",
        ),
        (lambda: fill(3).crop([2, 4]), ValueError, r"lengths must be 0 … \[3, 3\]; they are \[2, 4\]"),
        (lambda: fill(3).crop([2, -1]), ValueError, r"they are \[2, -1\]"),
        (lambda: fill(3).crop([1, 2, 3]), ValueError, r"one for each of the 2 texts; there are \[1, 2, 3\]"),
        (lambda: fill(3).crop([1.5, 2.5]), TypeError, "lengths must be whole numbers; their dtype is torch.float32"),
        (lambda: fill(3).reorder([True, False]), TypeError, "indices must be whole numbers; their dtype is torch.bool"),
        (lambda: fill(3).reorder([0, 2]), ValueError, r"indices must be texts 0 … 1; they are \[0, 2\]"),
        (lambda: mh.KVCache(0, 2, 8, 4), ValueError, "must be ≥ 1; they are 0, 2, 8, 4, None"),
    ],
)
def test_errors(call, error, match):
    with pytest.raises(error, match=match):
        call()
