"""Models that several test files train."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn


class Experts(nn.Module):
    def __init__(self, count: int, cols: int, rows: int):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(count, rows, cols) / cols**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bi,eoi->bo", x, self.w1) / len(self.w1)


class Model(nn.Module):
    """Row counts that 2, 4 and 8 ranks divide evenly, unevenly, and into empty shards."""

    def __init__(self, widths: Sequence[int] = (16, 24, 10, 3, 1, 32), experts: int = 6):
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(50, widths[0])
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in itertools.pairwise(widths))
        self.experts = Experts(experts, widths[-1], 20)
        self.lm_head = nn.Linear(20, 50, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.lm_head(self.experts(x))


class Attention(nn.Module):
    """Grouped-query; queries have a bias, keys none: its gradient would be of rounding errors."""

    def __init__(self, dim: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.wq = nn.Linear(dim, heads * head_dim)
        self.wk, self.wv = (nn.Linear(dim, kv_heads * head_dim, bias=False) for _ in range(2))
        self.wo = nn.Linear(heads * head_dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, tokens, dim)
        projected = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q, k, v = (t.transpose(1, 2) for t in projected)  # (batch, heads here, tokens, head_dim)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).flatten(-2))
