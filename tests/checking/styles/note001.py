"""对话笔记的写法：q_linear … o_linear，掩码为 1 的位置乘以 −1e9 加到分数上。"""

import torch
from torch import nn


class MultiHeadAttention(torch.nn.Module):
    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = hidden_size // num_heads  # 每个头的维度
        self.q_linear = nn.Linear(hidden_size, hidden_size)
        self.k_linear = nn.Linear(hidden_size, hidden_size)
        self.v_linear = nn.Linear(hidden_size, hidden_size)
        self.o_linear = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden_state, attention_mask=None):
        batch_size = hidden_state.size(0)
        query = self.split_head(self.q_linear(hidden_state))
        key = self.split_head(self.k_linear(hidden_state))
        value = self.split_head(self.v_linear(hidden_state))
        attention_scores = torch.matmul(query, key.transpose(-1, -2)) / torch.sqrt(torch.tensor(self.head_dim, dtype=torch.float32))
        if attention_mask is not None:
            attention_scores += attention_mask * -1e9
        attention_probs = torch.softmax(attention_scores, dim=-1)
        output = torch.matmul(attention_probs, value)
        output = output.transpose(1, 2).reshape(batch_size, -1, self.head_dim * self.num_heads)
        output = self.o_linear(output)
        return output

    def split_head(self, x):
        batch_size = x.size(0)
        return x.reshape(batch_size, -1, self.num_heads, self.head_dim).transpose(1, 2)
