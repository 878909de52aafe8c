"""Masks written as text."""

import pytest

import multihead as mh
from multihead.masks import parse


@pytest.mark.parametrize(
    ("text", "mask"),
    [
        ("causal", mh.Causal()),
        (" Causal & window(1024)", mh.Causal() & mh.Window(1024)),
        ("causal | prefix(16)", mh.Causal() | mh.Prefix(16)),
        ("~window(3, ahead=2)", ~mh.Window(3, ahead=2)),
        (
            'causal("start") & (lengths([3, 5]) | valid_lens([1, 2]))',
            mh.Causal("start") & (mh.Lengths([3, 5]) | mh.ValidLens([1, 2])),
        ),
        ("documents([3, 5])", mh.Documents.from_lengths([3, 5])),
    ],
)
def test_text_is_the_mask(text, mask):
    assert parse(text) == mask


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("causl", r'mask "causl": there is no mask "causl"; did you mean causal\?'),
        ("xyz", r'there is no mask "xyz"; write causal, window, lengths'),
        ("causal &", r'mask "causal &" cannot be read; write causal, window'),
        ("window(0)", r'mask "window\(0\)": Window: width must be ≥ 1'),
        ("window", r'mask "window": .*missing 1 required positional argument'),
        ("causal + window(3)", r'"causal \+ window\(3\)" is no mask'),
        ("window(n)", r'"n" must be a number, a list of numbers or a quoted word'),
        ("__import__('os').system('true')", "is no mask"),
        ("prefix(*[1])", r'"\*\[1\]" must be a number'),
        ("window(**{})", "is no mask"),
    ],
)
def test_what_is_no_mask_says_why(text, said):
    with pytest.raises(ValueError, match=said):
        parse(text)
