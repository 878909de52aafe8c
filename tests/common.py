"""The masks every kernel is tested with, at the sizes of multihead.testing.Sizes."""

import torch

import multihead as mh
from multihead.testing import Sizes

B, H, G, T, S, D, E = Sizes()
RANDOM = torch.Generator().manual_seed(3)


def some(*shape: int, share: float = 0.6) -> torch.Tensor:
    return torch.rand(shape, generator=RANDOM) < share


TABLE2, TABLE3, TABLE4 = some(T, S), some(B, T, S), some(B, H, T, S)

MASKS: dict[str, mh.Mask | None] = {
    "none": None,
    "causal": mh.Causal(),
    "causal_start": mh.Causal(align="start"),
    "window": mh.Window(3),
    "window_ahead": mh.Window(2, ahead=1),
    "lengths": mh.Lengths([4, 7]),
    "lengths_empty": mh.Lengths([0, 5], [5, 2]),
    "keys_left": mh.Keys(torch.tensor([[False] * 3 + [True] * 4, [True] * 7])),
    "documents": mh.Documents([[0, 0, 1, 1, 1, 2, 2], [0, 0, 0, 0, 1, 1, -1]]),
    "documents_cross": mh.Documents.from_lengths([3, 4], queries=[2, 3]),
    "prefix": mh.Prefix(2),
    "prefix_lm": mh.Causal() | mh.Prefix([1, 4]),
    "valid_lens_1d": mh.ValidLens([3, 6]),
    "valid_lens_2d": mh.ValidLens([[0, 1, 2, 3, 4], [7, 6, 5, 4, 3]]),
    "allowed_2d": mh.Allowed(TABLE2),
    "allowed_3d": mh.Allowed(TABLE3),
    "allowed_4d": mh.Allowed(TABLE4),
    "blocked_3d": mh.Blocked(TABLE3),
    "allowed_absolute": mh.Allowed(some(S + 2, S + 2), absolute=True),
    "where": mh.Where(lambda b, h, q, k: (q + k + b + h) % 3 != 0),
    "not_window": ~mh.Window(3),
    "causal_padded": mh.Causal() & mh.Lengths([2, 7]),
    "causal_window_documents": mh.Causal() & mh.Window(4) & mh.Documents([[0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 2, 2]]),
    "nothing": mh.Causal() & ~mh.Causal(),
}


def moved(mask: mh.Mask | None, device: str) -> mh.Mask | None:
    return None if mask is None else mask.to(device)
