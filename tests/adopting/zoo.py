"""Attention as people write it: the layers of the five notes and of well-known projects, in our own hand."""

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

D, H = 24, 4


class Note000(nn.Module):
    """W_q … W_o, split_heads and combine_heads, `mask == 0` blocked by −1e9."""

    def __init__(self, d_model=D, num_heads=H):
        super().__init__()
        self.d_model, self.num_heads, self.d_k = d_model, num_heads, d_model // num_heads
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)

    def scaled_dot_product_attention(self, Q, K, V, mask=None):
        scores = torch.matmul(Q, K.transpose(-2, -1)) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        return torch.matmul(torch.softmax(scores, dim=-1), V)

    def split_heads(self, x):
        batch_size, seq_length, _ = x.size()
        return x.view(batch_size, seq_length, self.num_heads, self.d_k).transpose(1, 2)

    def combine_heads(self, x):
        batch_size, _, seq_length, _ = x.size()
        return x.transpose(1, 2).contiguous().view(batch_size, seq_length, self.d_model)

    def forward(self, Q, K, V, mask=None):
        q, k, v = self.split_heads(self.W_q(Q)), self.split_heads(self.W_k(K)), self.split_heads(self.W_v(V))
        return self.W_o(self.combine_heads(self.scaled_dot_product_attention(q, k, v, mask)))


class Note001(nn.Module):
    """q_linear … o_linear over one hidden state; a mask of ones blocks, times −1e9."""

    def __init__(self, hidden_size=D, num_heads=H):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, hidden_size // num_heads
        self.q_linear = nn.Linear(hidden_size, hidden_size)
        self.k_linear = nn.Linear(hidden_size, hidden_size)
        self.v_linear = nn.Linear(hidden_size, hidden_size)
        self.o_linear = nn.Linear(hidden_size, hidden_size)

    def split_head(self, x):
        return x.reshape(x.size(0), -1, self.num_heads, self.head_dim).transpose(1, 2)

    def forward(self, hidden_state, attention_mask=None):
        query = self.split_head(self.q_linear(hidden_state))
        key = self.split_head(self.k_linear(hidden_state))
        value = self.split_head(self.v_linear(hidden_state))
        scores = torch.matmul(query, key.transpose(-1, -2)) / torch.sqrt(torch.tensor(self.head_dim, dtype=torch.float32))
        if attention_mask is not None:
            scores += attention_mask * -1e9
        output = torch.matmul(torch.softmax(scores, dim=-1), value)
        output = output.transpose(1, 2).reshape(hidden_state.size(0), -1, self.head_dim * self.num_heads)
        return self.o_linear(output)


def note002_args(**more):
    return SimpleNamespace(**{"dim": D, "n_heads": H, "dropout": 0.1, "max_seq_len": 40} | more)


