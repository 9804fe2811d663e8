"""Tries the Triton kernels that a plan needs, before ranks agree on a step and anything is written.

Triton compiles a kernel where it is first launched, which takes a C compiler, Python's headers and
a device that the tiles fit. What fails then must not fail in the middle of a step.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Optional

import torch

from .. import core, triton_kernels
from ..distributed import wire
from ..distributed.plan import Lane, Plan
from ..newton_schulz import Recipe
from ..newton_schulz.iteration import orthogonalize
from ..parameters.options import Group
from ..scratch import Scratch

logger = logging.getLogger(__name__)


def try_kernels(plan: Plan, groups: Sequence[Group]) -> Optional[Exception]:
    """What keeps Triton from compiling or launching the kernels of a plan here; None if nothing."""
    lanes = [lane for lane in plan.all_lanes if triton_kernels.is_used_on(lane.device.type)]
    if not lanes:
        return None
    logger.info("trying Triton's kernels, which compiles them where they are new")
    try:
        for lane in lanes:
            entries = [plan.entries[number] for number in {u.entry for u, _ in lane.owners}]
            for group, dtype in {(entry.group, entry.dtype) for entry in entries}:
                _try_elementwise(lane, groups[group], dtype)
            for chunk in lane.chunks:
                for batch in chunk.batches:
                    unit = batch.units[0]
                    recipe, block = plan.entries[unit.entry].recipe, unit.block
                    shape = plan.count(batch), block.rows, block.cols
                    _try_batch(lane.device, lane.wire, recipe, shape)
    except torch.OutOfMemoryError:
        raise  # which the step would, too
    except Exception as error:  # of Triton, of what it compiles with, of the driver
        return error
    return None


def _try_elementwise(lane: Lane, group: Group, dtype: torch.dtype) -> None:
    """Updates a matrix of zeros in the dtypes and by the options of a group."""
    W, G = (torch.zeros(32, 32, dtype=dtype, device=lane.device) for _ in range(2))
    B = W.to(group.momentum_dtype or dtype)
    sent = torch.zeros(32, 32, dtype=lane.wire, device=lane.device)
    out = sent.to(lane.opmath) if lane.scaled else sent
    largest = torch.zeros(1, dtype=lane.opmath, device=lane.device)
    keep = [W == 0] if group.nonfinite == "skip" else None
    core.update_momentum(
        [B],
        [G],
        [out],
        momentum=group.momentum,
        nesterov=group.nesterov,
        style=group.momentum_style,
        maximize=group.maximize,
        keep=keep,
        largest=[largest[0]] if lane.scaled else None,
    )
    if lane.scaled:
        wire.scale_down([out], [sent], largest)
    core.update_weights(
        [W],
        [sent],
        rate=group.lr,
        decay=group.lr * group.weight_decay,
        cautious=group.cautious,
        factors=None if group.beta2 is None else [torch.ones_like(B[:, :1], dtype=lane.opmath)],
        keep=keep,
    )


@functools.cache
def _try_batch(
    device: torch.device, wire: torch.dtype, recipe: Recipe, shape: tuple[int, int, int]
) -> None:
    zeros = torch.zeros(shape, dtype=wire, device=device)
    orthogonalize(zeros, recipe, 1e-7, True, Scratch())
