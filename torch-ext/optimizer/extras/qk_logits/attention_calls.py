"""Reports calls of torch's attention functions, with the queries and keys of their logits.

While a forward pass is recorded, functions that report their arguments replace
`F.scaled_dot_product_attention` and `flex_attention` in torch's modules. A torch function mode
would see calls by any name, but Dynamo traces it into whatever is compiled within a forward pass,
which fails for some of torch's methods.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Callable, Optional

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.overrides import has_torch_function

from ...distributed.dtensors import is_dtensor
from .maxima import max_qk_logits


@dataclass(frozen=True)
class Call:
    """The inputs of one attention call's logits; local tensors.

    Args:
        queries: (B, Hq, Tq, D), or, without keys, the largest logit of each query, (B, Hq, Tq).
        keys: (B, Hk, Tk, D).
        options: further arguments of `max_qk_logits`.
        head_dim: width of a query head; 0 if unknown.
        heads: if queries are sharded by head, the mesh, its dimension, and the number of heads.
    """

    queries: Tensor
    keys: Optional[Tensor] = None
    options: Mapping[str, Any] = field(default_factory=dict)
    head_dim: int = 0
    heads: Optional[tuple[Any, int, int]] = None

    @property
    def has_numbers(self) -> bool:
        return not (self.queries.is_meta or isinstance(self.queries, FakeTensor))

    def raise_maxima(self, maxima: Tensor) -> None:
        """Raises ``maxima``, (Hq,), fp32, to the largest logit of each head."""
        queries = self.queries.detach()
        if self.keys is not None and queries.dtype != torch.float64:
            max_qk_logits(queries, self.keys.detach(), **self.options, out=maxima)
            return
        if self.keys is not None:
            largest = max_qk_logits(queries, self.keys.detach(), **self.options)
        else:
            largest = queries.amax((0, 2)) if queries.numel() else maxima
        maxima.copy_(torch.maximum(maxima, largest))


# Number of running forward passes in all threads, by the recorder of their attention calls. Weak
# keys drop a recorder that is deleted after its forward passes were interrupted.
_running: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_handled = 0  # attention calls now in a handler of torch functions, in all threads
_replaced: dict[Callable, Callable] = {}  # originals by reporting function
_lock = threading.Lock()


def report_calls(recorder: Any, more: int) -> None:
    """Adds ``more`` to the count of a recorder's running forward passes. While any runs in any
    thread, attention calls of all threads are reported, each in its thread.

    Args:
        recorder: after each attention function, its ``record_call`` is called with a function that
            reads a `Call` from the arguments, and may raise.
    """
    with _lock:
        count = _running.pop(recorder, 0) + more
        if count > 0:
            _running[recorder] = count
        _set_functions()


def _set_functions() -> None:
    for module_name, name, reader in _FUNCTIONS:
        module = sys.modules.get(module_name)
        if module is not None:
            function = getattr(module, name)
            original = _replaced.get(function, function)
            reports = _running and not _handled
            setattr(module, name, _reporting(original, reader) if reports else original)


@contextlib.contextmanager
def _handling() -> Iterator[None]:
    """Restores torch's functions for a handler, which may check that it was called for
    `F.scaled_dot_product_attention`. Meanwhile, calls from other threads aren't seen."""
    global _handled
    with _lock:
        _handled += 1
        _set_functions()
    try:
        yield
    finally:
        with _lock:
            _handled -= 1
            _set_functions()