class Note002(nn.Module):
    """wq … wo from an args object, the causal mask as a buffer of −inf, softmax in float32; q, k, v share q's length."""

    def __init__(self, args=None, is_causal=True):
        super().__init__()
        args = args or note002_args()
        self.n_local_heads, self.head_dim = args.n_heads, args.dim // args.n_heads
        self.wq = nn.Linear(args.dim, self.n_local_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(args.dim, self.n_local_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(args.dim, self.n_local_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(self.n_local_heads * self.head_dim, args.dim, bias=False)
        self.attn_dropout, self.resid_dropout = nn.Dropout(args.dropout), nn.Dropout(args.dropout)
        self.is_causal = is_causal
        if is_causal:
            mask = torch.full((1, 1, args.max_seq_len, args.max_seq_len), float("-inf"))
            self.register_buffer("mask", torch.triu(mask, diagonal=1))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
        bsz, seqlen, _ = q.shape
        xq, xk, xv = (
            w(x).view(bsz, seqlen, self.n_local_heads, self.head_dim).transpose(1, 2)
            for w, x in ((self.wq, q), (self.wk, k), (self.wv, v))
        )
        scores = torch.matmul(xq, xk.transpose(2, 3)) / math.sqrt(self.head_dim)
        if self.is_causal:
            scores = scores + self.mask[:, :, :seqlen, :seqlen]
        scores = self.attn_dropout(F.softmax(scores.float(), dim=-1).type_as(xq))
        output = torch.matmul(scores, xv).transpose(1, 2).contiguous().view(bsz, seqlen, -1)
        return self.resid_dropout(self.wo(output))


def masked_softmax(X, valid_lens):
    if valid_lens is None:
        return F.softmax(X, dim=-1)
    shape = X.shape
    valid_lens = torch.repeat_interleave(valid_lens, shape[1]) if valid_lens.dim() == 1 else valid_lens.reshape(-1)
    X = X.reshape(-1, shape[-1])
    X = X.masked_fill(torch.arange(X.size(1))[None, :] >= valid_lens[:, None], -1e6)
    return F.softmax(X.reshape(shape), dim=-1)


class DotProductAttention(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def forward(self, queries, keys, values, valid_lens=None):
        scores = torch.bmm(queries, keys.transpose(1, 2)) / math.sqrt(queries.shape[-1])
        self.attention_weights = masked_softmax(scores, valid_lens)
        return torch.bmm(self.dropout(self.attention_weights), values)


class Note003(nn.Module):
    """d2l: sizes of keys, queries and values may differ; valid_lens count the keys of a text, or of a query."""

    def __init__(self, key_size=10, query_size=14, value_size=18, num_hiddens=D, num_heads=H, dropout=0.1, bias=False):
        super().__init__()
        self.num_heads = num_heads
        self.attention = DotProductAttention(dropout)
        self.W_q = nn.Linear(query_size, num_hiddens, bias=bias)
        self.W_k = nn.Linear(key_size, num_hiddens, bias=bias)
        self.W_v = nn.Linear(value_size, num_hiddens, bias=bias)
        self.W_o = nn.Linear(num_hiddens, num_hiddens, bias=bias)

    def transpose_qkv(self, X):
        X = X.reshape(X.shape[0], X.shape[1], self.num_heads, -1).permute(0, 2, 1, 3)
        return X.reshape(-1, X.shape[2], X.shape[3])

    def transpose_output(self, X):
        X = X.reshape(-1, self.num_heads, X.shape[1], X.shape[2]).permute(0, 2, 1, 3)
        return X.reshape(X.shape[0], X.shape[1], -1)

    def forward(self, queries, keys, values, valid_lens):
        queries, keys, values = (
            self.transpose_qkv(w(x)) for w, x in ((self.W_q, queries), (self.W_k, keys), (self.W_v, values))
        )
        if valid_lens is not None:
            valid_lens = torch.repeat_interleave(valid_lens, repeats=self.num_heads, dim=0)
        return self.W_o(self.transpose_output(self.attention(queries, keys, values, valid_lens)))


class Note004(nn.Module):
    """W_q … W_o, scale = √d_k, `mask == 0` blocked by −1e9 – and said to take [batch, seq, seq]."""

    def __init__(self, d_model=D, num_heads=H, dropout=0.1):
        super().__init__()
        self.d_model, self.num_heads, self.d_k = d_model, num_heads, d_model // num_heads
        self.W_q = nn.Linear(d_model, d_model, bias=False)
        self.W_k = nn.Linear(d_model, d_model, bias=False)
        self.W_v = nn.Linear(d_model, d_model, bias=False)
        self.W_o = nn.Linear(d_model, d_model, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.scale = math.sqrt(self.d_k)

    def forward(self, query, key, value, mask=None):
        batch_size = query.size(0)
        Q, K, V = (
            w(x).view(batch_size, -1, self.num_heads, self.d_k).transpose(1, 2)
            for w, x in ((self.W_q, query), (self.W_k, key), (self.W_v, value))
        )
        scores = torch.matmul(Q, K.transpose(-2, -1)) / self.scale
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        out = torch.matmul(self.dropout(F.softmax(scores, dim=-1)), V)
        return self.W_o(out.transpose(1, 2).contiguous().view(batch_size, -1, self.d_model))


NOTES = {"000": Note000, "001": Note001, "002": Note002, "003": Note003, "004": Note004}


# ---- well-known projects --------------------------------------------------------------------------------------------


class NanoGPT(nn.Module):
    """One Linear for q, k and v; causal, by SDPA or by a tril buffer named bias."""

    def __init__(self, n_embd=D, n_head=H, flash=True, block_size=40):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.attn_dropout, self.resid_dropout, self.dropout = nn.Dropout(0.1), nn.Dropout(0.2), 0.1
        self.n_head, self.n_embd, self.flash = n_head, n_embd, flash
        if not flash:
            self.register_buffer("bias", torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (y.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for y in self.c_attn(x).split(self.n_embd, 2))
        if self.flash:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0, is_causal=True)
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = F.softmax(att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf")), dim=-1)
            y = self.attn_dropout(att) @ v
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)))


class Timm(nn.Module):
    """timm's Attention: fused qkv, optional norms of q and k, proj, two dropouts."""

    def __init__(self, dim=D, num_heads=H, qkv_bias=True, qk_norm=False):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.scale = self.head_dim**-0.5
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.q_norm = nn.LayerNorm(self.head_dim) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(self.head_dim) if qk_norm else nn.Identity()
        self.attn_drop, self.proj, self.proj_drop = nn.Dropout(0.1), nn.Linear(dim, dim), nn.Dropout(0.2)

    def forward(self, x, attn_mask=None):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        p = self.attn_drop.p if self.training else 0.0
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=p)
        return self.proj_drop(self.proj(x.transpose(1, 2).reshape(B, N, C)))


class LucidViT(nn.Module):
    """to_qkv without bias, heads by rearrange, to_out a Sequential."""

    def __init__(self, dim=D, heads=H, dim_head=8):
        super().__init__()
        self.heads, self.scale = heads, dim_head**-0.5
        self.attend, self.dropout = nn.Softmax(dim=-1), nn.Dropout(0.1)
        self.to_qkv = nn.Linear(dim, 3 * heads * dim_head, bias=False)
        self.to_out = nn.Sequential(nn.Linear(heads * dim_head, dim), nn.Dropout(0.1))

    def forward(self, x):
        q, k, v = (y.unflatten(2, (self.heads, -1)).transpose(1, 2) for y in self.to_qkv(x).chunk(3, dim=-1))
        attn = self.dropout(self.attend(torch.matmul(q, k.transpose(-1, -2)) * self.scale))
        return self.to_out(torch.matmul(attn, v).transpose(1, 2).flatten(2))


def rotate_pairs(x, freqs_cis):
    x = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(x * freqs_cis.view(1, x.shape[1], 1, x.shape[-1])).flatten(3)


class MetaLlama(nn.Module):
    """wq … wo with shared kv heads; rotations of neighbouring features come from the caller as complex numbers."""

    def __init__(self, dim=32, n_heads=4, n_kv_heads=2):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, dim // n_heads
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)

    def forward(self, x, freqs_cis, mask=None):
        B, T, _ = x.shape
        q = rotate_pairs(self.wq(x).view(B, T, self.n_heads, -1), freqs_cis).transpose(1, 2)
        k = rotate_pairs(self.wk(x).view(B, T, self.n_kv_heads, -1), freqs_cis).transpose(1, 2)
        v = self.wv(x).view(B, T, self.n_kv_heads, -1).transpose(1, 2)
        k, v = (y.repeat_interleave(self.n_heads // self.n_kv_heads, 1) for y in (k, v))
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(self.head_dim)
        if mask is not None:
            scores = scores + mask
        return self.wo(torch.matmul(F.softmax(scores, -1), v).transpose(1, 2).flatten(2))


class Bare(nn.Module):
    """TransformerLens: one parameter [heads, in, head_dim] each, the biases apart."""

    def __init__(self, d_model=D, n_heads=H, d_head=5):
        super().__init__()
        self.W_Q, self.W_K, self.W_V = (nn.Parameter(torch.randn(n_heads, d_model, d_head) / 5) for _ in range(3))
        self.W_O = nn.Parameter(torch.randn(n_heads, d_head, d_model) / 5)
        self.b_Q, self.b_K, self.b_V = (nn.Parameter(torch.randn(n_heads, d_head) / 5) for _ in range(3))
        self.b_O = nn.Parameter(torch.randn(d_model) / 5)

    def forward(self, x):
        q, k, v = (
            torch.einsum("btd,hde->bhte", x, w) + b[:, None]
            for w, b in ((self.W_Q, self.b_Q), (self.W_K, self.b_K), (self.W_V, self.b_V))
        )
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -1e5)
        return torch.einsum("bhte,hed->btd", scores.softmax(-1) @ v, self.W_O) + self.b_O


class Windowed(nn.Module):
    """Causal within a window, with a soft cap on the scores and sinks."""

    def __init__(self, dim=D, heads=H, window_size=3, logit_cap=None, sinks=False):
        super().__init__()
        self.heads, self.window_size, self.logit_cap = heads, window_size, logit_cap
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim) for _ in range(4))
        self.sinks = nn.Parameter(torch.randn(heads)) if sinks else None

    def forward(self, x):
        q, k, v = (p(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if self.logit_cap is not None:
            scores = self.logit_cap * torch.tanh(scores / self.logit_cap)
        at = torch.arange(x.shape[1])
        hidden = (at[:, None] < at) | (at[:, None] - at >= self.window_size)
        scores = scores.masked_fill(hidden, float("-inf"))
        if self.sinks is not None:
            sinks = self.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2))


class TimeFirst(Note000):
    """[tokens, batch, dim] in and out."""

    def forward(self, query, key, value, mask=None):
        return super().forward(query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), mask).transpose(0, 1)


class NoOutput(Note001):
    """Without a projection of the output."""

    def __init__(self):
        super().__init__()
        self.o_linear = nn.Identity()


class Tied(Note001):
    """One projection for queries and keys."""

    def __init__(self):
        super().__init__()
        self.k_linear = self.q_linear


PROJECTS = {
    "nanoGPT": NanoGPT,
    "minGPT": lambda: NanoGPT(flash=False),
    "timm": Timm,
    "timm with norms": lambda: Timm(qk_norm=True),
    "lucidrains": LucidViT,
    "Meta's Llama": MetaLlama,
    "TransformerLens": Bare,
    "window": Windowed,
    "softcap": lambda: Windowed(logit_cap=2.0),
    "sinks": lambda: Windowed(sinks=True),
    "tokens first": TimeFirst,
    "no output": NoOutput,
    "tied": Tied,
}
