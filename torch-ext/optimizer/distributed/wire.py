"""Decides the format in which momentum and updates travel: dtype, scales, numbers beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import triton_kernels
from ..newton_schulz import Recipe

# A part is scaled so that its largest magnitude lies in [2^12, 2^13): fp16 then resolves what is
# 2^26 times smaller, where a part without scale would lose gradients under 6e-5.
_LARGEST = 13
_SMALLEST_EXPONENT = -110  # so that no factor leaves fp32


# Parts that one kernel copies: of more, torch's copies of all peers' at once are fewer launches.
_MOST_BY_KERNEL = 128


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


def scale_down_by_kernel(
    momenta: Sequence[Tensor],
    grads: Sequence[Tensor],
    outputs: Sequence[Tensor],
    exponents: Sequence[Tensor],
    largest: Sequence[Tensor],
    **how: Any,
) -> None:
    """Does what `scale_down` does, from what the parts were made of.

    Args:
        momenta, grads: as `core.update_momentum` left them.
        outputs: in fp16.
        exponents: one element for each output, in fp16, which its exponent is written to.
        largest: likewise, the largest magnitude that was measured.
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
    """Copies parts of n matrices each, and brings those of each matrix to one scale.

    Args:
        sources: (n, peers, …), as `scale_down` left them; of any dtype where they have no scale.
        targets: of the same shapes.
        exponents: (n, peers) of each source, and (n, …) of what else is of these matrices; none
            where sources have no scale.
    """
    parts = sum(target.shape[1] for target in targets)
    if parts <= _MOST_BY_KERNEL and triton_kernels.is_used_on(targets[0].device.type):
        from ..triton_kernels import elementwise

        inputs, outputs = (
            [part for of_run in runs for part in of_run.unbind(1)] for runs in (sources, targets)
        )
        elementwise.copy(inputs, outputs, torch.cat(list(exponents), 1) if exponents else None)
        return
    torch._foreach_copy_(list(targets), list(sources))
    if exponents:
        unify_scales(targets, exponents)


def unify_scales(parts: Sequence[Tensor], exponents: Sequence[Tensor]) -> None:
    """Brings the parts of each matrix to one scale, in place: that of its largest part.

    Numbers that fall under the range of fp16 thereby are 2^-37 of the largest magnitude.

    Args:
        parts: of n matrices each, (n, …), or of several peers, (n, peers, …), in fp16, as
            `scale_down` left them.
        exponents: (n,) or (n, peers) for each of these, and of what else is of these matrices.
    """
    of_all = torch.cat([of_part.reshape(len(of_part), -1) for of_part in exponents], dim=1)
    largest = of_all.amax(dim=1).to(torch.float32)
    for part, of_part in zip(parts, exponents):
        below = of_part.to(torch.float32) - largest.view(-1, *(1 for _ in of_part.shape[1:]))
        factors = torch.exp2(below).to(part.dtype)
        part.mul_(factors.view(*factors.shape, *(1 for _ in part.shape[factors.dim() :])))


def elements_of_numbers(wire: torch.dtype) -> int:
    """How many elements `write_numbers` takes for a number."""
    return 1 if wire.itemsize >= 4 else 4


def write_numbers(numbers: Tensor, target: Tensor) -> None:
    """Writes numbers exactly: where the wire has 16 bits, each byte of their fp32 as a number.

    Args:
        target: their elements, flat, or so in each row.
    """
    if elements_of_numbers(target.dtype) > 1:
        numbers = numbers.to(torch.float32).contiguous().view(torch.uint8)
    target.copy_(numbers.flatten())


def read_numbers(buffer: Tensor, start: int, count: int) -> Tensor:
    """``count`` numbers that `write_numbers` wrote, flat."""
    each = elements_of_numbers(buffer.dtype)
    elements = buffer[start : start + count * each]
    return elements if each == 1 else elements.to(torch.uint8).view(torch.float32)
