"""Figures for papers: a head's weights labelled with tokens, or all heads of a place. matplotlib is an extra."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .call import Call
from .sight import Sight
from .statistics import compute, unseen
from .stream_cpu import rows as weights_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EXACT = 512  # tokens up to which every weight is drawn; beyond, the pooled maxima
LABELS = 48  # tokens up to which every one is named


def plot(
    call: Call, head: int | None = None, *, batch: int = 0, rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None, size: float | None = None, colours: str = "magma_r", path: Any = None,
) -> Figure:  # fmt: skip
    """The weights of one head, or a panel for every head, as a matplotlib figure; path= saves it (PNG, SVG, PDF).

    rows, columns  what queries and keys are called;   size  inches of a panel
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot: matplotlib must be installed: pip install 'multihead[plot]'") from error
    B, H, _, T, S = call.sizes
    if not 0 <= batch < B or (head is not None and not 0 <= head < H):
        raise IndexError(f"plot: batch must be within 0 … {B - 1} and head within 0 … {H - 1}; they are {batch} and {head}")
    shown = range(H) if head is None else [head]
    across = min(len(shown), 4)
    down = -(-len(shown) // across)
    few = max(T, S) <= LABELS
    size = size or (max(3.0, 0.16 * max(T, S)) if few and head is not None else 2.6)
    figure = Figure(figsize=(across * size + 0.8, down * size + 0.3), layout="constrained")
    axes: list[Axes] = list(figure.subplots(down, across, squeeze=False).flat)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    pictures = _pictures(call, batch, list(shown))
    for axis, h, picture in zip(axes, shown, pictures, strict=False):
        _draw(axis, picture, (T, S), colours)
        axis.set_title(f"{call.name}, head {call.heads[h]}" if head is not None else f"head {call.heads[h]}", fontsize=8)  # pyright: ignore[reportUnknownMemberType]
        if few and head is not None:
            _label(axis, rows, columns)
    for axis in axes[len(shown) :]:
        axis.set_axis_off()
    if path is not None:
        figure.savefig(path, dpi=200)  # pyright: ignore[reportUnknownMemberType]
    return figure


def _pictures(call: Call, batch: int, heads: list[int]) -> list[Tensor]:
    T, S = call.sizes[3:]
    if max(T, S) > EXACT:
        found = compute(call, ["map"], {"map": EXACT})["map"].max[batch]
        return [found[h].cpu() for h in heads]
    with unseen(call):
        sight = Sight(call)
        return [weights_of(call, sight, batch, h, slice(0, T)).cpu() for h in heads]


def _draw(axis: Axes, picture: Tensor, sizes: tuple[int, int], colours: str) -> None:
    T, S = sizes
    axis.imshow(picture.float().numpy(), cmap=colours, vmin=0.0, extent=(-0.5, S - 0.5, T - 0.5, -0.5), interpolation="nearest")  # pyright: ignore[reportUnknownMemberType]
    axis.tick_params(labelsize=6, length=2)  # pyright: ignore[reportUnknownMemberType]


def _label(axis: Axes, rows: Sequence[str] | None, columns: Sequence[str] | None) -> None:
    if rows is not None:
        axis.set_yticks(range(len(rows)), [_readable(t) for t in rows])  # pyright: ignore[reportUnknownMemberType]
    if columns is not None:
        axis.set_xticks(range(len(columns)), [_readable(t) for t in columns], rotation=90)  # pyright: ignore[reportUnknownMemberType]


def _readable(token: str) -> str:
    return token.replace("Ġ", "␣").replace("▁", "␣").replace("Ċ", "↵").replace("\n", "↵").replace("$", r"\$")
