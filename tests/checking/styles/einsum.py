"""einsum over bare parameters [heads, in, head_dim], as in libraries that look into models."""

import torch
from torch import nn


class EinsumAttention(nn.Module):
    def __init__(self, d_model: int, n_heads: int, d_head: int):
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_head
        self.W_Q = nn.Parameter(torch.randn(n_heads, d_model, d_head) * d_model**-0.5)
        self.W_K = nn.Parameter(torch.randn(n_heads, d_model, d_head) * d_model**-0.5)
        self.W_V = nn.Parameter(torch.randn(n_heads, d_model, d_head) * d_model**-0.5)
        self.W_O = nn.Parameter(torch.randn(n_heads, d_head, d_model) * d_model**-0.5)

    def forward(self, x, causal_mask=None):
        q = torch.einsum("bqd,hde->bqhe", x, self.W_Q)
        k = torch.einsum("bkd,hde->bkhe", x, self.W_K)
        v = torch.einsum("bkd,hde->bkhe", x, self.W_V)
        scores = torch.einsum("bqhe,bkhe->bhqk", q, k)
        scores = scores / self.d_head**0.5
        if causal_mask is not None:
            scores = scores.masked_fill(causal_mask, float("-inf"))
        pattern = scores.softmax(dim=-1)
        z = torch.einsum("bhqk,bkhe->bqhe", pattern, v)
        return torch.einsum("bqhe,hed->bqd", z, self.W_O)
