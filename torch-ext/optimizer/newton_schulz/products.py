"""Computes symmetric products: whole, or only one half of each, in blocks or tiles.

`PRODUCTS` has three functions over batches for each of these ways. Two make symmetric products,
R = XXᵀ, and αAB + βC of symmetric matrices that commute; the third multiplies X, on its shorter
side, by such a product.
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
        padding: unused entries after each row of symmetric matrices. If rows were 2^k bytes apart,
            a column would fall on few lines of a CPU's cache, and a mirror image would take twice
            the time.
    """

    gram: Callable[..., Tensor]
    symmetric: Symmetric
    apply: Callable[[Tensor, Tensor, float, float, Tensor], Tensor]
    padding: int = 0


# For operands of each dtype, torch's switches, and the values at which cuBLAS neither reduces parts
# of a sum in 16 bits nor takes TF32. Torch's defaults or users may have set other values.
_SWITCHES: dict[torch.dtype, dict[str, Any]] = {
    torch.float16: {
        "allow_fp16_reduced_precision_reduction": False,
        "allow_fp16_accumulation": False,
    },
    torch.bfloat16: {"allow_bf16_reduced_precision_reduction": False},
    torch.float32: {"fp32_precision": "ieee"},
}


_switching = threading.RLock()  # switches are global: another thread could restore them too early


@contextlib.contextmanager
def full_precision(dtype: torch.dtype, device_type: str) -> Iterator[None]:
    """A context in which cuBLAS sums in fp32; it restores the user's switches at its end.

    It does nothing in graphs of torch.compile, which guards these switches.
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
                # Some versions of torch have a second switch, to be set with the first one.
                split_k = getattr(matmul, f"{name}_split_k", None)
                if split_k is not None:
                    before[name], value = (before[name], split_k), (value, split_k)
                setattr(matmul, name, value)
            yield
        finally:
            for name, value in before.items():
                if name == "fp32_precision":  # "none" inherits the value again, if it was inherited
                    setattr(matmul, name, "none")
                if getattr(matmul, name) != value:
                    setattr(matmul, name, value)


def _is_tall(X: Tensor) -> bool:
    return X.shape[-2] > X.shape[-1]


def _sides(X: Tensor) -> tuple[Tensor, Tensor]:
    """The factors, X and Xᵀ, of the smaller Gram matrix of X."""
    return (X.mT, X) if _is_tall(X) else (X, X.mT)


def _product(A: Tensor, B: Tensor, alpha: float, beta: float, C: Tensor, out: Tensor) -> Tensor:
    """Writes alpha·AB + beta·C, of two matrices or of two batches, into ``out``."""
    multiply, add = (torch.mm, torch.addmm) if A.ndim == 2 else (torch.bmm, torch.baddbmm)
    if alpha == 1.0 and beta == 0.0:
        return multiply(A, B, out=out)
    return add(C, A, B, alpha=alpha, beta=beta, out=out)


def _gram(symmetric: Symmetric, X: Tensor, alpha: float, out: Tensor) -> Tensor:
    return symmetric(*_sides(X), alpha, 0.0, out, out)


def _apply(Q: Tensor, X: Tensor, alpha: float, beta: float, out: Tensor) -> Tensor:
    """Multiplies one by one if Q has padding: libraries copy a padded batch, even of one matrix."""
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

    It takes one matrix at a time, since CPUs multiply in place into a part of a matrix, but not
    into a part of a batch. It takes columns rather than rows, since libraries repack the right
    factor: so they repack each part of that factor once. Exact mode takes rows up to the diagonal,
    ``by_rows``: the last bits of the two differ, and exact mode keeps its bits.
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
    """Rounds the upper triangle of an fp32 product once, and mirrors it, as kernels by tiles do."""
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
    # fp16 on CPUs, in the arithmetic of accelerators: products in fp32 that are rounded once.
    "in_fp32": Products(partial(_gram, _symmetric_in_fp32), _symmetric_in_fp32, _apply_in_fp32),
    # By Triton's kernels.
    "tiles": Products(partial(_gram, _symmetric_tiles), _symmetric_tiles, _apply),
}
