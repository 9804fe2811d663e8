"""Computes all of an update except the polar factor: momentum, scale, second moment, weights.

The functions work on numbers, lists of local tensors, or batches of matrices. They know nothing
about process groups or parameter groups, so tests can call them with plain tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Optional, Union

import torch
from torch import Tensor

from . import triton_kernels
from .scratch import Scratch
from .weight_rounding import RoundedBy, round_into, widen

Number = Union[float, Tensor]


def update_scale(rows: int, cols: int, adjust_lr: Union[str, float]) -> float:
    """Returns the factor by which the polar factor of a (rows, cols) matrix is multiplied.

    A number r means r·sqrt(max(rows, cols)), so that the update's root mean square is about r.
    ``match_rms_adamw`` is r = 0.2, about AdamW's (Liu et al. 2025, arXiv:2502.16982, section 2.2).
    ``original`` is sqrt(max(1, rows/cols)) (Jordan et al. 2024). ``spectral`` is sqrt(rows/cols),
    which makes the RMS → RMS operator norm 1 (Yang et al. 2023, arXiv:2310.17813, condition 1).
    ``none`` is 1.
    """
    if rows == 0 or cols == 0 or adjust_lr == "none":
        return 1.0
    rms = 0.2 if adjust_lr == "match_rms_adamw" else adjust_lr
    if not isinstance(rms, str):
        return rms * math.sqrt(max(rows, cols))
    least = 0.0 if adjust_lr == "spectral" else 1.0
    return math.sqrt(max(least, rows / cols))


def update_dtype(wire: torch.dtype, opmath: torch.dtype, device: torch.device) -> torch.dtype:
    """Returns the dtype that `update_momentum` writes and `update_weights` reads.

    Triton kernels convert elements as they go, so they use the staging buffer itself, in ``wire``.
    Torch's functions need a copy in ``opmath``.
    """
    return wire if triton_kernels.is_used_on(device.type) else opmath


def update_momentum(
    buffers: list[Tensor],
    grads: list[Tensor],
    outputs: Optional[list[Tensor]],
    *,
    momentum: float,
    nesterov: bool,
    style: str,
    maximize: bool,
    opmath: torch.dtype,
) -> None:
    """Updates B ← μB + wG, and writes the input of orthogonalization: wG + μB if Nesterov, else B.

    w is `gradient_weight`. Gradients are only read.

    Args:
        buffers, grads: momentum buffers B and gradients G, local tensors of equal shapes.
        outputs: tensors of the same shapes, in `update_dtype`, which receive the input of
            orthogonalization; None if it isn't needed.
        opmath: dtype of the arithmetic.
    """
    weight = gradient_weight(momentum, style, maximize)
    if not buffers:
        return
    if triton_kernels.is_used_on(buffers[0].device.type):
        from .triton_kernels import elementwise

        elementwise.update_momentum(
            buffers,
            grads,
            outputs,
            momentum=momentum,
            weight=weight,
            nesterov=nesterov,
        )
        return
    if min([buffer.itemsize for buffer in buffers]) >= opmath.itemsize:
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, grads, alpha=weight)
    else:  # round once: in 16 bits, how alpha= rounds depends on an element's place in the tensor
        wide = outputs or [torch.empty_like(buffer, dtype=opmath) for buffer in buffers]
        torch._foreach_copy_(wide, buffers)
        torch._foreach_mul_(wide, momentum)
        torch._foreach_add_(wide, grads, alpha=weight)
        torch._foreach_copy_(buffers, wide)
    if outputs is None:
        return
    if nesterov:
        torch._foreach_copy_(outputs, grads)
        if weight != 1.0:
            torch._foreach_mul_(outputs, weight)
        torch._foreach_add_(outputs, buffers, alpha=momentum)
    else:
        torch._foreach_copy_(outputs, buffers)


def gradient_weight(momentum: float, style: str, maximize: bool) -> float:
    """Returns the weight w of gradients: 1 (classical) or 1 − μ (ema), negated to maximize."""
    return (1.0 if style == "classical" else 1.0 - momentum) * (-1.0 if maximize else 1.0)


def second_moment(U: Tensor, of_rows: bool, scratch: Scratch) -> Tensor:
    """Returns the mean of U² over each row, (n, rows), or over each column, (n, cols).

    Args:
        U: polar factors, (n, rows, cols).
        of_rows: True for the means of rows, False for the means of columns.

    Returns:
        The means in fp32, or in fp64 if U is fp64.
    """
    dim = -1 if of_rows else -2
    dtype = torch.promote_types(U.dtype, torch.float32)
    if U.device.type != "cpu":  # accelerators widen elements as they read them: no copy
        # The order of a sum, and so its last bit, depends on the batch. Exact mode, which uses fp32
        # and fp64, needs the same bits on every layout, so these are summed one matrix at a time.
        parts = U.split(1 if U.dtype == dtype else len(U))
        norms = [torch.linalg.vector_norm(part, dim=dim, dtype=dtype) for part in parts]
        return torch.cat(norms).square_().div_(U.shape[dim])
    means = []
    for matrix in U:  # one at a time: the squares of all need twice the bytes of a bf16 U
        square = scratch.empty("opmath", matrix.shape, dtype, U.device).copy_(matrix).square_()
        means.append(square.mean(dim=dim))
    return torch.stack(means)


def second_moment_factor(
    V: Tensor,  # (n, numbers), fp32, updated in place
    v: Tensor,  # (n, numbers)
    beta2: float,
) -> Tensor:
    """Updates V ← lerp(V, v, 1 − β2); returns a factor for each row, or column, of the updates.

    The factors, (n, numbers), are rsqrt(max(V, 1e-10)), rescaled so that each update keeps its
    Frobenius norm (NorMuon, Li et al. 2025, arXiv:2510.05491, as implemented in nanochat).

    Args:
        V: running mean of the second moments.
        v: `second_moment` of these updates.
        beta2: decay of V.
    """
    V.copy_(torch.lerp(V.to(v.dtype), v, 1.0 - beta2))
    factors = V.to(v.dtype).clamp_min(1e-10).rsqrt_()
    # v contains means, not sums: the number of elements in each cancels in norm / norm_after.
    norm = v.sum(dim=-1, keepdim=True).sqrt_()
    norm_after = (v * factors.square()).sum(dim=-1, keepdim=True).sqrt_().clamp_min_(1e-10)
    return factors * (norm / norm_after)


def update_weights(
    weights: list[Tensor],
    updates: list[Tensor],
    *,
    rate: Number,
    decay: Number,
    cautious: bool,
    factors: Optional[list[Tensor]] = None,
    together: Optional[Tensor] = None,
    rounded_by: Optional[list[RoundedBy]] = None,
    clip: Optional[list[Optional[Tensor]]] = None,
) -> None:
    """Updates W ← W − (Δ + decay·W) with Δ = rate·factor·U, then clips W ← clip·W (QK-Clip).

    Rounds W once before the clip. May overwrite U.

    Args:
        weights: local tensors W of any floating dtype.
        updates: U, of the same shapes, in `update_dtype` or wider.
        rate: learning rate times scale, a number or a tensor of one element. The host doesn't read
            a tensor on the weights' device.
        decay: learning rate times weight decay (and times scale with decay_lr="adjusted"), a number
            or a tensor like ``rate``.
        cautious: True to decay only where Δ·W ≥ 0 (Chen et al. 2025, arXiv:2510.12402).
        factors: a factor for each update, which broadcasts to it; None for no factors.
        together: one tensor that contains all updates, if any, to multiply by ``rate`` at once.
        rounded_by: residuals or random bits that round bf16 weights from fp32; None rounds to
            nearest.
        clip: as in `clip_weights`.
    """
    if not weights:
        return
    if triton_kernels.is_used_on(weights[0].device.type):
        from .triton_kernels import elementwise

        elementwise.update_weights(
            weights,
            updates,
            rate=rate,
            decay=decay,
            cautious=cautious,
            factors=factors,
            rounded_by=rounded_by,
        )
    else:
        _update_weights(weights, updates, rate, decay, cautious, factors, together, rounded_by)
    if clip is not None:
        clip_weights(weights, clip, rounded_by)


def _update_weights(
    weights: list[Tensor],
    updates: list[Tensor],
    rate: Number,
    decay: Number,
    cautious: bool,
    factors: Optional[list[Tensor]],
    together: Optional[Tensor],
    rounded_by: Optional[list[RoundedBy]],
) -> None:
    """`update_weights` in torch's operations."""
    widened = weights if rounded_by is None else widen(weights, rounded_by)
    if factors is not None:
        torch._foreach_mul_(updates, factors)
    if together is not None:
        together.mul_(rate.reshape(()) if isinstance(rate, Tensor) else rate)
    elif isinstance(rate, Tensor):
        for update in updates:
            update.mul_(rate)
    else:
        torch._foreach_mul_(updates, rate)
    deltas, decayed = updates, widened
    if cautious:
        decayed = [torch.where(d * w >= 0, w, 0.0) for d, w in zip(deltas, widened)]
    if isinstance(decay, Tensor):  # alpha= would copy it to the host
        for delta, weight in zip(deltas, decayed):
            delta.add_(weight.to(delta.dtype) * decay)
    elif decay != 0.0:
        torch._foreach_add_(deltas, decayed, alpha=decay)
    torch._foreach_sub_(widened, deltas)
    if rounded_by is not None:
        round_into(widened, weights, rounded_by)


def clip_weights(
    weights: Sequence[Tensor],
    scales: Sequence[Optional[Tensor]],
    rounded_by: Optional[Sequence[Optional[RoundedBy]]] = None,
) -> None:
    """Multiplies each weight by its scale.

    Args:
        weights: local tensors.
        scales: for each weight, a factor that broadcasts to it, or None for no change.
        rounded_by: what `update_weights` used; this second rounding draws fresh random bits. None
            for each weight that is rounded to nearest.
    """
    for index, scale in enumerate(scales):
        if scale is None:
            continue
        rounding = None if rounded_by is None else rounded_by[index]
        if rounding is None:
            weights[index].mul_(scale)
            continue
        (widened,) = widen([weights[index]], [rounding])
        second_rounding = rounding if isinstance(rounding, Tensor) else rounding.again()
        round_into([widened.mul_(scale)], [weights[index]], [second_rounding])
