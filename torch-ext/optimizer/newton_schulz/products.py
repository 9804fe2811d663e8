"""Computes symmetric products: whole, or only one half of each, in blocks or tiles.

`PRODUCTS` has three functions over batches for each of these ways. Two compute symmetric products:
XXᵀ, and αAB + βC of symmetric matrices that commute. The third multiplies X, on its shorter side,
by a symmetric matrix.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .forms import block_side

Symmetric = Callable[[Tensor, Tensor, float, float, Tensor, Tensor], Tensor]


class Products(NamedTuple):
    """One way to multiply.

    Args:
        gram: ``(X, alpha, out)`` writes alpha·XXᵀ, or alpha·XᵀX of a tall X, into ``out``.
        symmetric: ``(A, B, alpha, beta, C, out)`` writes alpha·AB + beta·C into ``out``.
        apply: ``(Q, X, alpha, beta, out)`` writes alpha·QX + beta·X, or alpha·XQ + beta·X of a tall
            X, into ``out``.
        padding: unused entries after each row of symmetric matrices. With rows 2^k bytes apart, a
            column would map to few lines of a CPU's cache, and mirroring would be twice as slow.
    """

    gram: Callable[..., Tensor]
    symmetric: Symmetric
    apply: Callable[[Tensor, Tensor, float, float, Tensor], Tensor]
    padding: int = 0


# By dtype of operands: torch's switches, and the values with which cuBLAS neither reduces partial
# sums in 16 bits nor uses TF32. Torch's defaults or the user's settings may differ.
_SWITCHES: dict[torch.dtype, dict[str, Any]] = {
    torch.float16: {
        "allow_fp16_reduced_precision_reduction": False,
        "allow_fp16_accumulation": False,
    },
    torch.bfloat16: {"allow_bf16_reduced_precision_reduction": False},
    torch.float32: {"fp32_precision": "ieee"},
}


_switching = threading.RLock()  # switches are global: another thread must not restore them early


@contextlib.contextmanager
def full_precision(dtype: torch.dtype, device_type: str) -> Iterator[None]:
    """A context in which cuBLAS accumulates in fp32; it restores the user's switches at its end.

    It does nothing under torch.compile, which guards these switches.
    """
    if device_type != "cuda" or dtype not in _SWITCHES or torch.compiler.is_compiling():
        yield
        return
    matmul = torch.backends.cuda.matmul
    before: dict[str, Any] = {}
    with _switching:
        try:
            for name, value in _SWITCHES[dtype].items():
                before[name] = getattr(matmul, name)
                # Some versions of torch have a second switch, which must be set with the first.
                split_k = getattr(matmul, f"{name}_split_k", None)
                if split_k is not None:
                    before[name], value = (before[name], split_k), (value, split_k)
                setattr(matmul, name, value)
            yield
        finally:
            for name, value in before.items():
                if name == "fp32_precision":  # with "none" it inherits again, if it did before
                    setattr(matmul, name, "none")
                if getattr(matmul, name) != value:
                    setattr(matmul, name, value)


def _is_tall(X: Tensor) -> bool:
    return X.shape[-2] > X.shape[-1]


def _sides(X: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the factors of the smaller Gram matrix of X."""
    return (X.mT, X) if _is_tall(X) else (X, X.mT)


def _product(A: Tensor, B: Tensor, alpha: float, beta: float, C: Tensor, out: Tensor) -> Tensor:
    """Writes alpha·AB + beta·C, for matrices or batches, into ``out``."""
    multiply, add = (torch.mm, torch.addmm) if A.ndim == 2 else (torch.bmm, torch.baddbmm)
    if alpha == 1.0 and beta == 0.0:
        return multiply(A, B, out=out)
    return add(C, A, B, alpha=alpha, beta=beta, out=out)


def _gram(symmetric: Symmetric, X: Tensor, alpha: float, out: Tensor) -> Tensor:
    return symmetric(*_sides(X), alpha, 0.0, out, out)


