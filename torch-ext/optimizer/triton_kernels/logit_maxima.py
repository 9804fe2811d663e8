"""Finds the largest attention logit of every query head in one launch, without the score matrix.

`extras.qk_logits.maxima` defines what is computed, and does the same with torch's products.
"""

from __future__ import annotations

import dataclasses
from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launching
from .launching import SymmetricConfig
from .symmetric import INTERPRETED, multiply

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
KEYS = 64  # maximum keys of a tile: with as many as queries, registers would spill
WHOLE_WIDTH = 128  # maximum width of heads whose 16-bit queries are loaded only once


def raise_maxima(
    out: Tensor,  # (Hq,), fp32
    q: Tensor,  # (B, Hq, Tq, D)
    k: Tensor,  # (B, Hk, Tk, D)
    q_rope: Optional[Tensor],  # (B, Hq, Tq, R)
    k_rope: Optional[Tensor],  # (B, 1 or Hk, Tk, R)
    query_ids: Optional[Tensor],  # (B or 1, Tq)
    key_ids: Optional[Tensor],  # (B or 1, Tk)
    attn_mask: Optional[Tensor],  # (B or 1, Hq or 1, Tq or 1, Tk or 1)
    *,
    scale: float,
    causal: bool,
    largest_excluded: Optional[float],
) -> Tensor:
    """Raises ``out`` to the largest ``scale · (q·k + q_rope·k_rope)`` of each head.

    Products of 16-bit inputs are exact, fp32 inputs aren't reduced to TF32, and sums are in fp32.
    Only pairs of a query and a key that attend count; NaN in the logit of such a pair gives NaN.
    The result doesn't depend on the order of programs.

    Args:
        query_ids, key_ids: integers; pairs with equal ids count.
        attn_mask: bool, or numbers, which exceed ``largest_excluded`` for pairs that count.
        scale: a positive factor.
        causal: True if query i attends only to keys j ≤ i.

    Returns:
        ``out``.
    """
    (B, Hq, Tq, D), Tk = q.shape, k.shape[2]
    operands = [tensor for tensor in (q, k, q_rope, k_rope) if tensor is not None]
    aligned = attn_mask is None and all(map(_is_aligned, operands))
    target = launching.compile_target(q.device)
    rule = launching.choose_by_rule(q.dtype, min(Tq, Tk), B * Hq, aligned, target)
    config = with_two_tiles(rule, q.dtype)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = attn_mask.view(torch.uint8)
    is_whole = D <= WHOLE_WIDTH and q.dtype.itemsize == 2 and q_rope is None
    block_width = max(16, triton.next_power_of_2(D)) if is_whole else config.block_k
    # By itself, Triton launches on the current device.
    with torch.accelerator.device_index(q.device.index):
        _maxima_kernel[(B * Hq * -(-Tq // config.block),)](
            *(out.view(torch.int32), q, k, q_rope, k_rope, query_ids, key_ids, attn_mask),
            *(scale, largest_excluded, Hq, Hq // k.shape[1], Tq, Tk),
            *(D, None if q_rope is None else q_rope.shape[3], out.stride(0)),
            *map(_steps, (q, k, q_rope, k_rope, query_ids, key_ids, attn_mask)),
            CAUSAL=causal,
            WHOLE=is_whole,
            INTERPRETED=INTERPRETED,
            BLOCK=config.block,
            KEYS=min(config.block, KEYS),
            BLOCK_WIDTH=block_width,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            enable_fp_fusion=False,  # as in all kernels; the products aren't affected
        )
    return out


def takes(*inputs: Optional[Tensor]) -> bool:
    """Returns True if `raise_maxima` supports the dtypes and strides of its inputs.

    Offsets within a tile, of at most 128 positions or columns, have 32 bits.
    """
    tensors, mask = [tensor for tensor in inputs if tensor is not None], inputs[-1]
    has_dtypes = tensors[0].dtype in DTYPES and (
        mask is None or mask.dtype in (torch.bool, *DTYPES)
    )
    return has_dtypes and all(step < 2**23 for t in tensors for step in t.stride()[-2:])


def with_two_tiles(config: SymmetricConfig, dtype: torch.dtype) -> SymmetricConfig:
    """Adapts a configuration to a kernel with one more tile, of maxima, in registers."""
    block_k = min(config.block_k, 16 if dtype == torch.float32 else 64)
    return dataclasses.replace(config, num_warps=8, block_k=block_k)


def _steps(tensor: Optional[Tensor]) -> Optional[tuple[int, ...]]:
    """Returns strides, with 0 for dimensions of size 1, which broadcast."""
    if tensor is None:
        return None
    return tuple(0 if size == 1 else step for size, step in zip(tensor.shape, tensor.stride()))


def _is_aligned(operand: Tensor) -> bool:
    """Returns True if Triton, which looks for multiples of 16, can load vectors."""
    *strides, within_row = operand.stride()
    multiples = all(size % 16 == 0 for size in (operand.shape[-1], operand.data_ptr(), *strides))
    return within_row == 1 and multiples


# Specializing on 1 or multiples of 16 isn't worth more compilations for these arguments.
@triton.jit(do_not_specialize=["heads", "group", "queries", "keys", "out_stride"])
def _maxima_kernel(
    out,  # (heads,), the bits of fp32 as integers
    q,
    k,
    q_rope,
    k_rope,
    query_ids,
    key_ids,
    mask,
    scale,
    largest_excluded,
    heads,  # query heads
    group,  # query heads per key head
    queries,
    keys,
    width,
    rope_width,
    out_stride,
    q_steps,
    k_steps,
    q_rope_steps,
    k_rope_steps,
    query_ids_steps,
    key_ids_steps,
    mask_steps,
    CAUSAL: tl.constexpr,
    WHOLE: tl.constexpr,  # the width is at most BLOCK_WIDTH
    INTERPRETED: tl.constexpr,
    BLOCK: tl.constexpr,  # queries per tile, a multiple of KEYS
    KEYS: tl.constexpr,  # keys per tile
    BLOCK_WIDTH: tl.constexpr,
):
    # A program handles one tile of a head's queries. The last tiles, which have the most keys in
    # causal attention, come first.
    tiles = tl.cdiv(queries, BLOCK)
    number = tl.program_id(0)
    first = (tiles - 1 - number % tiles) * BLOCK
    head = (number // tiles % heads).to(tl.int64)
    batch = (number // tiles // heads).to(tl.int64)
    key_head = head // group

    # Beyond the end, the last query and the last key are repeated, which changes no maximum. Bases
    # have 64 bits; offsets within a tile have 32.
    rows = tl.minimum(tl.arange(0, BLOCK), queries - 1 - first)
    skipped = first.to(tl.int64)
    q += batch * q_steps[0] + head * q_steps[1] + skipped * q_steps[2]
    k += batch * k_steps[0] + key_head * k_steps[1]
    if WHOLE:
        inner = tl.arange(0, BLOCK_WIDTH)
        offsets = rows[:, None] * q_steps[2] + inner[None, :] * q_steps[3]
        of_queries = tl.load(q + offsets, mask=inner[None, :] < width, other=0.0)
    if q_rope is not None:
        q_rope += batch * q_rope_steps[0] + head * q_rope_steps[1] + skipped * q_rope_steps[2]
        k_rope += batch * k_rope_steps[0] + key_head * k_rope_steps[1]
    if query_ids is not None:
        query_ids += batch * query_ids_steps[0] + skipped * query_ids_steps[1]
        query_id = tl.load(query_ids + rows * query_ids_steps[1]).to(tl.int64)
        key_ids += batch * key_ids_steps[0]
    if mask is not None:
        mask += batch * mask_steps[0] + head * mask_steps[1] + skipped * mask_steps[2]

    # First the keys that all queries of the tile attend to, then those that some attend to.
    best = tl.full((BLOCK, KEYS), float("-inf"), tl.float32)
    middle = keys
    if CAUSAL:
        middle = tl.minimum(first, keys // KEYS * KEYS)
    for part in tl.static_range(2 if CAUSAL else 1):
        begin = 0 if part == 0 else middle
        end = middle if part == 0 else tl.minimum(keys, first + BLOCK)
        for start in range(begin, end, KEYS):
            cols = tl.minimum(tl.arange(0, KEYS), keys - 1 - start)
            skipped = tl.cast(start, tl.int64)
            scores = tl.zeros((BLOCK, KEYS), dtype=tl.float32)
            k_at = k + skipped * k_steps[2]
            if WHOLE:
                k_offsets = inner[:, None] * k_steps[3] + cols[None, :] * k_steps[2]
                of_keys = tl.load(k_at + k_offsets, mask=inner[:, None] < width, other=0.0)
                scores = multiply(of_queries, of_keys, scores, INTERPRETED)
            else:
                scores = _add_products(
                    scores, q, k_at, rows, cols, q_steps, k_steps, width, BLOCK_WIDTH, INTERPRETED
                )
            if q_rope is not None:
                k_rope_at = k_rope + skipped * k_rope_steps[2]
                scores = _add_products(
                    scores, q_rope, k_rope_at, rows, cols, q_rope_steps, k_rope_steps, rope_width,
                    BLOCK_WIDTH, INTERPRETED,
                )  # fmt: skip
            if query_ids is not None:
                ids_at = key_ids + skipped * key_ids_steps[1]
                key_id = tl.load(ids_at + cols * key_ids_steps[1]).to(tl.int64)
                scores = tl.where(query_id[:, None] != key_id[None, :], float("-inf"), scores)
            if mask is not None:
                mask_at = mask + skipped * mask_steps[3]
                mask_at = mask_at + rows[:, None] * mask_steps[2] + cols[None, :] * mask_steps[3]
                is_excluded = tl.load(mask_at).to(tl.float32) <= largest_excluded
                scores = tl.where(is_excluded, float("-inf"), scores)
            if part == 1:
                unused = first + rows[:, None] < start + cols[None, :]
                scores = tl.where(unused, float("-inf"), scores)
            best = tl.maximum(best, scores, propagate_nan=tl.PropagateNan.ALL)

    # As signed integers, the bits of positive floats have the same order as the floats, the bits of
    # negative floats the reverse order. NaN without a sign is above Inf.
    bits = best.to(tl.int32, bitcast=True)
    ordered = tl.where(best == best, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    largest = tl.max(ordered)
    largest = (largest ^ ((largest >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True) * scale
    bits = tl.where(largest == largest, largest.to(tl.int32, bitcast=True), 0x7FFFFFFF)
    # As unsigned integers, the bits of negative floats are above all others, in reverse order. NaN
    # of either sign stays.
    out += head * out_stride
    held = tl.load(out).to(tl.float32, bitcast=True)
    tl.atomic_max(out, bits, mask=(bits >= 0) & (held == held))
    unsigned = out.to(tl.pointer_type(tl.uint32), bitcast=True)
    tl.atomic_min(unsigned, bits.to(tl.uint32, bitcast=True), mask=(bits < 0) & (held == held))


@triton.jit
def _add_products(
    scores,
    q,
    k,
    rows,
    cols,
    q_steps,
    k_steps,
    width,
    BLOCK_WIDTH: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    inner = tl.arange(0, BLOCK_WIDTH)
    q_offsets = rows[:, None] * q_steps[2] + inner[None, :] * q_steps[3]
    k_offsets = inner[:, None] * k_steps[3] + cols[None, :] * k_steps[2]
    for start in range(0, width, BLOCK_WIDTH):
        left = width - start
        of_queries = tl.load(q + q_offsets, mask=inner[None, :] < left, other=0.0)
        of_keys = tl.load(k + k_offsets, mask=inner[:, None] < left, other=0.0)
        scores = multiply(of_queries, of_keys, scores, INTERPRETED)
        q += BLOCK_WIDTH * q_steps[3]
        k += BLOCK_WIDTH * k_steps[3]
    return scores
