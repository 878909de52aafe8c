"""What a module's tables and buffers tell about its rotations and slopes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .affine import named


def _tables(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, sub in named(module):
        for name, x in {**sub._buffers, **vars(sub)}.items():  # pyright: ignore[reportPrivateUsage]
            if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()):
                yield (f"{prefix}.{name}" if prefix else name).lower(), x


def names(module: nn.Module) -> list[tuple[str, object]]:
    return [(n.lower(), x) for sub in module.modules() for n, x in vars(sub).items()] + [
        (type(sub).__name__.lower(), None) for sub in module.modules()
    ]


def first_angles(module: nn.Module) -> Iterator[tuple[int, float]]:
    """(pairs, angle of the second pair at position 1) of every table that looks like one of rotations."""
    tables = [x for _, x in _tables(module)]
    for x in tables:
        if x.ndim == 1 and x.numel() >= 2 and not x.is_complex() and float(x[0]) == 1.0 and bool((x.diff() < 0).all()):
            yield x.numel(), float(x[1])
        if x.is_complex() and x.ndim >= 2 and x.shape[-2] >= 2:
            yield x.shape[-1], float(x.reshape(-1, x.shape[-1])[1, 1].angle())
    flat = [
        x.reshape(-1, x.shape[-1])
        for x in tables
        if not x.is_complex() and x.ndim >= 2 and x.shape[-1] >= 2 and x.numel() > x.shape[-1]
    ]
    for cos, sin in itertools.permutations(flat, 2):
        if cos.shape == sin.shape and bool((cos[0] == 1).all()) and not bool(sin[0].any()):
            angle = torch.atan2(sin[1], cos[1])
            if cos.shape[-1] % 2 == 0 and cos.shape[-1] >= 4 and bool(angle[0] == angle[1]):
                yield cos.shape[-1] // 2, float(angle[2])
            elif cos.shape[-1] % 2 == 0 and torch.equal(*angle.chunk(2)):
                yield cos.shape[-1] // 2, float(angle[1])
            else:
                yield cos.shape[-1], float(angle[1])


def slopes(module: nn.Module, heads: int) -> Iterator[list[float]]:
    for name, x in _tables(module):
        if x.numel() == heads and heads > 1 and ("slope" in name or "alibi" in name):
            yield [abs(float(s)) for s in x.flatten()]
