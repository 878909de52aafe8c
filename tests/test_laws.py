"""Laws that hold for any sizes: hypothesis looks for the sizes that break them."""

import hypothesis.strategies as st
import torch
from hypothesis import given

import multihead as mh
from multihead.masks import Frame, evaluate
from multihead.testing import Sizes, make

KERNELS = st.sampled_from(["auto", "reference"])


@st.composite
def sizes(draw, square=False):
    groups, kv_len = draw(st.integers(1, 3)), draw(st.integers(1, 20))
    kv_heads = draw(st.integers(1, 3))
    q_len = kv_len if square else draw(st.integers(1, 20))
    return Sizes(
        draw(st.integers(1, 3)),
        groups * kv_heads,
        kv_heads,
        q_len,
        kv_len,
        draw(st.integers(1, 9)),
        draw(st.integers(1, 9)),
    )


def simple(lens):
    return st.one_of(
        st.sampled_from([mh.Causal(), mh.Causal(align="start"), mh.Where(lambda b, h, q, k: (q * 3 + k + b) % 4 != 0)]),
        st.builds(mh.Window, st.integers(1, 9), st.integers(0, 3)),
        st.builds(mh.Prefix, st.integers(0, 9)),
        st.builds(lambda n: mh.Lengths([n]), st.integers(0, 20)),
        st.builds(
            lambda seed: mh.Allowed(torch.rand(lens, generator=torch.Generator().manual_seed(seed)) < 0.5),
            st.integers(0, 99),
        ),
    )


def masks(lens):
    """Any combination of masks, up to a few operators deep."""
    return st.recursive(
        simple(lens),
        lambda m: st.one_of(
            st.builds(lambda a, b: a & b, m, m), st.builds(lambda a, b: a | b, m, m), st.builds(lambda a: ~a, m)
        ),
        max_leaves=4,
    )


@st.composite
def calls(draw, square=False):
    n = draw(sizes(square))
    return (*make(n, seed=draw(st.integers(0, 99)), dtype=torch.float64), draw(masks((n.q_len, n.kv_len))))


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@given(calls())
def test_kernels_agree_under_any_mask(call):
    q, k, v, mask = call
    close(mh.attention(q, k, v, mask=mask), mh.attention(q, k, v, mask=mask, kernel="reference"))


@given(calls())
def test_weights_are_a_distribution_over_what_is_allowed(call):
    q, k, v, mask = call
    weights = mh.attention(q, k, v, mask=mask, return_weights=True)[1]
    allowed = mask.dense(q.shape[2], k.shape[2], batch=q.shape[0], heads=q.shape[1])
    assert bool(((weights >= 0) & (weights <= 1 + 1e-12)).all())
    assert not weights[~allowed].any()
    close(weights.sum(-1), allowed.any(-1).double())
    assert mask.pairs(q.shape[2], k.shape[2], batch=q.shape[0], heads=q.shape[1]) == int(allowed.sum())


@given(calls())
def test_de_morgan_and_friends(call):
    q, k, _, mask = call
    T, S = q.shape[2], k.shape[2]

    def dense(m):
        return m.dense(T, S, batch=2, heads=2)

    other = mh.Window(2, ahead=1)
    assert torch.equal(dense(~(mask & other)), dense(~mask | ~other))
    assert torch.equal(dense(~(mask | other)), dense(~mask & ~other))
    assert torch.equal(dense(~~mask), dense(mask))
    assert not dense(mask & ~mask).any()
    assert dense(mask | ~mask).all()


@given(calls(), KERNELS)
def test_batch_entries_do_not_touch(call, kernel):
    q, k, v, mask = call
    whole = mh.attention(q, k, v, mask=mask, kernel=kernel)
    frame = Frame(*q.shape[:3], k.shape[2])
    allowed = evaluate(mask, frame).expand(q.shape[0], -1, -1, -1)
    for b in range(q.shape[0]):
        close(
            mh.attention(q[b : b + 1], k[b : b + 1], v[b : b + 1], mask=mh.Allowed(allowed[b : b + 1]), kernel=kernel),
            whole[b : b + 1],
        )


@given(calls(square=True), st.integers(0, 19), KERNELS)
def test_causality(call, at, kernel):
    """What comes after a position cannot change it."""
    q, k, v, mask = call
    at = at % q.shape[2]
    later = [x.clone() for x in (q, k, v)]
    for x in later:
        x[:, :, at + 1 :] = torch.randn_like(x[:, :, at + 1 :])
    mask = mask & mh.Causal()
    close(
        mh.attention(*later, mask=mask, kernel=kernel)[:, :, : at + 1],
        mh.attention(q, k, v, mask=mask, kernel=kernel)[:, :, : at + 1],
    )


@given(calls(), KERNELS)
def test_without_a_mask_the_order_of_keys_is_irrelevant(call, kernel):
    q, k, v, _ = call
    order = torch.randperm(k.shape[2])
    close(mh.attention(q, k[:, :, order], v[:, :, order], kernel=kernel), mh.attention(q, k, v, kernel=kernel))


@given(calls(), KERNELS)
def test_constant_values_come_out_unchanged(call, kernel):
    q, k, v, mask = call
    v = torch.ones_like(v)
    out = mh.attention(q, k, v, mask=mask, kernel=kernel)
    allowed = mask.dense(q.shape[2], k.shape[2], batch=q.shape[0], heads=q.shape[1])
    close(out, allowed.any(-1, keepdim=True).double().expand_as(out))


@given(calls(), KERNELS)
def test_groups_are_repetition(call, kernel):
    q, k, v, mask = call
    n = q.shape[1] // k.shape[1]
    close(
        mh.attention(q, k, v, mask=mask, kernel=kernel),
        mh.attention(q, k.repeat_interleave(n, 1), v.repeat_interleave(n, 1), mask=mask, kernel=kernel),
    )


@given(calls(), st.integers(1, 19))
def test_two_halves_of_the_keys_merge_by_their_lse(call, cut):
    """What ring attention does: partial results, weighted by exp(lse), are the whole."""
    q, k, v, mask = call
    S, T = k.shape[2], q.shape[2]
    cut = cut % S
    parts = [
        mh.attention(q, k[:, :, a:b], v[:, :, a:b], mask=mh.Allowed(mask.dense(T, S, batch=q.shape[0], heads=q.shape[1])[..., a:b]), return_lse=True)
        for a, b in ((0, cut), (cut, S))
    ]  # fmt: skip
    lse = torch.stack([p[1] for p in parts])
    total = lse.logsumexp(0)
    merged = sum(p[0] * (p[1] - total).exp().nan_to_num(0.0).unsqueeze(-1) for p in parts)
    whole = mh.attention(q, k, v, mask=mask, return_lse=True)
    close(merged, whole[0])
    close(total, whole[1])


@given(st.integers(1, 4), st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(0, 99))
def test_any_chunks_through_the_cache_are_the_whole(window, chunks, seed):
    torch.manual_seed(seed)
    layer = mh.MultiHeadAttention(8, 2, kv_heads=1, positions=mh.RoPE(), mask=mh.Window(window), dtype=torch.float64)
    x = torch.randn(2, sum(chunks), 8, dtype=torch.float64)
    with torch.no_grad():
        cache = layer.new_cache(2, sum(chunks))
        close(torch.cat([layer(part, cache=cache) for part in x.split(chunks, 1)], 1), layer(x))
