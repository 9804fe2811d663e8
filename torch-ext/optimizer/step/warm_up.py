"""Compiles the Triton kernels that a plan needs, before ranks compare notes and before any write.

Triton compiles a kernel at its first launch, which needs a C compiler, Python's headers, and a
device that fits the tiles. If that fails, it must fail here, not in the middle of a step.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor

from .. import core, triton_kernels
from ..distributed.plan import Lane, Plan
from ..distributed.wire import copy_parts
from ..newton_schulz import Recipe
from ..newton_schulz.iteration import Eps, orthogonalize
from ..parameters.options import Group
from ..scratch import Scratch
from ..state.specs import momentum_dtype
from ..weight_rounding import RandomBits, RoundedBy, random_key

logger = logging.getLogger(__name__)


def warm_up(plan: Plan, groups: Sequence[Group]) -> None:
    """Launches the kernels of a plan once, on zeros, which compiles new ones.

    Raises:
        RuntimeError: Triton can't compile or launch one of them here.
    """
    types = {lane.device.type for lane in plan.all_lanes}
    if not triton_kernels.is_installed() and types.intersection(triton_kernels.DEVICE_TYPES):
        _warn_once()
    lanes = [lane for lane in plan.all_lanes if triton_kernels.is_used_on(lane.device.type)]
    if not lanes:
        return
    logger.info("launching Triton's kernels on zeros, which compiles new ones")
    try:
        for lane in lanes:
            entries = [plan.entries[number] for number in {u.entry for u, _ in lane.owners}]
            for group, dtype in {(entry.group, entry.dtype) for entry in entries}:
                _launch_elementwise(lane, groups[group], dtype)
            for chunk in lane.chunks:
                for batch in chunk.batches:
                    unit = batch.units[0]
                    recipe, block = plan.entries[unit.entry].recipe, unit.block
                    shape = batch.matrix_count, block.rows, block.cols
                    _orthogonalize_batch(lane.device, lane.wire, recipe, shape)
    except torch.OutOfMemoryError:
        raise  # only a smaller model helps, not the advice below
    except Exception as error:  # from Triton, the compiler, or the driver
        raise RuntimeError(
            f"Triton's kernels can't be launched here ({triton_kernels.first_line_of(error)}). "
            f"{triton_kernels.NEEDS}; to run without them, set Muon(..., triton=False) on all ranks"
        ) from error


@functools.cache
def _warn_once() -> None:
    triton_kernels.warn_of_doing_without("Triton is not installed")


def _launch_elementwise(lane: Lane, group: Group, dtype: torch.dtype) -> None:
    """Updates a matrix of zeros with the dtypes and options of a group."""
    W, G = (torch.zeros(32, 32, dtype=dtype, device=lane.device) for _ in range(2))
    B = W.to(momentum_dtype(group, dtype) or dtype)
    sent = torch.zeros(32, 32, dtype=lane.wire, device=lane.device)
    core.update_momentum(
        [B],
        [G],
        [sent],
        momentum=group.momentum,
        nesterov=group.nesterov,
        style=group.momentum_style,
        maximize=group.maximize,
        opmath=lane.opmath,
    )
    parts = sent[None, None]  # (units, peers, rows, cols)
    copy_parts([parts], [torch.zeros_like(parts)])
    core.update_weights(
        [W],
        [sent],
        rate=group.lr,
        decay=group.lr * group.weight_decay,
        cautious=group.cautious,
        factors=None if group.beta2 is None else [torch.ones_like(B[:, :1], dtype=lane.opmath)],
        rounded_by=_rounded_by(W, group),
    )


def _rounded_by(W: Tensor, group: Group) -> Optional[list[RoundedBy]]:
    if not group.updates_in_fp32(W.dtype):
        return None
    if group.weight_rounding == "exact":
        return [torch.zeros_like(W, dtype=torch.int16)]
    return [RandomBits(random_key(0, ""), W.to("meta"))]


@functools.cache
def _orthogonalize_batch(
    device: torch.device, wire: torch.dtype, recipe: Recipe, shape: tuple[int, int, int]
) -> None:
    """Orthogonalizes a batch of zeros."""
    zeros = torch.zeros(shape, dtype=wire, device=device)
    orthogonalize(zeros, recipe, Eps(1e-7), True, Scratch())