def _apply(Q: Tensor, X: Tensor, alpha: float, beta: float, out: Tensor) -> Tensor:
    """Multiplies a padded Q one matrix at a time: libraries copy a padded batch, even of one."""
    left, right = (X, Q) if _is_tall(X) else (Q, X)
    if Q.stride(-2) == Q.shape[-1]:
        return _product(left, right, alpha, beta, X, out)
    for left_i, right_i, X_i, out_i in zip(*(t.unbind(0) for t in (left, right, X, out))):
        _product(left_i, right_i, alpha, beta, X_i, out_i)
    return out


def _symmetric_blocks(
    name: str,
    by_rows: bool,
    A: Tensor,
    B: Tensor,
    alpha: float,
    beta: float,
    C: Tensor,
    out: Tensor,
) -> Tensor:
    """Computes columns from the diagonal down, block by block, and copies their mirror image.

    CPUs write a product in place into a part of a matrix, but not into a part of a batch, so this
    multiplies one matrix at a time. Libraries repack the right factor: with blocks of columns, they
    repack each part of it only once. Exact mode uses rows up to the diagonal (``by_rows``), whose
    last bits differ, because its bits must not change.
    """
    _, s, k = A.shape
    side = block_side(name, s, k)
    if side == s:
        return _product(A, B, alpha, beta, C, out)
    for A_i, B_i, C_i, out_i in zip(*(tensor.unbind(0) for tensor in (A, B, C, out))):
        for start in range(0, s, side):
            block = slice(start, min(start + side, s))
            rows, cols = (block, slice(block.stop)) if by_rows else (slice(start, None), block)
            _product(A_i[rows], B_i[:, cols], alpha, beta, C_i[rows, cols], out_i[rows, cols])
            others = slice(start) if by_rows else slice(block.stop, None)
            mirrored = (others, block) if by_rows else (block, others)
            out_i[mirrored].copy_(out_i[mirrored[::-1]].mT)
    return out


def _by_blocks(name: str, by_rows: bool = False, padding: int = 32) -> Products:
    symmetric = partial(_symmetric_blocks, name, by_rows)
    return Products(partial(_gram, symmetric), symmetric, _apply, padding)


def _symmetric_in_fp32(
    A: Tensor, B: Tensor, alpha: float, beta: float, C: Tensor, out: Tensor
) -> Tensor:
    """Rounds the upper triangle of an fp32 product once, and mirrors it, like the Triton kernel."""
    product = torch.baddbmm(C.float(), A.float(), B.float(), alpha=alpha, beta=beta)
    return out.copy_(product.triu().add_(product.triu(1).mT))


def _apply_in_fp32(Q: Tensor, X: Tensor, alpha: float, beta: float, out: Tensor) -> Tensor:
    Y = torch.empty_like(X, dtype=torch.float32)
    return out.copy_(_apply(Q.float(), X.float(), alpha, beta, Y))


def _symmetric_tiles(
    A: Tensor, B: Tensor, alpha: float, beta: float, C: Tensor, out: Tensor
) -> Tensor:
    from ..triton_kernels import symmetric

    return symmetric.symmetric_product(A, B, alpha, beta, C, out)


PRODUCTS = {
    "whole": Products(partial(_gram, _product), _product, _apply),
    "blocks": _by_blocks("blocks"),
    "fp32 blocks": _by_blocks("fp32 blocks"),
    "exact blocks": _by_blocks("exact blocks", by_rows=True, padding=0),
    # fp16 on CPUs with the arithmetic of accelerators: products in fp32, rounded once.
    "in_fp32": Products(partial(_gram, _symmetric_in_fp32), _symmetric_in_fp32, _apply_in_fp32),
    # With a Triton kernel.
    "tiles": Products(partial(_gram, _symmetric_tiles), _symmetric_tiles, _apply),
}
