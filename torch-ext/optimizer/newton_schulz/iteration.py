"""Orthogonalizes matrices: brings them to norm 1 and iterates, in the standard or the Gram form.

Let X be (s, l) with s ≤ l; a tall matrix counts as transposed. One iteration is
X ← aX + (bR + cR²)X with R = XXᵀ (Jordan et al. 2024). In the Gram form (Zhang, Amsel, Chen & Dao
2026, "Gram Newton-Schulz") several iterations work on s × s matrices alone:

    Z = bR + cR²       Q ← ZQ + aQ       T = RZ + aR,  R ← ZT + aT       …       X ← QX

The iterations between two updates of X are a segment. The standard form has segments of one
iteration.

Before the iteration a matrix is divided by its largest magnitude, and then by its *size*, which is
norm_factor·norm + eps, or 1 where that is 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from .. import triton_kernels
from ..scratch import Scratch
from .coefficients import Coefficients, Triple
from .forms import ALGORITHMS, Recipe, block_side, recipe_for
from .products import PRODUCTS, Products, full_precision

_LEAST_ROW_NORM = 1e-6  # the least that equilibration divides a row by: smaller rows stay smaller
_LEAST_NORM = 1e-6  # the least that renormalization divides a matrix by
# A bound on the quotient of an absolute eps and a matrix's largest magnitude. Divided by the bound
# the matrix vanishes already, and the square of more would overflow.
MOST_EPS = 1e18
_SIDES = (-2, -1)

# Bytes of fp32 numbers that are brought to norm 1 at once; on CPUs, what caches hold.
NORMALIZE_BYTES = {"cpu": 1 << 20}
DEFAULT_NORMALIZE_BYTES = 64 << 20


@torch.no_grad()
def newton_schulz(
    G: Tensor,  # (..., rows, cols)
    steps: Optional[int] = None,
    coefficients: Coefficients = "polar_express",
    *,
    algorithm: str = "auto",
    dtype: Optional[torch.dtype] = None,
    eps: float = 1e-7,
    eps_absolute: float = 0.0,
    norm_factor: Optional[float] = None,
    equilibrate: bool = False,
    renormalize: bool = False,
    scratch: Optional[Scratch] = None,
    batch_invariant: bool = False,
) -> Tensor:
    """Approximate polar factor U of every matrix of ``G``: if G = PΣQᵀ, then U ≈ PQᵀ.

    Args:
        G: matrices (..., rows, cols), real floating point; leading dimensions are a batch.
        steps: number of iterations; None takes the number that the coefficients were made for, 5
            for a triple.
        coefficients: a family of `FAMILIES`, one (a, b, c) for all iterations, or a list with one
            for each iteration.
        algorithm: ``"standard"``, ``"gram"``, or ``"auto"``, which takes the faster one for the
            shape.
        dtype: arithmetic of the iteration; None picks by device (`default_dtype`).
        eps: added to the norm of the matrix after its largest magnitude was scaled to 1, so that
            it acts alike on a matrix and on 1e-30 times that matrix.
        eps_absolute: added to the norm of the matrix itself, as most other Muons have it.
        norm_factor: what the norm is multiplied with; None takes the family's.
        equilibrate: first scale rows to the root mean square of their norms, see `_equilibrate`.
        renormalize: scale U to the Frobenius norm sqrt(min(rows, cols)), that of a polar factor.
        scratch: buffers to work in; with them ``G`` may be overwritten, and U lies in ``G`` or in
            one of them. Without them ``G`` is not modified and U is new.
        batch_invariant: orthogonalize one matrix at a time, so that no bit of a result depends on
            the other matrices in ``G``. Libraries pick kernels by the size of a batch, so with
            several threads their sums would differ in the last bits.

    Returns:
        U (..., rows, cols) in the arithmetic dtype. Zero matrices give zeros, matrices with Inf or
        NaN give NaN, empty ones stay empty.

    Raises:
        ValueError: fewer than two dimensions, complex or integer input, unknown options.
    """
    if G.ndim < 2 or not G.is_floating_point():
        raise ValueError(
            f"newton_schulz takes real matrices (..., rows, cols), found {tuple(G.shape)} {G.dtype}"
        )
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {ALGORITHMS}, found {algorithm!r}")
    recipe = recipe_for(
        coefficients,
        steps,
        algorithm,
        dtype,
        G.dtype,
        G.device,
        batch_invariant,
        norm_factor=norm_factor,
        equilibrate=equilibrate,
        renormalize=renormalize,
    )
    batch = G.flatten(0, -3) if G.ndim > 2 else G[None]  # (n, rows, cols)
    overwrite, scratch = scratch is not None, scratch or Scratch()
    U = orthogonalize(batch, recipe, Eps(eps, eps_absolute), overwrite, scratch)
    return U.view(G.shape)


class Eps(NamedTuple):
    """What is added to the norms that matrices are divided by.

    Args:
        relative: added to the norm of a matrix after it was divided by its largest magnitude.
        absolute: added to the norm of the matrix itself.
        divided_by: what `_equilibrate` has divided the matrices by, (n, 1, 1), and therefore
            divides ``absolute`` as well; None for 1.
    """

    relative: float
    absolute: float = 0.0
    divided_by: Optional[Tensor] = None

    def add_to(self, norms: Tensor, largest: Tensor, of: slice) -> Tensor:
        """Adds to norms of matrices that were divided by their largest magnitudes.

        Args:
            norms, largest: of some of the matrices, (n, 1, 1); norms are overwritten.
            of: which of the matrices.
        """
        if self.absolute == 0.0:
            return norms.add_(self.relative)
        absolute = self.absolute / (1.0 if self.divided_by is None else self.divided_by[of])
        return norms.add_((absolute / largest).clamp_(max=MOST_EPS).add_(self.relative))


def orthogonalize(
    batch: Tensor,  # (n, rows, cols)
    recipe: Recipe,
    eps: Eps,
    overwrite: bool,
    scratch: Scratch,
) -> Tensor:
    """Polar factors of a batch, by a recipe.

    The result may lie in ``scratch`` or, if ``overwrite`` allows it, in ``batch``.
    """
    if batch.numel() == 0:
        return batch.to(recipe.dtype, copy=True)
    if not recipe.batch_invariant:
        return _orthogonalize_together(batch, recipe, eps, overwrite, scratch)
    if overwrite and batch.dtype == recipe.dtype:
        U = batch
    else:
        U = scratch.empty("U", batch.shape, recipe.dtype, batch.device)
    # Libraries pick kernels by alignment as well, so each matrix is computed in the same memory.
    single = scratch.empty("single", batch[:1].shape, batch.dtype, batch.device)
    for matrix, polar_factor in zip(batch.split(1), U.split(1)):
        alone = single.copy_(matrix)
        polar_factor.copy_(_orthogonalize_together(alone, recipe, eps, True, scratch))
    return U


def _orthogonalize_together(
    batch: Tensor,
    recipe: Recipe,
    eps: Eps,
    overwrite: bool,
    scratch: Scratch,
) -> Tensor:
    """Does what `orthogonalize` does, for all matrices at once."""
    n, rows, cols = batch.shape
    if recipe.equilibrate:
        batch, eps = _equilibrate(batch, eps, overwrite, scratch)
        overwrite = True
    if overwrite and batch.dtype == recipe.dtype:
        X = batch
    else:
        X = scratch.empty("X", batch.shape, recipe.dtype, batch.device)
    # A large matrix of norm 1 has entries under 6e-5, which fp16 would lose: a power of two brings
    # them nearer to 1. The norm comes to less than 2^7, and partial sums of XXᵀ to less than 2^14
    # or so: nothing overflows even if a library keeps these in fp16.
    is_magnified = recipe.dtype == torch.float16
    magnification = 2.0 ** min(6, int(math.log2(rows * cols) / 2)) if is_magnified else 1.0
    _normalize(batch, recipe.polynomials.norm_factor, eps, magnification, overwrite, scratch, X)

    form, side = recipe.form(rows, cols), min(rows, cols)
    without_kernels = form.products == "tiles" and not triton_kernels.is_used_on(X.device.type)
    products = PRODUCTS["whole" if without_kernels else form.products]
    Y = scratch.empty("Y", X.shape, X.dtype, X.device)
    # One tensor for all: allocators would return several large ones to the system after each call.
    padding = products.padding if block_side(form.products, side, side) < side else 0
    shape = (4 if form.is_gram else 2, n, side, side + padding)
    squares = scratch.empty("squares", shape, X.dtype, X.device)[..., :side].unbind(0)  # R, Z, Q, T
    with full_precision(X.dtype, X.device.type):
        for start, stop in form.segments:
            R = products.gram(X, magnification**-2, squares[0])
            Q, alpha, beta = _segment(R, form.triples[start:stop], products, squares[1:])
            if stop == len(form.triples):
                alpha, beta = alpha / magnification, beta / magnification
            X, Y = products.apply(Q, X, alpha, beta, Y), X
    return _renormalize(X) if recipe.renormalize else X


def _segment(
    R: Tensor,  # (n, s, s), overwritten
    triples: Sequence[Triple],
    products: Products,
    buffers: Sequence[Tensor],
) -> tuple[Tensor, float, float]:
    """Q, α and β of X ← αQX + βX, the update that the iterations of a segment make together."""
    if len(triples) == 1:
        (a, b, c), Z = triples[0], buffers[0]
        return (R, b, a) if c == 0.0 else (products.symmetric(R, R, c, b, R, Z), 1.0, a)
    Z, Q, spare = buffers
    for step, (a, b, c) in enumerate(triples):
        Z = torch.mul(R, b, out=Z) if c == 0.0 else products.symmetric(R, R, c, b, R, Z)
        if step < len(triples) - 1:
            T = products.symmetric(R, Z, 1.0, a, R, spare)
            R = products.symmetric(Z, T, 1.0, a, T, R)
        if step == 0:  # Q = Z + aI
            Z.diagonal(dim1=-2, dim2=-1).add_(a)
            Q, Z = Z, Q
        else:  # ZQ, as R is ZT: roundings agree
            Q, spare = products.symmetric(Z, Q, 1.0, a, Q, spare), Q
    return Q, 1.0, 0.0


def _renormalize(U: Tensor) -> Tensor:
    """Scales U, in place, to the Frobenius norm sqrt(min(rows, cols)) (Muon+, arXiv:2602.21545)."""
    dtype = torch.promote_types(U.dtype, torch.float32)
    parts = U.split(1 if U.device.type == "cpu" else len(U))  # CPUs copy 16 bits to widen them
    norms = [torch.linalg.vector_norm(U_i, 2, _SIDES, True, dtype=dtype) for U_i in parts]
    polar_norm = math.sqrt(min(U.shape[-2:]))
    return U.mul_(torch.cat(norms).clamp_min_(_LEAST_NORM).reciprocal_().mul_(polar_norm))


def _normalize(
    G: Tensor,
    factor: float,
    eps: Eps,
    magnification: float,
    overwrite: bool,
    scratch: Scratch,
    out: Tensor,
) -> None:
    """Divides each matrix by its largest magnitude, then by its size; rounds once into ``out``.

    The size is that after the first division, factor·‖G‖_F + eps. It is not finite for a matrix
    with Inf or NaN. The quotient is multiplied by ``magnification``, a power of two.
    """
    if triton_kernels.is_used_on(G.device.type) and torch.float64 not in (G.dtype, out.dtype):
        from ..triton_kernels import elementwise

        elementwise.normalize(G, out, factor, *eps, MOST_EPS, magnification)
        return
    n, rows, cols = G.shape
    dtype = torch.promote_types(G.dtype, torch.float32)
    limit = NORMALIZE_BYTES.get(G.device.type, DEFAULT_NORMALIZE_BYTES)
    at_once = max(1, limit // (4 * rows * cols))
    # A large matrix that comes or goes in 16 bits is widened some rows at a time, twice, not whole.
    rounds_on_cpu = G.device.type == "cpu" and out.dtype.itemsize == 2
    by_rows = G.dtype != dtype or rounds_on_cpu
    rows_at_once = max(1, limit // (4 * at_once * cols)) if by_rows else rows
    buffers = None if overwrite and G.dtype == dtype else scratch
    for start in range(0, n, at_once):
        part = slice(start, start + at_once)
        # Squares of values under 1e-19 vanish in fp32: bring the largest magnitude to 1 first.
        largest = _largest(G[part]).to(dtype)
        largest.masked_fill_(largest == 0, 1.0)  # (n, 1, 1)
        split = rows_at_once < rows
        slices = G[part].split(rows_at_once, dim=-2) if split else [G[part]]
        targets = out[part].split(rows_at_once, dim=-2) if split else [out[part]]
        norms = []
        for slice_of_G in slices:
            X = _divided(slice_of_G, largest, buffers)
            norms.append(torch.linalg.vector_norm(X, dim=_SIDES, keepdim=True))
        norm = torch.linalg.vector_norm(torch.stack(norms), dim=0) if split else norms[0]
        size = eps.add_to(norm.mul_(factor), largest, part)
        size.masked_fill_(size == 0, 1.0).div_(magnification)
        for slice_of_G, output in zip(slices, targets):
            if split:
                X = slice_of_G if buffers is None else _divided(slice_of_G, largest, buffers)
            if rounds_on_cpu:  # on CPUs out= would allocate the quotient before it is rounded
                output.copy_(X.div_(size))
            else:
                torch.div(X, size, out=output)


def _equilibrate(G: Tensor, eps: Eps, overwrite: bool, scratch: Scratch) -> tuple[Tensor, Eps]:
    """Scales each row to ‖G‖_F/√rows, the root mean square of rows' norms (arXiv:2603.28254).

    A row with a norm under 1e-6 is scaled as if its norm were 1e-6, as nanochat has it.

    Returns:
        A multiple of that matrix, with rows of norm √cols, whose entries fit every format; it lies
        in G if that may be overwritten. Then eps for this multiple.
    """
    n, rows, cols = G.shape
    dtype = torch.promote_types(G.dtype, torch.float32)
    out = G if overwrite else scratch.empty("equilibrated", G.shape, G.dtype, G.device)
    limit = NORMALIZE_BYTES.get(G.device.type, DEFAULT_NORMALIZE_BYTES)
    at_once = max(1, limit // (dtype.itemsize * cols))
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


def _largest(G: Tensor) -> Tensor:
    """The largest magnitude of each matrix, (n, 1, 1); NaN if the matrix has one."""
    if len(G) == 1 and G.device.type == "cpu":  # amax over two dimensions is slow in 16 bits
        lowest, highest = torch.aminmax(G)
    else:
        highest, lowest = G.amax(_SIDES, True), G.amin(_SIDES, True)
    return torch.maximum(highest, -lowest).view(-1, 1, 1)


def _divided(G: Tensor, largest: Tensor, scratch: Optional[Scratch]) -> Tensor:
    """G / largest, in the dtype of ``largest``: in a scratch buffer, or without one in place."""
    if scratch is None:
        return G.div_(largest)
    X = scratch.empty("opmath", G.shape, largest.dtype, G.device)
    return torch.div(G, largest, out=X) if G.dtype == X.dtype else X.copy_(G).div_(largest)
