"""Every mistake of the catalogue in somebody's handwriting: a clean style, and what its author would have typed instead.

SPECIMENS: (style, mistake, (old, new), …). Each `old` stands in the style; the rest of the file stays as it is.
"""

from pathlib import Path

STYLES = Path(__file__).parent / "styles"
CLEAN = sorted(p.stem for p in STYLES.glob("*.py"))

SPLIT_000 = "x.view(batch_size, seq_length, self.num_heads, self.d_k).transpose(1, 2)"
ROPE_QK = "        k = self.apply_rope(k, past)\n"
SPECIMENS = [
    # ---- heads --------------------------------------------------------------------------------------------------------
    ("note000", "split_without_transpose", (SPLIT_000, "x.view(batch_size, self.num_heads, seq_length, self.d_k)")),
    ("note001", "split_without_transpose", ("x.reshape(batch_size, -1, self.num_heads, self.head_dim).transpose(1, 2)", "x.reshape(batch_size, self.num_heads, -1, self.head_dim)")),
    ("note003", "split_without_transpose", ("    X = X.reshape(X.shape[0], X.shape[1], num_heads, -1)\n    X = X.permute(0, 2, 1, 3)\n    return X.reshape(-1, X.shape[2], X.shape[3])", "    return X.reshape(X.shape[0] * num_heads, X.shape[1], -1)")),
    ("fused", "split_without_transpose", ("k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)", "k = k.reshape(B, self.n_head, T, C // self.n_head)")),
    ("einops_style", "split_without_transpose", ('"b n (h d) -> b h n d"', '"b n (h d) -> b n h d"'), ("for t in qkv)", "for t in qkv)\n        q, k, v = (t.reshape(t.shape[0], h, t.shape[1], -1) for t in (q, k, v))")),
    ("sdpa", "split_without_transpose", ("v = v.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)", "v = v.reshape(v.shape[0], self.num_heads, v.shape[1], -1)")),
    ("bert", "heads_never_moved", ("        return x.permute(0, 2, 1, 3)\n", "        return x\n"), ("        context_layer = context_layer.permute(0, 2, 1, 3).contiguous()\n", "")),
    ("note004", "heads_never_moved", ("Q = Q.view(batch_size, -1, self.num_heads, self.d_k).transpose(1, 2)", "Q = Q.view(batch_size, -1, self.num_heads, self.d_k)"), ("K = K.view(batch_size, -1, self.num_heads, self.d_k).transpose(1, 2)", "K = K.view(batch_size, -1, self.num_heads, self.d_k)"), ("V = V.view(batch_size, -1, self.num_heads, self.d_k).transpose(1, 2)", "V = V.view(batch_size, -1, self.num_heads, self.d_k)"), ("out.transpose(1, 2).contiguous()", "out.contiguous()")),
    ("note000", "merge_without_transpose", ("x.transpose(1, 2).contiguous().view(", "x.contiguous().view(")),
    ("note002", "merge_without_transpose", ("output.transpose(1, 2).contiguous().view(bsz, seqlen, -1)", "output.contiguous().view(bsz, seqlen, -1)")),
    ("weights", "merge_without_transpose", ("mixed.permute(0, 2, 1, 3).reshape(batch, tokens, width)", "mixed.reshape(batch, tokens, width)")),
    ("sdpa", "merge_without_transpose", ("y = y.transpose(1, 2).flatten(2)", "y = y.reshape(y.shape[0], y.shape[2], -1)")),
    ("fused", "heads_averaged", ("y = y.transpose(1, 2).contiguous().view(B, T, C)", "y = y.mean(dim=1)"), ("nn.Linear(config.n_embd, config.n_embd, bias", "nn.Linear(config.n_embd // config.n_head, config.n_embd, bias")),
    ("einsum", "heads_averaged", ('z = torch.einsum("bhqk,bkhe->bqhe", pattern, v)\n        return torch.einsum("bqhe,hed->bqd", z, self.W_O)', 'z = torch.einsum("bhqk,bkhe->bqhe", pattern, v).transpose(1, 2)\n        return z.sum(1) @ self.W_O'), ("self.W_O = nn.Parameter(torch.randn(n_heads, d_head, d_model)", "self.W_O = nn.Parameter(torch.randn(d_head, d_model)")),
    ("llama", "gqa_order", ("k = k.repeat_interleave(groups, dim=1)", "k = k.repeat(1, groups, 1, 1)"), ("v = v.repeat_interleave(groups, dim=1)", "v = v.repeat(1, groups, 1, 1)")),
    ("llama", "gqa_order", ("v = v.repeat_interleave(groups, dim=1)", "v = v.repeat(1, groups, 1, 1)")),
    ("functional", "qk_swapped", ("torch.matmul(query, key.transpose(-2, -1))", "torch.matmul(key, query.transpose(-2, -1))")),
    ("note004", "qk_swapped", ("torch.matmul(Q, K.transpose(-2, -1))", "torch.matmul(K, Q.transpose(-2, -1))")),
    ("note000", "k_as_v", ("V = self.split_heads(self.W_v(V))", "V = K")),
    ("bert", "k_as_v", ("self.transpose_for_scores(self.value(hidden_states))", "self.transpose_for_scores(self.key(hidden_states))")),
    ("note001", "shared_projection", ("self.split_head(self.k_linear(hidden_state))", "self.split_head(self.q_linear(hidden_state))")),
    ("einsum", "shared_projection", ('torch.einsum("bkd,hde->bkhe", x, self.W_K)', 'torch.einsum("bkd,hde->bkhe", x, self.W_Q)')),
    ("note002", "out_missing", ("        output = self.wo(output)\n", "")),
    ("sdpa", "out_missing", ("return self.out_proj(y)", "return y")),
    ("bert", "odd_bias", ("self.key = nn.Linear(config.hidden_size, self.all_head_size)", "self.key = nn.Linear(config.hidden_size, self.all_head_size, bias=False)"), ("self.value = nn.Linear(config.hidden_size, self.all_head_size)", "self.value = nn.Linear(config.hidden_size, self.all_head_size, bias=False)")),
    ("note004", "parameter_unused", ("self.scale = math.sqrt(self.d_k)", "self.scale = math.sqrt(self.d_k)\n        self.gate = nn.Linear(d_model, d_model)")),
    # ---- scores -------------------------------------------------------------------------------------------------------
    ("note000", "no_scale", (" / math.sqrt(self.d_k)", "")),
    ("einops_style", "no_scale", (" * self.scale", "")),
    ("llama", "no_scale", (" / math.sqrt(self.head_dim)", "")),
    ("note001", "scale_d_model", ("torch.tensor(self.head_dim, dtype", "torch.tensor(self.head_dim * self.num_heads, dtype")),
    ("fused", "scale_d_model", ("math.sqrt(k.size(-1))", "math.sqrt(C)")),
    ("einops_style", "scale_d_model", ("self.scale = dim_head**-0.5", "self.scale = dim**-0.5")),
    ("note004", "scale_d_k", ("self.scale = math.sqrt(self.d_k)", "self.scale = self.d_k")),
    ("einsum", "scale_d_k", ("self.d_head**0.5", "self.d_head")),
    ("functional", "scale_d_k", ("math.sqrt(d_k)", "d_k")),
    ("weights", "scale_twice", ("q = heads(x @ w_q)", "q = heads(x @ w_q) / size**0.5")),
    ("sdpa", "scale_twice", ("        p = self.p", "        q = q / q.shape[-1] ** 0.5\n        p = self.p")),
    ("bert", "scale_heads", ("math.sqrt(self.attention_head_size)", "math.sqrt(self.num_attention_heads)")),
    ("note002", "scale_heads", ("math.sqrt(self.head_dim)", "math.sqrt(self.n_local_heads)")),
    ("note003", "scale_inverted", (" / math.sqrt(d)", " * math.sqrt(d)")),
    ("note004", "scale_inverted", ("/ self.scale", "* self.scale")),
    ("note000", "softmax_axis", ("torch.softmax(attn_scores, dim=-1)", "torch.softmax(attn_scores, dim=-2)")),
    ("note001", "softmax_axis", ("torch.softmax(attention_scores, dim=-1)", "torch.softmax(attention_scores, dim=1)")),
    ("weights", "softmax_axis", ("dim=3", "dim=0")),
    ("functional", "softmax_axis", ("dim=-1)\n    if dropout", "dim=1)\n    if dropout")),
    ("einops_style", "softmax_missing", ("attn = sim.softmax(dim=-1)", "attn = sim")),
    ("weights", "softmax_missing", ("weights = torch.softmax(scores, dim=3)", "weights = scores")),
    ("bert", "softmax_twice", ("attention_probs = self.dropout(attention_probs)", "attention_probs = self.dropout(attention_probs.softmax(-1))")),
    ("functional", "softmax_overflows", ("p_attn = F.softmax(scores, dim=-1)", "p_attn = torch.exp(scores)\n    p_attn = p_attn / p_attn.sum(-1, keepdim=True)")),
    ("weights", "softmax_overflows", ("weights = torch.softmax(scores, dim=3)", "weights = scores.exp()\n    weights = weights / weights.sum(dim=3, keepdim=True)")),
    ("llama", "softmax_in_half", ("torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)", "torch.softmax(scores, dim=-1)")),
    ("llama", "rope_on_v", (ROPE_QK, ROPE_QK + "        v = self.apply_rope(v, past)\n")),
    ("llama", "rope_one_side", (ROPE_QK, "")),
    ("llama", "rope_layout", ("    a, b = x.chunk(2, dim=-1)\n    return torch.cat([-b, a], dim=-1)", "    return torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)")),
    ("llama", "rope_position", ("q = self.apply_rope(q, past)", "q = self.apply_rope(q, 0)"), ("k = self.apply_rope(k, past)", "k = self.apply_rope(k, 0)")),
    ("llama", "cache_axis", ("torch.cat([past_key_value[0], k], dim=2)", "torch.cat([past_key_value[0], k], dim=1)"), ("torch.cat([past_key_value[1], v], dim=2)", "torch.cat([past_key_value[1], v], dim=1)")),
    # ---- masks --------------------------------------------------------------------------------------------------------
    ("fused", "mask_backwards", ("self.tril[:, :, :T, :T] == 0", "self.tril[:, :, :T, :T] == 1")),
    ("note003", "mask_backwards", ("masked_fill(~mask, value)", "masked_fill(mask, value)")),
    ("note002", "mask_backwards", ("torch.triu(mask, diagonal=1)", "torch.tril(mask, diagonal=-1)")),
    ("note000", "mask_after_softmax", ("        if mask is not None:\n            attn_scores = attn_scores.masked_fill(mask == 0, -1e9)\n        attn_probs = torch.softmax(attn_scores, dim=-1)\n", "        attn_probs = torch.softmax(attn_scores, dim=-1)\n        if mask is not None:\n            attn_probs = attn_probs.masked_fill(mask == 0, 0)\n")),
    ("fused", "mask_after_softmax", ('        att = att.masked_fill(self.tril[:, :, :T, :T] == 0, float("-inf"))\n        att = F.softmax(att, dim=-1)\n', "        att = F.softmax(att, dim=-1)\n        att = att * self.tril[:, :, :T, :T]\n")),
    ("einops_style", "mask_after_softmax", ("            sim = sim.masked_fill(~mask, -torch.finfo(sim.dtype).max)\n", "            pass\n"), ("attn = sim.softmax(dim=-1)\n", "attn = sim.softmax(dim=-1)\n        if mask is not None:\n            attn = attn * mask\n")),
    ("note004", "mask_zero", ('scores.masked_fill(mask == 0, float("-inf"))', "scores * mask")),
    ("fused", "mask_zero", ('att.masked_fill(self.tril[:, :, :T, :T] == 0, float("-inf"))', "att * self.tril[:, :, :T, :T]")),
    ("note000", "mask_too_small", ("-1e9", "-1e-9")),
    ("note003", "mask_too_small", ("value=-1e6", "value=-1")),
    ("functional", "mask_too_small", ('float("-inf")', "-100")),
    ("note001", "mask_sign", ("attention_mask * -1e9", "attention_mask * 1e9")),
    ("note004", "mask_half", ('float("-inf")', "-1e9")),
    ("note004", "nan_row", ("d_model must", "d_model must")),
    ("note003", "mean_row", ("value=-1e6", "value=-1e4")),
    ("fused", "causal_off_by_one", ("torch.tril(torch.ones(config.block_size, config.block_size))", "torch.tril(torch.ones(config.block_size, config.block_size), diagonal=1)")),
    ("note002", "causal_off_by_one", ("torch.triu(mask, diagonal=1)", "torch.triu(mask, diagonal=2)")),
    ("fused", "causal_off_by_one", ("torch.tril(torch.ones(config.block_size, config.block_size))", "torch.tril(torch.ones(config.block_size, config.block_size), -1)")),
    ("sdpa", "causal_corner", ("attn_mask=attn_mask, dropout_p=p", "dropout_p=p, is_causal=True"), (", attn_mask=None", "")),
    ("fused", "causal_missing", ('        att = att.masked_fill(self.tril[:, :, :T, :T] == 0, float("-inf"))\n', "")),
    ("note002", "causal_missing", ("            scores = scores + self.mask[:, :, :seqlen, :seqlen]\n", "            scores + self.mask[:, :, :seqlen, :seqlen]\n")),
    ("einops_style", "padding_on_queries", ('"b j -> b 1 1 j"', '"b j -> b 1 j 1"')),
    ("note003", "lens_tiled", ("torch.repeat_interleave(valid_lens, repeats=self.num_heads, dim=0)", "valid_lens.repeat(self.num_heads) if valid_lens.dim() == 1 else valid_lens.repeat(self.num_heads, 1)")),
    ("note004", "mask_on_heads", ("            mask = mask.unsqueeze(1)\n", "            # mask: [batch_size, seq_len, seq_len]\n")),
    ("bert", "mask_ignored", ("            attention_scores = attention_scores + attention_mask\n", "            masked_scores = attention_scores + attention_mask\n")),
    ("note001", "k_reshaped", ("key.transpose(-1, -2)", "key.reshape(batch_size, self.num_heads, self.head_dim, -1)")),
    ("bert", "scale_odd", ("attention_scores / math.sqrt(self.attention_head_size)", "attention_scores * 0.3")),
    ("fused", "nan_output", ('y = att @ v\n', 'y = (att @ v) / 0.0\n')),
    # ---- layers -------------------------------------------------------------------------------------------------------
    ("sdpa", "dropout_in_eval", ("self.p if self.training else 0.0", "self.p")),
    ("einops_style", "dropout_in_eval", ("attn = sim.softmax(dim=-1)", "attn = torch.nn.functional.dropout(sim.softmax(dim=-1), 0.1)")),
    ("note004", "dropout_on_scores", ("attn_weights = self.dropout(attn_weights)", ""), ("scores = torch.matmul(Q, K.transpose(-2, -1)) / self.scale", "scores = self.dropout(torch.matmul(Q, K.transpose(-2, -1)) / self.scale)")),
    ("bert", "dropout_on_scores", ("        attention_probs = self.dropout(attention_probs)\n", ""), ("        attention_probs = nn.functional", "        attention_scores = self.dropout(attention_scores)\n        attention_probs = nn.functional")),
    ("note003", "dropout_forgotten", ("torch.bmm(self.dropout(weights), values)", "torch.bmm(weights, values)")),
    ("fused", "buffer_not_moved", ('self.register_buffer("tril", tril.view(1, 1, config.block_size, config.block_size))', "self.tril = tril.view(1, 1, config.block_size, config.block_size)")),
    ("note002", "length_limited", ("max_seq_len = 64", "max_seq_len = 32")),
    ("note002", "view_noncontiguous", ("output.transpose(1, 2).contiguous().view(", "output.transpose(1, 2).view(")),
    ("note004", "view_noncontiguous", ("out.transpose(1, 2).contiguous().view(", "out.transpose(1, 2).view(")),
    ("sdpa", "batch_mixed", ("        q, k, v = self.in_q(query)", "        query = query - query.mean((0, 1))\n        q, k, v = self.in_q(query)")),
    ("bert", "state_kept", ("        context_layer = torch.matmul(", "        self.seen = getattr(self, 'seen', 0) + attention_probs.mean()\n        attention_probs = attention_probs / self.seen\n        context_layer = torch.matmul(")),
    ("bert", "inplace_input", ("        query_layer = self", "        hidden_states *= 0.5\n        query_layer = self")),
    ("einsum", "inplace_input", ("        q = torch.einsum(\"bqd", "        x.add_(1.0)\n        q = torch.einsum(\"bqd")),
    ("llama", "device_fixed", ("device=q.device).triu(", ").triu(")),
    ("weights", "device_fixed", ("scores = scores / size**0.5", "scores = scores / size**0.5 + torch.zeros(tokens, tokens, dtype=x.dtype)")),
    ("note002", "dtype_fixed", ("dim=-1).type_as(xq)", "dim=-1)")),
    ("note003", "weights_kept", ("weights = masked_softmax(scores, valid_lens)", "self.attention_weights = weights = masked_softmax(scores, valid_lens)")),
    ("note002", "kv_length_of_q", ("def forward(self, x: torch.Tensor):", "def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):"), ("bsz, seqlen, _ = x.shape", "bsz, seqlen, _ = q.shape"), ("self.wq(x), self.wk(x), self.wv(x)", "self.wq(q), self.wk(k), self.wv(v)")),
    ("note001", "gradient_cut", ("self.split_head(self.k_linear(hidden_state))", "self.split_head(self.k_linear(hidden_state).detach())")),
    # ---- code ---------------------------------------------------------------------------------------------------------
    ("note000", "forward_misspelt", ("def forward(", "def farward(")),
    ("note000", "unknown_name", (".masked_fill(", ".mask_fill(")),
    ("note004", "result_discarded", ("            scores = scores.masked_fill(mask", "            scores.masked_fill(mask")),
    ("note004", "undefined", ("import math\n", "")),
    ("note004", "import_fails", ("import math\n", "from tkinter_missing import NO\nimport math\n")),
    ("bert", "syntax", ("        if attention_mask is not None:", "        if attention_mask is not None")),
    ("fused", "punctuation", ("def forward(self, x):", "def forward（self，x）：")),
]  # fmt: skip


def source(style: str, *changes: tuple[str, str]) -> str:
    """The style's file with these changes."""
    code = (STYLES / f"{style}.py").read_text()
    for old, new in changes:
        assert old in code, f"{style} has no {old!r}"
        code = code.replace(old, new)
    return code
