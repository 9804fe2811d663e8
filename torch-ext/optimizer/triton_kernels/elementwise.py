"""Kernels for the element-wise arithmetic of `core` on accelerators, in one pass over memory.

`core` defines what they compute; `tests/test_triton_elementwise.py` compares both.

Every operation is rounded separately: launches forbid the compiler to fuse products with sums
(`_LAUNCH`), which it would do for some kernels, tiles, and vector widths only. So an element gets
the same bits at any position, and ranks with different layouts agree.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Optional, Union

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..weight_rounding import GAMMA, MIX, RandomBits, RoundedBy
from . import launching
from .launching import layout_of

Number = Union[float, Tensor]

_PARTIALS = 1024  # partial results to combine at once
_LAUNCH = {"num_warps": 4, "enable_fp_fusion": False}


def update_momentum(
    buffers: Sequence[Tensor],
    grads: Sequence[Tensor],
    outputs: Optional[Sequence[Tensor]],
    *,
    momentum: float,
    weight: float,
    nesterov: bool,
) -> None:
    """Updates B ← μB + wG, and writes wG + μB, or B, to ``outputs``; see `core.update_momentum`.

    Arithmetic is in fp32, or fp64 if any tensor is fp64. B is rounded once, to its dtype, and the
    output is computed from the rounded B. Tensors may have any strides and floating dtypes.
    """
    device = buffers[0].device
    for launch in launches((buffers, grads, outputs)):
        B, G, out = launch.tiling.dtypes
        numbers, arithmetic = _numbers((momentum, weight), (B, G, out), device)
        _launch(
            _momentum_kernel,
            launch,
            device,
            *numbers,
            **arithmetic,
            B_DTYPE=_TL[B],
            G_DTYPE=_TL[G],
            OUT_DTYPE=_TL[out],
            NESTEROV=nesterov,
        )


def update_weights(
    weights: Sequence[Tensor],
    updates: Sequence[Tensor],
    *,
    rate: Number,
    decay: Number,
    cautious: bool,
    factors: Optional[Sequence[Tensor]] = None,
    rounded_by: Optional[Sequence[RoundedBy]] = None,
) -> None:
    """Updates W ← W − (Δ + decay·W) with Δ = rate·factor·U; see `core.update_weights`.

    Arithmetic is in fp32, or fp64 if any tensor is fp64. W is rounded once, with ``rounded_by``
    from fp32; updates are only read. Tensors may have any strides and floating dtypes.
    """
    device = weights[0].device
    residuals: Any = None
    random_bits: Any = rounded_by
    if rounded_by is not None and isinstance(rounded_by[0], Tensor):
        residuals, random_bits = rounded_by, None
    for launch in launches((weights, updates, residuals), (factors, random_bits)):
        W, U, _, factor, _ = launch.tiling.dtypes
        numbers, arithmetic = _numbers((rate, decay), (W, U), device)
        _launch(
            _weights_kernel,
            launch,
            device,
            *numbers,
            **arithmetic,
            W_DTYPE=_TL[W],
            U_DTYPE=_TL[U],
            FACTOR_DTYPE=_TL[factor],
            DECAYS=isinstance(decay, Tensor) or bool(decay != 0.0),
            CAUTIOUS=cautious,
        )


def normalize(
    matrices: Tensor,
    out: Tensor,
    factor: float,
    eps: float,
    eps_absolute: float,
    divided_by: Optional[Tensor],
    most_eps: float,
    magnification: float,
) -> None:
    """Divides matrices by their largest magnitudes and sizes; see `normalization.normalize`.

    Args:
        matrices, out: (n, rows, cols), not empty, any strides, fp32 or narrower; may be the same
            tensor.
        factor: factor on the norms.
        eps, eps_absolute, divided_by: see `normalization.Eps`.
        most_eps: bound on an absolute eps divided by a largest magnitude.
        magnification: factor on ``out``, a power of two.
    """
    count, device = len(matrices), matrices.device
    (launch,) = launches(([matrices],), by_slices=True)
    partials = torch.empty((2, launch.programs), dtype=torch.float32, device=device)
    _launch(_measure_kernel, launch, device, partials, launch.programs, X_DTYPE=_TL[matrices.dtype])
    sizes = torch.empty((2, count), dtype=torch.float32, device=device)
    arguments = (
        *(partials, sizes, divided_by, launch.programs, launch.programs // count),
        *(factor, eps, eps_absolute, most_eps, magnification),
    )
    key = ("sizes", *map(layout_of, arguments))
    constants = {"BLOCK": _PARTIALS}
    launching.launch(_sizes_kernel, key, device, count, arguments, constants, **_LAUNCH)
    copy([matrices], [out], sizes)


def copy(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], sizes: Optional[Tensor] = None
) -> None:
    """Copies inputs to outputs of the same shapes and any floating dtypes.

    With ``sizes``, (2, n) in fp32, slices of a single input are divided by both of their sizes.
    """
    count = 0 if sizes is None else sizes.shape[1]
    for launch in launches((inputs, outputs), by_slices=True):
        X, out = launch.tiling.dtypes
        types = {"X_DTYPE": _TL[X], "OUT_DTYPE": _TL[out]}
        _launch(_copy_kernel, launch, outputs[0].device, sizes, count, **types)


_TL = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    None: None,  # of a column that is None
}


def _numbers(
    values: Sequence[Number], dtypes: Sequence[Any], device: torch.device
) -> tuple[list[Number], dict[str, Any]]:
    """Converts numbers for a kernel; also returns its constants DTYPE and ON_DEVICE.

    Numbers become floats for fp32, and tensors on the device for fp64 or if one is there already.
    """
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    numbers: list[Number] = [  # only tensors on the host are read, so nothing synchronizes
        v if isinstance(v, Tensor) and (device.type == "cpu" or not v.is_cpu) else float(v)
        for v in values
    ]
    on_device = dtype != torch.float32 or any(isinstance(v, Tensor) for v in numbers)
    if on_device:
        numbers = [
            v if isinstance(v, Tensor) else torch.full((), v, dtype=dtype, device=device)
            for v in numbers
        ]
    return numbers, {"DTYPE": _TL[dtype], "ON_DEVICE": on_device}


def _launch(
    kernel: Any, launch: Launch, device: torch.device, *arguments: Any, **constants: Any
) -> None:
    tiling, firsts, lengths = launch.tiling, launch.firsts, launch.lengths
    # Triton specializes on each number of a tuple, regardless of `do_not_specialize`.
    addresses = [address for column in launch.columns if column for address in column]
    key = (
        *(kernel.__name__, tiling, firsts, lengths, launch.is_aligned),
        tuple([address % 16 == 0 for address in addresses]),
        *(*map(layout_of, arguments), *constants.values()),
    )
    arguments = *launch.columns, *arguments, firsts, lengths, tiling.shape, *tiling.strides
    constants |= {"ALIGNED": launch.is_aligned, "ROWS": tiling.rows, "COLS": tiling.cols}
    launching.launch(kernel, key, device, launch.programs, arguments, constants, **_LAUNCH)


# Kernels get lists of tensors as tuples of addresses, and random bits as tuples of first counters.
# As arguments of the launch, these need no copy to the device, and CUDA graphs can capture the
# launch. torch's foreach functions do the same.

# Elements per program: in bf16, two vectors of 16 bytes for each thread of four warps.
_TILE = 2048
_SQUARE_TILE = (32, 64)  # if rows are contiguous in one tensor and columns in another

# Each program searches the items of its launch for its own; with more items, that takes too long.
_MOST_ITEMS = 32

_ALIGNMENT = 16  # multiple of bytes of addresses, and of elements of rows, that vectors need

Shape = tuple[int, ...]
Column = Optional[Sequence[Any]]  # of tensors or of random bits


class Tiling(NamedTuple):
    """How the tensors of an item, one from each column, are cut into tiles."""

    shape: Shape  # (slices, rows)
    strides: tuple[Shape, ...]  # per column, for (slices, rows, elements)
    dtypes: tuple[Any, ...]  # per column; None for a column that is None
    rows: int  # per tile
    cols: int


class Launch(NamedTuple):
    """One launch, with a program for each tile of its items, which share a tiling.

    Lists with one entry per item are padded to a power of two, to save compilations; the first
    program of padding is after the last one.
    """

    tiling: Tiling
    columns: tuple[Optional[tuple[int, ...]], ...]  # addresses, or first counters, per item
    firsts: tuple[int, ...]  # the number of each item's first program
    lengths: tuple[int, ...]  # elements per row of each item
    programs: int
    is_aligned: bool  # True if wide tensors and rows can be accessed in vectors


def launches(
    wide: Sequence[Column], broadcast: Sequence[Column] = (), *, by_slices: bool = False
) -> Iterator[Launch]:
    """Yields as few launches as possible for all items; skips empty items.

    Args:
        wide: columns, which are lists of tensors; the tensors of an item have the same shape. Any
            column but the first may be None.
        broadcast: columns of tensors or random bits that broadcast to these, or None.
        by_slices: True to keep the first dimension, as slices. Other dimensions are merged if
            possible.
    """
    columns = (*wide, *broadcast)
    items = list(zip(*[column for column in columns if column is not None]))
    wide_count = len(wide) - wide.count(None)
    alike: dict[tuple[Tiling, bool], list[tuple]] = {}
    for operands in items:
        tensors = [o.places if isinstance(o, RandomBits) else o for o in operands]
        if not tensors[0].numel():
            continue
        layout = tuple([(t.shape, t.stride(), t.dtype) for t in tensors])
        cut = _cut(layout, by_slices)
        if cut is None:  # too many dimensions: append the slices as items
            shape, dim = tensors[0].shape, int(by_slices)
            items += zip(*[_slices(operand, shape, dim) for operand in operands])
            continue
        tiling, length, tiles = cut
        addresses = [
            o.first_counter if isinstance(o, RandomBits) else o.data_ptr() for o in operands
        ]
        low_bits = length
        for address in addresses[:wide_count]:
            low_bits |= address
        is_aligned = low_bits % _ALIGNMENT == 0
        alike.setdefault((tiling, is_aligned), []).append((addresses, length, tiles))
    for (tiling, is_aligned), members in alike.items():
        for start in range(0, len(members), _MOST_ITEMS):
            part = members[start : start + _MOST_ITEMS]
            yield _launch_of(part, tiling, columns, is_aligned)


def _slices(operand: Any, shape: Shape, dim: int) -> Sequence[Any]:
    """Returns the slices, along a dimension, of an operand that broadcasts to that shape."""
    if isinstance(operand, RandomBits):
        return [operand._replace(places=places) for places in operand.places.unbind(dim)]
    return operand.expand(shape).unbind(dim)


def _launch_of(
    items: list[tuple], tiling: Tiling, columns: Sequence[Column], is_aligned: bool
) -> Launch:
    padding = (1 << (len(items) - 1).bit_length()) - len(items)
    *firsts, programs = accumulate([tiles for _, _, tiles in items], initial=0)
    addresses, lengths, _ = zip(*items, *(items[-1:] * padding))
    given = zip(zip(*addresses), tiling.strides, tiling.dtypes)
    addresses, strides, dtypes = zip(
        *[(None, (0, 0, 0), None) if column is None else next(given) for column in columns]
    )
    tiling = tiling._replace(strides=strides, dtypes=dtypes)
    return Launch(
        tiling, addresses, (*firsts, *[programs] * padding), lengths, programs, is_aligned
    )


@functools.lru_cache(maxsize=4096)
def _cut(layout: tuple, by_slices: bool) -> Optional[tuple[Tiling, int, int]]:
    """Returns an item's tiling, elements per row, and number of tiles.

    Returns None if there are more than three dimensions even after merging.

    Args:
        layout: shape, strides, and dtype of each tensor; shapes broadcast to the first one.
    """
    shape = layout[0][0]
    expanded = [_expanded(shape, *tensor[:2]) for tensor in layout]
    sizes: list[int] = []
    steps: list[Shape] = []  # for each size, the stride of each tensor
    for dim, (size, step) in enumerate(zip(shape, zip(*expanded))):
        if size == 1 and dim >= by_slices:
            continue
        follows = len(sizes) > by_slices and all(
            outer == size * inner for outer, inner in zip(steps[-1], step)
        )
        if follows:
            sizes[-1], steps[-1] = sizes[-1] * size, step
        else:
            sizes.append(size)
            steps.append(step)
    missing = 3 - len(sizes)
    if missing < 0:
        return None
    first = int(by_slices)  # slices stay first
    sizes[first:first], steps[first:first] = [1] * missing, [(0,) * len(layout)] * missing
    if not by_slices and sizes[:2] == [1, 1]:
        rows, cols = 1, _TILE
    elif any(row == 1 and col > 1 for row, col in zip(steps[1], steps[2])):
        rows, cols = _SQUARE_TILE
    else:
        cols = min(_TILE, triton.next_power_of_2(sizes[2]))
        rows = min(_TILE // cols, triton.next_power_of_2(sizes[1]))
    tiles = sizes[0] * -(-sizes[1] // rows) * -(-sizes[2] // cols)
    dtypes = tuple([dtype for _, _, dtype in layout])
    return Tiling(tuple(sizes[:2]), tuple(zip(*steps)), dtypes, rows, cols), sizes[2], tiles


def _expanded(shape: Shape, sizes: Shape, strides: Shape) -> Shape:
    """Returns the strides of a tensor that is expanded to that shape."""
    added = len(shape) - len(sizes)
    own = zip(sizes, strides, shape[added:])
    return (*[0] * added, *(0 if size == 1 < whole else step for size, step, whole in own))


# Arguments that begin with a capital letter, and ``out``, ``factor``, and ``residual``, are tuples
# of addresses, and ``counters`` is a tuple of numbers (see `Launch`); strides are tuples of three.
# A program handles one tile of one item. Offsets have 64 bits, for more than 2^31 elements.

_ITEMS = ["B", "G", "W", "U", "X", "out", "factor", "residual", "counters", "firsts", "lengths"]


@triton.jit(do_not_specialize=[*_ITEMS])
def _momentum_kernel(
    B,
    G,
    out,
    momentum,
    weight,
    firsts,
    lengths,
    shape,
    B_strides,
    G_strides,
    out_strides,
    DTYPE: tl.constexpr,
    B_DTYPE: tl.constexpr,
    G_DTYPE: tl.constexpr,
    OUT_DTYPE: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    NESTEROV: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    momentum_ = _number(momentum, DTYPE, ON_DEVICE)
    weight_ = _number(weight, DTYPE, ON_DEVICE)
    index, row, col, inside = _place(firsts, lengths, shape, ALIGNED, ROWS, COLS)
    B_at = _at(B, B_DTYPE, B_strides, firsts, index, row, col, ALIGNED)
    after = tl.load(B_at, inside, 0.0)
    G_at = _at(G, G_DTYPE, G_strides, firsts, index, row, col, ALIGNED)
    grad = tl.load(G_at, inside, 0.0).to(DTYPE) * weight_
    after = _cast(after.to(DTYPE) * momentum_ + grad, B_DTYPE)
    tl.store(B_at, after, inside)
    if out is not None:
        result = after.to(DTYPE)
        if NESTEROV:
            result = grad + result * momentum_
        out_at = _at(out, OUT_DTYPE, out_strides, firsts, index, row, col, ALIGNED)
        tl.store(out_at, _cast(result, OUT_DTYPE), inside)


@triton.jit(do_not_specialize=[*_ITEMS, "programs"])
def _measure_kernel(
    X,
    partials,  # (2, programs)
    programs,
    firsts,
    lengths,
    shape,
    X_strides,
    X_DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    index, row, col, inside = _place(firsts, lengths, shape, ALIGNED, ROWS, COLS)
    at = _at(X, X_DTYPE, X_strides, firsts, index, row, col, ALIGNED)
    values = tl.load(at, inside, 0.0).to(tl.float32)
    largest = tl.max(_bits(values)).to(tl.float32, bitcast=True)
    scaled = values / tl.where(largest == 0, 1.0, largest)
    tl.store(partials + tl.program_id(0), largest)
    tl.store(partials + programs + tl.program_id(0), tl.sum(scaled * scaled))


@triton.jit(do_not_specialize=["programs", "count"])
def _sizes_kernel(
    partials,  # (2, matrices, count): per tile, the largest magnitude, then the sum of (x/largest)²
    sizes,  # (2, matrices): the first divisor of each matrix, and the second
    divided_by,  # (matrices,); None means 1
    programs,
    count,
    factor,
    eps,
    eps_absolute,
    most_eps,
    magnification,
    BLOCK: tl.constexpr,
):
    """Combines the partial results of a matrix's tiles, in order, to its size."""
    matrix = tl.program_id(0).to(tl.int64)
    partials += matrix * count
    top = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        top = tl.maximum(top, _bits(tl.load(partials + at, at < count, 0.0)))
    largest = tl.max(top).to(tl.float32, bitcast=True)
    largest = tl.where(largest == 0, 1.0, largest)
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        ratio = tl.load(partials + at, at < count, 0.0) / largest
        squares += tl.load(partials + programs + at, at < count, 0.0) * ratio * ratio
    absolute = eps_absolute
    if divided_by is not None:
        absolute = absolute / tl.load(divided_by + matrix)
    added = eps + tl.minimum(absolute / largest, most_eps)
    size = tl.sqrt(tl.sum(squares)) * factor + added
    size = tl.where(size == 0.0, 1.0, size) / magnification
    tl.store(sizes + matrix, largest)
    tl.store(sizes + tl.num_programs(0) + matrix, size)


