"""Multiplies by tiles where the product is symmetric: computes one half and mirrors it.

The products XXᵀ, bA + cA² and αAB + βC (of A, B, C that commute) are symmetric by algebra, yet a
general product rounds (i, j) and (j, i) differently where it sums in another order. Here each pair
is one number stored twice, so what is symmetric stays so to the last bit.
"""

from __future__ import annotations

from typing import Any, Optional, Union

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import launching
from .launching import INT32_MAX, SymmetricConfig

Operand = Union[Tensor, TensorDescriptor]


def symmetric_product(
    A: Tensor,  # (n, s, k)
    B: Tensor,  # (n, k, s)
    alpha: float,
    beta: float,
    C: Tensor,  # (n, s, s)
    out: Tensor,  # (n, s, s)
    config: Optional[SymmetricConfig] = None,
) -> Tensor:
    """``out = alpha · A @ B + beta · C`` of every matrix, where that is symmetric.

    Only the entries on and above the diagonal are computed; each is stored in its mirror's place
    too, so the result is exactly symmetric. Nothing is checked, neither that the sum is symmetric
    nor that operands fit. Products and sums are in fp32 (fp32 input is not cut to TF32), with one
    rounding to the dtype of ``out``. Nothing is allocated, and the host waits for nothing.

    Args:
        A, B: fp16, bf16 or fp32, of one dtype, with any strides; they may be one tensor.
        C: fp16, bf16 or fp32, any strides. Not read where beta is 0; what lies below its diagonal
            is never used. May be A or B; may be ``out`` itself, since a tile reads only the entries
            of it that it writes, and none that another tile's mirror image is written to.
        out: fp16, bf16 or fp32, whatever the inputs have; any strides. Programs write it while
            others read: it shares no memory with A or B, nor with a C that is not ``out`` itself.
        config: tiles to use; None looks them up (`launching.choose`).

    Returns:
        ``out``.
    """
    matrices, s, k = A.shape
    if matrices == 0 or s == 0:
        return out
    key = (
        *("symmetric", A.dtype, out.dtype, C.dtype, beta == 0.0, config),
        *(A.data_ptr() % 16, B.data_ptr() % 16, C.data_ptr() % 16, out.data_ptr() % 16),
        *(A.shape, A.stride(), B.stride(), C.stride(), out.stride()),
    )
    prepared = _prepared.get((key, out.device))
    if prepared is None:
        if len(_prepared) >= _MOST_PREPARED:
            _prepared.clear()
        prepared = _prepared[key, out.device] = _prepare(A, B, beta != 0.0, C, out, config)
    config, constants = prepared
    left: Operand = A
    right: Operand = B
    if constants["DESCRIPTORS"]:
        left = _descriptor(A, config.block, config.block_k)
        right = _descriptor(B, config.block_k, config.block * config.width)
    per_matrix = config.programs(s)
    arguments = (
        *(left, right, C, out, float(alpha), float(beta), per_matrix, s, k),
        *(A.stride(), B.stride(), C.stride(), out.stride()),
    )
    # One program for each tile, not for a share of the tiles: where collectives hold some
    # processors, the other processors then take all tiles in turn. Without fusion, or what a tile
    # adds to its products is rounded otherwise by one compiler and layout than by another. The
    # products are not affected.
    launching.launch(
        *(_symmetric_kernel, key, out.device, matrices * per_matrix, arguments, constants),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=False,
    )
    return out


_MOST_PREPARED = 4096
_prepared: dict[tuple, tuple[SymmetricConfig, dict[str, Any]]] = {}


def _prepare(
    A: Tensor,
    B: Tensor,
    has_C: bool,
    C: Tensor,
    out: Tensor,
    config: Optional[SymmetricConfig],
) -> tuple[SymmetricConfig, dict[str, Any]]:
    """The tiles for operands of that layout, and the constants of the launch."""
    matrices, s, k = A.shape
    operands = [A, B, out, C] if has_C else [A, B, out]
    if config is None:
        aligned = s % 16 == 0 and k % 16 == 0 and all(map(_is_aligned, operands))
        target = launching.compile_target(out.device)
        config = launching.choose(A.dtype, s, k, matrices, aligned, target)
    return config, dict(
        HAS_C=has_C,
        DESCRIPTORS=config.descriptors and _can_be_described(A) and _can_be_described(B),
        A_TRANSPOSED=A.stride(2) != 1,
        B_TRANSPOSED=B.stride(2) != 1,
        EVEN=s % (config.block * config.width) == 0 and k % config.block_k == 0,
        LONG_OFFSETS=any(_extent(X[0]) > INT32_MAX for X in operands),
        INTERPRETED=INTERPRETED,
        BLOCK=config.block,
        BLOCK_K=config.block_k,
        WIDTH=config.width,
        GROUP=config.group,
    )


