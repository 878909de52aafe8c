"""Each kind of mask against its predicate written once more, in plain Python, a pair at a time."""

import copy
import itertools

import pytest
import torch
from torch.utils import _pytree as pytree

import multihead as mh
from multihead.masks import Frame, evaluate
from tests.common import MASKS, TABLE2, TABLE3, TABLE4, B, H, S, T

START = S - T  # the last query stands at the last key
DOCS = [[0, 0, 1, 1, 1, 2, 2], [0, 0, 0, 0, 1, 1, -1]]
PLAIN = {
    "causal": lambda b, h, i, k: k <= i + START,
    "causal_start": lambda b, h, i, k: k <= i,
    "window": lambda b, h, i, k: i + START - 3 < k <= i + START,
    "window_ahead": lambda b, h, i, k: i + START - 2 < k <= i + START + 1,
    "lengths": lambda b, h, i, k: k < [4, 7][b],
    "lengths_empty": lambda b, h, i, k: k < [0, 5][b] and i < [5, 2][b],
    "keys_left": lambda b, h, i, k: b == 1 or k >= 3,
    "documents": lambda b, h, i, k: DOCS[b][i + START] == DOCS[b][k] != -1,
    "documents_cross": lambda b, h, i, k: (i < 2) == (k < 3),
    "prefix": lambda b, h, i, k: k < 2,
    "prefix_lm": lambda b, h, i, k: k <= i + START or k < [1, 4][b],
    "valid_lens_1d": lambda b, h, i, k: k < [3, 6][b],
    "valid_lens_2d": lambda b, h, i, k: k < [[0, 1, 2, 3, 4], [7, 6, 5, 4, 3]][b][i],
    "allowed_2d": lambda b, h, i, k: bool(TABLE2[i, k]),
    "allowed_3d": lambda b, h, i, k: bool(TABLE3[b, i, k]),
    "allowed_4d": lambda b, h, i, k: bool(TABLE4[b, h, i, k]),
    "blocked_3d": lambda b, h, i, k: not TABLE3[b, i, k],
    "allowed_absolute": lambda b, h, i, k: bool(MASKS["allowed_absolute"].tensor[i + START, k]),
    "where": lambda b, h, i, k: (i + START + k + b + h) % 3 != 0,
    "not_window": lambda b, h, i, k: not i + START - 3 < k <= i + START,
    "causal_padded": lambda b, h, i, k: k <= i + START and k < [2, 7][b],
    "causal_window_documents": lambda b, h, i, k: (
        i + START - 4 < k <= i + START
        and [[0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 2, 2]][b][i + START] == [[0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 2, 2]][b][k]
    ),
    "nothing": lambda b, h, i, k: False,
}


def by_pairs(allows) -> torch.Tensor:
    pairs = itertools.product(range(B), range(H), range(T), range(S))
    return torch.tensor([bool(allows(*p)) for p in pairs]).view(B, H, T, S)


def test_every_mask_has_a_plain_predicate():
    assert set(PLAIN) == set(MASKS) - {"none"}


@pytest.mark.parametrize("name", PLAIN)
def test_predicate(name, device):
    found = MASKS[name].to(device).dense(T, S, batch=B, heads=H, device=device)
    assert torch.equal(found.cpu(), by_pairs(PLAIN[name]))


@pytest.mark.parametrize("name", PLAIN)
def test_pairs_counts_what_dense_shows(name):
    assert MASKS[name].pairs(T, S, batch=B, heads=H) == int(by_pairs(PLAIN[name]).sum())


def test_pairs_never_makes_a_square(monkeypatch):
    """What has no intervals is looked at a few rows at a time."""
    sizes = []
    predicate = mh.Where.predicate
    monkeypatch.setattr(mh.Where, "predicate", lambda *a: sizes.append((r := predicate(*a)).numel()) or r)
    n = 20_000
    assert mh.Where(lambda b, h, q, k: k <= q).pairs(n, n) == n * (n + 1) // 2
    assert max(sizes) <= 2**22 < n * n


@pytest.mark.parametrize("name", PLAIN)
def test_full_is_never_wrong(name):
    for q_len, kv_len in ((1, 1), (1, S), (T, S), (S, S)):
        frame = Frame(B, H, q_len, kv_len)
        if MASKS[name].full(frame):
            assert bool(evaluate(MASKS[name], frame).all())


@pytest.mark.parametrize("name", PLAIN)
def test_diagonal_and_reach_are_never_wrong(name):
    mask = MASKS[name]
    pairs = by_pairs(PLAIN[name])
    for b, h, i, k in itertools.product(range(B), range(H), range(T), range(S)):
        if mask.diagonal and k == i + START:
            assert pairs[b, h, i, k]
        if mask.reach is not None and i + START - k >= mask.reach:
            assert not pairs[b, h, i, k]


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("lens", [(1, S), (T, S), (S, S)], ids=str)
def test_within_a_frame_says_the_same(name, lens):
    if name in ("none", "documents_cross", "valid_lens_2d") or (lens != (T, S) and name.startswith(("allowed", "blocked"))):
        return
    frame = Frame(B, H, *lens)
    same = evaluate(MASKS[name].within(frame), frame).expand(B, H, *lens)
    assert torch.equal(same, evaluate(MASKS[name], frame).expand(B, H, *lens))


def test_a_wide_window_is_causal():
    assert mh.Window(7).within(Frame(1, 1, 7, 7)) == mh.Causal()
    assert mh.Window(6).within(Frame(1, 1, 7, 7)) == mh.Window(6)
    assert mh.Window(7, ahead=1).within(Frame(1, 1, 7, 7)) == mh.Window(7, ahead=1)


