"""See what any model attended to, in memory that grows with the text. Its rooms are entered on the first call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

if TYPE_CHECKING:
    from .intercept import Recorder
    from .patterns import Heads
    from .recording import Recording

ALL = ("entropy", "received", "distance", "strongest", "map")


def record(
    model: nn.Module | None = None, *, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None,
    where: str | Callable[[str], bool] | None = None, keep: Literal["queries", "values", "statistics"] = "queries",
    statistics: Sequence[str] = ALL, every: int = 1, device: Any = None, budget: int | None = None,
    tokens: Sequence[str] | Sequence[Sequence[str]] | None = None,
    key_tokens: Sequence[str] | Sequence[Sequence[str]] | None = None, out_proj: str | Tensor | None = None,
    differentiable: bool = False,
) -> Recorder:  # fmt: skip
    """See every attention call of any model, which runs as it would have run.

        with record() as seen:
            model(**inputs)
        seen[3].entropy()

    What is kept is q and k of each call, in memory that grows with the text; answers are computed from them when asked for.
    Outputs, gradients and random state are those of an unrecorded run; but a compiled model runs uncompiled meanwhile.

    model          names places by their path from it; else from whatever module is called outright
    layers, heads, where   numbers of places, numbers of heads, and a part, pattern or predicate of a place's name
    keep           "queries": q and k; "values": v too; "statistics": only `statistics`, computed at once
    every          of a recorder that is entered again and again, one time in so many
    device         where what is kept goes;   budget  bytes that it may take, else BudgetError
    tokens, key_tokens   labels of the tokens, a list or one for each batch entry, and of another sequence attended to
    out_proj       path, from an attention module, or weight [dim, heads · v_dim] of the output projection, for value norms
    differentiable   keep the graph, for weights(differentiable=True) in a loss
    """
    from .intercept import recorder

    return recorder(
        model, layers=layers, heads=heads, where=where, keep=keep, statistics=statistics, every=every, device=device,
        budget=budget, tokens=tokens, key_tokens=key_tokens, out_proj=out_proj, differentiable=differentiable,
    )  # fmt: skip


def load(path: Any) -> Recording:
    """A recording that Recording.save() wrote."""
    from .keeping import load

    return load(path)


def find_heads(model: nn.Module, pattern: str = "induction", *, tokenizer: Any = None, **more: Any) -> Heads:
    """Run the standard probe for a pattern on a model and rank its heads; see patterns.find."""
    from .patterns import find

    return find(model, pattern, tokenizer=tokenizer, **more)