@triton.jit(do_not_specialize=[*_ITEMS, "count"])
def _copy_kernel(
    X,
    out,
    sizes,  # (2, count): the first divisor of each slice, and the second; None means 1
    count,
    firsts,
    lengths,
    shape,
    X_strides,
    out_strides,
    X_DTYPE: tl.constexpr,
    OUT_DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    index, row, col, inside = _place(firsts, lengths, shape, ALIGNED, ROWS, COLS)
    at = _at(X, X_DTYPE, X_strides, firsts, index, row, col, ALIGNED)
    values = tl.load(at, inside, 0.0)
    if sizes is not None:
        values = values.to(tl.float32) / tl.load(sizes + index) / tl.load(sizes + count + index)
    out_at = _at(out, OUT_DTYPE, out_strides, firsts, index, row, col, ALIGNED)
    tl.store(out_at, _cast(values, OUT_DTYPE), inside)


@triton.jit(do_not_specialize=[*_ITEMS])
def _weights_kernel(
    W,
    U,
    residual,
    factor,
    counters,
    rate,
    decay,
    firsts,
    lengths,
    shape,
    W_strides,
    U_strides,
    residual_strides,
    factor_strides,
    counters_strides,
    DTYPE: tl.constexpr,
    W_DTYPE: tl.constexpr,
    U_DTYPE: tl.constexpr,
    FACTOR_DTYPE: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    DECAYS: tl.constexpr,
    CAUTIOUS: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    rate_ = _number(rate, DTYPE, ON_DEVICE)
    decay_ = _number(decay, DTYPE, ON_DEVICE)
    index, row, col, inside = _place(firsts, lengths, shape, ALIGNED, ROWS, COLS)
    W_at = _at(W, W_DTYPE, W_strides, firsts, index, row, col, ALIGNED)
    weight = tl.load(W_at, inside, 0.0)
    if residual is not None:
        rest_at = _at(residual, tl.int16, residual_strides, firsts, index, row, col, ALIGNED)
        rest = tl.load(rest_at, inside, 0)
        bits = weight.to(tl.float32).to(tl.int32, bitcast=True) + rest
        weight = bits.to(tl.float32, bitcast=True)
    weight = weight.to(DTYPE)
    U_at = _at(U, U_DTYPE, U_strides, firsts, index, row, col, ALIGNED)
    delta = tl.load(U_at, inside, 0.0).to(DTYPE)
    if factor is not None:
        at = _at(factor, FACTOR_DTYPE, factor_strides, firsts, index, row, col, False)
        delta = delta * tl.load(at, inside, 0.0).to(DTYPE)
    delta = delta * rate_
    if DECAYS:
        decayed = weight * decay_
        if CAUTIOUS:
            decayed = tl.where(delta * weight >= 0.0, decayed, 0.0)
        delta = delta + decayed
    weight = weight - delta
    if residual is not None or counters is not None:
        added = 0x8000
        if counters is not None:
            counter = _chosen(counters, firsts) + _offsets(index, row, col, counters_strides)
            added = _random_16_bits(counter.to(tl.uint64))
        bits = weight.to(tl.float32).to(tl.int32, bitcast=True)
        bits = tl.where(weight != weight, 0x7FC00000, bits)
        rounded = (bits + added) & -0x10000
        after = rounded.to(tl.float32, bitcast=True).to(W_DTYPE)
    else:
        after = _cast(weight, W_DTYPE)
    tl.store(W_at, after, inside)
    if residual is not None:
        tl.store(rest_at, (bits - rounded).to(tl.int16), inside)


_GAMMA = tl.constexpr(GAMMA)
_FIRST_SHIFT, _FIRST_MULTIPLIER = map(tl.constexpr, MIX[0])
_SECOND_SHIFT, _SECOND_MULTIPLIER = map(tl.constexpr, MIX[1])


@triton.jit
def _random_16_bits(counter):
    """Returns SplitMix64's upper bits, as in `weight_rounding.draw`."""
    bits = counter * _GAMMA
    bits = (bits ^ (bits >> _FIRST_SHIFT)) * _FIRST_MULTIPLIER
    bits = (bits ^ (bits >> _SECOND_SHIFT)) * _SECOND_MULTIPLIER
    return (bits >> 48).to(tl.int32)


@triton.jit
def _chosen(values, firsts):
    """Picks the value of this program's item, the last one whose first program isn't later."""
    value = values[0]
    for number in tl.static_range(1, len(values)):
        value = tl.where(tl.program_id(0) >= firsts[number], values[number], value)
    return value


@triton.jit
def _at(addresses, dtype: tl.constexpr, strides, firsts, index, row, col, ALIGNED: tl.constexpr):
    """Returns pointers to this program's tile of a column."""
    pointer = _chosen(addresses, firsts).to(tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer + _offsets(index, row, col, strides)


@triton.jit
def _place(firsts, lengths, shape, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Returns this program's slice, rows (ROWS, 1), elements (1, COLS), and a mask."""
    length = _chosen(lengths, firsts)
    if ALIGNED:
        length = tl.multiple_of(length, 16)
    program = tl.program_id(0) - _chosen(firsts, firsts)
    across = tl.cdiv(length, COLS)
    down = tl.cdiv(shape[1], ROWS)
    col = (program % across).to(tl.int64) * COLS + tl.arange(0, COLS)[None, :]
    program = program // across
    row = (program % down).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    index = (program // down).to(tl.int64)
    return index, row, col, (row < shape[1]) & (col < length)


@triton.jit
def _offsets(index, row, col, strides):
    return index * strides[0] + row * strides[1] + col * strides[2]


@triton.jit
def _number(number, DTYPE: tl.constexpr, ON_DEVICE: tl.constexpr):
    if ON_DEVICE:
        return tl.load(number).to(DTYPE)
    else:
        return number


@triton.jit
def _cast(x, dtype: tl.constexpr):
    if x.dtype == tl.float64 and dtype == tl.bfloat16:  # some compilers can't convert directly
        return x.to(tl.float32).to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def _bits(x):
    """Returns the bits of fp32 magnitudes as integers: same order, with NaN above Inf."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
