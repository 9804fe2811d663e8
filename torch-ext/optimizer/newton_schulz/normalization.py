"""Scales matrices to norm 1 before the iteration, and to the norm of a polar factor after it.

A matrix is divided by its largest magnitude, so that no square underflows, and then by its *size*:
norm_factor·norm + eps, or 1 if that is 0.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from .. import triton_kernels
from ..scratch import Scratch

_LEAST_ROW_NORM = 1e-6  # the smallest divisor of rows in equilibration: smaller rows stay smaller
_LEAST_NORM = 1e-6  # the smallest divisor of a matrix in renormalization
# A bound on the quotient of an absolute eps and a matrix's largest magnitude. A matrix divided by
# the bound already vanishes, and a larger quotient would overflow when squared.
MOST_EPS = 1e18
_SIDES = (-2, -1)

# Bytes of fp32 numbers to work on at once; on CPUs, what fits caches.
PART_BYTES = {"cpu": 1 << 20}
DEFAULT_PART_BYTES = 64 << 20


class Eps(NamedTuple):
    """Values to add to the norms that matrices are divided by.

    Args:
        relative: added to the norm of a matrix after division by its largest magnitude.
        absolute: added to the norm of the matrix itself.
        divided_by: the matrices' divisors in `equilibrate`, (n, 1, 1), which also divide
            ``absolute``; None is 1.
    """

    relative: float
    absolute: float = 0.0
    divided_by: Optional[Tensor] = None

    def add_to(self, norms: Tensor, largest: Tensor) -> Tensor:
        """Adds to norms (n, 1, 1), in place; ``largest`` (n, 1, 1) has divided the matrices."""
        if self.absolute == 0.0:
            return norms.add_(self.relative)
        absolute = self.absolute / (1.0 if self.divided_by is None else self.divided_by)
        return norms.add_((absolute / largest).clamp_(max=MOST_EPS).add_(self.relative))


def part_bytes(device_type: str) -> int:
    return PART_BYTES.get(device_type, DEFAULT_PART_BYTES)


def is_by_kernel(G: Tensor, out: Tensor) -> bool:
    """Returns True if one kernel normalizes all matrices of a batch."""
    return triton_kernels.is_used_on(G.device.type) and torch.float64 not in (G.dtype, out.dtype)


def normalize(
    G: Tensor,  # (n, rows, cols)
    factor: float,
    eps: Eps,
    magnification: float,
    scratch: Scratch,
    out: Tensor,
) -> None:
    """Divides each matrix by its largest magnitude, then by its size; rounds once into ``out``.

    The size, factor·‖G‖_F + eps after the first division, isn't finite for a matrix with Inf or
    NaN. The quotient is multiplied by ``magnification``, a power of two. ``out`` may be G itself.
    """
    if is_by_kernel(G, out):
        from ..triton_kernels import elementwise

        elementwise.normalize(G, out, factor, *eps, MOST_EPS, magnification)
        return
    n, rows, cols = G.shape
    dtype = torch.promote_types(G.dtype, torch.float32)
    # Squares of values under 1e-19 vanish in fp32: scale the largest magnitude to 1 first.
    largest = _largest(G).to(dtype)
    largest.masked_fill_(largest == 0, 1.0)  # (n, 1, 1)
    # To save memory, large matrices with 16-bit input or output are widened in slices, twice.
    rounds_on_cpu = G.device.type == "cpu" and out.dtype.itemsize == 2
    by_rows = G.dtype != dtype or rounds_on_cpu
    at_once = max(1, part_bytes(G.device.type) // (4 * n * cols)) if by_rows else rows
    slices = list(zip(G.split(at_once, dim=1), out.split(at_once, dim=1)))
    norms = []
    for rows_of_G, output in slices:
        X = _divided(rows_of_G, largest, scratch, output)
        norms.append(torch.linalg.vector_norm(X, dim=_SIDES, keepdim=True))
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), dim=0)
    size = eps.add_to(norm.mul_(factor), largest)
    size.masked_fill_(size == 0, 1.0).div_(magnification)
    for rows_of_G, output in slices:
        if len(slices) > 1:
            X = _divided(rows_of_G, largest, scratch, output)
        if rounds_on_cpu:  # on CPUs, out= would allocate the quotient before rounding it
            output.copy_(X.div_(size))
        else:
            torch.div(X, size, out=output)


def _largest(G: Tensor) -> Tensor:
    """Returns the largest magnitude of each matrix, (n, 1, 1); NaN if the matrix has NaN."""
    if len(G) == 1 and G.device.type == "cpu":  # amax over two dimensions is slow in 16 bits
        lowest, highest = torch.aminmax(G)
    else:
        highest, lowest = G.amax(_SIDES, True), G.amin(_SIDES, True)
    return torch.maximum(highest, -lowest).view(-1, 1, 1)


def _divided(G: Tensor, largest: Tensor, scratch: Scratch, out: Tensor) -> Tensor:
    """Returns G / largest in the dtype of ``largest``, in ``out`` if that fits, or ``scratch``."""
    dtype = largest.dtype
    X = out if out.dtype == dtype else scratch.empty("opmath", G.shape, dtype, G.device)
    return torch.div(G, largest, out=X) if G.dtype == dtype else X.copy_(G).div_(largest)


def equilibrate(G: Tensor, eps: Eps, overwrite: bool, scratch: Scratch) -> tuple[Tensor, Eps]:
    """Scales each row to ‖G‖_F/√rows, the root mean square of the rows' norms (arXiv:2603.28254).

    A row with a norm under 1e-6 is scaled as if its norm were 1e-6, as in nanochat.

    Returns:
        A multiple of that matrix whose rows have norm √cols, so that entries fit every dtype, and
        eps for this multiple. The matrix overwrites G if ``overwrite``.
    """
    n, rows, cols = G.shape
    dtype = torch.promote_types(G.dtype, torch.float32)
    overwrite = overwrite and G.is_contiguous()
    out = G if overwrite else scratch.empty("equilibrated", G.shape, G.dtype, G.device)
    at_once = max(1, part_bytes(G.device.type) // (dtype.itemsize * cols))
    norms = []
    pieces = (t.view(n * rows, -1).split(at_once) for t in (G.contiguous(), out))
    for rows_of_G, output in zip(*pieces):
        X = scratch.empty("opmath", rows_of_G.shape, dtype, G.device).copy_(rows_of_G)
        largest = torch.linalg.vector_norm(X, math.inf, -1, True)
        largest.masked_fill_(largest == 0, 1.0)  # zeros stay zeros
        norms.append(torch.linalg.vector_norm(X.div_(largest), dim=-1, keepdim=True).mul_(largest))
        factors = largest.div_(norms[-1].clamp_min(_LEAST_ROW_NORM)).mul_(math.sqrt(cols))
        output.copy_(X.mul_(factors))
    if eps.absolute != 0.0:
        norm = torch.linalg.vector_norm(torch.cat(norms).view(n, rows, 1), dim=1, keepdim=True)
        eps = eps._replace(divided_by=norm.div_(math.sqrt(rows * cols)))
    return out, eps


def renormalize(U: Tensor) -> Tensor:
    """Scales U, in place, to the Frobenius norm sqrt(min(rows, cols)) (Muon+, arXiv:2602.21545)."""
    dtype = torch.promote_types(U.dtype, torch.float32)
    parts = U.split(1 if U.device.type == "cpu" else len(U))  # CPUs copy 16 bits to widen them
    norms = [torch.linalg.vector_norm(U_i, 2, _SIDES, True, dtype=dtype) for U_i in parts]
    polar_norm = math.sqrt(min(U.shape[-2:]))
    return U.mul_(torch.cat(norms).clamp_min_(_LEAST_NORM).reciprocal_().mul_(polar_norm))
