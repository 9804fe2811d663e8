"""Tries the Triton kernels that a plan needs, before ranks agree on a step and anything is written.

Triton compiles a kernel where it is first launched, which takes a C compiler, Python's headers and
a device that the tiles fit. What fails then must not fail in the middle of a step.
"""

from __future__ import annotations

import functools
import logging

import torch

from .. import core, triton_kernels
from ..distributed.plan import Plan
from ..newton_schulz import Recipe
from ..newton_schulz.iteration import orthogonalize
from ..scratch import Scratch

logger = logging.getLogger(__name__)


def try_kernels(plan: Plan) -> None:
    """Gives the kernels up, with a warning, where they can't be compiled or launched here."""
    batches = {
        (lane.device, lane.wire, plan.entries[unit.entry].recipe, rows, cols, plan.count(batch))
        for lane in plan.all_lanes
        if triton_kernels.is_used_on(lane.device.type)
        for chunk in lane.chunks
        for batch in chunk.batches
        for unit in batch.units[:1]
        for rows, cols in [(unit.block.rows, unit.block.cols)]
    }
    if not batches:
        return
    logger.info("trying Triton's kernels on %d shapes, which compiles them once", len(batches))
    try:
        for device in {device for device, *_ in batches}:
            _try_momentum(device)
        for batch in batches:
            _try_batch(*batch)
    except torch.OutOfMemoryError:
        raise  # which the step would, too
    except Exception as error:  # of Triton, of what it compiles with, of the driver
        triton_kernels.give_up(error)


@functools.cache
def _try_momentum(device: torch.device) -> None:
    B, G, out = (torch.zeros(16, 16, device=device) for _ in range(3))
    core.update_momentum([B], [G], [out], momentum=0.9, nesterov=True, style="ema", maximize=False)


@functools.cache
def _try_batch(
    device: torch.device, wire: torch.dtype, recipe: Recipe, rows: int, cols: int, count: int
) -> None:
    zeros = torch.zeros(count, rows, cols, dtype=wire, device=device)
    orthogonalize(zeros, recipe, 1e-7, True, Scratch())
