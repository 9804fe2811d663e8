"""Decides the format in which momentum and updates travel: dtype, and numbers beside them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import triton_kernels
from ..newton_schulz import Recipe

# The most parts that our kernels copy one by one: if there are more, torch's copies, each of the
# parts of many peers, take fewer launches.
_MOST_BY_KERNEL = 128


def wire_of(recipe: Recipe) -> torch.dtype:
    """The dtype of the wire if the user gives none: fp64 if the arithmetic has it, else bf16."""
    return torch.float64 if recipe.dtype == torch.float64 else torch.bfloat16


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


def elements_of_numbers(wire: torch.dtype) -> int:
    """How many elements of the wire's dtype `write_numbers` takes for a number."""
    return 1 if wire.itemsize >= 4 else 4


def write_numbers(numbers: Tensor, target: Tensor) -> None:
    """Writes numbers without loss: to a wire of 16 bits, as fp32, each byte in one element.

    Args:
        numbers: of any shape.
        target: the elements for all numbers, flat; or several rows of as many, written alike.
    """
    if elements_of_numbers(target.dtype) > 1:
        numbers = numbers.to(torch.float32).contiguous().view(torch.uint8)
    target.copy_(numbers.flatten())


def read_numbers(buffer: Tensor, start: int, count: int) -> Tensor:
    """Reads ``count`` numbers that `write_numbers` wrote; they are flat."""
    each = elements_of_numbers(buffer.dtype)
    elements = buffer[start : start + count * each]
    return elements if each == 1 else elements.to(torch.uint8).view(torch.float32)
