"""Orthogonalizes matrices: brings them to norm 1 and iterates, in the standard or the Gram form.

On X of shape (s, l), s ≤ l, transposed where it is tall, one iteration is X ← aX + (bR + cR²)X with
R = XXᵀ (Jordan et al. 2024). In its Gram form (Zhang, Amsel, Chen & Dao 2026, "Gram Newton-Schulz")
several iterations are made on matrices of s × s alone:

    Z = bR + cR²       Q ← ZQ + aQ       T = RZ + aR,  R ← ZT + aT       …       X ← QX

A segment is what happens between two updates of X. The standard form is segments of one iteration.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Optional, Union

import torch
from torch import Tensor

from .. import triton_kernels
from ..scratch import Scratch
from .coefficients import Coefficients, Triple
from .forms import ALGORITHMS, Recipe, recipe_for
from .products import PRODUCTS, Products, full_precision

NORMS = ("frobenius", "schatten4")
_SIDES = (-2, -1)

# Matrices are brought to norm 1 in fp32, this many bytes of it at once.
NORMALIZE_BYTES = {"cpu": 2 << 20}
DEFAULT_NORMALIZE_BYTES = 64 << 20


@torch.no_grad()
def newton_schulz(
    G: Tensor,  # (..., rows, cols)
    steps: Optional[int] = None,
    coefficients: Coefficients = "polar_express",
    *,
    norm: str = "frobenius",
    algorithm: str = "auto",
    dtype: Optional[torch.dtype] = None,
    eps: float = 1e-7,
    scratch: Optional[Scratch] = None,
    batch_invariant: bool = False,
) -> Tensor:
    """Approximate polar factor U of every matrix of ``G``: if G = PΣQᵀ, then U ≈ PQᵀ.

    Args:
        G: matrices (..., rows, cols), real floating point; leading dimensions are a batch.
        steps: number of iterations; None is 5, or what an explicit list of coefficients has.
        coefficients: a family of `FAMILIES`, one (a, b, c) for all iterations, or a list of those
            of each iteration.
        norm: ``"frobenius"`` or ``"schatten4"`` (‖XXᵀ‖_F^½, a tighter bound on the largest
            singular value), what matrices are divided by first.
        algorithm: ``"standard"``, ``"gram"``, or ``"auto"``: what is faster for the shape.
        dtype: arithmetic of the iteration; None picks by device (`default_dtype`).
        eps: added to the norm of the matrix after its largest magnitude was scaled to 1, so that
            it acts alike on a matrix and on 1e-30 times that matrix.
        scratch: buffers to work in; with them, ``G`` is overwritten and U lies in one of them.
            Without them ``G`` is not modified and U is new.
        batch_invariant: orthogonalize one matrix after the other, so that none depends, by a bit,
            on which others are in ``G``. Libraries pick kernels by the size of a batch, and with
            several threads their sums then differ in the last bits.

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
    if norm not in NORMS or algorithm not in ALGORITHMS:
        raise ValueError(
            f"norm must be one of {NORMS} and algorithm one of {ALGORITHMS}, "
            f"found {norm!r} and {algorithm!r}"
        )
    recipe = recipe_for(coefficients, steps, algorithm, norm, dtype, G.dtype, G.device)
    if G.numel() == 0:
        return G.to(recipe.dtype, copy=True)
    batch = G.reshape(-1, *G.shape[-2:])  # (n, rows, cols)
    overwrite, scratch = scratch is not None, scratch or Scratch()
    if not batch_invariant:
        return orthogonalize(batch, recipe, eps, overwrite, scratch).view(G.shape)
    if overwrite and G.dtype == recipe.dtype:
        U = batch
    else:
        U = scratch.empty("U", batch.shape, recipe.dtype, G.device)
    # Libraries pick kernels by alignment as well: each matrix is computed in the same memory.
    single = scratch.empty("single", batch[:1].shape, G.dtype, G.device)
    for matrix, polar_factor in zip(batch.split(1), U.split(1)):
        polar_factor.copy_(orthogonalize(single.copy_(matrix), recipe, eps, True, scratch))
    return U.view(G.shape)


