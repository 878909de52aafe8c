"""The questions that a call, a place and a picture that grows all answer, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .call import Call
from .sight import Sight
from .statistics import NUMBERS, Map, Profile, Strongest, Top, compute, unseen
from .stream_cpu import MOST, rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Index = int | slice | Sequence[int] | Tensor | None


class Answers:
    """Questions to the call that `_asked()` gives; a statistic that was computed at once is looked up."""

    def _asked(self) -> Call:
        raise NotImplementedError

    def _tokens(self) -> tuple[list[str] | None, list[str] | None]:
        """What rows and columns are called."""
        return None, None

    def compute(self, *wanted: str, progress: bool | None = None, **arguments: int) -> dict[str, Any]:
        """Several statistics in one pass: compute("entropy", "received", "map", map=128) → {"entropy": …, …}."""
        call = self._asked()
        if not call.answered:
            return compute(call, wanted, dict(arguments), progress=progress)
        missing = [name for name in wanted if name not in call.found]
        if missing or arguments:
            raise ValueError(
                f'{call.name}: was recorded with keep="statistics", so that only what was asked then is there: '
                f"{', '.join(call.found)}; not {', '.join(missing) or 'with other numbers'}. "
                'Name it in record(statistics=…), or record with keep="queries"'
            )
        return {name: call.found[name] for name in wanted}

    def _one(self, name: str, argument: int | None = None) -> Any:
        known = self._asked().answered and argument == NUMBERS.get(name)  # what was computed at once had these
        arguments: dict[str, Any] = {} if argument is None or known else {name: argument}
        return self.compute(name, **arguments)[name]

    def lse(self) -> Tensor:
        """[batch, heads, q_len]: ln Σ_s exp(l[t,s]), sinks included; −inf where a query sees nothing."""
        return self._one("lse")

    def largest(self) -> Tensor:
        """[batch, heads, q_len]: max_s l[t,s], the largest logit."""
        return self._one("largest")

    def entropy(self) -> Tensor:
        """[batch, heads, q_len]: −Σ_s w[t,s] ln w[t,s], in nats."""
        return self._one("entropy")

    def effective_keys(self) -> Tensor:
        """[batch, heads, q_len]: exp(entropy), the number of equally weighted keys that has this entropy."""
        return self._one("effective_keys")

    def received(self) -> Tensor:
        """[batch, heads, kv_len]: Σ_t w[t,s], what each key is given by all queries."""
        return self._one("received")

    def distance(self) -> Tensor:
        """[batch, heads, q_len]: Σ_s w[t,s] |q_t − k_s|, in positions."""
        return self._one("distance")

    def strongest(self) -> Strongest:
        """weight and key, [batch, heads, q_len]: the largest weight of each query, and where."""
        return self._one("strongest")

    def top(self, k: int = 5) -> Top:
        """weights and keys, [batch, heads, q_len, k]: the k strongest keys of each query."""
        return self._one("top", k)

    def first(self, n: int = 1) -> Tensor:
        """[batch, heads, q_len]: Σ_{s<n} w[t,s], the mass on the first n keys."""
        return self._one("first", n)

    def within(self, n: int = 8) -> Tensor:
        """[batch, heads, q_len]: Σ_{|q_t − k_s| ≤ n} w[t,s], the mass near the query."""
        return self._one("within", n)

    def offsets(self, n: int | None = None) -> Profile:
        """mass [batch, heads, offsets] and offsets: mean_t w[t, t + d] for every relative offset d = k − q, or |d| ≤ n."""
        return self._one("offsets", n)

    def map(self, n: int = 256) -> Map:
        """The weights pooled to at most n × n cells, by mean and by max."""
        return self._one("map", n)

    # ---- weights ------------------------------------------------------------------------------------------------------

    def weights(self, head: Index = None, queries: Index = None, keys: Index = None, *, differentiable: bool = False) -> Tensor:
        """w[batch, heads, queries, keys], exactly, of what was asked for; a number for head, queries or keys drops its axis.

        differentiable  with gradients to what made q and k; the recording must have been made with differentiable=True
        """
        call = self._whole("weights")
        if differentiable and not call.q.requires_grad:
            raise ValueError(
                f"weights: {call.name} has no graph to differentiate; record(differentiable=True) keeps it, where the model "
                "itself runs with gradients"
            )
        B, H, _, T, S = call.sizes
        hs, ts, ss = _index("head", head, H), _index("queries", queries, T), _index("keys", keys, S)
        with torch.set_grad_enabled(differentiable), torch._C.DisableTorchFunction(), _plain(call):  # pyright: ignore[reportPrivateUsage]
            sight, columns = Sight(call), torch.tensor(ss, device=call.q.device, dtype=torch.int64)
            found = torch.stack(
                [torch.stack([_rows(call, sight, b, h, ts, columns) for h in hs]) for b in range(B)]
                if hs and B
                else [call.q.new_zeros(len(hs), len(ts), len(ss))] * B
            )
        for axis, given in ((3, keys), (2, queries), (1, head)):
            found = found.squeeze(axis) if isinstance(given, int) else found
        return found

    # ---- values -------------------------------------------------------------------------------------------------------

    def value_norms(self, out_proj: Tensor | None = None) -> Tensor:
        """[batch, heads, kv_len]: ‖v[s] W_o‖, of each head's own part of W_o.

        What a query takes from a key is ‖w[t,s] v[s] W_o‖ = w[t,s] · value_norms[s] (https://arxiv.org/abs/2004.10102).

        out_proj  [dim, heads · v_dim], the weight of the output projection, where the recorder did not find it
        """
        call = self._whole("value_norms")
        if call.v is None:
            raise ValueError(f'value_norms: the values of {call.name} were not kept; record(keep="values") keeps them')
        W = call.out_proj if out_proj is None else out_proj
        B, H, G, _, S = call.sizes
        E = call.v.shape[3]
        if W is None or W.ndim != 2 or W.shape[1] % E or max(call.heads) >= W.shape[1] // E:
            came = "none was found" if W is None else f"its shape is {list(W.shape)}"
            raise ValueError(
                f"value_norms: needs the output projection of {call.name}, [dim, heads · v_dim] with v_dim {E}; {came}. "
                "Pass out_proj= here, or its path to record(out_proj=…)"
            )
        out = torch.empty(B, H, S, device=call.q.device, dtype=torch.promote_types(call.v.dtype, torch.float32))
        with unseen(call):
            for i, h in enumerate(call.heads):
                part = W[:, h * E : (h + 1) * E].to(out.device, out.dtype)
                v = call.v[:, i * G // H].to(out.dtype)
                # ‖W v‖² = vᵀ(WᵀW)v: E × E numbers instead of dim a key
                out[:, i] = ((v @ (part.mT @ part)) * v).sum(-1).clamp(min=0).sqrt()
        return out

    def norms(self, head: Index = None, queries: Index = None, keys: Index = None, *, out_proj: Tensor | None = None) -> Tensor:
        """‖w[t,s] v[s] W_o‖ of what was asked for, [batch, heads, queries, keys]: what a query really takes from a key."""
        call = self._asked()
        found = self.value_norms(out_proj).to(torch.float32)
        _, H, _, _, S = call.sizes
        found = found[:, _index("head", head, H)][:, :, _index("keys", keys, S)].unsqueeze(2)
        for axis, given in ((3, keys), (2, queries), (1, head)):
            found = found.squeeze(axis) if isinstance(given, int) else found
        return self.weights(head, queries, keys) * found

    def received_norms(self, out_proj: Tensor | None = None) -> Tensor:
        """[batch, heads, kv_len]: Σ_t ‖w[t,s] v[s] W_o‖ = received[s] · value_norms[s]."""
        return self.received() * self.value_norms(out_proj)

    def plot(self, head: int | None = None, *, batch: int = 0, tokens: Sequence[str] | None = None, **more: Any) -> Figure:
        """A figure of one head, or of all; see plotting.plot."""
        from .plotting import plot

        rows_, columns = self._tokens()
        return plot(self._whole("plot"), head, batch=batch, rows=tokens or rows_, columns=tokens or columns, **more)

    def _whole(self, asked: str) -> Call:
        call = self._asked()
        if call.answered:
            raise ValueError(
                f'{asked}: {call.name} was recorded with keep="statistics", which drops q and k; record with keep="queries"'
            )
        return call


def _rows(call: Call, sight: Sight, b: int, h: int, queries: list[int], columns: Tensor) -> Tensor:
    """[queries, keys], by runs of neighbouring queries, a few at a time."""
    S, parts, i = call.sizes[4], [], 0  # pyright: ignore[reportUnknownVariableType]
    size = max(1, MOST // max(S, 1))
    while i < len(queries):
        n = 1
        while n < size and i + n < len(queries) and queries[i + n] == queries[i] + n:
            n += 1
        w = rows(call, sight, b, h, slice(queries[i], queries[i] + n))
        parts.append(w if len(columns) == S and bool((columns == torch.arange(S, device=w.device)).all()) else w[:, columns])
        i += n
    return torch.cat(parts) if parts else call.q.new_zeros(0, len(columns))  # pyright: ignore[reportUnknownArgumentType]


def _plain(call: Call) -> torch.autocast:
    return torch.autocast(call.q.device.type, enabled=False)


def _index(name: str, given: Index, size: int) -> list[int]:
    """The numbers meant, each within 0 … size − 1."""
    if given is None:
        return list(range(size))
    if isinstance(given, slice):
        return list(range(size))[given]
    try:
        numbers = [given] if isinstance(given, int) else [int(i) for i in given]
    except (TypeError, ValueError):
        raise TypeError(f"{name}: must be a number, a slice or a list of numbers; it is {given!r}") from None
    if any(not -size <= i < size for i in numbers):
        raise IndexError(f"{name}: must be within 0 … {size - 1}; it is {given!r}")
    return [i % size for i in numbers]