def _is_aligned(operand: Tensor) -> bool:
    """Whether Triton, which looks for multiples of 16, can load vectors rather than entries."""
    strides = operand.stride()
    multiples = all(stride == 1 or stride % 16 == 0 for stride in strides)
    return operand.data_ptr() % 16 == 0 and 1 in strides[1:] and multiples


def _can_be_described(operand: Tensor) -> bool:
    """Whether a descriptor can say where the tiles of all matrices lie: rows, or columns, have
    unit stride and follow each other, matrices too, all at multiples of 16 bytes.
    """
    rows = operand if operand.stride(2) == 1 else operand.mT
    matrices, count, length = rows.shape
    per_matrix, step, unit = rows.stride()
    follow = (
        step >= length
        and step % 16 == 0
        and (matrices == 1 or (per_matrix >= count * step and per_matrix % step == 0))
    )
    return rows.numel() > 0 and unit == 1 and follow and _is_aligned(operand)


def _descriptor(operand: Tensor, rows: int, cols: int) -> TensorDescriptor:
    """What loads tiles (rows, cols) in bulk; those of a transposed operand come transposed.

    The host makes it: one that a kernel makes takes memory from an allocator of the whole process.
    """
    shape, tile = list(operand.shape), [1, rows, cols]
    per_matrix, *steps = operand.stride()
    if steps[1] != 1:
        shape[1:], tile[1:], steps = shape[:0:-1], tile[:0:-1], steps[::-1]
    if shape[0] == 1:  # where it may be any
        per_matrix = shape[1] * steps[0]
    return TensorDescriptor(operand, shape, [per_matrix, *steps], tile)