def orthogonalize(
    batch: Tensor,  # (n, rows, cols)
    recipe: Recipe,
    eps: float,
    overwrite: bool,
    scratch: Scratch,
) -> Tensor:
    """Polar factors of a batch that is not empty, by a recipe; may be in ``batch``, if it may be
    overwritten, or in ``scratch``."""
    n, rows, cols = batch.shape
    if overwrite and batch.dtype == recipe.dtype:
        X = batch
    else:
        X = scratch.empty("X", batch.shape, recipe.dtype, batch.device)
    factor, scale = recipe.iteration.norm_factor, 1.0
    rest: Optional[Tensor] = None  # what X is still to be divided by, as the first segment does
    if recipe.dtype == torch.float16:
        # The entries of a large matrix of norm 1 would be lost under 6e-5: a power of two brings
        # them nearer to 1. The norm comes to less than 2^7, and sums of a part of XXᵀ to less than
        # 2^14 or so: nothing overflows where a library keeps these in fp16, too.
        scale = 2.0 ** min(6, int(math.log2(rows * cols) / 2))
        size, rest = _normalize_exactly(batch, factor, eps, scale, X)
    else:
        size = _normalize(batch, factor, eps, overwrite, scratch, X)  # (n, 1, 1)

    form, side = recipe.form(rows, cols), min(rows, cols)
    without_kernels = form.products == "tiles" and not triton_kernels.is_used_on(X.device.type)
    products = PRODUCTS["whole" if without_kernels else form.products]
    Y = scratch.empty("Y", X.shape, X.dtype, X.device)
    squares = [
        scratch.empty(purpose, (n, side, side), X.dtype, X.device)
        for purpose in ("RZQT" if form.is_gram else "RZ")
    ]
    with full_precision(X.dtype, X.device.type):
        for start, stop in form.segments:
            correction = None if rest is None else rest.square().reciprocal_()
            R = products.gram(X, scale**-2, correction, squares[0])
            if start == 0 and recipe.norm == "schatten4":  # X is of size 1 by the Frobenius norm
                dtype = torch.promote_types(R.dtype, torch.float32)
                norm_of_R = torch.linalg.vector_norm(R, dim=_SIDES, keepdim=True, dtype=dtype)
                closer = _size(norm_of_R.sqrt_(), factor, eps / size)
                R.div_(closer.square())
                rest = closer if rest is None else rest * closer
            Q, alpha, beta = _segment(R, form.triples[start:stop], rest, products, squares[1:])
            rest = None
            if stop == len(form.triples):
                alpha, beta = alpha / scale, beta / scale
            X, Y = products.apply(Q, X, alpha, beta, Y), X
    return X


def _segment(
    R: Tensor,  # (n, s, s), overwritten
    triples: Sequence[Triple],
    rest: Optional[Tensor],
    products: Products,
    buffers: Sequence[Tensor],
) -> tuple[Tensor, float, float]:
    """Q, α and β of the update X ← αQX + βX that the iterations of a segment make together.

    X is divided by ``rest``, (n, 1, 1), at that, where it is not None.
    """
    Z, *more = buffers
    alone = len(triples) == 1
    for step, (a, b, c) in enumerate(triples):
        if c == 0.0 and alone and rest is None:
            return R, b, a
        Z = torch.mul(R, b, out=Z) if c == 0.0 else products.symmetric(R, R, c, b, R, Z)
        if alone and rest is None:
            return Z, 1.0, a
        if step < len(triples) - 1:
            T = products.symmetric(R, Z, 1.0, a, R, more[-1])
            R = products.symmetric(Z, T, 1.0, a, T, R)
        if step == 0:  # Q = Z + aI
            Q = Z if alone else more[0]
            inverse = torch.ones_like(Z[:, :1, :1]) if rest is None else rest.reciprocal()
            torch.mul(Z, inverse, out=Q)
            Q.diagonal(dim1=-2, dim2=-1).add_(inverse.squeeze(-1), alpha=a)
        else:
            Q, spare = more
            Q = products.symmetric(Z, Q, 1.0, a, Q, spare)  # Z last, as in R: roundings agree
            more = [Q, more[0]]
    return Q, 1.0, 0.0


def _size(norm: Tensor, factor: float, eps: Union[float, Tensor]) -> Tensor:
    """What a matrix of that norm is divided by: 1 for a zero matrix without eps."""
    size = norm.mul_(factor).add_(eps)
    return size.masked_fill_(size == 0, 1.0)


