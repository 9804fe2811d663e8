"""Decides the format in which momentum and updates travel: dtype, scales, numbers beside them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import triton_kernels
from ..newton_schulz import Recipe

# A part is scaled so that its largest magnitude lies in [2^12, 2^13): fp16 then resolves what is
# 2^26 times smaller, where a part without scale would lose gradients under 6e-5.
_LARGEST = 13
_SMALLEST_EXPONENT = -110  # so that no factor leaves fp32


def wire_of(recipe: Recipe) -> torch.dtype:
    """The format in which to travel: as many digits as 16 bits have for the arithmetic to use."""
    if recipe.dtype in (torch.float16, torch.float64):
        return recipe.dtype
    return torch.bfloat16


def scale_down(parts: Sequence[Tensor], outputs: Sequence[Tensor], largest: Tensor) -> Tensor:
    """Rounds parts in fp32 into fp16 ``outputs``, each scaled by a power of two to fit.

    Args:
        parts: none of them empty; overwritten.
        outputs: of the same shapes.
        largest: (len(parts),), their largest magnitudes; Inf or NaN where there is one.

    Returns:
        The exponents to scale up with, (len(parts),) in fp32: whole numbers that fp16 holds.
    """
    if triton_kernels.is_used_on(largest.device.type):
        from ..triton_kernels import elementwise

        exponents = elementwise.exponents_to_fit(largest, _LARGEST, _SMALLEST_EXPONENT)
        elementwise.pack(parts, outputs, exponents)
        return exponents
    exponents = torch.frexp(largest).exponent.clamp_min(_SMALLEST_EXPONENT) - _LARGEST
    # Zeros set no scale for other parts of their matrix; Inf and NaN are sent as they are.
    exponents = torch.where(largest == 0, _SMALLEST_EXPONENT - _LARGEST, exponents)
    exponents = torch.where(torch.isfinite(largest), exponents, 0).to(torch.float32)
    torch._foreach_mul_(list(parts), list(torch.exp2(-exponents)))
    torch._foreach_copy_(list(outputs), list(parts))
    return exponents


def unify_scales(parts: Sequence[Tensor], exponents: Tensor) -> None:
    """Brings the parts of each matrix to one scale, in place: that of its largest part.

    Numbers that fall under the range of fp16 thereby are 2^-37 of the largest magnitude.

    Args:
        parts: of n matrices each, (n, …) in fp16, as `scale_down` left them.
        exponents: (parts, n).
    """
    exponents = exponents.to(torch.float32)
    factors = torch.exp2(exponents - exponents.amax(dim=0)).to(parts[0].dtype)
    for part, factor in zip(parts, factors):
        part.mul_(factor.view(-1, *(1 for _ in part.shape[1:])))


def elements_of_numbers(wire: torch.dtype) -> int:
    """How many elements `write_numbers` takes for a number."""
    return 1 if wire.itemsize >= 4 else 4


def write_numbers(numbers: Tensor, buffer: Tensor, start: int) -> None:
    """Writes numbers exactly: where the wire has 16 bits, each byte of their fp32 as a number."""
    if elements_of_numbers(buffer.dtype) > 1:
        numbers = numbers.to(torch.float32).contiguous().view(torch.uint8)
    buffer[start : start + numbers.numel()].copy_(numbers.flatten())


def read_numbers(buffer: Tensor, start: int, count: int) -> Tensor:
    """``count`` numbers that `write_numbers` wrote, flat."""
    each = elements_of_numbers(buffer.dtype)
    elements = buffer[start : start + count * each]
    return elements if each == 1 else elements.to(torch.uint8).view(torch.float32)
