"""Kernels that do the element-wise arithmetic of `core` on accelerators, in one pass over memory.

What they compute is decided in `core`; `tests/test_triton_elementwise.py` compares both.

Every operation is rounded on its own: launches forbid the compiler to fuse products with sums
(`_LAUNCH`), which it would do in one kernel, tile or vector width and not in another. So the same
element becomes the same bits wherever it lies, and ranks of different layouts agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional, Union

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


class Sizes(NamedTuple):
    """What `measure` returns of the matrices of a batch, (n,) each.

    Args:
        largest: magnitudes; NaN where there is one.
        norm: Frobenius norms divided by ``largest``, so that they neither underflow nor overflow;
            not finite where there is Inf or NaN, and 0 of zeros.
        size: what matrices are divided by after ``largest``.
        rest: what matrices are to be divided by beside a power of two, in [1, 2); NaN of a matrix
            with Inf or NaN.
        inverse: of ``rest``.
        of_gram: what Gram matrices are multiplied with, (scale·rest)^-2.
        exponents: of that power of two, for `pack_batch`, in fp32.
    """

    largest: Tensor
    norm: Tensor
    size: Tensor
    rest: Tensor
    inverse: Tensor
    of_gram: Tensor
    exponents: Tensor


def measure(matrices: Tensor, *, factor: float, eps: float, scale: float) -> Sizes:
    """What matrices are divided by, as `newton_schulz.iteration` has it for fp16.

    Args:
        matrices: (n, rows, cols), not empty, of any strides; in fp32 arithmetic, or fp64 of fp64.
        factor, eps: the size is factor·norm + eps, or 1 where that is 0.
        scale: a power of two that the size is brought near to.
    """
    count, device, dtype = len(matrices), matrices.device, _opmath(matrices.dtype)
    (launch,) = launches(([matrices],), whole_dims=1)
    partials = torch.empty((2, launch.programs), dtype=dtype, device=device)
    types = {"X_DTYPE": _TL[matrices.dtype], "DTYPE": _TL[dtype]}
    _launch(_measure_kernel, launch, device, partials, launch.programs, **types)
    numbers = torch.empty((6, count), dtype=dtype, device=device)
    exponents = torch.empty(count, dtype=torch.float32, device=device)
    arguments = (
        *(partials, numbers, exponents, launch.programs, launch.programs // count),
        *(factor, eps, int(math.log2(scale)), scale**-2),
    )
    key = ("sizes", *map(layout_of, arguments))
    constants = {"BITS": _BITS[dtype], "BLOCK": _PARTIALS}
    launching.launch(_sizes_kernel, key, device, count, arguments, constants, **_LAUNCH)
    return Sizes(*numbers, exponents)  # type: ignore[call-arg]  # six numbers


def pack_batch(matrices: Tensor, out: Tensor, exponents: Tensor) -> None:
    """``matrices``·2^−e into ``out``, of any floating dtype, which may be the same tensor.

    Args:
        matrices, out: (n, rows, cols).
        exponents: (n,) in fp32, whole numbers between −127 and 126.
    """
    (launch,) = launches(([matrices], [out]), whole_dims=1)
    types = {"X_DTYPE": _TL[matrices.dtype], "OUT_DTYPE": _TL[out.dtype]}
    _launch(_pack_kernel, launch, matrices.device, exponents, **types)


def copy(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """Inputs into outputs of the same shapes, of any floating dtype."""
    for launch in launches((inputs, outputs), whole_dims=1):
        types = {"X_DTYPE": _TL[launch.dtypes[0]], "OUT_DTYPE": _TL[launch.dtypes[1]]}
        _launch(_copy_kernel, launch, outputs[0].device, **types)


def add_to_diagonal(Z: Tensor, inverse: Optional[Tensor], diagonal: float, out: Tensor) -> None:
    """(Z + diagonal·I)·inverse, of which Z·inverse is rounded first.

    Args:
        Z, out: (n, s, s), in fp32 or less.
        inverse: (n, 1, 1) in fp32; None is 1.
    """
    (launch,) = launches(([Z], [out]), whole_dims=3)
    types = {"X_DTYPE": _TL[Z.dtype], "OUT_DTYPE": _TL[out.dtype]}
    _launch(_diagonal_kernel, launch, Z.device, inverse, diagonal, **types)


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

_ITEMS = ["B", "G", "W", "U", "X", "Z", "out", "factor", "residual", "counters"]
_ITEMS += ["firsts", "lengths"]


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
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    index, row, col, inside = _place(firsts, lengths, shape, ALIGNED, ROWS, COLS)
    at = _pointer(X, firsts, X_DTYPE, ALIGNED) + _offsets(index, row, col, X_strides)
    values = tl.load(at, inside, 0.0).to(DTYPE)
    largest = tl.max(_bits(values)).to(DTYPE, bitcast=True)
    scaled = values / tl.where(largest == 0, 1.0, largest)
    tl.store(partials + tl.program_id(0), largest)
    tl.store(partials + programs + tl.program_id(0), tl.sum(scaled * scaled))


@triton.jit(do_not_specialize=["programs", "count", "log2_scale"])
def _sizes_kernel(
    partials,  # (2, matrices, count): largest magnitudes of tiles, and sums of squares over them
    numbers,  # (6, matrices), see `Sizes`
    exponents,
    programs,
    count,
    factor,
    eps,
    log2_scale,
    scale_of_gram,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Combines what was measured of the tiles of a matrix, in their order, to its size."""
    DTYPE: tl.constexpr = partials.dtype.element_ty
    matrix = tl.program_id(0).to(tl.int64)
    partials += matrix * count
    top = tl.zeros((BLOCK,), dtype=BITS)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        top = tl.maximum(top, _bits(tl.load(partials + at, at < count, 0.0)))
    largest = tl.max(top).to(DTYPE, bitcast=True)
    divisor = tl.where(largest == 0, 1.0, largest)
    squares = tl.zeros((BLOCK,), dtype=DTYPE)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        ratio = tl.load(partials + at, at < count, 0.0) / divisor
        squares += tl.load(partials + programs + at, at < count, 0.0) * ratio * ratio
    norm = tl.sqrt(tl.sum(squares))
    exponent_of_top, top_mantissa = _split(divisor)
    size = norm * factor + eps
    size = tl.where(size == 0.0, 1.0, size)
    exponent, rest = _split(size * top_mantissa)
    exponent = tl.minimum(tl.maximum(exponent_of_top + exponent - log2_scale, -126), 126)
    matrices = tl.num_programs(0)
    numbers += matrix
    tl.store(numbers, largest)
    tl.store(numbers + matrices, norm)
    tl.store(numbers + 2 * matrices, size)
    tl.store(numbers + 3 * matrices, rest)
    tl.store(numbers + 4 * matrices, _inverse(rest))
    tl.store(numbers + 5 * matrices, _inverse(rest * rest) * scale_of_gram)
    tl.store(exponents + matrix, exponent.to(tl.float32))


