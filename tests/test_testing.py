"""The helpers must be able to fail."""

import math

import pytest
import torch

import multihead as mh
from multihead.testing import Sizes, check, cotangent, make, naive, oracle


def test_sizes_are_pairwise_distinct():
    assert len(set(Sizes())) == len(Sizes())


def test_check_accepts_the_reference_and_names_the_worst_row():
    q, k, v = make()
    exact, plain = oracle(q, k, v).out, naive(q, k, v)
    check(plain, exact, plain)
    wrong = plain.clone()
    wrong[1, 2, 3] += 1e-4
    with pytest.raises(AssertionError, match=r"out: row \[1, 2, 3\] is off by 0.0001"):
        check(wrong, exact, plain)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_check_finds_what_is_not_finite(value):
    q, k, v = make()
    wrong = naive(q, k, v)
    wrong[0, 0, 0, 0] = value
    with pytest.raises(AssertionError, match=r"row \[0, 0, 0\] is off by inf"):
        check(wrong, oracle(q, k, v).out, naive(q, k, v))


def test_an_overflow_of_plain_torch_excuses_nothing():
    q, k, v = make()
    exact, plain = oracle(q, k, v).out, naive(q, k, v)
    overflown = plain.clone()
    overflown[0, 0, 0, 0] = math.inf
    check(plain, exact, overflown)
    with pytest.raises(AssertionError, match="is off by inf"):
        check(torch.full_like(plain, math.nan), exact, overflown)
    check(plain[:0], exact[:0], plain[:0])


def test_check_wants_exact_zeros_and_the_right_shape():
    q, k, v = make()
    mask = mh.Lengths([0, 7])
    exact, plain = oracle(q, k, v, mask=mask).out, naive(q, k, v, mask=mask)
    wrong = plain.clone()
    wrong[0, 0, 0, 0] = 1e-30
    check(wrong, exact, plain)
    with pytest.raises(AssertionError, match="allowed is 0 "):
        check(wrong, exact, plain, zero=torch.tensor([True, False]).view(2, 1, 1))
    with pytest.raises(AssertionError, match=r"shape \[2, 6, 5\] instead of \[2, 6, 5, 13\]"):
        check(plain[..., 0], exact, plain)


@pytest.mark.parametrize(
    "mistake",
    [
        lambda q, k, v: mh.attention(q, k, v, mask=mh.Causal(align="start")),
        lambda q, k, v: mh.attention(q, k, v, mask=mh.Causal(), scale=1.0),
        lambda q, k, v: mh.attention(q, k.flip(1), v, mask=mh.Causal()),
        lambda q, k, v: mh.attention(q, k.roll(1, 2), v, mask=mh.Causal()),
        lambda q, k, v: mh.attention(q, k, v),
        lambda q, k, v: mh.attention(q, k, v, mask=~mh.Causal()),
    ],
)
def test_the_oracle_tells_mistakes_apart(mistake):
    q, k, v = make()
    exact, plain = oracle(q, k, v, mask=mh.Causal()).out, naive(q, k, v, mask=mh.Causal())
    check(mh.attention(q, k, v, mask=mh.Causal()), exact, plain)
    with pytest.raises(AssertionError):
        check(mistake(q, k, v), exact, plain)


def test_make_and_cotangent_are_seeded_and_differ():
    assert all(torch.equal(a, b) for a, b in zip(make(), make(), strict=True))
    assert not torch.equal(make()[0], make(seed=1)[0])
    assert not torch.equal(cotangent(torch.ones(3)), cotangent(torch.ones(3), seed=2))
