"""Kernels that do the element-wise arithmetic of `core` on accelerators, in one pass over memory.

What they compute is decided in `core`; `tests/test_triton_elementwise.py` compares both.

Every operation is rounded on its own: launches forbid the compiler to fuse products with sums
(`_LAUNCH`), which it would do in one kernel, tile or vector width and not in another. So the same
element becomes the same bits wherever it lies, and ranks of different layouts agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional, Union

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..weight_rounding import GAMMA, MIX, RoundedBy
from . import launching
from .launching import layout_of
from .tiles import Launch, launches

Number = Union[float, Tensor]

_PARTIALS = 1024  # read at once where they are combined
_LAUNCH = {"num_warps": 4, "enable_fp_fusion": False}

_GAMMA = tl.constexpr(GAMMA)
_FIRST_SHIFT, _FIRST_MULTIPLIER = map(tl.constexpr, MIX[0])
_SECOND_SHIFT, _SECOND_MULTIPLIER = map(tl.constexpr, MIX[1])


def update_momentum(
    buffers: Sequence[Tensor],
    grads: Sequence[Tensor],
    outputs: Sequence[Tensor],
    *,
    momentum: float,
    weight: float,
    nesterov: bool,
    wanted: bool = True,
) -> None:
    """B ← μB + wG, and wG + μB, or B, into ``outputs``; in fp32, or fp64 where a tensor has it.

    B is rounded once, into its dtype, and the output is made of what it was rounded to. Tensors may
    have any strides and floating dtypes. For the other arguments see `core.update_momentum`.
    """
    device = buffers[0].device
    for launch in launches((buffers, grads, outputs)):
        B, G, out = launch.dtypes
        dtype = _opmath(B, G, out)
        numbers, on_device = _numbers((momentum, weight), dtype, device)
        _launch(
            _momentum_kernel,
            launch,
            device,
            *numbers,
            DTYPE=_TL[dtype],
            B_DTYPE=_TL[B],
            G_DTYPE=_TL[G],
            OUT_DTYPE=_TL[out],
            ON_DEVICE=on_device,
            NESTEROV=nesterov,
            WANTED=wanted,
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
        W, U, residual, factor, random = launch.dtypes
        dtype = _opmath(W, U)
        numbers, on_device = _numbers((rate, decay), dtype, device)
        _launch(
            _weights_kernel,
            launch,
            device,
            *numbers,
            DTYPE=_TL[dtype],
            W_DTYPE=_TL[W],
            U_DTYPE=_TL[U],
            FACTOR_DTYPE=None if factor is None else _TL[factor],
            ON_DEVICE=on_device,
            DECAYS=isinstance(decay, Tensor) or bool(decay != 0.0),
            CAUTIOUS=cautious,
            RESIDUAL=residual is not None,
            RANDOM=random is not None,
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
    (launch,) = launches(([matrices],), whole_dims=1)
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
    for launch in launches((inputs, outputs), whole_dims=1):
        types = {"X_DTYPE": _TL[launch.dtypes[0]], "OUT_DTYPE": _TL[launch.dtypes[1]]}
        _launch(_copy_kernel, launch, outputs[0].device, sizes, count, **types)


def _launch(
    kernel: Any, launch: Launch, device: torch.device, *arguments: Any, **constants: Any
) -> None:
    # Triton specializes each number of a tuple, whatever `do_not_specialize` says.
    addresses = [address for column in launch.columns if column for address in column]
    key = (
        *(kernel.__name__, launch.dtypes, launch.firsts, launch.lengths, launch.shape),
        *(launch.strides, launch.rows, launch.cols, launch.is_aligned),
        tuple([address % 16 == 0 for address in addresses]),
        *(*map(layout_of, arguments), *constants.values()),
    )
    constants = {
        **constants,
        "ALIGNED": launch.is_aligned,
        "ROWS": launch.rows,
        "COLS": launch.cols,
    }
    arguments = (
        *launch.columns,
        *arguments,
        *(launch.firsts, launch.lengths, launch.shape, *launch.strides),
    )
    launching.launch(kernel, key, device, launch.programs, arguments, constants, **_LAUNCH)


# -- kernels ---------------------------------------------------------------------------------------
# Arguments that begin with a capital letter, and ``out``, ``factor`` and ``residual``, are tuples
# of addresses, and ``counters`` one of numbers, see `tiles.Launch`; strides are tuples of three. A
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
    WANTED: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    momentum_ = _number(momentum, DTYPE, ON_DEVICE)
    weight_ = _number(weight, DTYPE, ON_DEVICE)
    index, row, col, inside = _place(firsts, lengths, shape, ALIGNED, ROWS, COLS)
    B_at = _pointer(B, firsts, B_DTYPE, ALIGNED) + _offsets(index, row, col, B_strides)
    after = tl.load(B_at, inside, 0.0)
    G_at = _pointer(G, firsts, G_DTYPE, ALIGNED) + _offsets(index, row, col, G_strides)
    grad = tl.load(G_at, inside, 0.0).to(DTYPE) * weight_
    after = _cast(after.to(DTYPE) * momentum_ + grad, B_DTYPE)
    tl.store(B_at, after, inside)
    if WANTED:
        result = after.to(DTYPE)
        if NESTEROV:
            result = grad + result * momentum_
        out_at = _pointer(out, firsts, OUT_DTYPE, ALIGNED)
        out_at += _offsets(index, row, col, out_strides)
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
    at = _pointer(X, firsts, X_DTYPE, ALIGNED) + _offsets(index, row, col, X_strides)
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
    at = _pointer(X, firsts, X_DTYPE, ALIGNED) + _offsets(index, row, col, X_strides)
    values = tl.load(at, inside, 0.0)
    if sizes is not None:
        values = values.to(tl.float32) / tl.load(sizes + index) / tl.load(sizes + count + index)
    out_at = _pointer(out, firsts, OUT_DTYPE, ALIGNED) + _offsets(index, row, col, out_strides)
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
    RESIDUAL: tl.constexpr,
    RANDOM: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    rate_ = _number(rate, DTYPE, ON_DEVICE)
    decay_ = _number(decay, DTYPE, ON_DEVICE)
    index, row, col, inside = _place(firsts, lengths, shape, ALIGNED, ROWS, COLS)
    W_at = _pointer(W, firsts, W_DTYPE, ALIGNED) + _offsets(index, row, col, W_strides)
    weight = tl.load(W_at, inside, 0.0)
    if RESIDUAL:
        rest_at = _pointer(residual, firsts, tl.int16, ALIGNED)
        rest_at += _offsets(index, row, col, residual_strides)
        rest = tl.load(rest_at, inside, 0)
        bits = weight.to(tl.float32).to(tl.int32, bitcast=True) + rest
        weight = bits.to(tl.float32, bitcast=True)
    weight = weight.to(DTYPE)
    U_at = _pointer(U, firsts, U_DTYPE, ALIGNED) + _offsets(index, row, col, U_strides)
    delta = tl.load(U_at, inside, 0.0).to(DTYPE)
    if FACTOR_DTYPE is not None:
        at = _pointer(factor, firsts, FACTOR_DTYPE, False)
        at += _offsets(index, row, col, factor_strides)
        delta = delta * tl.load(at, inside, 0.0).to(DTYPE)
    delta = delta * rate_
    if DECAYS:
        decayed = weight * decay_
        if CAUTIOUS:
            decayed = tl.where(delta * weight >= 0.0, decayed, 0.0)
        delta = delta + decayed
    weight = weight - delta
    if RESIDUAL or RANDOM:
        added = 0x8000
        if RANDOM:
            counter = _chosen(counters, firsts) + _offsets(index, row, col, counters_strides)
            added = _random_16_bits(counter.to(tl.uint64))
        bits = weight.to(tl.float32).to(tl.int32, bitcast=True)
        bits = tl.where(weight != weight, 0x7FC00000, bits)
        rounded = (bits + added) & -0x10000
        after = rounded.to(tl.float32, bitcast=True).to(W_DTYPE)
    else:
        after = _cast(weight, W_DTYPE)
    tl.store(W_at, after, inside)
    if RESIDUAL:
        tl.store(rest_at, (bits - rounded).to(tl.int16), inside)


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
def _pointer(addresses, firsts, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = _chosen(addresses, firsts).to(tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


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


# -- arguments -------------------------------------------------------------------------------------

_TL = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


def _opmath(*dtypes: torch.dtype) -> torch.dtype:
    return torch.float64 if torch.float64 in dtypes else torch.float32


def _numbers(
    values: Sequence[Number], dtype: torch.dtype, device: torch.device
) -> tuple[list[Number], bool]:
    """Numbers as a kernel takes them, and whether as tensors: it takes floats for fp32 only."""
    values = [  # reading what is on the host waits for no device
        v if isinstance(v, Tensor) and (device.type == "cpu" or not v.is_cpu) else float(v)
        for v in values
    ]
    on_device = dtype != torch.float32 or any(isinstance(v, Tensor) for v in values)
    if on_device:
        values = [
            value
            if isinstance(value, Tensor)
            else torch.full((), value, dtype=dtype, device=device)
            for value in values
        ]
    return values, on_device