def _normalize(
    G: Tensor, factor: float, eps: float, overwrite: bool, scratch: Scratch, out: Tensor
) -> Tensor:
    """Divides each matrix by its size, factor·‖G‖_F + eps, rounding once into ``out``.

    Returns:
        The sizes, of matrices whose largest magnitude has been divided out, (n, 1, 1) in fp32 or
        fp64; not finite of a matrix with Inf or NaN.
    """
    _, rows, cols = G.shape
    dtype = torch.promote_types(G.dtype, torch.float32)
    limit = NORMALIZE_BYTES.get(G.device.type, DEFAULT_NORMALIZE_BYTES)
    at_once = max(1, limit // (4 * rows * cols))
    # A large matrix in 16 bits goes by in rows, twice, rather than being copied to fp32 whole.
    rows_at_once = rows if G.dtype == dtype else max(1, limit // (4 * at_once * cols))
    buffers = None if overwrite and G.dtype == dtype else scratch
    sizes = []
    for matrices, outputs in zip(G.split(at_once), out.split(at_once)):
        # Squares of values under 1e-19 vanish in fp32: bring the largest magnitude to 1 first.
        highest, lowest = matrices.amax(_SIDES, True), matrices.amin(_SIDES, True)
        largest = torch.maximum(highest, -lowest).to(dtype)
        largest.masked_fill_(largest == 0, 1.0)  # (n, 1, 1)
        slices, norms = matrices.split(rows_at_once, dim=-2), []
        for slice_of_G in slices:
            X = _divided(slice_of_G, largest, buffers)
            norms.append(torch.linalg.vector_norm(X, dim=_SIDES, keepdim=True))
        norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), dim=0)
        size = _size(norm, factor, eps)
        for slice_of_G, output in zip(slices, outputs.split(rows_at_once, dim=-2)):
            if len(slices) > 1:
                X = _divided(slice_of_G, largest, buffers)
            torch.div(X, size, out=output)
        sizes.append(size)
    return torch.cat(sizes)


def _divided(G: Tensor, largest: Tensor, scratch: Optional[Scratch]) -> Tensor:
    """G divided in the dtype of ``largest``: in a buffer, or in place where there are none."""
    if scratch is None:
        return G.div_(largest)
    return scratch.empty("opmath", G.shape, largest.dtype, G.device).copy_(G).div_(largest)


def _normalize_exactly(
    G: Tensor, factor: float, eps: float, scale: float, out: Tensor
) -> tuple[Tensor, Tensor]:
    """Multiplies each matrix by a power of two that brings its size near ``scale``, in fp16.

    What came in fp16, scaled by a power of two for the wire, is not rounded again. G may be
    ``out``.

    Returns:
        The sizes as `_normalize` has them, and what ``out`` is still to be divided by, in [1, 2),
        NaN of a matrix with Inf or NaN.
    """
    dtype = torch.promote_types(G.dtype, torch.float32)
    if triton_kernels.is_used_on(G.device.type):
        from ..triton_kernels import elementwise

        measured = torch.empty((2, len(G)), dtype=dtype, device=G.device)
        elementwise.measure(list(G), *measured)
        size, rest, exponents = elementwise.sizes(*measured, factor=factor, eps=eps, scale=scale)
        elementwise.pack(list(G), list(out), exponents)
        return size.view(-1, 1, 1), rest.view(-1, 1, 1)
    largest = torch.linalg.vector_norm(G, math.inf, _SIDES, True, dtype=dtype)  # (n, 1, 1)
    largest.masked_fill_(largest == 0, 1.0)
    scaled = torch.ldexp(G.to(dtype), -_exponent(largest))
    norm = torch.linalg.vector_norm(scaled, 2, _SIDES, True).div_(_mantissa(largest))
    size = _size(norm, factor, eps)
    rest = size * _mantissa(largest)
    exponents = _exponent(largest) + _exponent(rest) - int(math.log2(scale))
    half = exponents // 2  # a power of two for the whole may leave the range of fp32
    out.copy_(torch.ldexp(torch.ldexp(G.to(dtype), -half), half - exponents))
    return size, _mantissa(rest)


def _exponent(values: Tensor) -> Tensor:
    """k, where 2^k is the greatest power of two not above a value; whole numbers."""
    return torch.frexp(values).exponent - 1


def _mantissa(values: Tensor) -> Tensor:
    """What is left of values when their `_exponent` is divided out, in [1, 2); NaN of Inf."""
    return torch.where(torch.isfinite(values), torch.frexp(values).mantissa * 2, math.nan)