@triton.jit
def _power(exponent):
    """2^e of whole numbers in fp32, exactly, which exp2 need not be."""
    return ((127 + exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _inverse(x):
    if x.dtype == tl.float64:
        return 1.0 / x
    else:
        return tl.div_rn(1.0, x)  # else some compilers are content with less


@triton.jit
def _split(x):
    """k and m of numbers m·2^k that are not negative, with m in [1, 2); of Inf and NaN, m is NaN.

    Of 0 the two are of no meaning.
    """
    if x.dtype == tl.float64:
        tiny = x < 2.0**-1022
        bits = tl.where(tiny, x * 2.0**53, x).to(tl.int64, bitcast=True)
        biased = (bits >> 52) & 0x7FF
        mantissa = ((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).to(tl.float64, bitcast=True)
        exponent = (biased - tl.where(tiny, 1023 + 53, 1023)).to(tl.int32)
        return exponent, tl.where(biased == 0x7FF, float("nan"), mantissa)
    else:
        tiny = x < 2.0**-126
        bits = tl.where(tiny, x * 2.0**24, x).to(tl.int32, bitcast=True)
        biased = (bits >> 23) & 0xFF
        mantissa = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
        exponent = biased - tl.where(tiny, 127 + 24, 127)
        return exponent, tl.where(biased == 0xFF, float("nan"), mantissa)


@triton.jit(do_not_specialize=[*_ITEMS])
def _pack_kernel(
    X,
    out,
    exponents,
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
    exponent = tl.load(exponents + index).to(tl.int32)
    at = _pointer(X, firsts, X_DTYPE, ALIGNED) + _offsets(index, row, col, X_strides)
    scaled = _cast(tl.load(at, inside, 0.0) * _power(-exponent), OUT_DTYPE)
    out_at = _pointer(out, firsts, OUT_DTYPE, ALIGNED) + _offsets(index, row, col, out_strides)
    tl.store(out_at, scaled, inside)


@triton.jit(do_not_specialize=[*_ITEMS])
def _copy_kernel(
    X,
    out,
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
    out_at = _pointer(out, firsts, OUT_DTYPE, ALIGNED) + _offsets(index, row, col, out_strides)
    tl.store(out_at, _cast(values, OUT_DTYPE), inside)


@triton.jit(do_not_specialize=[*_ITEMS])
def _diagonal_kernel(
    Z,
    out,
    inverse,  # (n,), None for 1
    diagonal,
    firsts,
    lengths,
    shape,
    Z_strides,
    out_strides,
    X_DTYPE: tl.constexpr,
    OUT_DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    index, row, col, inside = _place(firsts, lengths, shape, ALIGNED, ROWS, COLS)
    factor = 1.0
    if inverse is not None:
        factor = tl.load(inverse + index)
    at = _pointer(Z, firsts, X_DTYPE, ALIGNED) + _offsets(index, row, col, Z_strides)
    scaled = _cast(tl.load(at, inside, 0.0).to(tl.float32) * factor, OUT_DTYPE).to(tl.float32)
    # In one rounding, as torch's addition has it.
    scaled = tl.where(row == col, tl.fma(diagonal, factor, scaled), scaled)
    out_at = _pointer(out, firsts, OUT_DTYPE, ALIGNED) + _offsets(index, row, col, out_strides)
    tl.store(out_at, _cast(scaled, OUT_DTYPE), inside)


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
    """Magnitudes as integers, which order like them, with NaN above Inf."""
    if x.dtype == tl.float64:
        return x.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
    else:
        return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


# -- arguments -------------------------------------------------------------------------------------

_TL = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
_BITS = {torch.float32: tl.int32, torch.float64: tl.int64}


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
