"""Chooses the wire's dtype, in which momentum and updates travel, and copies to and from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor

from .. import triton_kernels
from ..newton_schulz import Recipe

# Maximum number of parts that our kernels copy, one by one. With more parts, torch's copies, each
# for many peers, need fewer launches.
_MOST_BY_KERNEL = 128


def wire_of(
    recipe: Recipe, comm_dtype: Optional[torch.dtype] = None, exact: bool = False
) -> torch.dtype:
    """The user's ``comm_dtype``, else the arithmetic's dtype if exact or fp64, else bf16."""
    is_wide = exact or recipe.dtype == torch.float64
    return comm_dtype or (recipe.dtype if is_wide else torch.bfloat16)


def copy_parts(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copies parts of units, (n, peers, …) each, into targets of the same shapes."""
    parts = sum(target.shape[1] for target in targets)
    if parts > _MOST_BY_KERNEL or not triton_kernels.is_used_on(targets[0].device.type):
        torch._foreach_copy_(list(targets), list(sources))
        return
    from ..triton_kernels import elementwise

    inputs, outputs = (
        [part for parts_of_run in runs for part in parts_of_run.unbind(1)]
        for runs in (sources, targets)
    )
    elementwise.copy(inputs, outputs)
