"""Computes all of an update except the polar factor: momentum, scale, second moment, weights.

The functions take numbers, lists of local tensors, or batches of matrices. None of them knows
process groups or parameter groups, so plain tensors can test them.
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
    """The factor that an orthogonalized update is multiplied with.

    A number r: r·sqrt(max(rows, cols)), which gives the update about the root mean square r.
    ``match_rms_adamw``: r = 0.2, that of AdamW's (Liu et al. 2025, arXiv:2502.16982, section 2.2).
    ``original``: sqrt(max(1, rows/cols)) (Jordan et
    al. 2024). ``spectral``: sqrt(rows/cols), which makes the RMS → RMS operator norm 1 (Yang et al.
    2023, arXiv:2310.17813, condition 1). ``none``: 1.
    """
    if rows == 0 or cols == 0 or adjust_lr == "none":
        return 1.0
    rms = 0.2 if adjust_lr == "match_rms_adamw" else adjust_lr
    if not isinstance(rms, str):
        return rms * math.sqrt(max(rows, cols))
    least = 0.0 if adjust_lr == "spectral" else 1.0
    return math.sqrt(max(least, rows / cols))


def update_dtype(wire: torch.dtype, opmath: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype that `update_momentum` writes and `update_weights` reads, for a buffer in ``wire``.

    Kernels convert elements as they go, so they take the buffer itself; torch's functions need a
    copy in ``opmath``.
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
    """B ← μB + wG; writes the input of orthogonalization, wG + μB with Nesterov, else B.

    w is `gradient_weight`. Gradients are only read.

    Args:
        buffers, grads: momentum B and gradients G, local tensors of equal shapes.
        outputs: for the input of orthogonalization, of the same shapes, of `update_dtype`;
            overwritten. None if nobody reads it.
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
    else:  # round once: in 16 bits, alpha= rounds an element by its place in the tensor
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
    """The weight w of gradients in `update_momentum`: 1 (classical) or 1 − μ (ema).

    It is negated to maximize.
    """
    return (1.0 if style == "classical" else 1.0 - momentum) * (-1.0 if maximize else 1.0)


def second_moment(U: Tensor, of_rows: bool, scratch: Scratch) -> Tensor:
    """The mean of U² over each row, (n, rows), or over each column, (n, cols).

    Args:
        U: (n, rows, cols).
        of_rows: whether each mean is that of one row, not of one column.

    Returns:
        The means in fp32, or in fp64 of fp64.
    """
    dim = -1 if of_rows else -2
    dtype = torch.promote_types(U.dtype, torch.float32)
    if U.device.type != "cpu":  # accelerators' norms widen what they read, and need no copy
        # The order of a sum, and so its last bit, depends on the batch. 16 bits may differ so; in
        # fp32 and fp64, which exact mode uses, matrices are summed one at a time.
        parts = U.split(1 if U.dtype == dtype else len(U))
        norms = [torch.linalg.vector_norm(part, dim=dim, dtype=dtype) for part in parts]
        return torch.cat(norms).square_().div_(U.shape[dim])
    means = []
    for matrix in U:  # one at a time: the squares of all would take twice the bytes of U in bf16
        square = scratch.empty("opmath", matrix.shape, dtype, U.device).copy_(matrix).square_()
        means.append(square.mean(dim=dim))
    return torch.stack(means)


def second_moment_factor(
    V: Tensor,  # (n, numbers), fp32, updated in place
    v: Tensor,  # (n, numbers)
    beta2: float,
) -> Tensor:
    """Updates V ← lerp(V, v, 1 − β2); returns factors on the rows, or columns, of updates.

    The factors, (n, numbers), are rsqrt(max(V, 1e-10)), rescaled so that each update keeps its
    Frobenius norm (Li et al. 2025, arXiv:2510.05491, as nanochat has it).

    Args:
        V: mean squares of earlier updates.
        v: `second_moment` of the updates.
        beta2: share of V that stays.
    """
    V.copy_(torch.lerp(V.to(v.dtype), v, 1.0 - beta2))
    factors = V.to(v.dtype).clamp_min(1e-10).rsqrt_()
    # v has means, not sums: the number of elements behind each cancels in norm / norm_after.
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
    """W ← W − (Δ + decay·W) with Δ = rate·factor·U; rounds W once, and may overwrite U.

    Then QK-Clip: W ← clip·W.

    Args:
        weights: local tensors, any floating dtype.
        updates: U, of the same shapes, of `update_dtype` or wider.
        rate: learning rate times scale; like ``decay`` a number, or a tensor of one element. The
            host does not read a tensor that is on the weights' device.
        decay: learning rate times weight decay, and times scale with decay_lr="adjusted".
        cautious: decay only where Δ·W ≥ 0 (Chen et al. 2025, arXiv:2510.12402).
        factors: what each update is multiplied with; they broadcast to it.
        together: a tensor that contains all updates, if there is one: it is multiplied by ``rate``
            at once.
        rounded_by: residuals or random bits by which weights in bf16 are rounded from fp32; None
            rounds to the nearest.
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
    """Updates weights by torch's operations."""
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
    if isinstance(decay, Tensor):  # the host would read an alpha= from the device
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
    """W ← scale·W.

    Args:
        weights: local tensors.
        scales: a factor for each weight, which broadcasts to it; None leaves the weight as it is.
        rounded_by: as `update_weights` has used it, so that other bits are drawn; None for each
            weight that is rounded to the nearest.
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
