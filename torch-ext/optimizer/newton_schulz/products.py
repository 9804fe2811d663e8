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

from .forms import block_side

Symmetric = Callable[[Tensor, Tensor, float, float, Tensor, Tensor], Tensor]


class Products(NamedTuple):
    """One way to multiply.

    Args:
        gram: ``(X, alpha, scale, out)``: alpha·XXᵀ, or XᵀX of a tall X, into ``out``; where there
            is a tensor ``scale``, (n, 1, 1) and of about alpha's size, scale·XXᵀ. A keyword
            ``tall`` says which, whatever the shape of X, and so it does to ``apply``.
        symmetric: ``(A, B, alpha, beta, C, out)``: alpha·AB + beta·C into ``out``.
        apply: ``(Q, X, alpha, beta, out)``: alpha·QX + beta·X, or alpha·XQ + beta·X of a tall X.
        padding: entries after each row of symmetric matrices. Where rows are 2^k bytes apart, a
            column falls on few lines of a CPU's cache, and a mirror image takes twice the time.
    """

    gram: Callable[..., Tensor]
    symmetric: Symmetric
    apply: Callable[..., Tensor]
    padding: int = 0

    def of_slices(self, tall: bool) -> Products:
        """The same for slices of matrices that are tall or not; a slice may be either.

        Without padding, which sums over ranks do not take.
        """
        gram, apply = (partial(way, tall=tall) for way in (self.gram, self.apply))
        return Products(gram, self.symmetric, apply)


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


def _is_tall(X: Tensor, tall: Optional[bool]) -> bool:
    return X.shape[-2] > X.shape[-1] if tall is None else tall


def _sides(X: Tensor, tall: Optional[bool] = None) -> tuple[Tensor, Tensor]:
    """The factors, X and Xᵀ, of the smaller of X's two Gram matrices, or the one asked for."""
    return (X.mT, X) if _is_tall(X, tall) else (X, X.mT)


def _product(A: Tensor, B: Tensor, alpha: float, beta: float, C: Tensor, out: Tensor) -> Tensor:
    if alpha == 1.0 and beta == 0.0:
        return torch.bmm(A, B, out=out)
    return torch.baddbmm(C, A, B, alpha=alpha, beta=beta, out=out)


def _gram(
    symmetric: Symmetric,
    X: Tensor,
    alpha: float,
    scale: Optional[Tensor],
    out: Tensor,
    tall: Optional[bool] = None,
) -> Tensor:
    symmetric(*_sides(X, tall), alpha, 0.0, out, out)
    return out if scale is None else out.mul_(scale / alpha)


def _apply_whole(
    Q: Tensor, X: Tensor, alpha: float, beta: float, out: Tensor, tall: Optional[bool] = None
) -> Tensor:
    left, right = (X, Q) if _is_tall(X, tall) else (Q, X)
    return _product(left, right, alpha, beta, X, out)


def _symmetric_blocks(
    name: str, A: Tensor, B: Tensor, alpha: float, beta: float, C: Tensor, out: Tensor
) -> Tensor:
    """Computes columns from the diagonal down, block by block; the rest is their mirror image.

    One matrix at a time: CPUs multiply into a part of a matrix in place, but not of a batch.
    Columns rather than rows: libraries repack the right factor, and so each part of it once.
    """
    _, s, k = A.shape
    side = block_side(name, s, k)
    if side == s:
        return _product(A, B, alpha, beta, C, out)
    for A_i, B_i, C_i, out_i in zip(*(of.unbind(0) for of in (A, B, C, out))):
        for start in range(0, s, side):
            stop = min(start + side, s)
            block = out_i[start:, start:stop]
            _block(A_i[start:], B_i[:, start:stop], alpha, beta, C_i[start:, start:stop], block)
            if stop < s:
                out_i[start:stop, stop:].copy_(block[side:].mT)
    return out


