"""Around torch's scaled_dot_product_attention."""

import torch.nn.functional as F
from torch import nn


class MHA(nn.Module):
    def __init__(self, embed_dim, num_heads, dropout=0.1, causal=False):
        super().__init__()
        self.num_heads, self.p = num_heads, dropout
        self.in_q, self.in_k, self.in_v = (nn.Linear(embed_dim, embed_dim) for _ in range(3))
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, query, key, value, attn_mask=None):
        q, k, v = self.in_q(query), self.in_k(key), self.in_v(value)
        q = q.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k = k.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        v = v.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        p = self.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=p)
        y = y.transpose(1, 2).flatten(2)
        return self.out_proj(y)
