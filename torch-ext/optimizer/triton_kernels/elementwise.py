"""Kernels that do the element-wise arithmetic of `core` on accelerators, in one pass over memory.

What they compute is decided in `core`; `tests/test_triton_elementwise.py` compares both.

Every operation is rounded on its own: launches forbid the compiler to fuse products with sums
(`_LAUNCH`), which it would do in one kernel, tile or vector width and not in another. So the same
element becomes the same bits wherever it lies, and ranks of different layouts agree.
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

_PARTIALS = 1024  # read at once where they are combined
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
    """B ← μB + wG, and wG + μB, or B, into ``outputs``; in fp32, or fp64 where a tensor has it.

    B is rounded once, into its dtype, and the output is made of what it was rounded to. Tensors may
    have any strides and floating dtypes. For the other arguments see `core.update_momentum`.
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
    """W ← W − (Δ + decay·W), Δ = rate·factor·U; in fp32, or fp64 where a tensor has it.

    W is rounded once, with ``rounded_by`` from fp32; updates are only read. Both may have
    any strides and floating dtypes. For the other arguments see `core.update_weights`.
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
    """Divides matrices by their largest magnitudes and sizes, as `newton_schulz.iteration` has it.

    Args:
        matrices, out: (n, rows, cols), not empty, of any strides, in fp32 or less; they may be one
            tensor.
        factor: norms are multiplied with it.
        eps, eps_absolute, divided_by: see `iteration.Eps`.
        most_eps: bounds an absolute eps over a largest magnitude.
        magnification: a power of two that ``out`` is multiplied with.
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
    """Inputs into outputs of the same shapes, of any floating dtype; where ``sizes`` are given, (2,
    n) in fp32, slices of a single input are divided by both of theirs on the way."""
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
    """Numbers as a kernel takes them, and its constants DTYPE, of arithmetic, and ON_DEVICE.

    They are floats for fp32, and tensors on the device for fp64 or where one is such a tensor.
    """
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    numbers: list[Number] = [  # reading what is on the host waits for no device
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
    # Triton specializes each number of a tuple, whatever `do_not_specialize` says.
    addresses = [address for column in launch.columns if column for address in column]
    key = (
        *(kernel.__name__, tiling, firsts, lengths, launch.is_aligned),
        tuple([address % 16 == 0 for address in addresses]),
        *(*map(layout_of, arguments), *constants.values()),
    )
    arguments = *launch.columns, *arguments, firsts, lengths, tiling.shape, *tiling.strides
    constants |= {"ALIGNED": launch.is_aligned, "ROWS": tiling.rows, "COLS": tiling.cols}
    launching.launch(kernel, key, device, launch.programs, arguments, constants, **_LAUNCH)


# Kernels get the addresses of tensors as numbers, a tuple for each list of tensors; of random bits
# they get the first counters. These travel with the launch, as all arguments do: nothing is copied
# to the device before it, and graphs may be captured of it. torch's functions of lists do the same.

# Elements per program: two vectors of 16 bytes in bf16 for each thread of four warps.
_TILE = 2048
_SQUARE_TILE = (32, 64)  # where rows are contiguous in one tensor and columns in another

# Each program looks through the items of its launch for its own: with more items, that would take
# longer than its tile.
_MOST_ITEMS = 32

_ALIGNMENT = 16  # bytes of addresses, and elements of rows, that vectors take

Shape = tuple[int, ...]
Column = Optional[Sequence[Any]]  # of tensors or of random bits


class Tiling(NamedTuple):
    """How the tensors of an item, one of each column, are cut into tiles."""

    shape: Shape  # (slices, rows)
    strides: tuple[Shape, ...]  # of each column, for (slices, rows, elements)
    dtypes: tuple[Any, ...]  # of each column; None for a column that is None
    rows: int  # of a tile
    cols: int


class Launch(NamedTuple):
    """One launch, with a program for each tile of its items, which are cut alike.

    What there is of each item is padded to a power of two, or each number of items would be another
    compilation; the padding begins after the last program.
    """

    tiling: Tiling
    columns: tuple[Optional[tuple[int, ...]], ...]  # addresses, or first counters, of each item
    firsts: tuple[int, ...]  # the number of each item's first program
    lengths: tuple[int, ...]  # elements of a row of each item
    programs: int
    is_aligned: bool  # whether wide tensors and rows can be accessed in vectors


def launches(
    wide: Sequence[Column], broadcast: Sequence[Column] = (), *, by_slices: bool = False
) -> Iterator[Launch]:
    """Yields as few launches as have all items; empty ones are left out.

    Args:
        wide: columns, lists of tensors; the tensors of an item have one shape. Any column but the
            first may be None.
        broadcast: columns that broadcast to these, random bits among them, or None.
        by_slices: whether the first dimension stays as it is, as slices. Other dimensions are
            merged where they can be.
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
        if cut is None:  # its slices, which have fewer dimensions, become items at the end
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
    """An operand that is broadcast to that shape, slice by slice along a dimension."""
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
    """How an item is cut, the elements of a row, and how many tiles there are; None if there are
    more than three dimensions even when neighbours are merged.

    Args:
        layout: of each tensor the shape, which is broadcast to the first one's, the strides and
            the dtype.
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
    first = int(by_slices)  # slices stay the first
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
    """Strides of a tensor that is expanded to that shape."""
    added = len(shape) - len(sizes)
    own = zip(sizes, strides, shape[added:])
    return (*[0] * added, *(0 if size == 1 < whole else step for size, step, whole in own))


# Arguments that begin with a capital letter, and ``out``, ``factor`` and ``residual``, are tuples
# of addresses, and ``counters`` one of numbers, see `Launch`; strides are tuples of three. A
# program has a tile of one item. Offsets have 64 bits, for tensors of more than 2^31 elements.

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
    partials,  # (2, matrices, count): largest magnitudes of tiles, and sums of squares over them
    sizes,  # (2, matrices): what matrices are divided by first, and then
    divided_by,  # (matrices,), None for 1
    programs,
    count,
    factor,
    eps,
    eps_absolute,
    most_eps,
    magnification,
    BLOCK: tl.constexpr,
):
    """Combines what was measured of the tiles of a matrix, in their order, to its size."""
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
    sizes,  # (2, count): what slices are divided by first, and then; None for 1
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
    """SplitMix64's upper bits, as `weight_rounding.draw` has them."""
    bits = counter * _GAMMA
    bits = (bits ^ (bits >> _FIRST_SHIFT)) * _FIRST_MULTIPLIER
    bits = (bits ^ (bits >> _SECOND_SHIFT)) * _SECOND_MULTIPLIER
    return (bits >> 48).to(tl.int32)


@triton.jit
def _chosen(values, firsts):
    """Picks the value of this program's item, the last that has begun, from one for each item."""
    value = values[0]
    for number in tl.static_range(1, len(values)):
        value = tl.where(tl.program_id(0) >= firsts[number], values[number], value)
    return value


@triton.jit
def _at(addresses, dtype: tl.constexpr, strides, firsts, index, row, col, ALIGNED: tl.constexpr):
    """Pointers to this program's tile of a column."""
    pointer = _chosen(addresses, firsts).to(tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer + _offsets(index, row, col, strides)


@triton.jit
def _place(firsts, lengths, shape, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """This program's slice, rows (ROWS, 1), elements (1, COLS), and which lie inside."""
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
    if x.dtype == tl.float64 and dtype == tl.bfloat16:  # which not all compilers know
        return x.to(tl.float32).to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def _bits(x):
    """Magnitudes in fp32 as integers, which order like them, with NaN above Inf."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
