"""Muon without owners, as a reference: every rank gathers and orthogonalizes every matrix.

``use_distributed_muon=True`` selects this path, which updates one parameter after another. It
shares the engine's formulas, but not its plans or chunks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import empty

from . import core, regions
from .distributed import dtensors
from .distributed.plan import ranks_sort_key
from .newton_schulz.iteration import Eps, orthogonalize
from .parameters.options import Group
from .step.context import Step

# Options of groups for which this path supports only one value.
ONLY = {"beta2": None, "weight_rounding": "nearest", "capturable": False}


def check(groups: Sequence[Group], others: dict[str, bool]) -> None:
    """Raises ValueError for group options, and for others that are on, that need the engine."""
    found = [
        f"{key}={getattr(group, key)!r}"
        for group in groups
        if group.use_muon
        for key, value in ONLY.items()
        if getattr(group, key) != value
    ]
    found += [name for name, is_on in others.items() if is_on]
    if found:
        raise ValueError(
            f"use_distributed_muon=True is a plain reference, which does not support {found[0]}: "
            "leave one of them out"
        )


def update_matrices(step: Step) -> None:
    """Updates the momentum and weights of all of Muon's parameters that take part in the step."""

    def order(number: int) -> tuple:  # the same on all ranks, which could deadlock otherwise
        return ranks_sort_key(dtensors.ranks_of(step.params[number]) or ())

    for number in sorted(range(len(step.params)), key=order):
        if number not in step.absent:
            _update(number, step)
    step.progress.has_exchanged = True


def _update(number: int, step: Step) -> None:
    entry, param, weight = step.plan.entries[number], step.params[number], step.bound.weights
    group, W, B = step.groups[entry.group], weight[number], step.bound.momenta[number]
    look_ahead = empty(W.shape, dtype=entry.opmath, device=W.device)
    grads = step.complete_gradients([number])
    step.progress.has_written = True
    if W.numel():
        core.update_momentum(
            [B],
            grads,
            [look_ahead],
            momentum=group.momentum,
            nesterov=group.nesterov,
            style=group.momentum_style,
            maximize=group.maximize,
            opmath=entry.opmath,
        )
    # Plain tensors are also rounded to a wire of 32 or 64 bits, as if they traveled.
    wire = entry.wire
    if wire.itemsize < 4 and not dtensors.is_sharded(param):
        wire = entry.opmath
    whole = dtensors.gathered(look_ahead.to(wire), param)
    everything, held = regions.whole(whole.shape), entry.region(step.plan.rank)
    for block in entry.matrices.blocks:
        if not math.prod(block.shape):
            continue
        X = block.local_part(regions.whole(block.shape), everything).of(whole)
        matrices = X.reshape(-1, block.rows, block.cols).contiguous()
        eps = Eps(group.ns_eps, group.ns_eps_absolute or 0.0)
        U = orthogonalize(matrices, entry.recipe, eps, False, step.scratch)
        U, scale = U.to(wire).to(entry.opmath).view(block.shape), entry.scale(block)
        decay_scale = scale if group.decay_lr == "adjusted" else 1.0
        for box in block.boxes(held):
            core.update_weights(
                [block.local_part(box, held).of(W)],
                [U[regions.slices(box)].clone()],
                rate=group.lr * scale,
                decay=group.lr * group.weight_decay * decay_scale,
                cautious=group.cautious,
            )
