"""What a head does: how far its weights follow a known pattern, between 0 and 1; tables, a probe, comparisons."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from .call import Call
from .recording import Recording, Seen
from .statistics import Distance, EffectiveKeys, Entropy, First, Offsets, Statistic, StrongestKey, Within, look, unseen
from .stream_cpu import Block, blocks
from .tables import Changes, Heads

NEAR = 8  # what counts as near for the pattern "local"
SURE = 0.4  # from here on a pattern that says where a head looks goes before one that says how widely

WHERE: Mapping[str, str] = {
    "previous": "mean_t w[t, t−1]",
    "next": "mean_t w[t, t+1]",
    "same": "mean_t w[t, t]",
    "duplicate": "the mass on earlier keys with the query's own token, over queries that have one",
    "induction": "the mass on keys behind an earlier occurrence of the query's token, over queries that have one "
    "(https://arxiv.org/abs/2209.11895)",
    "sink": "mean_t w[t, 0], over queries behind the first (https://arxiv.org/abs/2309.17453)",
    "delimiter": "the mass on punctuation and special tokens (https://arxiv.org/abs/1906.04341)",
    "alignment": "cross-attention only: the rank correlation of the strongest key with the query's number, × (1 − uniform)",
}
HOW: Mapping[str, str] = {
    "local": f"mean_t of the mass within {NEAR} keys of the query",
    "positional": "max_d min_b mean_t w[b, t, t+d]: the same offset in every input",
    "uniform": "mean_t entropy[t] / ln(number of keys that t may see)",
}
PATTERNS = {**WHERE, **HOW}


class Visible(Statistic):
    """visible[t]: how many keys a query may see."""

    scores = first = True

    def take(self, block: Block) -> None:
        if block.s is not None:
            self.out[block.rows] = (block.s > -1e29).sum(-1).to(self.out.dtype)


class Matched(Statistic):
    """matched[t] = Σ_{s<t} w[t,s] where keys[s] = queries[t]: the mass on earlier keys that carry the query's mark.

    queries, keys  integer [batch | 1, q_len] and [batch | 1, kv_len], keys[s] < 0 matching nothing
    """

    def __init__(self, call: Call, argument: tuple[Tensor, Tensor]) -> None:
        super().__init__(call)
        self.queries, self.keys = (x.to(call.q.device) for x in argument)
        self.any = torch.zeros(call.q.shape[0], call.q.shape[2], dtype=torch.bool, device=call.q.device)

    def take(self, block: Block) -> None:
        b = block.b if len(self.keys) > 1 else 0
        own = torch.arange(block.i.start, block.i.stop, device=self.keys.device)[:, None] + block.shift
        before = torch.arange(block.j.start, block.j.stop, device=self.keys.device) < own
        hit = (self.queries[b, block.i, None] == self.keys[b, None, block.j]) & before
        self.any[block.b, block.i] = hit.any(-1)
        self.out[block.rows] = (block.w * hit).sum(-1)


class Marked(Statistic):
    """marked[t] = Σ_s w[t,s] marks[s]: the mass on some of the keys, bool [batch | 1, kv_len]."""

    def __init__(self, call: Call, argument: Tensor) -> None:
        super().__init__(call)
        self.marks = argument.to(self.out.device, self.out.dtype)

    def take(self, block: Block) -> None:
        self.out[block.rows] = block.w @ self.marks[block.b if len(self.marks) > 1 else 0, block.j]


# ---- the scores of a call -------------------------------------------------------------------------------------------


def scores(
    call: Call, tokens: Sequence[Sequence[str]] | None, keys: Sequence[Sequence[str]] | None, progress: bool | None
) -> dict[str, Tensor]:
    """{column: [heads]} of one call, means over its batch and queries; patterns that cannot be asked are left out."""
    T, S = call.sizes[3:]
    cross = call.kind == "cross"
    asked: dict[str, Statistic] = {
        "entropy": Entropy(call), "effective_keys": EffectiveKeys(call), "distance": Distance(call),
        "strongest": StrongestKey(call), "sink": First(call, 1), "local": Within(call, NEAR), "offsets": Offsets(call),
        "visible": Visible(call),
    }  # fmt: skip
    if tokens is not None and not cross:
        own, ids = _numbers(tokens, keys or tokens)
        asked["duplicate"] = Matched(call, (own, ids))
        asked["induction"] = Matched(call, (own, torch.nn.functional.pad(ids[:, :-1], (1, 0), value=-1)))
    if keys is not None:
        asked["delimiter"] = Marked(call, torch.tensor([[delimits(t) for t in row] for row in keys]))
    look(call, list(asked.values()), progress=progress, what=call.name)
    found = {name: one.result() for name, one in asked.items()}
    live = found["visible"] > 0
    out = {
        "entropy": _mean(found["entropy"], live),
        "effective_keys": _mean(found["effective_keys"], live),
        "distance": _mean(found["distance"], live),
        "strongest": _mean(found["strongest"].weight, live),
    }
    several = live & (found["visible"] > 1)
    out["uniform"] = _mean(found["entropy"] / found["visible"].clamp(min=2).log(), several)
    if not cross:
        behind = torch.tensor(call.shift, device=live.device).view(-1, 1, 1) + torch.arange(T, device=live.device)
        mass, offsets = found["offsets"]
        out |= {
            "previous": _at(mass, offsets, -1, live, behind >= 1), "next": _at(mass, offsets, 1, live, behind < S - 1),
            "same": _at(mass, offsets, 0, live, behind >= 0), "sink": _mean(found["sink"], live & (behind > 0)),
            "local": _mean(found["local"], live), "positional": mass.amin(0).amax(-1),
        }  # fmt: skip
        for name in ("duplicate", "induction"):
            if name in asked:
                out[name] = _mean(found[name], live & asked[name].any.unsqueeze(1))  # pyright: ignore[reportAttributeAccessIssue, reportUnknownArgumentType, reportUnknownMemberType]
    else:
        out["alignment"] = monotone(found["strongest"].key, live) * (1 - out["uniform"]).clamp(0, 1)
        out["sink"] = _mean(found["sink"], live)
    if "delimiter" in found:
        out["delimiter"] = _mean(found["delimiter"], live)
    return {name: x.clamp(0, 1) if name in PATTERNS else x for name, x in out.items() if not bool(x.isnan().all())}


def _mean(x: Tensor, over: Tensor) -> Tensor:
    """[heads]: the mean of [batch, heads, queries] over some of the queries; NaN where there are none."""
    over = over.expand_as(x)
    return torch.where(over, x, 0.0).sum((0, 2)) / over.sum((0, 2))


def _at(mass: Tensor, offsets: Tensor, d: int, live: Tensor, could: Tensor) -> Tensor:
    """[heads]: the mean weight at one offset, over the queries that have a key there."""
    place = (offsets == d).nonzero()
    if not len(place):
        return mass.new_full((mass.shape[1],), math.nan)
    total = (mass[..., int(place[0])] * live.sum(-1)).sum(0)
    return total / (live & could).sum((0, 2))


def monotone(keys: Tensor, live: Tensor) -> Tensor:
    """[heads]: how far the strongest key moves on as the queries do, Spearman's rank correlation, 0 where it moves back.

    keys  [batch, heads, queries]
    """
    found = torch.zeros(keys.shape[:2], device=keys.device)
    for b in range(keys.shape[0]):
        for h in range(keys.shape[1]):
            x = keys[b, h][live[b, h]].double()
            if len(x) < 3 or bool((x == x[0]).all()):
                continue
            _, inverse, counts = cast(tuple[Tensor, ...], x.unique(return_inverse=True, return_counts=True))
            rank = (counts.cumsum(0) - (counts - 1) / 2)[inverse]  # equal keys share their rank
            both = torch.stack([rank, torch.arange(len(x), device=x.device, dtype=x.dtype)])
            found[b, h] = both.corrcoef()[0, 1]
    return found.clamp(min=0).mean(0)


def delimits(token: str) -> bool:
    """Whether a token is punctuation, or one of the special ones ([SEP], <s>, <|endoftext|>)."""
    bare = token.strip().lstrip("Ġ▁#Ċ").strip()
    special = len(token) > 2 and token[0] + token[-1] in ("[]", "<>")
    return special or (bool(bare) and not any(c.isalnum() for c in bare))


def _numbers(*texts: Sequence[Sequence[str]]) -> tuple[Tensor, ...]:
    known: dict[str, int] = {}
    return tuple(torch.tensor([[known.setdefault(t, len(known)) for t in row] for row in text]) for text in texts)


# ---- tables ---------------------------------------------------------------------------------------------------------


def heads(recording: Recording, *, progress: bool | None = None) -> Heads:
    """Recording.heads(): a row a head, means over every picture of its place."""
    rows: list[dict[str, Any]] = []
    for place in recording:
        rows += _rows(place, _means(place, progress))
    return Heads(rows)


def _rows(place: Seen, found: dict[str, Tensor]) -> list[dict[str, Any]]:
    call = place.pictures[-1]._asked()  # pyright: ignore[reportPrivateUsage]
    rows: list[dict[str, Any]] = []
    for i, head in enumerate(call.heads):
        values = {name: float(x[i]) for name, x in found.items()}
        best = _best({n: x for n, x in values.items() if n in PATTERNS and not math.isnan(x)})
        first = {"layer": place.number, "head": head, "name": place.name, "kind": call.kind}
        rows.append({**first, "pattern": best, "score": values.get(best, math.nan), **values})
    return rows


def _means(place: Seen, progress: bool | None) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    count: dict[str, Tensor] = {}
    for one in place.pictures:
        call = one._whole("heads")  # pyright: ignore[reportPrivateUsage]
        labels = [place.recording.labels(call, b) for b in range(call.sizes[0])]
        own, keys = ([x[i] for x in labels] for i in (0, 1))
        whole = [None if any(x is None for x in side) else [x for x in side if x is not None] for side in (own, keys)]
        for name, x in scores(call, whole[0], whole[1], progress).items():
            weight = (~x.isnan()).to(x.dtype) * call.sizes[0] * call.sizes[3]
            total[name] = total.get(name, torch.zeros_like(x)) + x.nan_to_num(0.0) * weight
            count[name] = count.get(name, torch.zeros_like(x)) + weight
    return {name: (x / count[name]).cpu() for name, x in total.items()}


def _best(found: dict[str, float]) -> str:
    """The strongest pattern that says where a head looks; where none is SURE, the strongest of all."""
    where = {n: x for n, x in found.items() if n in WHERE}
    best = max(where, key=lambda n: where[n], default="")
    if best and where[best] >= SURE:
        return best
    return max(found, key=lambda n: found[n], default="")


# ---- comparing ------------------------------------------------------------------------------------------------------


def compare(a: Recording, b: Recording) -> Changes:
    """Recording.compare(): by total variation ½ mean_t Σ_s |w_a[t,s] − w_b[t,s]| where the two have the same shapes.

    Where they do not (other prompts), by the pattern score that differs most.
    """
    common = [place for place in a if place.name in b.names]
    if not common:
        raise ValueError(
            f"compare: the recordings share no place; one has {', '.join(a.names)}; the other {', '.join(b.names)}"
        )
    rows: list[dict[str, Any]] = []
    for place in common:
        one, other = place._whole("compare"), b[place.name]._whole("compare")  # pyright: ignore[reportPrivateUsage]
        if one.heads != other.heads:
            raise ValueError(f"compare: {place.name} has heads {one.heads} in one recording and {other.heads} in the other")
        same = one.sizes[:2] == other.sizes[:2] and one.sizes[3:] == other.sizes[3:]
        rows += _varied(place, one, other) if same else _differing(place, b[place.name])
    return Changes(sorted(rows, key=lambda row: -row["change"]))


def _varied(place: Seen, one: Call, other: Call) -> list[dict[str, Any]]:
    total = torch.zeros(one.sizes[1], dtype=torch.float64)
    queries = max(one.sizes[0] * one.sizes[3], 1)
    with unseen(one):
        for x, y in zip(blocks(one), blocks(other), strict=True):
            lo, hi = min(x.j.start, y.j.start), max(x.j.stop, y.j.stop)
            wide = x.w.new_zeros(*x.w.shape[:2], hi - lo)
            wide[..., x.j.start - lo : x.j.stop - lo] = x.w
            wide[..., y.j.start - lo : y.j.stop - lo] -= y.w.to(wide.device, wide.dtype)
            total[x.h] += wide.abs().sum((1, 2)).double().cpu() / 2
    return [
        {"layer": place.number, "head": h, "name": place.name, "change": float(total[i]) / queries, "by": "weights"}
        for i, h in enumerate(one.heads)
    ]


def _differing(place: Seen, other: Seen) -> list[dict[str, Any]]:
    found, again = _means(place, False), _means(other, False)
    rows: list[dict[str, Any]] = []
    names = [n for n in found if n in again and n in PATTERNS]
    for i, h in enumerate(place.pictures[-1]._asked().heads):  # pyright: ignore[reportPrivateUsage]
        apart = {n: abs(float(found[n][i]) - float(again[n][i])) for n in names}
        apart = {n: x for n, x in apart.items() if not math.isnan(x)}
        by = max(apart, key=lambda n: apart[n])
        rows.append({"layer": place.number, "head": h, "name": place.name, "change": apart[by], "by": by})
    return rows


# ---- the probe ------------------------------------------------------------------------------------------------------

TEXT = (
    "The old harbour was quiet in the morning. A fisherman mended his nets, and the nets of his brother, while the gulls "
    "watched the old harbour from the roof. In the evening, when the boats came back, the harbour was quiet no more: the "
    "fisherman sold his fish, his brother sold the nets, and the gulls took what nobody had sold."
)


def find(
    model: nn.Module, pattern: str = "induction", *, tokenizer: Any = None, text: str | None = None, tokens: int = 50,
    batch: int = 4, seed: int = 0, progress: bool | None = None, run: Callable[[Tensor], Any] | None = None,
) -> Heads:  # fmt: skip
    """The heads of a model that follow a pattern, the strongest first.

    The standard probe is a text of `tokens` random tokens that stands there twice, in `batch` variants: nothing but the
    repetition can be learned from it. With text= the measure is taken on natural text.

    tokenizer  says which tokens are special, and reads the text;   run  is called with ids [batch, tokens] instead of model
    """
    if pattern not in PATTERNS:
        raise ValueError(f"find_heads: there is no pattern {pattern!r}; there are {', '.join(PATTERNS)}")
    if pattern == "delimiter" and text is None:
        text = TEXT
    if text is not None and tokenizer is None:
        raise ValueError("find_heads: a text needs tokenizer= to read it")
    ids = random_twice(model, tokenizer, tokens, batch, seed) if text is None else torch.tensor([tokenizer(text)["input_ids"]])
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    listed = cast("list[list[int]]", ids.tolist())  # pyright: ignore[reportUnknownMemberType]
    labels: list[list[str]] = [
        [str(i) for i in row] if text is None else list(tokenizer.convert_ids_to_tokens(row)) for row in listed
    ]
    from .intercept import recorder

    watch = recorder(
        model, layers=None, heads=None, where=None, keep="queries", statistics=(), every=1, device=None, budget=None,
        tokens=labels, key_tokens=None, out_proj=None, differentiable=False,
    )  # fmt: skip
    with _evaluating(model), torch.no_grad(), watch as seen:
        (run or model)(ids.to(device))
    table = heads(seen, progress=progress)
    if not any(pattern in row for row in table):
        raise ValueError(f"find_heads: {pattern!r} cannot be measured here: {seen!r}")
    return table.sort(pattern)


def random_twice(model: nn.Module, tokenizer: Any, tokens: int, batch: int, seed: int) -> Tensor:
    """[batch, 1 + 2 · tokens]: a first token, then random ones and the same again; none of them special."""
    size = getattr(getattr(model, "config", None), "vocab_size", None) or next(
        (m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), None
    )
    if size is None:
        raise ValueError("find_heads: the model has neither config.vocab_size nor an nn.Embedding; give run= and a tokenizer=")
    special: set[int] = set(getattr(tokenizer, "all_special_ids", ()) or ())
    usable = torch.tensor([i for i in range(min(size, 50_000)) if i not in special])
    random = torch.Generator().manual_seed(seed)
    body = usable[torch.stack([torch.randperm(len(usable), generator=random)[:tokens] for _ in range(batch)])]
    first = getattr(tokenizer, "bos_token_id", None) or getattr(tokenizer, "cls_token_id", None) or int(usable[0])
    return torch.cat([torch.full((batch, 1), first), body, body], 1)


@contextmanager
def _evaluating(model: nn.Module) -> Generator[None]:
    training = [m for m in model.modules() if m.training]
    model.eval()
    try:
        yield
    finally:
        for m in training:
            m.training = True