def _symmetric_exact_blocks(
    A: Tensor, B: Tensor, alpha: float, beta: float, C: Tensor, out: Tensor
) -> Tensor:
    """As `_symmetric_blocks`, by rows up to the diagonal: the last bits differ, and exact mode
    keeps these."""
    _, s, k = A.shape
    rows = block_side("exact blocks", s, k)
    if rows == s:
        return _product(A, B, alpha, beta, C, out)
    for A_i, B_i, C_i, out_i in zip(A, B, C, out):
        for start in range(0, s, rows):
            stop = min(start + rows, s)
            block = (slice(start, stop), slice(stop))
            _block(A_i[start:stop], B_i[:, :stop], alpha, beta, C_i[block], out_i[block])
            out_i[:start, start:stop].copy_(out_i[start:stop, :start].mT)
    return out


def _block(A: Tensor, B: Tensor, alpha: float, beta: float, C: Tensor, out: Tensor) -> None:
    if alpha == 1.0 and beta == 0.0:
        torch.mm(A, B, out=out)
    else:
        torch.addmm(C, A, B, alpha=alpha, beta=beta, out=out)


def _apply_padded(
    Q: Tensor, X: Tensor, alpha: float, beta: float, out: Tensor, tall: Optional[bool] = None
) -> Tensor:
    """One by one where Q has padding: libraries copy batches of it, even of one matrix."""
    if Q.stride(-2) == Q.shape[-1]:
        return _apply_whole(Q, X, alpha, beta, out, tall)
    left, right = (X, Q) if _is_tall(X, tall) else (Q, X)
    for left_i, right_i, X_i, out_i in zip(*(of.unbind(0) for of in (left, right, X, out))):
        _block(left_i, right_i, alpha, beta, X_i, out_i)
    return out


def _by_blocks(name: str) -> Products:
    symmetric = partial(_symmetric_blocks, name)
    return Products(partial(_gram, symmetric), symmetric, _apply_padded, padding=32)


def _mirror(product: Tensor, out: Tensor) -> Tensor:
    """Rounds the upper triangle of an fp32 product, once, as kernels by tiles do."""
    return out.copy_(product.triu().add_(product.triu(1).mT))


def _gram_in_fp32(
    X: Tensor, alpha: float, scale: Optional[Tensor], out: Tensor, tall: Optional[bool] = None
) -> Tensor:
    product = torch.bmm(*_sides(X.float(), tall)).mul_(alpha)
    return _mirror(product if scale is None else product.mul_(scale / alpha), out)


def _symmetric_in_fp32(
    A: Tensor, B: Tensor, alpha: float, beta: float, C: Tensor, out: Tensor
) -> Tensor:
    return _mirror(torch.baddbmm(C.float(), A.float(), B.float(), alpha=alpha, beta=beta), out)


def _apply_in_fp32(
    Q: Tensor, X: Tensor, alpha: float, beta: float, out: Tensor, tall: Optional[bool] = None
) -> Tensor:
    X_fp32 = X.float()
    Y = _apply_whole(Q.float(), X_fp32, alpha, beta, torch.empty_like(X_fp32), tall)
    return out.copy_(Y)


def _gram_tiles(
    X: Tensor, alpha: float, scale: Optional[Tensor], out: Tensor, tall: Optional[bool] = None
) -> Tensor:
    of_each = alpha if scale is None else scale.flatten().to(torch.float32)
    return _symmetric_tiles(*_sides(X, tall), of_each, 0.0, out, out)


def _symmetric_tiles(
    A: Tensor, B: Tensor, alpha: Union[float, Tensor], beta: float, C: Tensor, out: Tensor
) -> Tensor:
    from ..triton_kernels import symmetric

    return symmetric.launch(A, B, alpha, beta, C, 0.0, out, None)


PRODUCTS = {
    "whole": Products(partial(_gram, _product), _product, _apply_whole),
    "blocks": _by_blocks("blocks"),
    "fp32 blocks": _by_blocks("fp32 blocks"),
    "exact blocks": Products(
        partial(_gram, _symmetric_exact_blocks), _symmetric_exact_blocks, _apply_whole
    ),
    # For fp16 on CPUs the arithmetic of accelerators: products in fp32, and one rounding.
    "in_fp32": Products(_gram_in_fp32, _symmetric_in_fp32, _apply_in_fp32),
    "tiles": Products(_gram_tiles, _symmetric_tiles, _apply_whole),  # by kernels
}
