"""Orthogonalizes matrices: scales them to norm 1 and iterates, in the standard or the Gram form.

X is (s, l) with s ≤ l; tall matrices work as if transposed. `standard` is the usual iteration
(Jordan et al. 2024); `gram` runs several iterations on s × s matrices alone (Zhang, Amsel, Chen &
Dao 2026, "Gram Newton-Schulz").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Optional

import torch
from torch import Tensor

from .. import triton_kernels
from ..scratch import Scratch
from .coefficients import Coefficients, Triple
from .forms import ALGORITHMS, Form, Recipe, block_side, recipe_for
from .normalization import Eps, equilibrate, is_by_kernel, normalize, part_bytes, renormalize
from .products import PRODUCTS, Products, full_precision

# Bytes of matrices to orthogonalize at once: on CPUs, few enough that buffers stay in caches.
AT_ONCE_BYTES = {"cpu": 4 << 20}


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
    """Approximates the polar factor U of every matrix in ``G``: if G = PΣQᵀ, then U ≈ PQᵀ.

    Args:
        G: matrices (..., rows, cols), real floating point; leading dimensions are a batch.
        steps: number of iterations. None uses the number that the coefficients were made for, or 5
            for one (a, b, c).
        coefficients: the name of a published family (see ``ns_coefficients`` in docs/options.md),
            one (a, b, c) for all iterations, or a list with one for each iteration.
        algorithm: ``"standard"``, ``"gram"``, or ``"auto"``, which picks the faster for the shape.
        dtype: dtype of the iteration's arithmetic; None uses `default_dtype`.
        eps: added to the norm after the matrix was scaled to a largest magnitude of 1, so it has
            the same effect on a matrix and on 1e-30 times that matrix.
        eps_absolute: added to the norm of the unscaled matrix, as in most other Muons.
        norm_factor: multiplies the norm; None uses the family's factor.
        equilibrate: True first scales each row to the root mean square of the rows' norms.
        renormalize: True scales U to the Frobenius norm sqrt(min(rows, cols)), that of a polar
            factor.
        scratch: buffers to work in. With them, ``G`` may be overwritten, and U lies in ``G`` or in
            one of them; without them, ``G`` is unchanged and U is new.
        batch_invariant: True orthogonalizes one matrix at a time, so that no bit of its result
            depends on the other matrices in ``G``. Libraries pick kernels by batch size, which can
            change the last bits.

    Returns:
        U (..., rows, cols), in the dtype of the arithmetic. Zero matrices give zeros, matrices with
        Inf or NaN give NaN, and empty matrices stay empty.

    Raises:
        ValueError: fewer than two dimensions, complex or integer input, or unknown options.
    """
    if G.ndim < 2 or not G.is_floating_point():
        raise ValueError(
            f"newton_schulz needs real matrices (..., rows, cols), found {tuple(G.shape)} {G.dtype}"
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


def orthogonalize(
    batch: Tensor,  # (n, rows, cols)
    recipe: Recipe,
    eps: Eps,
    overwrite: bool,
    scratch: Scratch,
) -> Tensor:
    """Returns the polar factors of a batch.

    The result may share memory with ``scratch`` or, if ``overwrite``, with ``batch``.
    """
    if batch.numel() == 0:
        return batch.to(recipe.dtype, copy=True)
    limit = AT_ONCE_BYTES.get(batch.device.type, batch.nbytes)
    at_once = 1 if recipe.batch_invariant else max(1, limit // batch[0].nbytes)
    if at_once >= len(batch) and not recipe.batch_invariant:
        return _orthogonalize_together(batch, recipe, eps, overwrite, scratch)
    if overwrite and batch.dtype == recipe.dtype:
        U = batch
    else:
        U = scratch.empty("U", batch.shape, recipe.dtype, batch.device)
    # Libraries also pick kernels by alignment, so exact mode copies each matrix to the same memory.
    for matrices, polar_factors in zip(batch.split(at_once), U.split(at_once)):
        polar_factors.copy_(_orthogonalize_together(matrices, recipe, eps, False, scratch))
    return U


def _orthogonalize_together(
    batch: Tensor,
    recipe: Recipe,
    eps: Eps,
    overwrite: bool,
    scratch: Scratch,
) -> Tensor:
    """Orthogonalizes all matrices of a batch at once, like `orthogonalize`."""
    n, rows, cols = batch.shape
    if overwrite and batch.dtype == recipe.dtype:
        X = batch
    else:
        X = scratch.empty("X", batch.shape, recipe.dtype, batch.device)
    # A large matrix of norm 1 has entries under 6e-5, which fp16 would lose, so multiply it by a
    # power of two. The norm is then less than 2^7, and partial sums of XXᵀ are less than about
    # 2^14: nothing overflows even if a library keeps the sums in fp16.
    is_magnified = recipe.dtype == torch.float16
    magnification = 2.0 ** min(6, int(math.log2(rows * cols) / 2)) if is_magnified else 1.0
    factor, by_kernel = recipe.polynomials.norm_factor, is_by_kernel(batch, X)
    at_once = n if by_kernel else max(1, part_bytes(batch.device.type) // (4 * rows * cols))
    for G, out in zip(batch.split(at_once), X.split(at_once)):
        eps_of_G = eps
        if recipe.equilibrate:
            G, eps_of_G = equilibrate(G, eps, overwrite, scratch)
        normalize(G, factor, eps_of_G, magnification, scratch, out)
    with full_precision(X.dtype, X.device.type):
        U = _iterate(X, recipe.form(rows, cols), magnification, scratch)
    return renormalize(U) if recipe.renormalize else U


def _iterate(X: Tensor, form: Form, magnification: float, scratch: Scratch) -> Tensor:
    """Iterates on X, which has been multiplied by ``magnification``; the result hasn't."""
    n, side = len(X), min(X.shape[-2:])
    without_kernels = form.products == "tiles" and not triton_kernels.is_used_on(X.device.type)
    products = PRODUCTS["whole" if without_kernels else form.products]
    products = products._replace(gram=partial(products.gram, alpha=magnification**-2))
    Y = scratch.empty("Y", X.shape, X.dtype, X.device)
    # One tensor for all four: separate large ones would go back to the system after each call.
    padding = products.padding if block_side(form.products, side, side) < side else 0
    shape = (4 if form.is_gram else 2, n, side, side + padding)
    squares = scratch.empty("squares", shape, X.dtype, X.device)[..., :side].unbind(0)  # R, Z, Q, T
    if not form.is_gram:
        return standard(X, form.triples, 1 / magnification, products, squares, Y)[0]
    for start, stop in form.segments:
        is_last, triples = stop == len(form.triples), form.triples[start:stop]
        iterate = standard if len(triples) == 1 else gram
        X, Y = iterate(X, triples, 1 / magnification if is_last else 1.0, products, squares, Y)
    return X


