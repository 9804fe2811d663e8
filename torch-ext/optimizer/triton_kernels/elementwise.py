"""Kernels that do the element-wise arithmetic of `core` on accelerators, in one pass over memory.

What they compute is decided in `core`; `tests/test_triton_elementwise.py` compares both.

Every operation is rounded on its own: launches forbid the compiler to fuse products with sums
(`_LAUNCH`), which it would do in one kernel, tile or vector width and not in another. So the same
element becomes the same bits wherever it lies, and ranks of different layouts agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Optional, Union

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tiles import Tiles, stacked, tiled, write_back

Number = Union[float, Tensor]

_PARTIALS = 1024  # read at once where they are combined
_NUMBERS = 256  # of matrices, one for each, in a program
_LAUNCH = {"num_warps": 4, "enable_fp_fusion": False}


def update_momentum(
    buffers: Sequence[Tensor],
    grads: Sequence[Tensor],
    outputs: Sequence[Tensor],
    *,
    momentum: float,
    weight: float,
    nesterov: bool,
    keep: Optional[Sequence[Tensor]] = None,
    wanted: bool = True,
    largest: Optional[Sequence[Tensor]] = None,
) -> None:
    """B ← μB + wG, and wG + μB, or B, into ``outputs``; in fp32, or fp64 where a tensor has it.

    B is rounded once, into its dtype, and the output is made of what it was rounded to. Tensors may
    have any strides and floating dtypes; ``largest`` is of outputs before they are rounded. For the
    other arguments see `core.update_momentum`.
    """
    for B, G, out, kept, top in stacked(buffers, grads, outputs, _bytes(keep), largest):
        dtype = _opmath(B, G, out)
        numbers, on_device = _numbers((momentum, weight), dtype, B.device)
        tiles, (B_, G_, out_, kept_) = tiled(B, G, out, kept)
        partials = None
        if top is not None:
            partials = torch.empty((1, len(B), tiles.count), dtype=dtype, device=B.device)
        _launch(
            _momentum_kernel,
            tiles,
            *(B_, G_, out_, kept_, partials, *numbers),
            DTYPE=_TL[dtype],
            ON_DEVICE=on_device,
            NESTEROV=nesterov,
            KEEP=kept is not None,
            WANTED=wanted,
            MEASURED=top is not None,
        )
        write_back((B, B_), (out, out_))
        if partials is not None:
            _combine(partials, top, None)


def update_weights(
    weights: Sequence[Tensor],
    updates: Sequence[Tensor],
    *,
    rate: Number,
    decay: Number,
    cautious: bool,
    factors: Optional[Sequence[Tensor]] = None,
    keep: Optional[Sequence[Tensor]] = None,
) -> None:
    """W ← W − (Δ + decay·W), Δ = rate·factor·U; in fp32, or fp64 where a tensor has it.

    W is rounded once, and updates are only read. Both may have any strides and floating dtypes. For
    the other arguments see `core.update_weights`.
    """
    for W, U, factor, kept in stacked(weights, updates, factors, _bytes(keep)):
        dtype = _opmath(W, U)
        numbers, on_device = _numbers((rate, decay), dtype, W.device)
        tiles, (W_, U_, factor_, kept_) = tiled(W, U, factor, kept)
        _launch(
            _weights_kernel,
            tiles,
            *(W_, U_, factor_, kept_, *numbers),
            DTYPE=_TL[dtype],
            ON_DEVICE=on_device,
            DECAYS=isinstance(decay, Tensor) or decay != 0.0,
            CAUTIOUS=cautious,
            FACTOR=factor is not None,
            KEEP=kept is not None,
        )
        write_back((W, W_))


def measure(matrices: Sequence[Tensor], largest: Tensor, norms: Tensor) -> None:
    """Largest magnitudes, and Frobenius norms over them, which neither underflow nor overflow.

    Args:
        matrices: of equal shapes, not empty, with any strides; in fp32 arithmetic, or fp64 of fp64.
        largest: (len(matrices),), overwritten; NaN where there is one.
        norms: likewise; not finite where there is Inf or NaN, and 0 of zeros.
    """
    for X, top, norm in stacked(matrices, largest.unbind(), norms.unbind()):
        dtype = _opmath(X)
        tiles, (X_,) = tiled(X)
        partials = torch.empty((2, len(X), tiles.count), dtype=dtype, device=X.device)
        _launch(_measure_kernel, tiles, X_, partials, tiles.programs, DTYPE=_TL[dtype])
        _combine(partials, top, norm)


def sizes(
    largest: Tensor, norms: Tensor, *, factor: float, eps: float, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What matrices are divided by, as `newton_schulz.iteration` has it for fp16, by `measure`.

    Args:
        largest, norms: (n,).
        factor, eps: the size is factor·norm + eps, or 1 where that is 0.
        scale: a power of two that the size is brought near to.

    Returns:
        Sizes of matrices whose largest magnitude has been divided out, (n,); what they are still
        to be divided by beside a power of two, in [1, 2), NaN of a matrix with Inf or NaN; and the
        exponents of that power, for `pack`, in fp32.
    """
    size, rest = torch.empty((2, len(largest)), dtype=largest.dtype, device=largest.device)
    exponents = torch.empty_like(size, dtype=torch.float32)
    with torch.accelerator.device_index(largest.device.index):
        _sizes_kernel[(-(-len(largest) // _NUMBERS),)](
            *(largest, norms, size, rest, exponents, len(largest)),
            *(factor, eps, int(math.log2(scale))),
            BLOCK=_NUMBERS,
            **_LAUNCH,
        )
    return size, rest, exponents


def exponents_to_fit(largest: Tensor, highest: int, least: int) -> Tensor:
    """Exponents e that bring ``largest``·2^−e to [2^(highest − 1), 2^highest), (n,) in fp32.

    Args:
        largest: (n,); e is 0 for Inf and NaN.
        highest: an exponent.
        least: of what is less than 2^(least − 1), as zeros are, e is least − highest.
    """
    exponents = torch.empty_like(largest, dtype=torch.float32)
    with torch.accelerator.device_index(largest.device.index):
        _exponents_kernel[(-(-len(largest) // _NUMBERS),)](
            *(largest, exponents, len(largest), highest, least), BLOCK=_NUMBERS, **_LAUNCH
        )
    return exponents


def pack(inputs: Sequence[Tensor], outputs: Sequence[Tensor], exponents: Tensor) -> None:
    """``inputs``·2^−e into ``outputs``, of any floating dtype.

    Args:
        exponents: (len(inputs),) in fp32, whole numbers between −127 and 126.
    """
    for X, out, exponent in stacked(inputs, outputs, exponents.unbind()):
        tiles, (X_, out_) = tiled(X, out)
        _launch(_pack_kernel, tiles, X_, out_, exponent, exponent.stride(0))
        write_back((out, out_))


def _launch(kernel: Any, tiles: Tiles, first: Any, *arguments: Any, **constants: Any) -> None:
    """Launches on the first argument's device: left to itself, Triton takes the current one."""
    constants = {**constants, "ROWS": tiles.rows, "COLS": tiles.cols, **_LAUNCH}
    with torch.accelerator.device_index(first.device.index):
        kernel[(tiles.programs,)](first, *arguments, tiles.shape, *tiles.strides, **constants)


def _combine(partials: Tensor, largest: Tensor, norms: Optional[Tensor]) -> None:
    _, tensors, count = partials.shape
    with torch.accelerator.device_index(partials.device.index):
        _combine_kernel[(tensors,)](
            *(partials, largest, norms, tensors * count, count, largest.stride(0)),
            0 if norms is None else norms.stride(0),
            BITS=_BITS[partials.dtype],
            NORM=norms is not None,
            BLOCK=_PARTIALS,
            **_LAUNCH,
        )


# -- kernels ---------------------------------------------------------------------------------------
# Stacks are (tensors, slices, rows, cols), with a tuple of four strides each; a program has a tile
# of rows and columns. Offsets have 64 bits: there are tensors of more than 2^31 elements.


@triton.jit
def _momentum_kernel(
    B,
    G,
    out,
    keep,
    partials,  # (programs,)
    momentum,
    weight,
    shape,
    B_strides,
    G_strides,
    out_strides,
    keep_strides,
    DTYPE: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    NESTEROV: tl.constexpr,
    KEEP: tl.constexpr,
    WANTED: tl.constexpr,
    MEASURED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    momentum_ = _number(momentum, DTYPE, ON_DEVICE)
    weight_ = _number(weight, DTYPE, ON_DEVICE)
    tensor, index, row, col, inside = _place(shape, ROWS, COLS)
    B_at = B + _offsets(tensor, index, row, col, B_strides)
    before = tl.load(B_at, inside, 0.0)
    grad = (
        tl.load(G + _offsets(tensor, index, row, col, G_strides), inside, 0.0).to(DTYPE) * weight_
    )
    after = _cast(before.to(DTYPE) * momentum_ + grad, before.dtype)
    result = after.to(DTYPE)
    if NESTEROV:
        result = grad + result * momentum_
    if KEEP:
        kept = tl.load(keep + _offsets(tensor, index, row, col, keep_strides), inside, 0) != 0
        after = tl.where(kept, after, before)
        result = tl.where(kept, result, 0.0)
    tl.store(B_at, after, inside)
    if WANTED:
        out_at = out + _offsets(tensor, index, row, col, out_strides)
        tl.store(out_at, _cast(result, out.dtype.element_ty), inside)
    if MEASURED:
        largest = tl.max(_bits(tl.where(inside, result, 0.0))).to(DTYPE, bitcast=True)
        tl.store(partials + tl.program_id(0), largest)


@triton.jit
def _measure_kernel(
    X,
    partials,  # (2, programs)
    programs,
    shape,
    X_strides,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    tensor, index, row, col, inside = _place(shape, ROWS, COLS)
    values = tl.load(X + _offsets(tensor, index, row, col, X_strides), inside, 0.0).to(DTYPE)
    largest = tl.max(_bits(values)).to(DTYPE, bitcast=True)
    scaled = values / tl.where(largest == 0, 1.0, largest)
    tl.store(partials + tl.program_id(0), largest)
    tl.store(partials + programs + tl.program_id(0), tl.sum(scaled * scaled))


@triton.jit
def _combine_kernel(
    partials,  # (2, tensors, count), or (1, …) without norms
    largest,
    norms,
    programs,
    count,
    largest_stride,
    norms_stride,
    BITS: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Largest magnitude, and norm over it, of a tensor from those of its tiles, in their order."""
    DTYPE: tl.constexpr = partials.dtype.element_ty
    tensor = tl.program_id(0).to(tl.int64)
    partials += tensor * count
    top = tl.zeros((BLOCK,), dtype=BITS)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        top = tl.maximum(top, _bits(tl.load(partials + at, at < count, 0.0)))
    whole = tl.max(top).to(DTYPE, bitcast=True)
    tl.store(largest + tensor * largest_stride, whole)
    if NORM:
        divisor = tl.where(whole == 0, 1.0, whole)
        squares = tl.zeros((BLOCK,), dtype=DTYPE)
        for start in range(0, count, BLOCK):
            at = start + tl.arange(0, BLOCK)
            ratio = tl.load(partials + at, at < count, 0.0) / divisor
            squares += tl.load(partials + programs + at, at < count, 0.0) * ratio * ratio
        tl.store(norms + tensor * norms_stride, tl.sqrt(tl.sum(squares)))


@triton.jit(do_not_specialize=["count", "log2_scale"])
def _sizes_kernel(
    largest,
    norms,
    size_out,
    rest_out,
    exponents_out,
    count,
    factor,
    eps,
    log2_scale,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    top = tl.load(largest + at, at < count, 1.0)
    exponent_of_top, top = _split(tl.where(top == 0.0, 1.0, top))
    size = tl.load(norms + at, at < count, 1.0) * factor + eps
    size = tl.where(size == 0.0, 1.0, size)
    exponent, rest = _split(size * top)
    exponent = tl.minimum(tl.maximum(exponent_of_top + exponent - log2_scale, -126), 126)
    tl.store(size_out + at, size, at < count)
    tl.store(rest_out + at, rest, at < count)
    tl.store(exponents_out + at, exponent.to(tl.float32), at < count)


@triton.jit(do_not_specialize=["count", "highest", "least"])
def _exponents_kernel(largest, out, count, highest, least, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    top = tl.load(largest + at, at < count, 1.0)
    exponent, mantissa = _split(top)
    exponent = tl.maximum(tl.where(top == 0.0, least, exponent + 1), least) - highest
    exponent = tl.where(mantissa == mantissa, exponent, 0)
    tl.store(out + at, exponent.to(tl.float32), at < count)


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


@triton.jit
def _pack_kernel(
    X,
    out,
    exponents,
    exponent_stride,
    shape,
    X_strides,
    out_strides,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    tensor, index, row, col, inside = _place(shape, ROWS, COLS)
    exponent = tl.load(exponents + tensor * exponent_stride).to(tl.int32)
    factor = ((127 - exponent) << 23).to(tl.float32, bitcast=True)  # exact, which exp2 need not be
    at = X + _offsets(tensor, index, row, col, X_strides)
    scaled = _cast(tl.load(at, inside, 0.0) * factor, out.dtype.element_ty)
    tl.store(out + _offsets(tensor, index, row, col, out_strides), scaled, inside)


@triton.jit
def _weights_kernel(
    W,
    U,
    factor,
    keep,
    rate,
    decay,
    shape,
    W_strides,
    U_strides,
    factor_strides,
    keep_strides,
    DTYPE: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    DECAYS: tl.constexpr,
    CAUTIOUS: tl.constexpr,
    FACTOR: tl.constexpr,
    KEEP: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    rate_ = _number(rate, DTYPE, ON_DEVICE)
    decay_ = _number(decay, DTYPE, ON_DEVICE)
    tensor, index, row, col, inside = _place(shape, ROWS, COLS)
    W_at = W + _offsets(tensor, index, row, col, W_strides)
    before = tl.load(W_at, inside, 0.0)
    weight = before.to(DTYPE)
    delta = tl.load(U + _offsets(tensor, index, row, col, U_strides), inside, 0.0).to(DTYPE)
    if FACTOR:
        at = factor + _offsets(tensor, index, row, col, factor_strides)
        delta = delta * tl.load(at, inside, 0.0).to(DTYPE)
    delta = delta * rate_
    if DECAYS:
        decayed = weight * decay_
        if CAUTIOUS:
            decayed = tl.where(delta * weight >= 0.0, decayed, 0.0)
        delta = delta + decayed
    after = _cast(weight - delta, before.dtype)
    if KEEP:
        kept = tl.load(keep + _offsets(tensor, index, row, col, keep_strides), inside, 0) != 0
        after = tl.where(kept, after, before)
    tl.store(W_at, after, inside)


@triton.jit
def _place(shape, ROWS: tl.constexpr, COLS: tl.constexpr):
    """This program's tensor, slice, rows (ROWS, 1), columns (1, COLS), and which lie inside."""
    program = tl.program_id(0)
    across = tl.cdiv(shape[2], COLS)
    down = tl.cdiv(shape[1], ROWS)
    col = (program % across).to(tl.int64) * COLS + tl.arange(0, COLS)[None, :]
    program = program // across
    row = (program % down).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    program = program // down
    tensor = (program // shape[0]).to(tl.int64)
    index = (program % shape[0]).to(tl.int64)
    return tensor, index, row, col, (row < shape[1]) & (col < shape[2])


@triton.jit
def _offsets(tensor, index, row, col, strides):
    return (tensor * strides[0] + index * strides[1]) + row * strides[2] + col * strides[3]


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

_TL = {torch.float32: tl.float32, torch.float64: tl.float64}
_BITS = {torch.float32: tl.int32, torch.float64: tl.int64}


def _opmath(*tensors: Tensor) -> torch.dtype:
    has_fp64 = any(tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if has_fp64 else torch.float32


def _numbers(
    values: Sequence[Number], dtype: torch.dtype, device: torch.device
) -> tuple[list[Number], bool]:
    """What a kernel takes numbers as, and whether that is tensors: it takes floats in fp32 only."""
    values = [  # reading what is on the host waits for no device
        float(v) if isinstance(v, Tensor) and v.is_cpu and device.type != "cpu" else v
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


def _bytes(flags: Optional[Sequence[Tensor]]) -> Optional[list[Tensor]]:
    return None if flags is None else [flag.view(torch.uint8) for flag in flags]