def _extent(matrix: Tensor) -> int:
    """How many elements there are from the first to the last, gaps included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(matrix.shape, matrix.stride()))


# Whether these are 1, or divisible by 16, is not worth another compilation.
@triton.jit(do_not_specialize=["per_matrix"])
def _symmetric_kernel(
    a_ptr,  # (matrices, s, k), where DESCRIPTORS a descriptor
    b_ptr,  # (matrices, k, s), likewise
    c_ptr,  # (matrices, s, s), read where HAS_C
    out_ptr,  # (matrices, s, s)
    alpha,
    beta,
    per_matrix,
    s,
    k,
    a_strides,
    b_strides,
    c_strides,
    out_strides,
    HAS_C: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    A_TRANSPOSED: tl.constexpr,  # columns are contiguous; read where DESCRIPTORS
    B_TRANSPOSED: tl.constexpr,
    EVEN: tl.constexpr,  # tiles end where the matrices do: no masks
    LONG_OFFSETS: tl.constexpr,  # 64-bit offsets within a matrix
    INTERPRETED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDTH: tl.constexpr,  # tiles side by side: 1 or 2
    GROUP: tl.constexpr,
):
    # Of WIDTH × WIDTH tiles, this program has one row. Where they lie on the diagonal, a row's tile
    # under it is computed for nothing.
    side = tl.cdiv(s, WIDTH * BLOCK)
    number = tl.program_id(0).to(tl.int64)
    matrix = number // per_matrix
    number = number % per_matrix
    row, col = _tile_at(number // WIDTH, side, GROUP)
    row = row * WIDTH + number % WIDTH
    col = col * WIDTH
    # Triton keeps 32-bit offsets in fewer registers, and AMD's buffer loads need them.
    if not LONG_OFFSETS:
        row = row.to(tl.int32)
        col = col.to(tl.int32)
    rows = row * BLOCK + tl.arange(0, BLOCK)
    cols = col * BLOCK + tl.arange(0, WIDTH * BLOCK)

    acc = tl.zeros((BLOCK, WIDTH * BLOCK), dtype=tl.float32)
    if DESCRIPTORS:
        at = matrix.to(tl.int32)
        first_row = (row * BLOCK).to(tl.int32)
        first_col = (col * BLOCK).to(tl.int32)
        for start in range(0, k, BLOCK_K):  # what lies outside is 0
            a = _load_tile(a_ptr, at, first_row, start, BLOCK, BLOCK_K, A_TRANSPOSED)
            b = _load_tile(b_ptr, at, start, first_col, BLOCK_K, WIDTH * BLOCK, B_TRANSPOSED)
            acc = multiply(a, b, acc, INTERPRETED)
    else:
        inner = tl.arange(0, BLOCK_K)
        if LONG_OFFSETS:
            inner = inner.to(tl.int64)
        # Offsets stay as they are while the bases advance: half the registers of pointers.
        a_base = a_ptr + matrix * a_strides[0]
        b_base = b_ptr + matrix * b_strides[0]
        a_offsets = rows[:, None] * a_strides[1] + inner[None, :] * a_strides[2]
        b_offsets = inner[:, None] * b_strides[1] + cols[None, :] * b_strides[2]
        advance = tl.full([], BLOCK_K, tl.int64)
        for start in range(0, k, BLOCK_K):
            if EVEN:
                a = tl.load(a_base + a_offsets)
                b = tl.load(b_base + b_offsets)
            else:
                left = k - start
                a_mask = (rows[:, None] < s) & (inner[None, :] < left)
                b_mask = (inner[:, None] < left) & (cols[None, :] < s)
                a = tl.load(a_base + a_offsets, mask=a_mask, other=0.0)
                b = tl.load(b_base + b_offsets, mask=b_mask, other=0.0)
            acc = multiply(a, b, acc, INTERPRETED)
            a_base += advance * a_strides[2]
            b_base += advance * b_strides[1]

    c_base = c_ptr + matrix * c_strides[0]
    out_base = out_ptr + matrix * out_strides[0]
    for half in tl.static_range(WIDTH):
        cols = (col + half) * BLOCK + tl.arange(0, BLOCK)
        tile, end = acc, s
        if WIDTH == 2:
            halves = acc.reshape(BLOCK, 2, BLOCK).permute(0, 2, 1).split()
            tile, end = halves[half], tl.where(row <= col + half, s, 0)
        tile *= alpha
        if HAS_C:
            # Beta is not 0 here. That rows depend on it keeps registers from being spilled.
            read_rows = tl.where(beta != 0.0, end, 0)
            c_offsets = rows[:, None] * c_strides[1] + cols[None, :] * c_strides[2]
            c_mask = (rows[:, None] < read_rows) & (cols[None, :] < s)
            tile += beta * tl.load(c_base + c_offsets, mask=c_mask, other=0.0).to(tl.float32)

        # The tile, and its mirror image; a tile on the diagonal is its own. Without a branch, whose
        # ends would hold the tile in registers twice.
        tile = _round_to_nearest(tile, out_ptr.dtype.element_ty, INTERPRETED)
        mirrored = tl.trans(tile)
        tile = tl.where(rows[:, None] <= cols[None, :], tile, mirrored)
        out_offsets = rows[:, None] * out_strides[1] + cols[None, :] * out_strides[2]
        tl.store(out_base + out_offsets, tile, mask=(rows[:, None] < end) & (cols[None, :] < s))
        mirrored_cols = tl.where(row < col + half, s, 0)
        out_offsets = cols[:, None] * out_strides[1] + rows[None, :] * out_strides[2]
        out_mask = (cols[:, None] < s) & (rows[None, :] < mirrored_cols)
        tl.store(out_base + out_offsets, mirrored, mask=out_mask)


@triton.jit
def _load_tile(descriptor, matrix, row, col, ROWS, COLS, TRANSPOSED: tl.constexpr):
    if TRANSPOSED:
        return descriptor.load([matrix, col, row]).reshape(COLS, ROWS).T
    else:
        return descriptor.load([matrix, row, col]).reshape(ROWS, COLS)


@triton.jit
def multiply(a, b, acc, INTERPRETED: tl.constexpr):
    if INTERPRETED:  # which multiplies bf16 as if it were integers
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _tile_at(number, side, GROUP):
    """(row, column) of the tile with that number, of those on and above the diagonal.

    Columns come in bands of GROUP. A band of columns from c on follows c(c + 1)/2 tiles, whatever
    GROUP is; it goes down row by row, so that tiles computed at the same time share rows of A and
    the band's columns of B in L2, and ends with the triangle at the diagonal.
    """
    row, col = _triangular(number)
    band = col // GROUP * GROUP
    width = tl.minimum(GROUP, side - band)
    number -= band * (band + 1) // 2
    above = band * width
    row, col = _triangular(tl.maximum(number - above, 0))
    row = tl.where(number < above, number // width, band + row)
    col = tl.where(number < above, number % width, col) + band
    return row, col


@triton.jit
def _triangular(number):
    """(row, column) with row ≤ column and column · (column + 1)/2 + row = number, in 64 bits."""
    col = tl.sqrt(2.0 * number.to(tl.float32)).to(tl.int64)
    # The root lies in [column, column + 1.5], give or take its rounding.
    col -= tl.where(col * (col + 1) // 2 > number, 1, 0)
    col += tl.where((col + 1) * (col + 2) // 2 <= number, 1, 0)
    return number - col * (col + 1) // 2, col


@triton.jit
def _round_to_nearest(value, dtype, INTERPRETED):
    """Rounds to the nearest of ``dtype``, also where Triton's interpreter would cut bf16 off."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        nearest = bits + 0x7FFF + ((bits >> 16) & 1)
        bits = tl.where(value == value, nearest, bits | 0x400000)  # NaN stays NaN
        value = (bits & -0x10000).to(tl.float32, bitcast=True)
    return value.to(dtype)


# TRITON_INTERPRET was set when triton was imported.
INTERPRETED = not isinstance(_symmetric_kernel, triton.JITFunction)
