"""Which rows of which weight are the queries', the keys' and the values', and how they fall into heads: every way there is.

The names of weights and numbers order the ways; a way is kept only if a single token, for which softmax is 1, comes out right.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from .affine import Affine, cut
from .hints import Hints

LIKE = {
    "q": re.compile(r"(^|[^a-z])w?_?(q|qs|query|queries)([^a-z]|$)|wq$"),
    "k": re.compile(r"(^|[^a-z])w?_?(k|ks|key|keys)([^a-z]|$)|wk$"),
    "v": re.compile(r"(^|[^a-z])w?_?(v|vs|value|values)([^a-z]|$)|wv$"),
    "out": re.compile(r"(^|[^a-z])w?_?(o|out|output|proj|fc|dense|final|unify|unifyheads|merge|combine)([^a-z]|$)|wo$"),
}
MOST_HEADS = 256


@dataclass(frozen=True, eq=False)
class Rows:
    """Some outputs of an affine map: all of them where index is None."""

    affine: Affine
    index: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        y = self.affine(x)
        return y if self.index is None else y[..., self.index]

    def __repr__(self) -> str:
        if self.index is None:
            return self.affine.name
        first, last = int(self.index.min()), int(self.index.max()) + 1
        dense = last - first == len(self.index) and bool((self.index.diff() == 1).all())
        return (
            f"{self.affine.name}[{first}:{last}]"
            if dense
            else f"{self.affine.name}[{len(self.index)} rows between {first} and {last}]"
        )


@dataclass(frozen=True, eq=False)
class Layout:
    """Projections and heads. Our order: query head h is served by kv head h // (heads // kv_heads).

    strided  the module serves query head h with kv head h % kv_heads; q's rows and out's columns are put into our order
    columns  the order of out's inputs, None where it is ours
    """

    q: Rows
    k: Rows
    v: Rows
    out: Affine | None
    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    strided: bool = False
    columns: Tensor | None = None

    def split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:-1], heads, x.shape[-1] // heads).transpose(1, 2)

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[batch, heads, tokens, features] of each."""
        return (
            self.split(self.q(query), self.heads),
            self.split(self.k(key), self.kv_heads),
            self.split(self.v(value), self.kv_heads),
        )

    def merge(self, out: Tensor) -> Tensor:
        """[batch, heads, tokens, v_dim] → [batch, tokens, dim]"""
        out = out.transpose(1, 2).flatten(2)
        if self.columns is not None:
            out = out[..., self.columns]
        return out if self.out is None else self.out(out)

    def one_token(self, value: Tensor) -> Tensor:
        """What a single key yields: its value, projected back."""
        v = self.split(self.v(value), self.kv_heads)
        return self.merge(v.repeat_interleave(self.heads // self.kv_heads, 1))

    def __repr__(self) -> str:
        parts = f"query={self.q!r}, key={self.k!r}, value={self.v!r}, out={self.out.name if self.out else 'none'}"
        grouped = f", kv_heads={self.kv_heads}" if self.kv_heads != self.heads else ""
        return f"{parts}, heads={self.heads}{grouped}" + (
            ", query head h served by kv head h % kv_heads" if self.strided else ""
        )


def layouts(affines: Sequence[Affine], hints: Hints, dims: dict[str, int], width: int) -> Iterator[Layout]:
    """Every layout, likeliest first. dims: features of query, key and value; width: features of the output."""
    seen: set[tuple[object, ...]] = set()
    for q, k, v, out in roles(affines, dims, width):
        for layout in _heads(q, k, v, out, hints, width):
            rows = tuple((id(r.affine), repr(cast(Any, _of(r)).tolist())) for r in (layout.q, layout.k, layout.v))
            key = (rows, id(out), layout.heads, layout.kv_heads, layout.strided)
            if key not in seen:
                seen.add(key)
                yield layout


def roles(
    affines: Sequence[Affine], dims: dict[str, int], width: int
) -> Iterator[tuple[Affine, Affine, Affine, Affine | None]]:
    """Which affine map is which, by names first: q, k and v may be one, two or three maps; out may be missing."""
    ways: list[tuple[float, tuple[Affine, Affine, Affine, Affine | None]]] = []
    fitting = {role: [a for a in affines if a.in_features == dim] for role, dim in dims.items()}
    for q, k, v in itertools.product(fitting["query"], fitting["key"], fitting["value"]):
        names = {a.name for a in (q, k, v)}
        if q.name == v.name != k.name or (q.name == k.name != v.name and len(affines) > 4):
            continue
        for out in (*affines, None):
            if out is not None and (out.name in names or out.out_features != width):
                continue
            score = sum(bool(LIKE[role].search(a.name.lower())) for role, a in zip("qkv", (q, k, v), strict=True))
            score += (
                0.5 * len(names)
                + (0.75 if out is not None else 0)
                + (out is not None and bool(LIKE["out"].search(out.name.lower())))
            )
            ways.append((score, (q, k, v, out)))
    yield from (way for _, way in sorted(ways, key=lambda way: -way[0]))


def _heads(q: Affine, k: Affine, v: Affine, out: Affine | None, hints: Hints, width: int) -> Iterator[Layout]:
    rows, inner = q.out_features, width if out is None else out.in_features
    for heads in dict.fromkeys([*hints.heads, *(h for h in range(1, MOST_HEADS + 1) if rows % h == 0)]):
        if inner % heads or not heads <= MOST_HEADS:
            continue
        for dim in dict.fromkeys([d for d in (rows // heads, inner // heads, *hints.head_dims) if d]):
            for rows_of in parts(q, k, v, heads, dim, inner // heads):
                yield from _orders(Layout(*rows_of, out, heads, len(_of(rows_of[1])) // dim, dim, inner // heads))


def _of(rows: Rows) -> Tensor:
    return torch.arange(rows.affine.out_features) if rows.index is None else rows.index


def parts(q: Affine, k: Affine, v: Affine, heads: int, dim: int, v_dim: int) -> Iterator[tuple[Rows, Rows, Rows]]:
    """The rows of each, for heads of `dim` features."""
    if q is k is v:
        if dim == v_dim:
            yield from _fused(q, heads, dim)
    elif k is v:
        if q.out_features == heads * dim and k.out_features % (dim + v_dim) == 0:
            groups = k.out_features // (dim + v_dim)
            if groups and heads % groups == 0:
                yield from ((Rows(q), a, b) for a, b in _halves(k, groups, dim, v_dim))
    elif q.out_features == heads * dim and k.out_features % dim == 0:
        groups = k.out_features // dim
        if groups and heads % groups == 0 and v.out_features == groups * v_dim:
            yield Rows(q), Rows(k), Rows(v)


def _fused(a: Affine, heads: int, dim: int) -> Iterator[tuple[Rows, Rows, Rows]]:
    """q, k and v in one weight: one after the other, or interleaved by kv head, or by feature."""
    total = a.out_features
    if total % dim or (total // dim - heads) % 2 or total // dim <= heads:
        return
    groups = (total // dim - heads) // 2
    if heads % groups:
        return
    all_rows, share = torch.arange(total), heads // groups
    for order in ((0, 1, 2), *(p for p in itertools.permutations(range(3)) if p != (0, 1, 2))):
        sizes = [(heads, groups, groups)[i] * dim for i in order]
        which = dict(zip(order, cut(all_rows, sizes), strict=True))
        yield Rows(a, which[0]), Rows(a, which[1]), Rows(a, which[2])
    by_group = all_rows.view(groups, share + 2, dim)
    yield (
        Rows(a, by_group[:, :share].reshape(-1)),
        Rows(a, by_group[:, share].reshape(-1)),
        Rows(a, by_group[:, share + 1].reshape(-1)),
    )
    if groups == heads:
        for by_feature in (all_rows.view(dim, 3, heads).permute(1, 2, 0), all_rows.view(heads, dim, 3).permute(2, 0, 1)):
            q, k, v = by_feature.reshape(3, -1)
            yield Rows(a, q), Rows(a, k), Rows(a, v)


def _halves(a: Affine, groups: int, dim: int, v_dim: int) -> Iterator[tuple[Rows, Rows]]:
    """k and v in one weight."""
    rows = torch.arange(a.out_features)
    k, v = cut(rows, [groups * dim, groups * v_dim])
    yield Rows(a, k), Rows(a, v)
    v, k = cut(rows, [groups * v_dim, groups * dim])
    yield Rows(a, k), Rows(a, v)
    by_group = rows.view(groups, dim + v_dim)
    yield Rows(a, by_group[:, :dim].reshape(-1)), Rows(a, by_group[:, dim:].reshape(-1))


def _orders(layout: Layout) -> Iterator[Layout]:
    """As it is; and, where kv heads are shared, for modules that repeat k and v the other way round."""
    yield layout
    heads, groups = layout.heads, layout.kv_heads
    if 1 < groups < heads:
        order = torch.arange(heads).view(heads // groups, groups).T.reshape(-1)  # our head i is the module's head order[i]
        q_rows = _of(layout.q).view(heads, -1)[order].reshape(-1)
        columns = torch.arange(heads * layout.v_dim).view(heads, -1)[order.argsort()].reshape(-1)
        yield Layout(
            Rows(layout.q.affine, q_rows), layout.k, layout.v, layout.out, heads, groups, layout.head_dim, layout.v_dim,
            strided=True, columns=columns,
        )  # fmt: skip
