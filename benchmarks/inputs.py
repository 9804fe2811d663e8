"""Matrices to orthogonalize: made ones of known spectra, and momentum of a training run."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

Generator = torch.Generator


def gaussian(rows: int, cols: int, generator: Generator) -> Tensor:
    return torch.randn(rows, cols, generator=generator)


def with_spectrum(sigmas: Tensor, rows: int, cols: int, generator: Generator) -> Tensor:
    """Random singular vectors, in float64 until the end."""
    left, right = (
        torch.linalg.qr(torch.randn(n, len(sigmas), generator=generator, dtype=torch.float64)).Q
        for n in (rows, cols)
    )
    return (left * sigmas @ right.mT).float()


def ill_conditioned(condition: float) -> Callable[[int, int, Generator], Tensor]:
    """Singular values evenly spaced on a logarithmic scale."""

    def make(rows: int, cols: int, generator: Generator) -> Tensor:
        exponents = torch.linspace(0, -1, min(rows, cols), dtype=torch.float64)
        return with_spectrum(condition**exponents, rows, cols, generator)

    return make


def power_law(rows: int, cols: int, generator: Generator) -> Tensor:
    """σ_i = 1/i."""
    sigmas = 1 / torch.arange(1, min(rows, cols) + 1, dtype=torch.float64)
    return with_spectrum(sigmas, rows, cols, generator)


def spiked(share: float) -> Callable[[int, int, Generator], Tensor]:
    """One direction has that share of the squares, a power law the others, as momentum may early
    on."""

    def make(rows: int, cols: int, generator: Generator) -> Tensor:
        sigmas = 1 / torch.arange(min(rows, cols), dtype=torch.float64).clamp_min_(1)
        sigmas[0] = sigmas[1:].norm() * math.sqrt(share / (1 - share))
        return with_spectrum(sigmas, rows, cols, generator)

    return make


def low_rank(
    rank: int | None = None, divisor: int = 1, scale: int = 8
) -> Callable[[int, int, Generator], Tensor]:
    """That rank, or s / divisor, exactly: a product of integers of that size, which fp32 holds."""

    def make(rows: int, cols: int, generator: Generator) -> Tensor:
        inner = rank or max(1, min(rows, cols) // divisor)
        left, right = (
            torch.randn(shape, generator=generator, dtype=torch.float64).mul_(scale).round_()
            for shape in ((rows, inner), (inner, cols))
        )
        return (left @ right).float()

    return make


def heavy_tailed(rows: int, cols: int, generator: Generator) -> Tensor:
    """Student's t with 1.5 degrees of freedom: Bailey 1994's polar method, in float64."""
    degrees = 1.5
    u, v = torch.rand(2, rows, cols, generator=generator, dtype=torch.float64).clamp_min_(1e-12)
    size = (degrees * (u ** (-2 / degrees) - 1)).sqrt()
    return (size * torch.cos(2 * torch.pi * v)).float()


MADE: dict[str, Callable[[int, int, Generator], Tensor]] = {
    "Gaussian": gaussian,
    "condition 1e4": ill_conditioned(1e4),
    "condition 1e8": ill_conditioned(1e8),
    "power law": power_law,
    "spiked": spiked(0.5),
    "spiked, 85%": spiked(0.85),
    "rank s/4": low_rank(divisor=4),
    "rank s/16": low_rank(divisor=16),
    "rank 2": low_rank(2, scale=512),  # which 16 bits do not hold
    "rank 1": low_rank(1, scale=512),
    "heavy-tailed": heavy_tailed,
}


def momentum(dim: int, steps: int) -> Iterator[tuple[str, Tensor]]:
    """Names and momentum of the last layer after some steps of the example's run, on the CPU.

    The run is the first ``steps`` of a schedule of 200, on the example's text and batches.
    """
    sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
    from train import Batches, Run, TrainConfig

    config = TrainConfig(dim=dim, hidden_dim=3 * dim, heads=max(4, dim // 64), out="")
    device = torch.device("cpu")
    batches, run = Batches(config, device), Run.start(config, device)
    while run.step < steps:
        run.update(batches.train(run.step))
    last = f"layers.{config.layers - 1}."
    for name, param in run.model.named_parameters():
        buffer = run.optimizer.state[param].get("momentum_buffer")
        if buffer is not None and name.startswith(last):
            yield name.removeprefix(last), buffer
