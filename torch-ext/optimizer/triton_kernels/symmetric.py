"""Computes one half of a symmetric product, in tiles, and mirrors it.

The products XXᵀ, bA + cA², and αAB + βC (if A, B, and C commute) are symmetric in exact arithmetic,
but a general product may round entries (i, j) and (j, i) differently. Here they are one number,
stored twice, so results are symmetric bit for bit.
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
    """Computes ``out = alpha · A @ B + beta · C`` for every matrix, if the result is symmetric.

    Entries on and above the diagonal are computed and also stored in their mirror's place. Nothing
    is checked: neither the symmetry of the result nor shapes. Products and sums are in fp32 (fp32
    input isn't reduced to TF32), rounded once to the dtype of ``out``. The call allocates nothing
    and doesn't synchronize.

    Args:
        A, B: fp16, bf16, or fp32, both of the same dtype, with any strides; may be the same tensor.
        C: fp16, bf16, or fp32, any strides. Not read if beta is 0; entries below its diagonal are
            never used. May be A or B. May be ``out`` itself, since a tile reads only those entries
            of C that it writes, and no other tile writes its mirror image there.
        out: fp16, bf16, or fp32, any strides. Must not share memory with A or B, nor with C unless
            it is C, because some programs write while others read.
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
    # One program per tile, not per share of the tiles: while collectives occupy some processors,
    # the others can run all tiles. Fusion is off, as it would round the sums that follow the
    # products differently depending on compiler and layout; it doesn't affect the products.
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
    """Returns the tiles for operands of that layout, and the constants of the launch."""
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
    """Returns True if Triton, which looks for multiples of 16, can load vectors."""
    strides = operand.stride()
    multiples = all(stride == 1 or stride % 16 == 0 for stride in strides)
    return operand.data_ptr() % 16 == 0 and 1 in strides[1:] and multiples


def _can_be_described(operand: Tensor) -> bool:
    """Returns True if a descriptor can address the tiles of all matrices.

    Rows, or columns, need unit stride, and everything must begin at multiples of 16 bytes.
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
    """Returns a descriptor that loads tiles (rows, cols), transposed if the operand is.

    The host makes the descriptor: in a kernel it would need memory from a process-wide allocator.
    """
    shape, tile = list(operand.shape), [1, rows, cols]
    per_matrix, *steps = operand.stride()
    if steps[1] != 1:
        shape[1:], tile[1:], steps = shape[:0:-1], tile[:0:-1], steps[::-1]
    if shape[0] == 1:  # the stride may be anything
        per_matrix = shape[1] * steps[0]
    return TensorDescriptor(operand, shape, [per_matrix, *steps], tile)


def _extent(matrix: Tensor) -> int:
    """Returns the number of elements from the first to the last, gaps included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(matrix.shape, matrix.stride()))


# Specializing on 1 or multiples of 16 isn't worth more compilations for these arguments.
@triton.jit(do_not_specialize=["per_matrix"])
def _symmetric_kernel(
    a_ptr,  # (matrices, s, k), a descriptor if DESCRIPTORS
    b_ptr,  # (matrices, k, s), a descriptor if DESCRIPTORS
    c_ptr,  # (matrices, s, s), read if HAS_C
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
    A_TRANSPOSED: tl.constexpr,  # columns are contiguous; read if DESCRIPTORS
    B_TRANSPOSED: tl.constexpr,
    EVEN: tl.constexpr,  # tiles end where the matrices do: no masks
    LONG_OFFSETS: tl.constexpr,  # 64-bit offsets within a matrix
    INTERPRETED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDTH: tl.constexpr,  # tiles side by side: 1 or 2
    GROUP: tl.constexpr,
):
    # This program computes one row of WIDTH × WIDTH tiles. On the diagonal, its tile below the
    # diagonal is wasted work.
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
        for start in range(0, k, BLOCK_K):  # entries outside are 0
            a = _load_tile(a_ptr, at, first_row, start, BLOCK, BLOCK_K, A_TRANSPOSED)
            b = _load_tile(b_ptr, at, start, first_col, BLOCK_K, WIDTH * BLOCK, B_TRANSPOSED)
            acc = multiply(a, b, acc, INTERPRETED)
    else:
        inner = tl.arange(0, BLOCK_K)
        if LONG_OFFSETS:
            inner = inner.to(tl.int64)
        # Offsets are fixed while the bases advance, which needs half the registers of pointers.
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
            # Beta isn't 0 here. Making rows depend on it avoids spilled registers.
            read_rows = tl.where(beta != 0.0, end, 0)
            c_offsets = rows[:, None] * c_strides[1] + cols[None, :] * c_strides[2]
            c_mask = (rows[:, None] < read_rows) & (cols[None, :] < s)
            tile += beta * tl.load(c_base + c_offsets, mask=c_mask, other=0.0).to(tl.float32)

        # Store the tile and its mirror image; a tile on the diagonal is its own. A branch would
        # hold the tile in registers twice.
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
    if INTERPRETED:  # the interpreter multiplies bf16 as if it were integers
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _tile_at(number, side, GROUP):
    """Returns (row, column) of a tile, numbered among those on and above the diagonal.

    Columns come in bands of GROUP. A band that begins at column c follows c(c + 1)/2 tiles for any
    GROUP. It goes down row by row, so that tiles computed at the same time share rows of A and the
    band's columns of B in L2, and ends with the triangle at the diagonal.
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
    """Returns 64-bit (row, column), row ≤ column, with column · (column + 1)/2 + row = number."""
    col = tl.sqrt(2.0 * number.to(tl.float32)).to(tl.int64)
    # The root is in [column, column + 1.5], up to rounding.
    col -= tl.where(col * (col + 1) // 2 > number, 1, 0)
    col += tl.where((col + 1) * (col + 2) // 2 <= number, 1, 0)
    return number - col * (col + 1) // 2, col


@triton.jit
def _round_to_nearest(value, dtype, INTERPRETED):
    """Rounds to nearest in ``dtype``; Triton's interpreter alone would truncate to bf16."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        nearest = bits + 0x7FFF + ((bits >> 16) & 1)
        bits = tl.where(value == value, nearest, bits | 0x400000)  # NaN stays NaN
        value = (bits & -0x10000).to(tl.float32, bitcast=True)
    return value.to(dtype)


# TRITON_INTERPRET was set when triton was imported.
INTERPRETED = not isinstance(_symmetric_kernel, triton.JITFunction)
