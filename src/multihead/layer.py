"""MultiHeadAttention: project, position, attend, project back."""

from __future__ import annotations

from typing import Any, Literal, cast, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import has_torch_function
from torch.utils import _pytree as pytree

from .attend import attention, brief, linear, step, suits, whole
from .cache import KVCache
from .kernels.spec import autocasts, check_bias, check_numbers
from .masks import And, Causal, Mask, Window
from .plan import listening
from .positions import Positions


class MultiHeadAttention(nn.Module):
    """Multi-head attention over [batch, tokens, dim].

        out = W_o · concat_h softmax_s(scale · (W_q x)_h · (W_k m)_g) (W_v m)_g,   g = h // (num_heads / kv_heads)

    embed_dim, num_heads, dropout, bias   as in nn.MultiheadAttention; dropout falls on the weights, in train() only
    kv_heads        heads of keys and values, a divisor of num_heads (GQA; 1 is MQA); num_heads unless given
    head_dim, value_head_dim   features a head; embed_dim // num_heads, and head_dim, unless given
    key_dim, value_dim, out_dim   features of key, value and output; embed_dim, key_dim and embed_dim unless given
    out_bias        bias of the output projection; as `bias` unless given
    out_dropout     dropout on the output, in train() only
    positions       RoPE(), ALiBi() or RelativeBias(…): where tokens stand
    qk_norm         RMS-normalise q and k of each head, with learned gains, before positions are applied
    softcap, sinks, scale   as in attention(); sinks=True learns one logit a head
    gate            multiply each head's output by sigmoid(W_g x) before the output projection
    mask            the layer's own mask; a mask given to the call holds as well
    """

    origin: object = None  # of a layer made by from_module: what it was read from, and the proof

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        value_head_dim: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        out_dim: int | None = None,
        out_bias: bool | None = None,
        out_dropout: float = 0.0,
        positions: Positions | None = None,
        qk_norm: bool = False,
        softcap: float | None = None,
        sinks: bool = False,
        gate: bool = False,
        scale: float | None = None,
        mask: Mask | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kv_heads = num_heads if kv_heads is None else kv_heads
        others = {"value_head_dim": value_head_dim, "key_dim": key_dim, "value_dim": value_dim, "out_dim": out_dim}
        _check_sizes(
            embed_dim, num_heads, kv_heads, head_dim, dropout, out_dropout, mask, positions, softcap, scale, others
        )  # fmt: skip
        self.embed_dim, self.num_heads, self.kv_heads = embed_dim, num_heads, kv_heads
        self.head_dim = head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.value_head_dim = v_dim = head_dim if value_head_dim is None else value_head_dim
        self.key_dim = embed_dim if key_dim is None else key_dim
        self.value_dim = self.key_dim if value_dim is None else value_dim
        self.out_dim = embed_dim if out_dim is None else out_dim
        self.dropout, self.out_dropout, self.scale, self.softcap = dropout, out_dropout, scale, softcap
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.query = nn.Linear(embed_dim, num_heads * head_dim, bias, **made)
        self.key = nn.Linear(self.key_dim, kv_heads * head_dim, bias, **made)
        self.value = nn.Linear(self.value_dim, kv_heads * v_dim, bias, **made)
        self.out = nn.Linear(num_heads * v_dim, self.out_dim, bias if out_bias is None else out_bias, **made)
        self.gate = nn.Linear(embed_dim, num_heads * v_dim, bias, **made) if gate else None
        self.query_norm = nn.RMSNorm(head_dim, eps=1e-6, **made) if qk_norm else None
        self.key_norm = nn.RMSNorm(head_dim, eps=1e-6, **made) if qk_norm else None
        self.sinks = nn.Parameter(torch.empty(num_heads, **made)) if sinks else None
        self.positions = positions
        if positions is not None:
            positions.fit(num_heads, head_dim)
            positions.to(self.query.weight.device)
            if self.query.weight.dtype == torch.float64:
                positions.double()
        self._mask, self.mask_tensors = _own(mask, self.query.weight.device)
        one_size = embed_dim == self.key_dim == self.value_dim and head_dim == v_dim
        self._plain = one_size and (mask is None or _hides_only_the_past(mask))  # what _short() can do, other parts permitting
        self._window = None if mask is None else mask.reach
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier-uniform q, k, v and gate, zero biases and sinks, as nn.MultiheadAttention begins."""
        for part in (self.query, self.key, self.value, self.out, self.gate):
            if part is not None:
                if part is self.out:
                    part.reset_parameters()
                else:
                    nn.init.xavier_uniform_(part.weight)
                if part.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
                    nn.init.zeros_(part.bias)
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)
        for part in (self.query_norm, self.key_norm, self.positions):
            if part is not None and hasattr(part, "reset_parameters"):
                part.reset_parameters()  # pyright: ignore[reportCallIssue]
        if self.mask_tensors is not None and self._mask is not None:
            for mine, given in zip(self.mask_tensors.buffers(), self._mask.leaves(), strict=True):
                if not given.is_meta:
                    mine.copy_(given)

    @property
    def mask(self) -> Mask | None:
        """The layer's own mask, with its tensors where the layer is."""
        if self.mask_tensors is None or self._mask is None:
            return self._mask
        leaves, spec = pytree.tree_flatten(self._mask)
        tensors = iter(self.mask_tensors.buffers())
        return pytree.tree_unflatten([next(tensors) if isinstance(x, Tensor) else x for x in leaves], spec)

    @overload
    def forward(
        self, query: Tensor, key: Tensor | None = ..., value: Tensor | None = ..., *, mask: Mask | None = ...,
        bias: Tensor | None = ..., position_ids: Tensor | None = ..., key_position_ids: Tensor | None = ...,
        cache: KVCache | None = ..., return_weights: Literal[False] = ..., seed: int | None = ..., kernel: str = ...,
    ) -> Tensor: ...  # fmt: skip
    @overload
    def forward(
        self, query: Tensor, key: Tensor | None = ..., value: Tensor | None = ..., *, mask: Mask | None = ...,
        bias: Tensor | None = ..., position_ids: Tensor | None = ..., key_position_ids: Tensor | None = ...,
        cache: KVCache | None = ..., return_weights: Literal[True], seed: int | None = ..., kernel: str = ...,
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip
    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Mask | None = None,
        bias: Tensor | None = None,
        position_ids: Tensor | None = None,
        key_position_ids: Tensor | None = None,
        cache: KVCache | None = None,
        return_weights: bool = False,
        seed: int | None = None,
        kernel: str = "auto",
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from query to key and value; layer(x) is self-attention, layer(x, memory) cross-attention.

        query, key, value  [batch, tokens, dim], or all without batch; value is key unless given, key is query
        mask, bias         as in attention(); the layer's own mask holds as well
        position_ids       [tokens] or [batch, tokens]: where the tokens stand, for packed or left-padded batches; masks
                           go by columns all the same. key_position_ids where keys are not the queries' own tokens
        cache              new_cache(…): keys and values are added to it and all of it is attended to
        return_weights     also [batch, heads, q_len, kv_len], softmax's weights before dropout; the output does not change
        seed               makes dropout a hash of (seed, batch, head, q, k)
        """
        try:
            axes = query.dim()
        except AttributeError:
            said = f"query must be a tensor [batch, tokens, dim]; it is a {type(query).__name__}"
            raise TypeError(f"MultiHeadAttention: {said}") from None
        if axes == 2:
            found: Any = cast(Any, self.forward)(
                *_batched(query, key, value), mask=mask, bias=bias, position_ids=position_ids,
                key_position_ids=key_position_ids, cache=cache, return_weights=return_weights, seed=seed, kernel=kernel,
            )  # fmt: skip
            return found.squeeze(0) if isinstance(found, Tensor) else (found[0].squeeze(0), found[1].squeeze(0))
        usual = mask is bias is key is value is position_ids is key_position_ids is seed is None
        if usual and kernel == "auto" and not return_weights and axes == 3:
            out = self._short(query, cache)
            if out is not None:
                return out
        q, k, v, own = self.project(query, key, value)
        start, key_start, commit = None, 0, None
        positions = self.positions
        if positions is None and not (position_ids is None and key_position_ids is None):
            raise ValueError(
                "MultiHeadAttention: position_ids say where tokens stand, but the layer has no positions= to use them"
            )
        if self._mask is not None:
            mask = _both(self.mask, mask)
        if cache is not None:
            _check_cache(cache, own, mask)
        if positions is not None and positions.turns:
            q, k = self._turn(positions, q, k, own, position_ids, key_position_ids, cache)
        if cache is not None:
            k, v, start, key_start, commit = cache.prepare(k, v)
        if positions is not None and positions.biases:
            added = self._bias(positions, q, k, own, position_ids, key_position_ids, start, key_start)
            bias = added if bias is None else added + check_bias(bias, (*q.shape[:3], k.shape[2]), q.device)
        found = attention(
            q, k, v, mask=mask, bias=bias, scale=self.scale, dropout=self.dropout if self.training else 0.0,
            seed=seed, softcap=self.softcap, sinks=self.sinks, start=start, key_start=key_start,
            return_weights=return_weights, kernel=kernel,
        )  # fmt: skip
        if commit is not None:
            commit()
        if isinstance(found, Tensor):
            return self.merge(found, query)
        return self.merge(found[0], query), found[1]

    def new_cache(
        self,
        batch: int,
        max_tokens: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> KVCache:
        """An empty cache for this layer; rolling, with memory that does not grow with the text, where its mask is a window."""
        like = next(t for t in (*self.key.parameters(), *self.parameters(), torch.empty(())) if t.is_floating_point())
        device = like.device if device is None else torch.device(device)
        if dtype is None:
            narrow = autocasts(device.type) and like.dtype == torch.float32
            dtype = torch.get_autocast_dtype(device.type) if narrow else like.dtype
        return KVCache(
            batch, self.kv_heads, max_tokens, self.head_dim, self.value_head_dim,
            window=self._window, device=device, dtype=dtype,
        )  # fmt: skip

    def _short(self, x: Tensor, cache: KVCache | None) -> Tensor | None:
        """The two most frequent calls: self-attention, plain or causal; and one token of every text over a cache.

        None where anything is not as usual, before anything has changed; then forward() goes the long way, which computes
        the same and costs 20 to 40 µs more behind large products: 2 % of a forward in bf16 at B 4, S 128, d 512, and 13 %
        of a step over 4,096 cached tokens with two kv heads.
        """
        positions, H, G, D = self.positions, self.num_heads, self.kv_heads, self.head_dim
        B, T, dim = x.shape
        if (
            torch.compiler.is_compiling()
            or has_torch_function((x,))  # a recorder wants to see attention()
            or not self._plain
            or dim != self.embed_dim
            or not (self.softcap is self.sinks is self.gate is None)
            or (self.training and (self.dropout or self.out_dropout))
            or not (self.scale is None or self.scale > 0)
            or (positions is not None and (positions.biases or positions.axes > 1))
            or (cache is None and self._window is not None)
            or (cache is not None and (T != 1 or cache.window != self._window or torch.is_grad_enabled()))
            or not suits(x, D)
            or (cache is None and not brief(x, B * H * T * T, 2 * D))
            or listening()
        ):
            return None
        q, k, v = linear(self.query, x), linear(self.key, x), linear(self.value, x)
        if cache is None:
            q, k, v = _split(q, D), _split(k, D), _split(v, D)
        elif q.shape[2] != H * D:  # a part of the heads, as tensor parallelism leaves them
            return None
        else:  # one token needs no transposing, and its heads lie by groups already
            q, k, v = q.view(B, G, H // G, D), k.view(B, G, 1, D), v.view(B, G, 1, D)
        if self.query_norm is not None:
            q, k = self._normalise(q, k, v)
        if positions is not None:
            at = _at(0 if cache is None else cache.start, k)
            q, k = positions.turn(q if cache is None else q.view(B, H, 1, D), k, at, at)
            q = q if cache is None else q.reshape(B, G, H // G, D)
        if cache is None:
            return linear(self.out, whole(q, k, v, self._mask is not None, self.scale).transpose(1, 2).flatten(2))
        found = cache.push(k, v, (B, G, D, D))
        return None if found is None else self.out(step(q, found[0], found[1], self.scale, found[2]).view(B, 1, H * D))

    # ---- the parts of forward ---------------------------------------------------------------------------------------

    def project(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor, Tensor, bool]:
        """q, k, v as [batch, heads, tokens, head_dim], and whether keys are the queries' own tokens."""
        own = key is None or key is query
        if key is None:
            key = query
        if value is None:
            value = key
        if key is value is query:
            fits = query.dim() == 3 and query.shape[2] == self.embed_dim == self.key_dim == self.value_dim
        else:
            fits = self._fits(query, key, value)
        if not fits:
            raise self._misfit(query, key, value)
        D, E = self.head_dim, self.value_head_dim
        q, k, v = linear(self.query, query), linear(self.key, key), linear(self.value, value)
        q, k, v = _split(q, D), _split(k, D), _split(v, E)
        if self.query_norm is not None:
            q, k = self._normalise(q, k, v)
        return q, k, v, own

    def merge(self, out: Tensor, query: Tensor) -> Tensor:
        """[batch, heads, tokens, value_head_dim] → [batch, tokens, out_dim]"""
        out = out.transpose(1, 2).flatten(2)
        if self.gate is not None:
            out = out * torch.sigmoid(linear(self.gate, query))
        out = linear(self.out, out)
        return F.dropout(out, self.out_dropout, self.training) if self.out_dropout else out

    def _turn(
        self, positions: Positions, q: Tensor, k: Tensor, own: bool,
        q_ids: Tensor | None, k_ids: Tensor | None, cache: KVCache | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        axes = positions.axes
        if axes > 1 and (q_ids is None or (k_ids is None and not own)):
            raise ValueError(
                f"MultiHeadAttention: {positions!r} needs to be told where tokens stand: position_ids=[.., tokens, {axes}]"
                + ("" if own else f", and key_position_ids=[.., tokens, {axes}]")
            )
        start = 0 if cache is None else cache.start
        q_at = _at(start if own else k.shape[2] - q.shape[2], q) if q_ids is None else _ids("position_ids", q_ids, q, axes)
        k_at = (q_at if own else _at(0, k)) if k_ids is None else _ids("key_position_ids", k_ids, k, axes)
        return positions.turn(q, k, q_at, k_at)

    def _bias(
        self, positions: Positions, q: Tensor, k: Tensor, own: bool,
        q_ids: Tensor | None, k_ids: Tensor | None, start: Any, key_start: Any,
    ) -> Tensor:  # fmt: skip
        if start is not None and (q_ids is not None or k_ids is not None):
            raise ValueError(
                f"MultiHeadAttention: {type(positions).__name__} takes distances from the cache's own positions; "
                "leave position_ids out when you pass a cache"
            )
        q_at = _at(k.shape[2] - q.shape[2] if start is None else start, q) if q_ids is None else _ids("position_ids", q_ids, q)
        k_ids = q_ids if own and k_ids is None else k_ids
        k_at = _at(key_start, k) if k_ids is None else _ids("key_position_ids", k_ids, k)
        return positions.bias(q_at, k_at)

    def _normalise(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.query_norm is None or self.key_norm is None:
            return q, k
        gains = getattr(self.query_norm, "weight", None)
        exact = q.dtype if gains is None else gains.dtype  # under autocast q is narrower than the gains
        return self.query_norm(q.to(exact)).to(v.dtype), self.key_norm(k.to(exact)).to(v.dtype)

    def _fits(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        dims = (self.embed_dim, self.key_dim, self.value_dim)
        return (
            query.dim() == key.dim() == value.dim() == 3
            and query.shape[0] == key.shape[0] == value.shape[0]
            and key.shape[1] == value.shape[1]
            and (query.shape[2], key.shape[2], value.shape[2]) == dims
        )

    def _misfit(self, query: Tensor, key: Tensor, value: Tensor) -> ValueError:
        wants = {"query": (query, self.embed_dim), "key": (key, self.key_dim), "value": (value, self.value_dim)}
        said = "; ".join(f"{n} [batch, tokens, {d}] has shape {list(x.shape)}" for n, (x, d) in wants.items())
        return ValueError(
            "MultiHeadAttention: query, key and value must have the layer's dims and one batch, and there must be as many "
            f"values as keys; {said}"
        )

    def extra_repr(self) -> str:
        said = [f"heads={self.num_heads}", f"head_dim={self.head_dim}"]
        said += [f"kv_heads={self.kv_heads}"] if self.kv_heads != self.num_heads else []
        for name in ("dropout", "out_dropout", "softcap", "scale"):
            said += [f"{name}={getattr(self, name):g}"] if getattr(self, name) else []
        return ", ".join(said + ([] if self._mask is None else [f"mask={self.mask!r}"]))


def _both(own: Mask | None, given: Mask | None) -> Mask | None:
    return own if given is None else given if own is None else own & given


def _own(mask: Mask | None, device: torch.device) -> tuple[Mask | None, nn.Module | None]:
    """The layer's mask, and a module that holds its tensors as buffers, so that .to() and state_dict see them."""
    if mask is None or not mask.leaves():
        return mask, None
    holder = nn.Module()
    for i, leaf in enumerate(mask.leaves()):
        holder.register_buffer(f"tensor{i}", leaf.detach().clone().to(device))  # layers that share a mask share no storage
    return mask, holder


def _hides_only_the_past(mask: Mask) -> bool:
    """From the newest token, nothing but what a cache with the mask's window leaves out."""
    if isinstance(mask, And):
        return all(_hides_only_the_past(part) for part in mask.parts)
    return isinstance(mask, Window) or (isinstance(mask, Causal) and mask.align == "end")


def _at(start: int | Tensor, x: Tensor) -> Tensor:
    """The positions of x's tokens, [tokens] or [batch, tokens]."""
    tokens = torch.arange(x.shape[2], device=x.device)
    return start.to(x.device).unsqueeze(1) + tokens if isinstance(start, Tensor) else tokens + start


def _ids(name: str, ids: Tensor, x: Tensor, axes: int = 1) -> Tensor:
    B, T, more = x.shape[0], x.shape[2], () if axes == 1 else (axes,)
    if not isinstance(ids, Tensor) or ids.shape not in ((T, *more), (B, T, *more), (1, T, *more)):  # pyright: ignore[reportUnnecessaryIsInstance]
        came = f"its shape is {list(ids.shape)}" if isinstance(ids, Tensor) else f"it is a {type(ids).__name__}"  # pyright: ignore[reportUnnecessaryIsInstance]
        last = "" if axes == 1 else f", {axes}"
        raise ValueError(
            f"MultiHeadAttention: {name} must be a tensor [tokens{last}] or [batch, tokens{last}], here {[T, *more]} or "
            f"{[B, T, *more]}; {came}"
        )
    return ids.to(x.device)


def _split(x: Tensor, size: int) -> Tensor:
    """[batch, tokens, heads · size] → [batch, heads, tokens, size], a view; as many heads as there are."""
    return x.view(*x.shape[:2], x.shape[2] // size, size).transpose(1, 2)


def _batched(query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The three with a batch axis; what was one tensor stays one, since that tells self-attention."""
    one = query.unsqueeze(0)
    keys = None if key is None else one if key is query else key.unsqueeze(0)
    values = None if value is None else keys if value is key else one if value is query else value.unsqueeze(0)
    return one, keys, values


def _check_cache(cache: object, own: bool, mask: Mask | None) -> None:
    if not isinstance(cache, KVCache):
        raise TypeError(
            "MultiHeadAttention: cache must be a KVCache, from layer.new_cache(batch, max_tokens); "
            f"it is a {type(cache).__name__}"
        )
    if not own:
        raise ValueError(
            "MultiHeadAttention: a cache keeps the queries' own keys; for cross-attention pass the whole memory and no cache"
        )
    reach = None if mask is None else mask.reach
    if cache.window is not None and (reach is None or reach > cache.window):
        sees = "every key before it" if reach is None else f"{reach} keys"
        raise ValueError(
            f"MultiHeadAttention: the cache keeps the last {cache.window} keys but a query of this layer sees {sees}; "
            "make it with this layer's new_cache(batch, max_tokens)"
        )


def _check_sizes(
    embed_dim: int, heads: int, kv_heads: int, head_dim: int | None, dropout: float, out_dropout: float,
    mask: object, positions: object, softcap: float | None, scale: float | None, others: dict[str, int | None],
) -> None:  # fmt: skip
    sizes = {"embed_dim": embed_dim, "num_heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, **others}
    if any(size is not None and size < 1 for size in sizes.values()):
        said = ", ".join(f"{name} is {size}" for name, size in sizes.items() if size is not None)
        raise ValueError(f"MultiHeadAttention: every size must be ≥ 1; {said}")
    check_numbers("MultiHeadAttention", scale, softcap)
    if head_dim is None and embed_dim % heads:
        raise ValueError(
            f"MultiHeadAttention: embed_dim ({embed_dim}) must be a multiple of num_heads ({heads}), or give head_dim="
        )
    if heads % kv_heads:
        raise ValueError(f"MultiHeadAttention: num_heads ({heads}) must be a multiple of kv_heads ({kv_heads})")
    if not 0 <= dropout <= 1 or not 0 <= out_dropout <= 1:
        raise ValueError(f"MultiHeadAttention: dropout and out_dropout must be 0 … 1; they are {dropout} and {out_dropout}")
    if mask is not None and not isinstance(mask, Mask):
        raise TypeError(
            f"MultiHeadAttention: mask must be a multihead mask such as Causal(); it is a {type(mask).__name__}. "
            "Wrap a bool tensor as Allowed(t) if True may attend, Blocked(t) if True may not"
        )
    if positions is not None and not isinstance(positions, Positions):
        raise TypeError(
            f"MultiHeadAttention: positions must be RoPE(), ALiBi(), RelativeBias(…) or your own Positions; "
            f"it is a {type(positions).__name__}"
        )
