"""The arithmetic of one update beside the iteration: momentum; then scale, second moment, weights.

Nothing here knows about process groups or parameter groups; every function works on lists of local
tensors or on batches of matrices, so that it can be tested with plain tensors.
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


def update_scale(rows: int, cols: int, adjust_lr: str) -> float:
    """Factor on the orthogonalized update.

    ``match_rms_adamw``: 0.2·sqrt(max(rows, cols)) brings its RMS to AdamW's (Liu et al. 2025,
    arXiv:2502.16982, section 2.2). ``original``: sqrt(max(1, rows/cols)) (Jordan et al. 2024).
    ``spectral``: sqrt(rows/cols), an RMS → RMS operator norm of 1 (Yang et al. 2023,
    arXiv:2310.17813, condition 1).
    """
    if rows == 0 or cols == 0 or adjust_lr == "none":
        return 1.0
    if adjust_lr == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    least = 0.0 if adjust_lr == "spectral" else 1.0
    return math.sqrt(max(least, rows / cols))


def update_dtype(wire: torch.dtype, opmath: torch.dtype, device: torch.device) -> torch.dtype:
    """What `update_momentum` writes and `update_weights` reads of a buffer in the dtype ``wire``.

    Kernels convert as they go; torch's functions want a copy in ``opmath``.
    """
    return wire if triton_kernels.is_used_on(device.type) else opmath


def update_momentum(
    buffers: list[Tensor],
    grads: list[Tensor],
    outputs: list[Tensor],
    *,
    momentum: float,
    nesterov: bool,
    style: str,
    maximize: bool,
    keep: Optional[list[Tensor]] = None,
    wanted: bool = True,
    largest: Optional[list[Tensor]] = None,
) -> None:
    """B ← μB + wG, and what is to be orthogonalized into ``outputs``: wG + μB, or B.

    w is `gradient_weight`. Gradients are only read.

    Args:
        buffers, grads: momentum B and gradients G, local tensors of equal shapes.
        outputs: of the same shapes, of `update_dtype` or wider; overwritten.
        keep: booleans that broadcast to each gradient; where False the buffer stays as it is and
            the output is zero.
        wanted: whether anybody reads the outputs; they are scratch where not.
        largest: one element for each output, raised to its largest magnitude, NaN where there is
            one; only of outputs that are not empty.
    """
    weight = gradient_weight(momentum, style, maximize)
    if triton_kernels.is_used_on(buffers[0].device.type):
        from .triton_kernels import elementwise

        elementwise.update_momentum(
            buffers,
            grads,
            outputs,
            momentum=momentum,
            weight=weight,
            nesterov=nesterov,
            keep=keep,
            wanted=wanted,
            largest=largest,
        )
        return
    if keep is not None:  # a product with zero would keep Inf and NaN: they have to be replaced
        grads = [torch.where(kept, grad, 0.0) for grad, kept in zip(grads, keep)]
        before = [buffer.clone() for buffer in buffers]
    if all(b.dtype.itemsize >= out.dtype.itemsize for b, out in zip(buffers, outputs)):
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, grads, alpha=weight)
    else:  # one rounding, which is the same wherever an element lies: torch's with alpha is not
        torch._foreach_copy_(outputs, buffers)
        torch._foreach_mul_(outputs, momentum)
        torch._foreach_add_(outputs, grads, alpha=weight)
        torch._foreach_copy_(buffers, outputs)
    if keep is not None:
        for buffer, old, kept in zip(buffers, before, keep):
            buffer.copy_(torch.where(kept, buffer, old))
    if not wanted and largest is None:
        return
    if nesterov:
        torch._foreach_copy_(outputs, grads)
        if weight != 1.0:
            torch._foreach_mul_(outputs, weight)
        torch._foreach_add_(outputs, buffers, alpha=momentum)
    else:
        torch._foreach_copy_(outputs, buffers)
    if keep is not None:
        for output, kept in zip(outputs, keep):
            output.masked_fill_(~kept, 0.0)
    if largest is not None:
        torch._foreach_maximum_(largest, torch._foreach_norm(outputs, math.inf))


def gradient_weight(momentum: float, style: str, maximize: bool) -> float:
    """w of `update_momentum`: 1 (classical) or 1 − μ (ema), negative to maximize."""
    return (1.0 if style == "classical" else 1.0 - momentum) * (-1.0 if maximize else 1.0)


def second_moment(U: Tensor, of_rows: bool, scratch: Scratch) -> Tensor:
    """Mean of U² of each row, (n, rows), or of each column, in fp32 (fp64 for fp64 input).

    Args:
        U: (n, rows, cols).
    """
    dim = -1 if of_rows else -2
    dtype = torch.promote_types(U.dtype, torch.float32)
    if U.device.type != "cpu":  # their norms widen what they read, and need no copy
        # The order of a sum depends on the batch, which shows in 16 bits only.
        parts = U.split(1 if U.dtype == dtype else len(U))
        norms = [torch.linalg.vector_norm(part, dim=dim, dtype=dtype) for part in parts]
        return torch.cat(norms).square_().div_(U.shape[dim])
    means = []
    for matrix in U:  # one by one: their squares take twice the bytes of U in bf16
        square = scratch.empty("opmath", matrix.shape, dtype, U.device).copy_(matrix).square_()
        means.append(square.mean(dim=dim))
    return torch.stack(means)


def second_moment_factor(
    V: Tensor,  # (n, numbers), fp32, updated in place
    v: Tensor,  # (n, numbers)
    beta2: float,
    keep: Optional[Tensor] = None,  # (n,)
) -> Tensor:
    """What an update is multiplied with along its rows, or columns, (n, numbers).

    V ← lerp(V, v, 1 − β2); rsqrt(max(V, 1e-10)), rescaled to the Frobenius norm that the update had
    (Li et al. 2025, arXiv:2510.05491, as nanochat has it).

    Args:
        v: `second_moment` of the update.
        keep: where False, V of that matrix stays as it is.
    """
    updated = torch.lerp(V.to(v.dtype), v, 1.0 - beta2)
    V.copy_(updated if keep is None else torch.where(keep[:, None], updated, V))
    step = V.to(v.dtype).clamp_min(1e-10).rsqrt_()
    # The number of columns summed over cancels in the quotient of the two norms.
    norm = v.sum(dim=-1, keepdim=True).sqrt_()
    norm_after = (v * step.square()).sum(dim=-1, keepdim=True).sqrt_().clamp_min_(1e-10)
    return step * (norm / norm_after)


def update_weights(
    weights: list[Tensor],
    updates: list[Tensor],
    *,
    rate: Number,
    decay: Number,
    cautious: bool,
    factors: Optional[list[Tensor]] = None,
    keep: Optional[list[Tensor]] = None,
    together: Optional[Tensor] = None,
    rounded_by: Optional[list[RoundedBy]] = None,
) -> None:
    """W ← W − (Δ + decay·W), Δ = rate·factor·U, in one rounding; U may be overwritten.

    Args:
        weights: local tensors, any floating dtype.
        updates: U, of the same shapes, of `update_dtype` or wider.
        rate: learning rate times scale; like ``decay`` a number, or a tensor of one element, which
            is not read by the host where it is on the weights' device.
        decay: learning rate times weight decay.
        cautious: decay only where Δ·W ≥ 0 (Chen et al. 2025, arXiv:2510.12402).
        factors: broadcast to each update.
        keep: booleans that broadcast to each weight; where False the weight stays as it is.
        together: the tensor that the updates are all of, where there is one.
        rounded_by: what weights in bf16 are rounded by, from fp32; None rounds to the nearest.
    """
    if triton_kernels.is_used_on(weights[0].device.type):
        from .triton_kernels import elementwise

        elementwise.update_weights(
            weights,
            updates,
            rate=rate,
            decay=decay,
            cautious=cautious,
            factors=factors,
            keep=keep,
            rounded_by=rounded_by,
        )
        return
    exact = weights if rounded_by is None else widen(weights, rounded_by)
    if factors is not None:
        torch._foreach_mul_(updates, factors)
    if together is not None:
        together.mul_(rate.reshape(()) if isinstance(rate, Tensor) else rate)
    elif isinstance(rate, Tensor):
        for update in updates:
            update.mul_(rate)
    else:
        torch._foreach_mul_(updates, rate)
    deltas, decayed = updates, exact
    if cautious:
        decayed = [torch.where(d * w >= 0, w, 0.0) for d, w in zip(deltas, exact)]
    if isinstance(decay, Tensor):  # an alpha= would be read from the device
        for delta, weight in zip(deltas, decayed):
            delta.add_(weight.to(delta.dtype) * decay)
    elif decay != 0.0:
        torch._foreach_add_(deltas, decayed, alpha=decay)
    if keep is not None:
        for delta, kept in zip(deltas, keep):
            delta.masked_fill_(~kept, 0.0)
    torch._foreach_sub_(exact, deltas)
    if rounded_by is not None:
        round_into(exact, weights, rounded_by)


def clip_weights(
    weights: Sequence[Tensor],
    scales: Sequence[Optional[Tensor]],
    keep: Optional[Sequence[Tensor]] = None,
    rounded_by: Optional[Sequence[Optional[RoundedBy]]] = None,
) -> None:
    """W ← scale·W.

    Args:
        weights: local tensors.
        scales: broadcast to each weight; None leaves it as it is.
        keep: booleans that broadcast to each weight; where False it stays as it is.
        rounded_by: as for `update_weights`; None of a weight that is rounded to the nearest.
    """
    for index, scale in enumerate(scales):
        if scale is None:
            continue
        if keep is not None:
            scale = torch.where(keep[index], scale, 1.0)
        rounding = None if rounded_by is None else rounded_by[index]
        if rounding is None:
            weights[index].mul_(scale)
            continue
        (exact,) = widen([weights[index]], [rounding])
        again = rounding if isinstance(rounding, Tensor) else rounding.again()
        round_into([exact.mul_(scale)], [weights[index]], [again])
