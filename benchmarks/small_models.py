"""Small models and data that every machine has, to compare optimizers in training.

Transformers are the example's, on its bytes of Python sources. An MLP and a CNN tell apart ten
digits of seven segments, drawn anew for every batch: shifted, turned, scaled, and under noise.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
from data import load_corpus, train_batch, val_batches
from model import ModelConfig, Transformer

Batch = tuple[Tensor, Tensor]  # inputs, and the class of each output


@dataclass(frozen=True)
class Task:
    build: Callable[[], nn.Module]
    draw: Callable[[int, int], Batch]  # the batch of a seed and a step
    validation: Callable[[], list[Batch]]
    steps: int
    rates: tuple[float, ...]  # of matrices, to try first, each twice the one before
    rest_rates: tuple[float, ...]  # of everything else


# -- bytes -----------------------------------------------------------------------------------------


class ByteModel(nn.Module):
    """The example's transformer without its second output, the balance of experts."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        config = ModelConfig(dim=dim, hidden_dim=hidden_dim, max_seq_len=48)
        self.transformer = Transformer(config)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.transformer(tokens)[0]


def draw_bytes(seed: int, step: int) -> Batch:
    return train_batch(load_corpus()[0], 24, 48, seed, step, rank=0, world_size=1)


def validation_bytes() -> list[Batch]:
    return val_batches(load_corpus()[1], 24, 48, count=8, rank=0, world_size=1)


def transformer(dim: int, hidden_dim: int, steps: int) -> Task:
    build = partial(ByteModel, dim, hidden_dim)
    rates, rest_rates = (4e-3, 8e-3, 1.6e-2), (1.6e-2, 3.2e-2, 6.4e-2)
    return Task(build, draw_bytes, validation_bytes, steps, rates, rest_rates)


# -- digits ----------------------------------------------------------------------------------------

# Rows and columns of each segment in a picture of 16 × 16, and the segments of each digit.
SEGMENTS = {
    "a": (slice(2, 4), slice(4, 12)),
    "b": (slice(2, 9), slice(10, 12)),
    "c": (slice(7, 14), slice(10, 12)),
    "d": (slice(12, 14), slice(4, 12)),
    "e": (slice(7, 14), slice(4, 6)),
    "f": (slice(2, 9), slice(4, 6)),
    "g": (slice(7, 9), slice(4, 12)),
}
DIGITS = ("abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcdfg")


def draw_digits(seed: int, step: int, count: int = 128) -> Batch:
    """Pictures (count, 1, 16, 16) and their digits."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"digits/{seed}/{step}".encode()))
    templates = torch.zeros(10, 1, 16, 16)
    for digit, segments in enumerate(DIGITS):
        for segment in segments:
            templates[digit, 0][SEGMENTS[segment]] = 1
    digits = torch.randint(10, (count,), generator=generator)
    angle, size, dx, dy = 2 * torch.rand(4, count, generator=generator) - 1
    angle, size, dx, dy = 0.4 * angle, 1.2 + 0.3 * size, 0.3 * dx, 0.3 * dy
    rows = (angle.cos(), -angle.sin(), dx, angle.sin(), angle.cos(), dy)
    theta = torch.stack(rows, dim=1).view(count, 2, 3) * size.view(-1, 1, 1)
    grid = F.affine_grid(theta, [count, 1, 16, 16], align_corners=False)
    pictures = F.grid_sample(templates[digits], grid, align_corners=False)
    return pictures + 0.3 * torch.randn(pictures.shape, generator=generator), digits


def validation_digits() -> list[Batch]:
    return [draw_digits(-1, number) for number in range(16)]


def mlp() -> nn.Module:
    layers = [part for _ in range(3) for part in (nn.Linear(256, 256), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(256, 10))


def cnn() -> nn.Module:
    blocks: list[nn.Module] = []
    for channels, filters, stride in ((1, 32, 1), (32, 64, 2), (64, 128, 2)):
        conv = nn.Conv2d(channels, filters, 3, stride, padding=1, bias=False)
        blocks += [conv, nn.BatchNorm2d(filters), nn.ReLU()]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def digits(build: Callable[[], nn.Module], steps: int) -> Task:
    rates = (4e-3, 8e-3, 1.6e-2)
    return Task(build, draw_digits, validation_digits, steps, rates, rates)


TASKS = {
    "transformer-s": transformer(dim=128, hidden_dim=384, steps=200),
    "transformer-m": transformer(dim=256, hidden_dim=1024, steps=200),
    "transformer-l": transformer(dim=512, hidden_dim=2048, steps=200),
    "mlp": digits(mlp, steps=300),
    "mlp-long": digits(mlp, steps=3000),
    "cnn": digits(cnn, steps=300),
}
