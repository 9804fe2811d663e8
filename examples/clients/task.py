"""What all of these train, a tiny Llama on sequences it can learn: replace both by your own."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, LENGTH = 64, 32


def build_model(seed: int = 0) -> LlamaForCausalLM:
    """Random weights, the same on every rank."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


class Sequences(Dataset):
    """Each token follows from the one before, x ← 5x + 7 (mod 64), but for one in eight."""

    def __init__(self, size: int):
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        noise = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
        is_noise = torch.rand(LENGTH, generator=generator) < 1 / 8
        tokens = [int(noise[0])]
        for t in range(1, LENGTH):
            tokens.append(int(noise[t]) if is_noise[t] else (5 * tokens[-1] + 7) % VOCABULARY)
        ids = torch.tensor(tokens)
        return {"input_ids": ids, "labels": ids}