def test_known_to_be_full():
    assert mh.Causal().full(Frame(2, 3, 1, 9))
    assert not mh.Causal().full(Frame(2, 3, 2, 9))
    assert mh.Window(9).full(Frame(2, 3, 1, 9))
    assert not mh.Window(8).full(Frame(2, 3, 1, 9))
    assert mh.Window(3, ahead=2).full(Frame(2, 3, 3, 3))
    assert (mh.Causal() & mh.Window(9)).full(Frame(2, 3, 1, 9))
    assert (mh.Causal() | mh.Prefix(1)).full(Frame(2, 3, 1, 9))


@pytest.mark.parametrize("name", PLAIN)
def test_repr_describe_equality_copies(name):
    mask = MASKS[name]
    assert len(repr(mask)) < 250
    assert mask.describe()
    assert mask.describe("zh") != mask.describe("en")
    other = copy.deepcopy(mask)
    assert mask == other
    assert hash(mask) == hash(other)
    assert mask != mh.Causal() & mh.Window(77)
    assert mask != "a string"


def test_repr_reads_like_the_source():
    assert repr(mh.Causal() & mh.Window(4, ahead=1) & mh.Lengths([3, 5])) == "Causal() & Window(4, ahead=1) & Lengths([3, 5])"
    assert repr((mh.Causal(align="start") | mh.Prefix(2)) & ~mh.Window(3)) == '(Causal(align="start") | Prefix(2)) & ~Window(3)'
    assert repr(mh.Allowed(torch.ones(99, 99) > 0)) == "Allowed(<bool [99, 99]>)"
    assert repr(mh.Blocked(torch.eye(2) > 0, absolute=True)) == "Blocked([[True, False], [False, True]], absolute=True)"
    assert repr(mh.Lengths([1], [2])) == "Lengths([1], [2])"
    assert repr(~(mh.Causal() | mh.Prefix(1))) == "~(Causal() | Prefix(1))"
    assert eval("Causal() & Window(4)", vars(mh)) == mh.Window(4) & mh.Causal()


def test_describe_says_what_it_is():
    assert (mh.Causal() & mh.Window(4)).describe() == (
        "a query sees the keys up to its own position (the last query sees the last key), and "
        "a query sees the 4 keys that end at its own position and none after it"
    )
    assert "前 2 个键" in (mh.Causal() | mh.Prefix(2)).describe("zh")


def test_draw():
    assert mh.Causal().draw(3, 4) == "■ ■ · ·\n■ ■ ■ ·\n■ ■ ■ ■"
    assert mh.Lengths([1, 2]).draw(1, 2) == "■ ·\n\n■ ■"


def test_algebra():
    a, b, c = mh.Causal(), mh.Window(3), mh.Lengths([2, 5])
    assert a & b == b & a
    assert (a & b) & c == a & (b & c)
    assert a & a is a
    assert a & c & a == a & c
    assert ~~a is a
    assert a | b != a & b
    assert mh.Lengths([2, 5]) != mh.Lengths([2, 4])
    assert mh.Lengths([2, 5]) != mh.ValidLens([2, 5])
    d = [m.dense(6, 6, batch=2, heads=1) for m in (a, b, c)]
    assert torch.equal((~(a & b) | c).dense(6, 6, batch=2, heads=1), ~(d[0] & d[1]) | d[2])


@pytest.mark.parametrize("name", PLAIN)
def test_pytree(name):
    leaves, spec = pytree.tree_flatten(MASKS[name])
    assert pytree.tree_unflatten(leaves, spec) == MASKS[name]
    assert all(isinstance(x, torch.Tensor) or x is None for x in leaves)
    pytree.tree_unflatten([object() for _ in leaves], spec)  # as tracers do


def test_to_moves_every_tensor():
    mask = (mh.Causal() & mh.Lengths([1, 2])) | ~mh.Allowed(torch.ones(2, 3) > 0)
    assert {t.device.type for t in mask.to("meta").leaves()} == {"meta"}
    assert len(mask.leaves()) == 2


def test_positions_restart_in_each_document():
    mask = mh.Documents.from_lengths([[2, 3], [4]])
    assert mask.positions().tolist() == [[0, 1, 0, 1, 2], [0, 1, 2, 3, 0]]


def test_positions_of_the_cache_shift_the_mask():
    frame = Frame(2, 1, 1, 4, q_start=torch.tensor([5, 3]), k_start=torch.tensor([2, -1]))
    assert evaluate(mh.Causal(), frame).tolist() == [
        [[[True] * 4]],
        [[[False, True, True, True]]],
    ]  # position −1: no key
    assert evaluate(mh.Window(2), frame).tolist() == [[[[False, False, True, True]]], [[[False, False, False, True]]]]
    keys = mh.Keys(torch.tensor([[True, True, False, True, True, False], [False, True, True, True, True, True]]))
    assert evaluate(keys, frame).tolist() == [[[[False, True, True, False]]], [[[False, False, True, True]]]]


def test_a_batch_mask_never_lands_on_the_heads():
    """[batch, q, k] with batch == heads is where SDPA and hand-written layers broadcast silently over the heads."""
    table = torch.zeros(2, 1, 1, dtype=torch.bool)
    table[0] = True
    dense = mh.Allowed(table).dense(3, 3, batch=2, heads=2)
    assert bool(dense[0].all())
    assert not bool(dense[1].any())
