"""Finds two learning rates: one for the matrices that Muon trains, one for everything else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

Rates = tuple[float, float]  # of the matrices, of the rest


def grid_search(
    loss_at: Callable[[Rates], float],
    matrices: Sequence[float],
    rest: Sequence[float],
    most_beyond: int = 3,
) -> dict[Rates, float]:
    """Losses of all pairs of the given rates, and of more where the best pair is at an edge.

    Each rate is twice the one before. Beyond an edge the grid grows by a whole row or column, at
    most ``most_beyond`` times. A single rate is meant: it gets no neighbours.
    """
    losses: dict[Rates, float] = {}
    lines = list(matrices), list(rest)
    for _ in range(most_beyond + 1):
        for rates in product(*lines):
            if rates not in losses:
                losses[rates] = loss_at(rates)
        best = best_of(losses)
        grown = grow(lines[0], best[0]), grow(lines[1], best[1])
        if grown == lines:
            break
        lines = grown
    return losses


def best_of(losses: dict[Rates, float]) -> Rates:
    return min(losses, key=lambda rates: losses[rates])


def is_at_edge(losses: dict[Rates, float]) -> bool:
    lines = [sorted({*line}) for line in zip(*losses)]
    return [grow(line, rate) for line, rate in zip(lines, best_of(losses))] != lines


def grow(line: list[float], best: float) -> list[float]:
    if len(line) == 1:
        return line
    below = [best / 2] if best == line[0] else []
    above = [best * 2] if best == line[-1] else []
    return [*below, *line, *above]