@functools.cache  # Dynamo guards on the function
def _reporting(function: Callable, reader: Callable[..., Call]) -> Callable:
    def reporting(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        has_handler = has_torch_function((*args, *kwargs.values()))
        with _handling() if has_handler else contextlib.nullcontext():
            result = function(*args, **kwargs)
        with _lock:
            recorders = list(_running)
        for recorder in recorders:
            recorder.record_call(lambda: reader(result, *args, **kwargs))
        return result

    _replaced[reporting] = function
    return reporting


def _read_sdpa(
    result: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
) -> Call:
    materialize = getattr(attn_mask, "_materialize", None)  # torch.nn.attention.bias
    if materialize is not None:
        attn_mask = materialize(query.device)
    return read(query, key, scale, is_causal, {"attn_mask": attn_mask})


def _read_flex(
    result: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: Optional[float] = None,
    *args: Any,
    return_aux: Any = None,
    **kwargs: Any,
) -> Call:
    if getattr(return_aux, "max_scores", False):  # maxima of the scores after score_mod
        return read_scores(result[1].max_scores, query.shape[-1])
    mask_mod = None if block_mask is None else block_mask.mask_mod
    return read(query, key, scale, False, {"mask_mod": mask_mod})


_FUNCTIONS = (
    ("torch.nn.functional", "scaled_dot_product_attention", _read_sdpa),
    ("torch.nn.attention.flex_attention", "flex_attention", _read_flex),
)


def read_scores(max_scores: Tensor, head_dim: int = 0) -> Call:
    """Reads a call from its largest logits (B, Hq, Tq), possibly a DTensor."""
    if max_scores.ndim != 3:
        raise ValueError(f"has max_scores of shape {tuple(max_scores.shape)}, not (B, Hq, Tq)")
    local, heads = _local_heads(max_scores, 1)
    return Call(local, head_dim=head_dim, heads=heads)


def read(q: Tensor, k: Tensor, scale: Optional[float], causal: bool, masks: dict[str, Any]) -> Call:
    """Reads a call from queries and keys of scaled dot product attention, possibly DTensors.

    Args:
        q, k: (…, heads, T, D) or (T, D); all dimensions but the last two broadcast.
        masks: further arguments of `max_qk_logits`; None values are left out.

    Raises:
        ValueError: nested tensors, or DTensors sharded by anything but heads and batch.
    """
    if q.is_nested or k.is_nested:
        raise ValueError("attends to nested tensors")
    local_q, heads = _local_heads(q, q.ndim - 3)
    k = _local_with_queries(k, q, "keys", may_replicate=k.ndim > 2 and k.shape[-3] == 1)
    options: dict[str, Any] = {"scale": scale, "causal": causal}
    for name, mask in masks.items():
        if mask is not None:
            options[name] = _local_with_queries(mask, q, name, may_replicate=True)
    q = local_q
    head_dim = q.shape[-1] + (options["q_rope"].shape[-1] if "q_rope" in options else 0)
    dtype = torch.promote_types(q.dtype, k.dtype)  # under autocast they may differ
    q, k = q.to(dtype), k.to(dtype)
    if q.ndim != 4 or k.ndim != 4 or q.shape[0] != k.shape[0] or q.shape[1] % k.shape[1]:
        q, k = (tensor[None] if tensor.ndim == 2 else tensor for tensor in (q, k))
        batch = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3])
        q = q if q.shape[-3] > 1 else q.expand(*q.shape[:-3], k.shape[-3], *q.shape[-2:])
        q, k = _in_four_dims(q, batch), _in_four_dims(k, batch)
        mask = options.get("attn_mask")
        if mask is not None and mask.ndim > 4:
            options["attn_mask"] = _in_four_dims(mask, batch)
    return Call(q, k, options, head_dim, heads)


def _in_four_dims(tensor: Tensor, batch: torch.Size) -> Tensor:
    """Merges the leading dimensions of (…, heads, rows, cols), broadcast to ``batch``."""
    size = tensor.shape[-3:]
    return tensor.expand(*batch, *size).reshape(math.prod(batch), *size)


def _local_heads(tensor: Any, head_dim: int) -> tuple[Tensor, Optional[tuple[Any, int, int]]]:
    """The local tensor; the mesh, the mesh dimension that shards ``head_dim``, and the number of
    heads."""
    if not is_dtensor(tensor):
        return tensor, None
    sharded: list[int] = []
    for index, placement in enumerate(tensor.placements):
        if placement.is_shard(head_dim):
            sharded.append(index)
        elif not (placement.is_replicate() or any(map(placement.is_shard, range(head_dim)))):
            raise ValueError(f"attends with queries placed {placement}")
    if len(sharded) > 1:
        raise ValueError("attends with heads sharded on several mesh dimensions")
    heads = (tensor.device_mesh, sharded[0], tensor.shape[head_dim]) if sharded else None
    return tensor.to_local(), heads


def _local_with_queries(tensor: Any, q: Any, name: str, may_replicate: bool) -> Any:
    """The local tensor of keys or a mask, if placed like the queries; other values unchanged."""
    if not is_dtensor(tensor):
        return tensor
    for placement, of_q in zip(tensor.placements, getattr(q, "placements", ())):
        is_equal = tensor.ndim == q.ndim and placement == of_q
        if not (is_equal or (may_replicate and placement.is_replicate())):
            raise ValueError(f"attends with {name} placed {placement} and queries placed {of_q}")
    return tensor.to_local()
