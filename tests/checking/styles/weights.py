"""A function that is handed its weights, x @ W as in numpy."""

import torch


def multi_head_attention(x, w_q, w_k, w_v, w_o, num_heads):
    batch, tokens, width = x.shape
    size = width // num_heads

    def heads(y):
        return y.reshape(batch, tokens, num_heads, size).permute(0, 2, 1, 3)

    q = heads(x @ w_q)
    k = heads(x @ w_k)
    v = heads(x @ w_v)
    scores = q @ k.mT
    scores = scores / size**0.5
    weights = torch.softmax(scores, dim=3)
    mixed = weights @ v
    mixed = mixed.permute(0, 2, 1, 3).reshape(batch, tokens, width)
    return mixed @ w_o
