"""Intervals and blocks against the predicate: exact for a query, never too small and never too sure for a block of queries."""

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import multihead as mh
from multihead.masks import Frame, evaluate
from multihead.masks.blocks import MOST, Spans, spans, split
from tests.common import MASKS, B, H, S, T

LOOK = {"allowed_2d", "allowed_3d", "allowed_4d", "blocked_3d", "allowed_absolute", "where"}  # they have no intervals
KNOWN = sorted(set(MASKS) - {"none"} - LOOK)
FRAMES = {
    "call": lambda: Frame(B, H, T, S),
    "decoding": lambda: Frame(B, H, 1, S),
    "dropped keys": lambda: Frame(B, H, 2, 4, q_start=5, k_start=3),
    "ragged": lambda: Frame(B, H, 2, S, q_start=torch.tensor([4, 2]), k_start=torch.tensor([-1, -3])),
}


def dense(mask, frame):
    """What the predicate says, [batch, q_len, kv_len]."""
    allowed = evaluate(mask, frame).expand(frame.batch, -1, frame.q_len, frame.kv_len)
    assert bool((allowed == allowed[:, :1]).all())
    return allowed[:, 0]


def of(found, frame):
    return found.dense(frame.q_len).expand(frame.batch, 1, -1, -1)[:, 0]


@pytest.mark.parametrize("where", FRAMES)
@pytest.mark.parametrize("name", KNOWN)
def test_intervals_say_what_the_predicate_says(name, where):
    mask, frame = MASKS[name], FRAMES[where]()
    try:
        want = dense(mask, frame)
    except ValueError:
        pytest.skip("the mask does not fit this call, and says so")
    found, rest = split(mask, frame)
    assert rest is None
    assert torch.equal(of(found, frame), want)
    assert torch.equal(found.pairs(frame.q_len).expand(frame.batch), want.sum((1, 2)))


@pytest.mark.parametrize("name", sorted(LOOK))
def test_what_has_no_intervals_is_kept_apart(name):
    frame = Frame(B, H, T, S)
    assert spans(MASKS[name], frame) is None
    found, rest = split(mh.Causal() & MASKS[name] & mh.Lengths([4, 7]), frame)
    assert rest == MASKS[name]
    assert torch.equal(of(found, frame), dense(mh.Causal() & mh.Lengths([4, 7]), frame))
    assert split(mh.Causal() | MASKS[name], frame) == (None, mh.Causal() | MASKS[name])


def test_no_mask_is_no_interval():
    assert split(None, Frame(B, H, T, S)) == (None, None)


def masks():
    number = st.integers(0, 9)
    ids = st.lists(st.integers(-1, 3), min_size=9, max_size=9).map(lambda x: mh.Documents(x))
    leaf = st.one_of(
        st.sampled_from([mh.Causal(), mh.Causal(align="start")]),
        st.builds(mh.Window, st.integers(1, 5), st.integers(0, 3)),
        st.builds(lambda a, b: mh.Lengths([a, b]), number, number),
        st.builds(lambda a, b, c, d: mh.Lengths([a, b], [c, d]), number, number, number, number),
        st.builds(lambda a: mh.Keys(torch.tensor(a).view(2, 9)), st.lists(st.booleans(), min_size=18, max_size=18)),
        st.builds(lambda a, b: mh.Prefix([a, b]), number, number),
        st.builds(lambda a, b: mh.ValidLens([a, b]), number, number),
        ids,
    )
    several = st.recursive(
        leaf, lambda x: st.one_of(st.builds(lambda a, b: a & b, x, x), st.builds(lambda a, b: a | b, x, x), x.map(lambda a: ~a))
    )
    return several  # noqa: RET504 - names what it is


