"""Each convention in the wild, by its name, against the library or the code whose convention it is."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import multihead as mh
from multihead import masks

Q, K = 3, 4
ALLOWED = torch.tensor([[1, 0, 1, 1], [0, 1, 0, 0], [1, 1, 1, 0]], dtype=torch.bool)


def dense(mask: mh.Mask, batch: int = 1, heads: int = 1) -> torch.Tensor:
    return mask.dense(Q, K, batch=batch, heads=heads)


@pytest.mark.parametrize(
    ("read", "tensor"),
    [
        (lambda t: masks.from_torch(t), ~ALLOWED),
        (lambda t: masks.from_torch(t), torch.where(ALLOWED, 0.0, -math.inf)),
        (masks.from_sdpa, ALLOWED),
        (masks.from_sdpa, torch.where(ALLOWED, 0.0, -math.inf)),
        (masks.from_additive, torch.where(ALLOWED, 0.0, torch.finfo(torch.float32).min)),
        (masks.from_additive, torch.where(ALLOWED, 0.0, -1e9)),
        (masks.from_zeros, ALLOWED.int()),
        (masks.from_zeros, ALLOWED),
        (masks.from_zeros, ALLOWED.float()),
        (masks.from_ones, (~ALLOWED).float()),
        (masks.from_ones, ~ALLOWED),
        (mh.Allowed, ALLOWED),
        (mh.Blocked, ~ALLOWED),
    ],
)
def test_every_reader_finds_the_same_pairs(read, tensor):
    assert torch.equal(dense(read(tensor))[0, 0], ALLOWED)


def test_from_torch_means_what_torch_means():
    layer = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x, y = torch.randn(2, Q, 8), torch.randn(2, K, 8)
    padding = torch.tensor([[False, False, True, True], [False, False, False, True]])
    blocked = torch.rand(4, Q, K) < 0.4
    blocked[:, :, 0] = False
    weights = layer(x, y, y, attn_mask=blocked, key_padding_mask=padding, average_attn_weights=False)[1]
    mask = masks.from_torch(blocked, padding, num_heads=2)
    assert torch.equal(dense(mask, 2, 2), weights != 0)
    floats = masks.from_torch(key_padding_mask=torch.where(padding, -math.inf, 0.0))
    assert torch.equal(dense(floats, 2)[:, 0, 0], ~padding)
    assert masks.from_torch() is None


def test_from_sdpa_means_what_sdpa_means():
    q, k = torch.randn(1, 1, Q, 8), torch.randn(1, 1, K, 8)
    v = torch.eye(K)[None, None]
    weights = F.scaled_dot_product_attention(q, k, v, ALLOWED)
    assert torch.equal(dense(masks.from_sdpa(ALLOWED)), weights != 0)


def test_from_huggingface():
    mask = masks.from_huggingface(torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]]))
    assert mask == mh.Keys(torch.tensor([[False, True, True, True], [True, True, False, False]]))


def test_from_triu_reads_the_causal_buffer_back():
    buffer = torch.full((1, 1, 6, 6), -math.inf).triu(1)  # note 002's register_buffer("mask", …)
    assert masks.from_triu(buffer) == mh.Causal()
    banded = buffer + torch.full((6, 6), -math.inf).tril(-3)
    mask = masks.from_triu(banded)
    assert mask == mh.Allowed(banded == 0, absolute=True)
    assert torch.equal(mask.dense(Q, K), (mh.Causal() & mh.Window(3)).dense(Q, K))


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (
            lambda: masks.from_additive(torch.tensor([[0.0, -2.5]])),
            ValueError,
            r"-2\.5 at \[0, 1\].*pass them as bias=",
        ),
        (lambda: masks.from_additive(ALLOWED), TypeError, "float tensor of 0 and −inf; its dtype is torch.bool"),
        (lambda: masks.from_ones(torch.tensor([[0, 2]])), ValueError, r"must be 0 or 1; there is 2 at \[0, 1\]"),
        (lambda: masks.from_sdpa(ALLOWED[None]), ValueError, r"m\[:, None\] if that axis is the batch"),
        (lambda: masks.from_torch(ALLOWED[None]), ValueError, "num_heads is None; pass the layer's num_heads="),
        (
            lambda: masks.from_huggingface(ALLOWED[None]),
            ValueError,
            r"2-D mask \[batch, tokens\]; its shape is \[1, 3, 4\]",
        ),
        (lambda: mh.Allowed(ALLOWED.int()), TypeError, "needs a bool tensor .* got dtype torch.int32.*from_zeros"),
        (lambda: mh.Keys([[True]]), TypeError, r"Keys: needs a bool tensor \[batch, kv_len\]; got a list"),
        (lambda: mh.Allowed(ALLOWED[0]), ValueError, r"Allowed: the mask must be \[q, k\].*its shape is \[4\]"),
        (lambda: mh.Causal(align="left"), ValueError, 'align must be "end" or "start"; it is \'left\''),
        (lambda: mh.Window(0), ValueError, "width must be ≥ 1 and ahead ≥ 0; they are 0 and 0"),
        (lambda: mh.Prefix(-1), ValueError, "Prefix: n must be ≥ 0; the smallest is -1"),
        (lambda: mh.Prefix(True), TypeError, "n must be a list or tensor of whole numbers; got"),
        (lambda: mh.Window(2.5), TypeError, r"width and ahead must be whole numbers; they are 2.5 and 0"),
        (lambda: mh.Lengths(None), TypeError, "keys must be a list or tensor of whole numbers; got None"),
        (lambda: mh.Documents([[0, 1], [0]]), ValueError, "ids must have rows of one length"),
        (lambda: mh.Documents.from_lengths(3), TypeError, "lengths must be whole numbers, a list or a list of lists; got 3"),
        (lambda: mh.Causal().to(torch.float16), TypeError, "a mask moves between devices and keeps its dtype; it got torch.float16"),
        (lambda: masks.from_huggingface(None), TypeError, "from_huggingface: needs a tensor; got a NoneType"),
        (lambda: masks.from_triu(torch.zeros(3)), ValueError, r"from_triu: a mask has at least 2 axes.*its shape is \[3\]"),
        (lambda: masks.from_torch(torch.ones(3, 4)), ValueError, "from_torch: a mask holds 0 and −inf only, but there is 1"),
        (lambda: masks.from_torch(ALLOWED[None], num_heads=0), ValueError, "num_heads is 0; pass the layer's num_heads="),
        (lambda: mh.Where(lambda b, h, q, k: torch.ones(3) > 0).dense(2, 2), ValueError, r"broadcast to \[batch, heads, q, k\] = \[1, 1, 2, 2\]; it returned shape \[3\]"),
        (lambda: mh.Lengths([2, -1]), ValueError, "Lengths: keys must be ≥ 0; the smallest is -1"),
        (lambda: mh.Lengths([2.5]), TypeError, r"a list or tensor of whole numbers; got \[2.5\]"),
        (lambda: mh.Lengths(torch.ones(2)), TypeError, "must hold whole numbers; its dtype is torch.float32"),
        (lambda: mh.Lengths("ab"), TypeError, "a list or tensor of whole numbers; got 'ab'"),
        (lambda: mh.Lengths([[2]]), ValueError, r"keys must be 1-D; its shape is \[1, 1\]"),
        (lambda: mh.Lengths([2, 3], [1]), ValueError, "keys has 2, queries has 1"),
        (lambda: mh.Documents.from_lengths([2, -3]), ValueError, r"lengths must be ≥ 0; got \[2, -3\]"),
        (lambda: mh.Where(3), TypeError, r"needs a function \(b, h, q, k\) → bool; got int"),
        (
            lambda: mh.Where(lambda b, h, q, k: q - k).dense(2, 2),
            TypeError,
            "must return a bool tensor.*it returned torch.int64",
        ),
        (lambda: mh.Causal() and mh.Prefix(1), TypeError, "combine masks with & | ~, not with and, or, not"),
        (
            lambda: mh.Causal() & ALLOWED,
            TypeError,
            r"Causal\(\) & ….* a bare tensor; wrap a tensor as Allowed\(t\) if True may attend",
        ),
        (lambda: mh.Causal() | None, TypeError, "the right one is a NoneType"),
        (lambda: mh.Lengths([1, 2]).dense(3, 4, batch=3), ValueError, "made for batch 2 but the call has batch 3"),
        (lambda: mh.Keys(ALLOWED).dense(3, 5), ValueError, "covers 4 keys but kv_len is 5"),
        (lambda: mh.Allowed(ALLOWED).dense(2, 4), ValueError, r"3 rows but q_len is 2.*absolute=True"),
        (lambda: mh.Allowed(ALLOWED).dense(3, 5), ValueError, "covers 4 keys but kv_len is 5"),
        (
            lambda: mh.Allowed(ALLOWED.expand(1, 2, 3, 4)).dense(3, 4, heads=3),
            ValueError,
            "2 heads .* but the call has 3",
        ),
        (
            lambda: mh.Allowed(ALLOWED, absolute=True).dense(2, 5),
            ValueError,
            "must cover every position of the call; its queries stand at 3 … 4",
        ),
        (
            lambda: mh.Documents([0, 1]).dense(3, 2),
            ValueError,
            "some queries stand before the first key.*pass queries=",
        ),
        (lambda: mh.Documents([0, 1], [0]).dense(2, 2), ValueError, "queries names 1 tokens but q_len is 2"),
        (lambda: mh.ValidLens([[1, 2]]).dense(3, 4), ValueError, r"shape \[1, 2\] but q_len is 3"),
        (
            lambda: mh.Keys(ALLOWED).dense(3, 4, device="meta"),
            ValueError,
            r"the mask is on cpu but the call is on meta; write mask.to\(.meta.\)",
        ),
    ],
)  # fmt: skip
def test_errors_say_what_must_hold_what_came_and_what_to_do(call, error, match):
    with pytest.raises(error, match=match):
        call()
