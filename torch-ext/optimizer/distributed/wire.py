"""Decides the format in which momentum and updates travel: dtype, scales, further numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import triton_kernels
from ..newton_schulz import Recipe

# A part is scaled so that its largest magnitude lies in [2^12, 2^13): fp16 then resolves numbers
# that are 2^26 times smaller. Without a scale it would lose gradients under 6e-5.
_LARGEST = 13
_SMALLEST_EXPONENT = -110  # so that no factor leaves the range of fp32


# The most parts that our kernels copy one by one: if there are more, torch's copies, each of the
# parts of many peers, take fewer launches.
_MOST_BY_KERNEL = 128


def wire_of(recipe: Recipe) -> torch.dtype:
    """The dtype of the wire if the user gives none: fp16 or fp64 like the arithmetic, else bf16."""
    if recipe.dtype in (torch.float16, torch.float64):
        return recipe.dtype
    return torch.bfloat16


def scale_down(parts: Sequence[Tensor], outputs: Sequence[Tensor], largest: Tensor) -> Tensor:
    """Rounds parts in fp32 into fp16 ``outputs``, each part scaled by a power of two to fit.

    Args:
        parts: none of them empty; overwritten.
        outputs: of the same shapes.
        largest: (len(parts),), the largest magnitude of each part; Inf or NaN if it has one.

    Returns:
        The exponents to scale up with, (len(parts),) in fp32: whole numbers that fp16 holds.
    """
    if triton_kernels.is_used_on(largest.device.type):
        from ..triton_kernels import elementwise

        exponents = elementwise.exponents_to_fit(largest, _LARGEST, _SMALLEST_EXPONENT)
        elementwise.pack(parts, outputs, exponents)
        return exponents
    exponents = torch.frexp(largest).exponent.clamp_min(_SMALLEST_EXPONENT) - _LARGEST
    # A part of zeros takes the least exponent, so as to set no scale for other parts of its matrix.
    # Inf and NaN are sent as they are.
    exponents = torch.where(largest == 0, _SMALLEST_EXPONENT - _LARGEST, exponents)
    exponents = torch.where(torch.isfinite(largest), exponents, 0).to(torch.float32)
    torch._foreach_mul_(list(parts), list(torch.exp2(-exponents)))
    torch._foreach_copy_(list(outputs), list(parts))
    return exponents


def scale_down_by_kernel(
    momenta: Sequence[Tensor],
    grads: Sequence[Tensor],
    outputs: Sequence[Tensor],
    exponents: Sequence[Tensor],
    largest: Sequence[Tensor],
    **how: Any,
) -> None:
    """Does what `scale_down` does, but makes the parts anew from momentum and gradients.

    Args:
        momenta, grads: as `core.update_momentum` left them.
        outputs: in fp16.
        exponents: one element for each output, in fp16, into which its exponent is written.
        largest: one element for each output, the largest magnitude that was measured.
        how: nesterov and so on, see `elementwise.scale_momentum`.
    """
    from ..triton_kernels import elementwise

    elementwise.scale_momentum(
        momenta,
        grads,
        outputs,
        exponents=exponents,
        largest=largest,
        highest=_LARGEST,
        least=_SMALLEST_EXPONENT,
        **how,
    )


def copy_parts(
    sources: Sequence[Tensor], targets: Sequence[Tensor], exponents: Sequence[Tensor] = ()
) -> None:
    """Copies parts of n matrices, and brings all parts of a matrix to one scale.

    Args:
        sources: (n, peers, …), as `scale_down` left them; of any dtype if they have no scale.
        targets: of the same shapes.
        exponents: (n, peers) for each source, then (n, …) for other parts of the same matrices;
            empty if sources have no scale.
    """
    parts = sum(target.shape[1] for target in targets)
    if parts <= _MOST_BY_KERNEL and triton_kernels.is_used_on(targets[0].device.type):
        from ..triton_kernels import elementwise

        inputs, outputs = (
            [part for parts_of_run in runs for part in parts_of_run.unbind(1)]
            for runs in (sources, targets)
        )
        elementwise.copy(inputs, outputs, torch.cat(list(exponents), 1) if exponents else None)
        return
    torch._foreach_copy_(list(targets), list(sources))
    if exponents:
        unify_scales(targets, exponents)


def unify_scales(parts: Sequence[Tensor], exponents: Sequence[Tensor]) -> None:
    """Brings the parts of each matrix to one scale, in place: that of its largest part.

    Numbers that this takes below the range of fp16 are at most 2^-37 of the largest magnitude.

    Args:
        parts: of n matrices, from several peers, (n, peers, …), in fp16, as `scale_down` left them.
        exponents: (n, peers) for each of these, then those of other parts of the same matrices.
    """
    largest = torch.cat(list(exponents), dim=1).amax(dim=1, keepdim=True).to(torch.float32)
    for part, part_exponents in zip(parts, exponents):
        factors = torch.exp2(part_exponents.to(torch.float32) - largest).to(part.dtype)
        part.mul_(factors.view(*factors.shape, *(1 for _ in part.shape[2:])))


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
