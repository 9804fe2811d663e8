"""What every rank holds of weights, gradients and state; what averaging gradients would send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from planner.architectures import Weight
from planner.costs import Ints
from planner.deployment import Layout, rows_of, sharding_of


def elements_of_muon(kernel: Any, entries: Iterable[Any], ranks: int) -> Ints:
    """Elements of Muon's weights that each rank holds, (ranks,)."""
    held: Counter[tuple] = Counter((e.sharding, e.matrices.shape) for e in entries)
    return _elements(kernel, held, ranks)


def elements_of_all(
    kernel: Any, entries: Iterable[Any], weights: Iterable[Weight], layout: Layout, ranks: int
) -> Ints:
    """Elements of all weights, their gradients, momentum and AdamW's two moments, (ranks,).

    Args:
        kernel: the package.
        entries: Muon's weights, as the plan sees them.
        weights: of the model, in the same order.
        layout: where they lie.
        ranks: how many.
    """
    of_muon = iter(entries)
    held: Counter[tuple] = Counter()
    for weight in weights:
        lies = sharding_of(kernel, weight, layout)
        held[lies, weight.shape] += 2  # the gradient lies as the weight does
        if weight.muon:
            held[next(of_muon).momentum_sharding or lies, weight.shape] += 1
        elif layout.kind == "zero2" and kernel.distributed.replicas.is_divided(weight.shape, ranks):
            held[rows_of(kernel, layout), weight.shape] += 2
        else:
            held[lies, weight.shape] += 2
    return _elements(kernel, held, ranks)


def _elements(kernel: Any, held: Counter[tuple], ranks: int) -> Ints:
    """Elements that each rank holds of the given tensors, (ranks,)."""
    numel = kernel.regions.numel
    total = np.zeros(ranks, np.int64)
    for (sharding, shape), times in held.items():
        regions = (sharding.region(shape, rank) for rank in range(ranks))
        total += times * np.fromiter(map(numel, regions), np.int64, ranks)
    return total


def averaged_in_backward(kernel: Any, weights: Iterable[Weight], layout: Layout) -> float | None:
    """Elements of gradients that each rank sends in rings of DDP or FSDP2; None: in the step.

    Reduce-scatters among ranks that hold shards, all-reduces among those that hold replicas. Ranks
    of TP average nothing, nor do those that divide experts.
    """
    if layout.kind == "zero2":
        return None
    sent = 0.0
    for weight in weights:
        sharding, size = sharding_of(kernel, weight, layout), float(weight.numel)
        is_inner = layout.kind == "fsdp+tp" or (layout.kind == "ep" and weight.is_expert)
        for number in reversed(range(len(sharding.mesh_shape))):
            ranks, is_cut = sharding.mesh_shape[number], sharding.placements[number] is not None
            if number == 0 or not is_inner:
                sent += size * (ranks - 1) / ranks * (1 if is_cut else 2)
            size /= ranks if is_cut else 1
    return sent
