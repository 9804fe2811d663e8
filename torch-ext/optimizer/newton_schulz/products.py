"""Computes products that are symmetric: whole, or one half only, in blocks or tiles.

One set of three functions for each way, over batches: R = XXᵀ, and αAB + βC of matrices that
commute, both symmetric; and the multiplication of X by such a matrix, on its shorter side.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, Optional, Union

import torch
from torch import Tensor

from .forms import block_rows

Symmetric = Callable[[Tensor, Tensor, float, float, Tensor, Tensor], Tensor]


class Products(NamedTuple):
    """One way to multiply.

    Args:
        gram: ``(X, alpha, factor, out)``: alpha·factor·XXᵀ, or XᵀX of a tall X, into ``out``;
            ``factor`` is None or a tensor (n, 1, 1).
        symmetric: ``(A, B, alpha, beta, C, out)``: alpha·AB + beta·C into ``out``.
        apply: ``(Q, X, alpha, beta, out)``: alpha·QX + beta·X, or alpha·XQ + beta·X of a tall X.
    """

    gram: Callable[[Tensor, float, Optional[Tensor], Tensor], Tensor]
    symmetric: Symmetric
    apply: Callable[[Tensor, Tensor, float, float, Tensor], Tensor]


# What torch lets cuBLAS do with operands of a dtype, by default or as users ask: sum parts of k in
# 16 bits, take TF32.
_SWITCHES: dict[torch.dtype, dict[str, Any]] = {
    torch.float16: {
        "allow_fp16_reduced_precision_reduction": False,
        "allow_fp16_accumulation": False,
    },
    torch.bfloat16: {"allow_bf16_reduced_precision_reduction": False},
    torch.float32: {"fp32_precision": "ieee"},
}


_switching = threading.RLock()  # switches are the process's, and another thread would restore them


@contextlib.contextmanager
def full_precision(dtype: torch.dtype, device_type: str) -> Iterator[None]:
    """Lets cuBLAS multiply with sums in fp32; the user's switches are back afterwards.

    Not in graphs of torch.compile, which guards these switches.
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
                split_k = getattr(matmul, f"{name}_split_k", None)  # set together, if torch has it
                if split_k is not None:
                    before[name], value = (before[name], split_k), (value, split_k)
                setattr(matmul, name, value)
            yield
        finally:
            for name, value in before.items():
                if name == "fp32_precision":  # what was inherited comes back by itself
                    setattr(matmul, name, "none")
                if getattr(matmul, name) != value:
                    setattr(matmul, name, value)


def _sides(X: Tensor) -> tuple[Tensor, Tensor]:
    """The factors, X and Xᵀ, of the smaller of X's two Gram matrices."""
    return (X.mT, X) if X.shape[-2] > X.shape[-1] else (X, X.mT)


def _product(A: Tensor, B: Tensor, alpha: float, beta: float, C: Tensor, out: Tensor) -> Tensor:
    if alpha == 1.0 and beta == 0.0:
        return torch.bmm(A, B, out=out)
    return torch.baddbmm(C, A, B, alpha=alpha, beta=beta, out=out)


def _gram(
    symmetric: Symmetric, X: Tensor, alpha: float, factor: Optional[Tensor], out: Tensor
) -> Tensor:
    symmetric(*_sides(X), alpha, 0.0, out, out)
    return out if factor is None else out.mul_(factor)


def _apply_whole(Q: Tensor, X: Tensor, alpha: float, beta: float, out: Tensor) -> Tensor:
    left, right = (X, Q) if X.shape[-2] > X.shape[-1] else (Q, X)
    return _product(left, right, alpha, beta, X, out)


def _symmetric_blocks(
    A: Tensor, B: Tensor, alpha: float, beta: float, C: Tensor, out: Tensor
) -> Tensor:
    """Computes rows up to the diagonal, block by block; the rest is their mirror image.

    One matrix at a time: CPUs multiply into a part of a matrix in place, but not of a batch.
    """
    _, s, k = A.shape
    rows = block_rows("blocks", s, k)
    if rows == s:
        return _product(A, B, alpha, beta, C, out)
    for A_i, B_i, C_i, out_i in zip(A, B, C, out):
        for start in range(0, s, rows):
            stop = min(start + rows, s)
            block, left, right = (slice(start, stop), slice(stop)), A_i[start:stop], B_i[:, :stop]
            if alpha == 1.0 and beta == 0.0:
                torch.mm(left, right, out=out_i[block])
            else:
                torch.addmm(C_i[block], left, right, alpha=alpha, beta=beta, out=out_i[block])
            out_i[:start, start:stop].copy_(out_i[start:stop, :start].mT)
    return out


def _mirror(product: Tensor, out: Tensor) -> Tensor:
    """Rounds the upper triangle of an fp32 product, once, as kernels by tiles do."""
    return out.copy_(product.triu().add_(product.triu(1).mT))


def _gram_in_fp32(X: Tensor, alpha: float, factor: Optional[Tensor], out: Tensor) -> Tensor:
    product = torch.bmm(*_sides(X.float())).mul_(alpha)
    return _mirror(product if factor is None else product.mul_(factor), out)


def _symmetric_in_fp32(
    A: Tensor, B: Tensor, alpha: float, beta: float, C: Tensor, out: Tensor
) -> Tensor:
    return _mirror(torch.baddbmm(C.float(), A.float(), B.float(), alpha=alpha, beta=beta), out)


def _apply_in_fp32(Q: Tensor, X: Tensor, alpha: float, beta: float, out: Tensor) -> Tensor:
    X_fp32 = X.float()
    return out.copy_(_apply_whole(Q.float(), X_fp32, alpha, beta, torch.empty_like(X_fp32)))


def _gram_tiles(X: Tensor, alpha: float, factor: Optional[Tensor], out: Tensor) -> Tensor:
    scale = alpha if factor is None else factor.flatten().to(torch.float32) * alpha
    return _symmetric_tiles(*_sides(X), scale, 0.0, out, out)


def _symmetric_tiles(
    A: Tensor, B: Tensor, alpha: Union[float, Tensor], beta: float, C: Tensor, out: Tensor
) -> Tensor:
    from ..triton_kernels.symmetric import symmetric_product

    return symmetric_product(A, B, alpha=alpha, beta=beta, C=C, out=out)


PRODUCTS = {
    "whole": Products(partial(_gram, _product), _product, _apply_whole),
    "blocks": Products(partial(_gram, _symmetric_blocks), _symmetric_blocks, _apply_whole),
    # For fp16 on CPUs the arithmetic of accelerators: products in fp32, and one rounding.
    "in_fp32": Products(_gram_in_fp32, _symmetric_in_fp32, _apply_in_fp32),
    "tiles": Products(_gram_tiles, _symmetric_tiles, _apply_whole),  # by kernels
}
