"""Computes the largest attention logit of every query head, without the score matrix.

Where Triton kernels are used, one launch does it. Otherwise, and for inputs that the kernel does
not support, scores are computed block by block: some batch entries and heads, and a square of
queries and keys. In a compiled graph, the loop over blocks is one operator or, with a mask_mod, a
scan, so the graph doesn't grow with the length.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Optional, Union

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from ... import triton_kernels
from ...distributed.dtensors import is_dtensor

try:
    from ..._ops import add_op_namespace_prefix  # type: ignore[import-not-found]
except ImportError:  # the sources, to which a build adds it

    def add_op_namespace_prefix(name: str) -> str:
        return f"optimizer_sources::{name}"


MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
DocumentIds = Union[Tensor, tuple[Tensor, Tensor]]

# Elements of a block (scores, and the rows they come from) and its longest side in positions. On
# CPUs a block stays in the cache; on accelerators it is worth its launches. Long sides waste work
# above the diagonal.
BLOCK_NUMEL = {"cpu": 1 << 20}
DEFAULT_BLOCK_NUMEL = 8 << 20
BLOCK_SIDE = {"cpu": 256}
DEFAULT_BLOCK_SIDE = 512

# Additive masks exclude a pair with -inf, their dtype's minimum, or sums of these. Numbers up to
# this one (in fp16, up to half of the minimum) exclude their pair; others are a bias.
EXCLUDED = -1e8


@torch.no_grad()
def max_qk_logits(
    q: Tensor,  # (B, Hq, Tq, D)
    k: Tensor,  # (B, Hk, Tk, D)
    scale: Optional[float] = None,
    causal: bool = True,
    *,
    q_rope: Optional[Tensor] = None,  # (B, Hq, Tq, R)
    k_rope: Optional[Tensor] = None,  # (B, 1 or Hk, Tk, R)
    document_ids: Optional[DocumentIds] = None,
    mask_mod: Optional[MaskMod] = None,
    attn_mask: Optional[Tensor] = None,
    out: Optional[Tensor] = None,
    block_size: Optional[int] = None,
) -> Tensor:
    """Largest logit ``scale · q·k`` of each query head, over the batch and all admitted pairs.

    This is S_max of QK-Clip (Kimi K2, arXiv:2507.20534, algorithm 1): logits before the softmax. A
    pair counts if every given mask admits it. A head without such a pair gets -inf. NaN in the
    logit of a pair that counts gives NaN; logits of other pairs don't matter.

    Products of 16-bit inputs are exact and summed in fp32. With logits rounded to bf16, clips would
    be wrong by up to 0.2%. Autocast doesn't apply, the host doesn't wait for the device, and no
    gradient flows.

    On accelerators with Triton, one kernel launch computes it without extra memory. Elsewhere, and
    with a mask_mod, fp64, a scale that isn't positive, or a ``block_size``, a loop over blocks
    does. Its memory doesn't depend on B, H, or T: about 8 MiB on CPUs and 64 MiB on accelerators,
    unless ``block_size`` is given. TF32, if enabled, applies to its fp32 inputs.

    Under ``torch.compile`` it is part of the full graph, even with dynamic shapes. Inside a
    compiled `torch.utils.checkpoint`, pass masks as tensors and don't pass ``out``: a mask_mod is
    run by torch's ``scan``, which copies q and k, and which torch can't recompute.

    Args:
        q: queries (B, Hq, Tq, D), as passed to attention (with rotary embedding applied), in any
            real floating dtype and with any strides.
        k: keys (B, Hk, Tk, D) with the same dtype. Hq is a multiple of Hk, and query head h reads
            key head h // (Hq / Hk).
        scale: scale of the logits; None is 1/sqrt(D + R).
        causal: True if query i uses only keys j ≤ i. Both count from 0, even if Tq ≠ Tk, as with
            ``is_causal`` of torch's ``scaled_dot_product_attention``. For queries at the end of
            longer keys, pass causal=False and a mask. Blocks above the diagonal aren't computed.
        q_rope: a second part of the queries (B, Hq, Tq, R), as in multi-head latent attention.
            Logits are then scale · (q·k + q_rope·k_rope).
        k_rope: the second part of the keys, (B, Hk, Tk, R), or (B, 1, Tk, R) if heads share it.
        document_ids: integers (T,) or (B, T) for packed sequences: only pairs in the same document
            count. A tuple (for queries, for keys) if Tq ≠ Tk.
        mask_mod: ``mask_mod(b, h, q_idx, kv_idx)`` as in FlexAttention: True if a query head may
            use a pair. It gets integer tensors that broadcast to (B, Hq, Tq, Tk) of a block, and
            returns booleans that do so too. All blocks are computed.
        attn_mask: as in torch's attention, broadcast to (B, Hq, Tq, Tk): True where a pair counts,
            or a floating-point bias. A bias excludes pairs with -inf or numbers near its dtype's
            minimum (below -1e8, or half of fp16's minimum); other values aren't added, because
            QK-Clip scales q·k, not the bias. ``causal`` applies too.
        out: running maxima (Hq,) in the result's dtype, updated in place and returned.
        block_size: number of queries, and of keys, in a block; None chooses, or uses the kernel.

    Returns:
        Maxima (Hq,) on q's device, in fp32, or fp64 for fp64 inputs.

    Raises:
        ValueError: shapes, dtypes, or devices that don't fit, or DTensors. The message names the
            argument.
    """
    is_one = document_ids is None or isinstance(document_ids, Tensor)
    ids = (document_ids, document_ids) if is_one else tuple(document_ids)  # type: ignore[arg-type]
    if len(ids) != 2:
        raise ValueError(f"document_ids must be a tensor or two, not {len(ids)}")
    inputs = _Inputs(q, k, q_rope, k_rope, *ids, attn_mask, 1.0, causal, mask_mod)
    inputs = _checked(inputs, out)
    inputs = inputs._replace(scale=_check_numbers(scale, block_size, inputs.width))
    best = _empty_maxima(q) if out is None else out
    if not (q.shape[0] and q.shape[2] and k.shape[2]):  # no pair
        return best
    if torch.compiler.is_compiling() and mask_mod is not None:
        largest = _scan(inputs, block_size)
    elif torch.compiler.is_compiling():
        largest = _loop_of_graphs(*inputs[:-1], block_size)
    elif _raise_by_kernel(inputs, block_size, best):
        return best
    else:
        largest = _loop(inputs, block_size)
    return largest if out is None else out.copy_(torch.maximum(out, largest))


def _empty_maxima(q: Tensor) -> Tensor:
    """The maxima of heads without any pair, (Hq,)."""
    return torch.full((q.shape[1],), -math.inf, dtype=_dtype_of_maxima(q), device=q.device)


def _dtype_of_maxima(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


class _Inputs(NamedTuple):
    """The checked inputs of the logits."""

    q: Tensor  # (B, Hq, Tq, D)
    k: Tensor  # (B, Hk, Tk, D)
    q_rope: Optional[Tensor]  # (B, Hq, Tq, R)
    k_rope: Optional[Tensor]  # (B, 1 or Hk, Tk, R); given where q_rope is
    query_ids: Optional[Tensor]  # (B or 1, Tq)
    key_ids: Optional[Tensor]  # (B or 1, Tk); given where query_ids are
    attn_mask: Optional[Tensor]  # four dimensions, each of 1 or all
    scale: float
    causal: bool
    mask_mod: Optional[MaskMod]

    @property
    def width(self) -> int:
        return self.q.shape[3] + (0 if self.q_rope is None else self.q_rope.shape[3])


_has_failed = False  # the kernel failed in this process, and isn't tried again


def _raise_by_kernel(inputs: _Inputs, block_size: Optional[int], best: Tensor) -> bool:
    """Raises ``best`` in one launch. Returns False if the kernel doesn't support these inputs, or
    if Triton can't compile or launch it."""
    global _has_failed
    takes_blocks = inputs.mask_mod is not None or inputs.scale <= 0 or block_size is not None
    is_used = not _has_failed and triton_kernels.is_used_on(inputs.q.device.type)
    if takes_blocks or not is_used or not all(map(_is_readable, inputs[:7])):
        return False
    from ...triton_kernels.logit_maxima import raise_maxima, takes

    if not takes(*inputs[:7]):
        return False
    mask = inputs.attn_mask
    largest_excluded = None if mask is None else _largest_excluded(mask)
    options: dict[str, Any] = {"scale": inputs.scale, "causal": inputs.causal}
    try:
        raise_maxima(best, *inputs[:7], largest_excluded=largest_excluded, **options)
    except Exception as error:  # nothing was launched
        _has_failed = True
        problem = triton_kernels.first_line_of(error)
        triton_kernels.warn_of_doing_without(f"{problem}. {triton_kernels.NEEDS}")
        return False
    return True


def _is_readable(tensor: Optional[Tensor]) -> bool:
    """True if a kernel finds a tensor's numbers in its memory: not for fake tensors, functorch's
    wrappers, and lazily negated tensors."""
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    if tensor is None:
        return True
    return not (isinstance(tensor, FakeTensor) or is_wrapped(tensor) or tensor.is_neg())


Selection = Union[slice, Tensor]  # a tensor holds indices, (n,)


class _Block(NamedTuple):
    """Indices of a block, by dimension."""

    batch: Selection
    query_heads: Selection
    key_heads: Selection
    queries: Selection
    keys: Selection


def _block_sizes(inputs: _Inputs, block_size: Optional[int]) -> tuple[int, int, int, int]:
    """Batch entries, key heads, queries, and keys of a block; the last blocks have fewer."""
    (B, Hq, Tq, _), (Hk, Tk) = inputs.q.shape, inputs.k.shape[1:3]
    device = inputs.q.device.type
    numel = BLOCK_NUMEL.get(device, DEFAULT_BLOCK_NUMEL)
    side = block_size or BLOCK_SIDE.get(device, DEFAULT_BLOCK_SIDE)
    while True:
        queries, keys = min(side, Tq), min(side, Tk)
        rows = Hq // Hk * queries  # of one key head
        numel_of_head = rows * keys + (rows + keys) * inputs.width
        if block_size is not None or side <= 16 or numel_of_head <= numel:
            break
        side //= 2
    heads = max(1, numel // numel_of_head)
    return min(max(1, heads // Hk), B), min(heads, Hk), queries, keys


def _loop(inputs: _Inputs, block_size: Optional[int]) -> Tensor:
    """The maxima over all blocks, selected by slices."""
    best = _empty_maxima(inputs.q)
    (B, Hq, Tq, _), (Hk, Tk) = inputs.q.shape, inputs.k.shape[1:3]
    batches, heads, queries, keys = (
        [slice(start, min(start + size, total)) for start in range(0, total, size)]
        for total, size in zip((B, Hk, Tq, Tk), _block_sizes(inputs, block_size))
    )
    group = Hq // Hk
    for batch, key_heads in itertools.product(batches, heads):
        query_heads = slice(group * key_heads.start, group * key_heads.stop)
        head_maxima = best[query_heads]
        for rows, columns in itertools.product(queries, keys):
            if not inputs.causal or columns.start < rows.stop:
                block = _Block(batch, query_heads, key_heads, rows, columns)
                torch.maximum(head_maxima, _maxima(inputs, block), out=head_maxima)
    return best * inputs.scale if inputs.scale > 0 else best


@torch.library.custom_op(add_op_namespace_prefix("max_qk_products"), mutates_args=())
def _loop_of_graphs(
    q: Tensor,
    k: Tensor,
    q_rope: Optional[Tensor],
    k_rope: Optional[Tensor],
    query_ids: Optional[Tensor],
    key_ids: Optional[Tensor],
    attn_mask: Optional[Tensor],
    scale: float,
    causal: bool,
    block_size: Optional[int],
) -> Tensor:
    """`_loop` as one operator of a compiled graph, for any length."""
    tensors = q, k, q_rope, k_rope, query_ids, key_ids, attn_mask
    inputs, best = _Inputs(*tensors, scale, causal, None), _empty_maxima(q)
    return best if _raise_by_kernel(inputs, block_size, best) else _loop(inputs, block_size)


_loop_of_graphs.register_fake(lambda q, *_: _empty_maxima(q))


def _scan(inputs: _Inputs, block_size: Optional[int]) -> Tensor:
    """The maxima by a scan over numbered blocks, selected by index tensors.

    A graph can contain a scan with the mask_mod. All blocks have the same shape: the last block of
    a dimension is moved back to end with it, and overlaps the previous one, which changes no
    maximum.
    """
    from torch._higher_order_ops.scan import scan

    # Queries and keys are often views of one projection; scan refuses views of one storage.
    copies = [None if tensor is None else tensor.clone() for tensor in inputs[:6]]
    inputs = _Inputs._make([*copies, *inputs[6:]])
    scale = inputs.scale
    if scale > 0:  # scan would refuse the symbol of a dynamic width
        inputs = inputs._replace(scale=1.0)

    (B, Hq, Tq, _), (Hk, Tk) = inputs.q.shape, inputs.k.shape[1:3]
    totals, sizes = (B, Hk, Tq, Tk), _block_sizes(inputs, block_size)
    counts = [-(-total // size) for total, size in zip(totals, sizes)]
    group, device = Hq // Hk, inputs.q.device

    def update(best: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
        rest, indices = number, []
        for count, total, size in reversed(list(zip(counts, totals, sizes))):
            start = (rest % count * size).clamp_max(total - size)
            indices.append(start + torch.arange(size, device=device))
            rest = rest // count
        keys, queries, key_heads, batch = indices
        query_heads = key_heads[:, None] * group + torch.arange(group, device=device)
        query_heads = query_heads.flatten()
        maxima = _maxima(inputs, _Block(batch, query_heads, key_heads, queries, keys))
        maxima = torch.maximum(best.index_select(0, query_heads), maxima)
        return best.index_copy(
            0, query_heads, maxima
        ), number.clone()  # scan needs an output per step

    numbers = torch.arange(math.prod(counts), device=device)
    best = scan(update, _empty_maxima(inputs.q), numbers)[0]
    return best * scale if scale > 0 else best


def _maxima(inputs: _Inputs, block: _Block) -> Tensor:
    """The largest product of each query head in a block (products are ordered like logits), or, if
    the scale isn't positive, the largest logit."""
    q = _select(inputs.q, block.batch, block.query_heads, block.queries)
    k = _select(inputs.k, block.batch, block.key_heads, block.keys)
    if inputs.q_rope is not None and inputs.k_rope is not None:
        q_rope = _select(inputs.q_rope, block.batch, block.query_heads, block.queries)
        k_rope = _select(inputs.k_rope, block.batch, block.key_heads, block.keys)
        q = torch.cat((q, q_rope), -1)
        k = torch.cat((k, k_rope.expand(*k.shape[:-1], -1)), -1)
    scores = _products(q, k)
    if inputs.scale <= 0:
        scores.mul_(inputs.scale)
    for excluded in _excluded(inputs, block):
        scores.masked_fill_(excluded, -math.inf)
    return scores.amax((0, 2, 3))


def _select(tensor: Tensor, *selections: Selection) -> Tensor:
    """Selects from the first dimensions of a tensor; dimensions of size 1 stay."""
    index: list[Selection] = []
    for dim, selection in enumerate(selections):
        if isinstance(selection, slice):
            index.append(selection if tensor.shape[dim] != 1 else slice(None))
        else:
            selection = selection if tensor.shape[dim] != 1 else selection.new_zeros(1)
            index.append(selection.view(-1, *[1] * (len(selections) - 1 - dim)))
    return tensor[tuple(index)]


def _products(q: Tensor, k: Tensor) -> Tensor:
    """Multiplies q and k of a block, (b, hq, queries, keys): one product for each key head."""
    b, hk, keys, D = k.shape
    dtype = _dtype_of_maxima(q)
    rows = q.reshape(b * hk, -1, D)
    columns = k.reshape(b * hk, keys, D).transpose(1, 2)
    has_mixed_products = (  # 16-bit inputs, fp32 results
        q.dtype in (torch.float16, torch.bfloat16)
        and q.device.type == "cuda"
        and torch.version.hip is None
    )
    with torch.autocast(q.device.type, enabled=False):  # autocast would round fp32
        if has_mixed_products:
            scores = torch.bmm(rows, columns, out_dtype=dtype)
        else:
            scores = torch.bmm(rows.to(dtype), columns.to(dtype))
    return scores.view(b, q.shape[1], q.shape[2], keys)


def _excluded(inputs: _Inputs, block: _Block) -> Iterator[Tensor]:
    """Yields the excluded pairs of each mask in a block, broadcast to its scores."""
    device, rows, columns = inputs.q.device, block.queries, block.keys
    is_below_diagonal = (
        isinstance(rows, slice) and isinstance(columns, slice) and columns.stop <= rows.start + 1
    )
    if inputs.causal and not is_below_diagonal:
        yield _indices(rows, device)[:, None] < _indices(columns, device)
    if inputs.query_ids is not None and inputs.key_ids is not None:
        query_ids = _select(inputs.query_ids, block.batch, rows)
        key_ids = _select(inputs.key_ids, block.batch, columns)
        yield query_ids[:, None, :, None] != key_ids[:, None, None, :]
    if inputs.attn_mask is not None:
        mask = _select(inputs.attn_mask, block.batch, block.query_heads, rows, columns)
        yield ~mask if mask.dtype == torch.bool else mask <= _largest_excluded(mask)
    if inputs.mask_mod is not None:
        admitted = inputs.mask_mod(
            _indices(block.batch, device)[:, None, None, None],
            _indices(block.query_heads, device)[:, None, None],
            _indices(rows, device)[:, None],
            _indices(columns, device),
        )
        if not isinstance(admitted, Tensor) or admitted.dtype != torch.bool:
            returned = admitted.dtype if isinstance(admitted, Tensor) else type(admitted).__name__
            raise ValueError(f"mask_mod must return a tensor of booleans, not {returned}")
        yield ~admitted


def _largest_excluded(mask: Tensor) -> float:
    """The largest value in a mask that excludes a pair."""
    if mask.dtype == torch.bool:
        return 0.0
    return max(EXCLUDED, torch.finfo(mask.dtype).min / 2)


def _indices(selection: Selection, device: torch.device) -> Tensor:
    if isinstance(selection, slice):
        return torch.arange(selection.start, selection.stop, device=device)
    return selection


def _checked(inputs: _Inputs, out: Optional[Tensor]) -> _Inputs:
    """Checks the inputs, and gives ids and masks all dimensions."""
    q, k, q_rope, k_rope = inputs[:4]
    if (q_rope is None) != (k_rope is None):
        name = "q_rope" if k_rope is None else "k_rope"
        raise ValueError(f"q_rope and k_rope belong together: only {name} was given")
    names = ("q", "k", "q_rope", "k_rope", "document_ids", "document_ids", "attn_mask", "out")
    tensors: list[tuple[str, Any]] = list(zip(names, (*inputs[:7], out)))
    for name, tensor in tensors:
        if tensor is None and name not in ("q", "k"):
            continue
        if is_dtensor(tensor):
            raise ValueError(
                f"{name} is a DTensor: pass this rank's heads, {name}.to_local(), and combine the "
                "maxima of all ranks afterwards"
            )
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} must be a tensor, not {type(tensor).__name__}")
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}, but q on {q.device}")
    for name, tensor in tensors[: 2 if q_rope is None else 4]:
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} must be (batch, heads, positions, width), but has shape "
                f"{tuple(tensor.shape)}"
            )
        if not tensor.is_floating_point():
            raise ValueError(f"{name} must be real floating point, not {tensor.dtype}")
        if tensor.dtype != q.dtype:
            raise ValueError(f"{name} is {tensor.dtype}, but q is {q.dtype}")
    (B, Hq, Tq, D), (Hk, Tk) = q.shape, k.shape[1:3]
    if min(Hq, Hk) == 0 or Hq % Hk:
        raise ValueError(f"q has {Hq} heads, which is not a multiple of the {Hk} heads of k")
    _check_shape("k", k, (B, Hk, Tk, D))
    if q_rope is not None and k_rope is not None:
        R = q_rope.shape[3]
        _check_shape("q_rope", q_rope, (B, Hq, Tq, R))
        _check_shape("k_rope", k_rope, (B, Hk, Tk, R), (B, 1, Tk, R))
    dtype = _dtype_of_maxima(q)
    if out is not None and (out.shape != (Hq,) or out.dtype != dtype):
        raise ValueError(
            f"out must be {(Hq,)} of {dtype}, but has shape {tuple(out.shape)} and {out.dtype}"
        )
    return inputs._replace(
        query_ids=_check_ids(inputs.query_ids, B, Tq),
        key_ids=_check_ids(inputs.key_ids, B, Tk),
        attn_mask=_check_mask(inputs.attn_mask, (B, Hq, Tq, Tk)),
    )


def _check_shape(name: str, tensor: Tensor, *shapes: tuple[int, ...]) -> None:
    if tuple(tensor.shape) not in shapes:
        raise ValueError(
            f"{name} must be {' or '.join(map(str, shapes))}, but has shape {tuple(tensor.shape)}"
        )


def _check_numbers(scale: Any, block_size: Any, width: int) -> float:
    """The scale, or its default."""
    if scale is None and width == 0:
        raise ValueError("q and k have no columns")
    if isinstance(scale, Tensor):
        raise ValueError("scale must be a number: a tensor would have to be read from the device")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale must be finite, not {scale}")
    if block_size is not None and not (isinstance(block_size, int) and block_size >= 1):
        raise ValueError(f"block_size must be a positive integer, not {block_size!r}")
    return width**-0.5 if scale is None else float(scale)


def _check_ids(ids: Optional[Tensor], B: int, T: int) -> Optional[Tensor]:
    """Document ids, (B or 1, T)."""
    if ids is None:
        return None
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"document_ids must be integers, not {ids.dtype}")
    if tuple(ids.shape) not in ((T,), (B, T)):
        raise ValueError(
            f"document_ids must be {(T,)} or {(B, T)}, but have shape {tuple(ids.shape)}; pass a "
            "tuple if queries and keys differ"
        )
    return ids if ids.dim() == 2 else ids[None]


def _check_mask(mask: Optional[Tensor], shape: tuple[int, ...]) -> Optional[Tensor]:
    """The mask with all four dimensions, each of size 1 or full."""
    if mask is None:
        return None
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(f"attn_mask must be bool or floating point, not {mask.dtype}")
    padded = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    if len(padded) > 4 or any(n not in (1, size) for n, size in zip(padded, shape)):
        raise ValueError(f"attn_mask of shape {tuple(mask.shape)} does not broadcast to {shape}")
    return mask.detach().view(padded)