def standard(
    X: Tensor,  # (n, s, l), or (n, l, s) transposed
    triples: Sequence[Triple],
    scale: float,
    products: Products,
    squares: Sequence[Tensor],  # of (n, s, s), overwritten
    Y: Tensor,  # like X; both are overwritten
) -> tuple[Tensor, Tensor]:
    """Computes X ← aX + ZX with Z = bR + cR² and R = XXᵀ for each (a, b, c), then X ← scale·X.

    Returns:
        X, and the other one of the tensors ``X`` and ``Y``.
    """
    R, Z, *_ = squares
    for step, (a, b, c) in enumerate(triples, start=1):
        last = scale if step == len(triples) else 1.0
        R = products.gram(X, out=R)
        if c == 0.0:
            X, Y = products.apply(R, X, last * b, last * a, Y), X
        else:
            Z = products.symmetric(R, R, c, b, R, Z)
            X, Y = products.apply(Z, X, last, last * a, Y), X
    return X, Y


def gram(
    X: Tensor,
    triples: Sequence[Triple],
    scale: float,
    products: Products,
    squares: Sequence[Tensor],
    Y: Tensor,
) -> tuple[Tensor, Tensor]:
    """Computes the same as `standard`, but reads and updates X only once, between two restarts.

    With R = XXᵀ and Q = I at first, for each (a, b, c): Z = bR + cR², Q ← ZQ + aQ, T = RZ + aR,
    R ← ZT + aT. Then X ← scale·QX.
    """
    R, Z, Q, T = squares
    R = products.gram(X, out=R)
    for step, (a, b, c) in enumerate(triples, start=1):
        Z = torch.mul(R, b, out=Z) if c == 0.0 else products.symmetric(R, R, c, b, R, Z)
        if step < len(triples):
            T = products.symmetric(R, Z, 1.0, a, R, T)
            R = products.symmetric(Z, T, 1.0, a, T, R)
        if step == 1:
            Z.diagonal(dim1=-2, dim2=-1).add_(a)
            Q, Z = Z, Q
        else:  # ZQ rather than QZ, since R is ZT: they round the same way
            Q, T = products.symmetric(Z, Q, 1.0, a, Q, T), Q
    return products.apply(Q, X, scale, 0.0, Y), X
