"""A small GPT of today's shape: pre-norm RMSNorm, RoPE, grouped-query attention, SwiGLU, optional
mixture of experts. Byte-level, so it needs no tokenizer.

Shapes: B sequences, T positions, D = dim, T' = B * T tokens, E experts, K experts per token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class ModelConfig:
    vocab_size: int = 256
    dim: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    hidden_dim: int = 384  # of the SwiGLU, or of each expert
    experts: int = 0  # 0: a dense model
    top_k: int = 2  # experts per token
    max_seq_len: int = 1024
    rope_theta: float = 10_000.0

    def __post_init__(self) -> None:
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            raise ValueError(f"dim={self.dim} must be an even multiple of heads={self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")
        if self.experts and not 1 <= self.top_k <= self.experts:
            raise ValueError(f"top_k={self.top_k} must lie in 1..experts={self.experts}")

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


class Transformer(nn.Module):
    rope: Tensor  # (2, max_seq_len, head_dim / 2)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)
        # Not persistent: it follows from the config, so checkpoints need not hold it.
        self.register_buffer("rope", rope_table(config), persistent=False)
        self.init_weights()

    def init_weights(self) -> None:
        for name, param in self.named_parameters():
            if param.ndim < 2:
                continue  # norms keep their ones
            std = 0.02
            if name.endswith(("wo.weight", "w2.weight", "experts.w2")):
                # Two residual branches a layer: keeps the stream's variance independent of depth.
                std /= math.sqrt(2 * self.config.layers)
            nn.init.normal_(param, std=std)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:  # (B, T)
        """Logits (B, T, vocab) and the experts' load-balancing loss (0 for a dense model)."""
        x = self.tok_embeddings(tokens)
        rope = self.rope[:, : tokens.shape[1]]
        balance = x.new_zeros(())
        for layer in self.layers:
            x, layer_balance = layer(x, rope)
            if layer_balance is not None:
                balance = balance + layer_balance / len(self.layers)
        return self.lm_head(self.norm(x)), balance


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim)
        if config.experts:
            self.moe = MoE(config)
        else:
            self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor | None]:  # (B, T, D)
        x = x + self.attention(self.attention_norm(x), rope)
        y = self.ffn_norm(x)
        if hasattr(self, "moe"):
            y, balance = self.moe(y)
            return x + y, balance
        return x + self.feed_forward(y), None


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.dim, config.heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.heads * config.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:  # (B, T, D)
        q, k, v = (
            w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, heads, T, head_dim)
            for w in (self.wq, self.wk, self.wv)
        )
        q, k = rotate(q, rope), rotate(k, rope)
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1]
        )
        return self.wo(y.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.w2 = nn.Linear(config.hidden_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class MoE(nn.Module):
    """Top-k routing that drops no token: every expert's batch is padded to the busiest one's."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.router = nn.Linear(config.dim, config.experts, bias=False)
        self.experts = Experts(config)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # (B, T, D)
        tokens = x.flatten(0, 1)  # (T', D)
        probs = self.router(tokens).float().softmax(-1)  # (T', E)
        gates, chosen = probs.topk(self.top_k, dim=-1)  # (T', K)
        gates = (gates / gates.sum(-1, keepdim=True)).to(x.dtype)

        expert = chosen.flatten()  # (T'K,), the K choices of a token side by side
        one_hot = F.one_hot(expert, probs.shape[-1])  # (T'K, E)
        slot = one_hot.cumsum(0).gather(1, expert[:, None]).squeeze(1) - 1  # its row in the batch
        count = one_hot.sum(0)  # (E,)

        batch = tokens.new_zeros(len(count), int(count.max()), tokens.shape[-1])
        source = tokens.repeat_interleave(self.top_k, dim=0)
        y = self.experts(batch.index_put((expert, slot), source))[expert, slot]  # (T'K, D)
        y = (y.unflatten(0, (-1, self.top_k)) * gates[..., None]).sum(1)

        # Switch Transformer (arXiv:2101.03961), equation 4: 1 when tokens spread evenly.
        share = count / count.sum()
        balance = len(count) * (share * probs.mean(0)).sum()
        return y.view_as(x), balance


class Experts(nn.Module):
    """All experts of a layer, stored as 3-D tensors (E, out, in)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        E, dim, hidden = config.experts, config.dim, config.hidden_dim
        self.w1 = nn.Parameter(torch.empty(E, hidden, dim))
        self.w2 = nn.Parameter(torch.empty(E, dim, hidden))
        self.w3 = nn.Parameter(torch.empty(E, hidden, dim))

    def forward(self, x: Tensor) -> Tensor:  # (E, tokens of each, D)
        h = F.silu(torch.bmm(x, self.w1.mT)) * torch.bmm(x, self.w3.mT)
        return torch.bmm(h, self.w2.mT)


def rope_table(config: ModelConfig) -> Tensor:
    """Cosines and sines of RoPE's angles, (2, max_seq_len, head_dim / 2)."""
    exponent = torch.arange(0, config.head_dim, 2) / config.head_dim
    angles = torch.outer(torch.arange(config.max_seq_len), config.rope_theta**-exponent)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, rope: Tensor) -> Tensor:  # (B, heads, T, head_dim)
    cos, sin = rope
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).type_as(x)