@given(masks(), st.sampled_from([1, 2, 4, 5]))
def test_blocks_hold_all_that_is_seen_and_are_sure_only_of_what_is(mask, size):
    frame = Frame(2, 1, 6, 9)
    want = dense(mask, frame)
    found, rest = split(mask, frame)
    if rest is not None:  # documents that were torn apart
        assert "Documents" in repr(rest)
        return
    assert torch.equal(of(found, frame), want)
    blocks = found.blocks(size, 6)
    some, every = (x.dense(-(-6 // size)).expand(2, 1, -1, -1)[:, 0] for x in (blocks.some, blocks.every))
    for i in range(-(-6 // size)):
        rows = want[:, i * size : (i + 1) * size]
        assert bool((rows.any(1) <= some[:, i]).all())
        assert bool((every[:, i] <= rows.all(1)).all())


@pytest.mark.parametrize("mask", [mh.Causal(), mh.Window(3), mh.Documents.from_lengths([4, 5]), mh.Prefix(4)], ids=repr)
def test_blocks_of_simple_masks_are_exact(mask):
    frame = Frame(1, 1, 9, 9)
    want, blocks = dense(mask, frame)[0], spans(mask, frame).blocks(3, 9)
    for i in range(3):
        rows = want[3 * i : 3 * i + 3]
        for found, exact in ((blocks.some, rows.any(0)), (blocks.every, rows.all(0))):
            row = min(i, found.start.shape[1] - 1)
            k = torch.arange(9)
            assert torch.equal(((k >= found.start[0, row, 0]) & (k < found.end[0, row, 0])), exact)


def test_documents_that_are_torn_apart_are_looked_at():
    frame = Frame(1, 1, 6, 6)
    assert spans(mh.Documents([0, 0, 1, 1, 0, 0]), frame) is None
    assert spans(mh.Documents([0, -1, 1, 1, -1, 2]), frame) is not None


def test_keys_in_many_runs_are_looked_at():
    keys = torch.arange(4 * MOST) % 2 == 0
    assert spans(mh.Keys(keys[None]), Frame(1, 1, 3, 4 * MOST)) is None
    assert spans(mh.Keys(keys[None, : 2 * MOST]), Frame(1, 1, 3, 2 * MOST)).start.shape == (1, 1, MOST)


def test_a_million_tokens_lower_in_linear_time():
    """Causal & Window(4096) & Documents at 1,048,576 tokens: no square of anything, and under 50 ms on a free machine."""
    tokens = 2**20
    mask = mh.Causal() & mh.Window(4096) & mh.Documents.from_lengths([3000] * (tokens // 3000) + [tokens % 3000])
    frame, times = Frame(1, 8, tokens, tokens), []
    for _ in range(5):
        begin = time.perf_counter()
        blocks = spans(mask, frame).blocks(256, tokens)
        times.append(time.perf_counter() - begin)
    assert blocks.some.start.shape == (1, 4096, 1)
    assert int((blocks.some.end - blocks.some.start).max()) <= 4096 + 256
    assert min(times) < 0.2  # 0.03 s where nothing else runs


def test_pairs_of_a_million_tokens_are_counted():
    """A plan of such a call must not look at 10¹² pairs."""
    tokens = 2**20
    assert (mh.Causal() & mh.Window(4096)).pairs(tokens, tokens) == 4096 * tokens - 4096 * 4095 // 2
    assert (mh.Causal() | mh.Prefix(7)).pairs(tokens, tokens) == tokens * (tokens + 1) // 2 + 21


def test_algebra_of_intervals():
    a = Spans(torch.tensor([[[0, 5]]]), torch.tensor([[[2, 8]]]), 10)
    b = Spans(torch.tensor([[[1]]]), torch.tensor([[[6]]]), 10)
    for found, want in ((a & b, [(1, 2), (5, 6)]), (a | b, [(0, 8)]), (~a, [(2, 5), (8, 10)]), (~~a, [(0, 2), (5, 8)])):
        assert [tuple(map(int, x)) for x in zip(found.start[0, 0], found.end[0, 0], strict=True)] == want
