"""Reports calls of torch's attention functions, with the queries and keys of their logits.

While any `CallReporter` is open, the names by which models call attention functions stand for
functions that report their arguments. A torch function mode would see calls by any name, but Dynamo
traces through it whatever is compiled within a forward, which fails for some of torch's methods.
"""

from __future__ import annotations

import math
import sys
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Callable, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.overrides import has_torch_function

from ...distributed.dtensors import is_dtensor
from .maxima import max_qk_logits

FLEX = "torch.nn.attention.flex_attention"


# A file's globals, a name in them, and what reads the calls by that name.
_Name = tuple[dict[str, Any], str, Callable[..., "Call"]]


@dataclass(frozen=True)
class Call:
    """What gives the logits of one attention call: q and k, or `max_scores`; local tensors.

    Args:
        q, k: (B, Hq, Tq, D), (B, Hk, Tk, D).
        masks: further arguments of `max_qk_logits`.
        max_scores: (B, Hq, Tq), largest logit of each query.
        head_dim: numbers of a query head; 0 if unknown.
        heads: where q is sharded by heads, the mesh, its dimension, and how many heads there are.
    """

    q: Optional[Tensor] = None
    k: Optional[Tensor] = None
    scale: Optional[float] = None
    causal: bool = False
    masks: Optional[dict[str, Any]] = None
    max_scores: Optional[Tensor] = None
    head_dim: int = 0
    heads: Optional[tuple[Any, int, int]] = None

    @property
    def device(self) -> torch.device:
        return self._queries.device

    @property
    def has_numbers(self) -> bool:
        return not (self._queries.is_meta or isinstance(self._queries, FakeTensor))

    @property
    def head_count(self) -> int:
        """Query heads of this rank."""
        return self._queries.shape[1]

    @property
    def _queries(self) -> Tensor:
        tensor = self.max_scores if self.q is None else self.q
        assert tensor is not None
        return tensor

    def raise_maxima(self, maxima: Tensor) -> None:
        """Raises ``maxima``, (Hq,), fp32, to the largest logits of each head."""
        if self.max_scores is not None:
            if self.max_scores.numel():
                largest = self.max_scores.detach().amax((0, 2))
                maxima.copy_(torch.maximum(maxima, largest))
            return
        assert self.q is not None and self.k is not None
        q, k = self.q.detach(), self.k.detach()
        masks = self.masks or {}
        if q.dtype == torch.float64:
            largest = max_qk_logits(q, k, self.scale, self.causal, **masks)
            maxima.copy_(torch.maximum(maxima, largest))
        else:
            max_qk_logits(q, k, self.scale, self.causal, **masks, out=maxima)


class CallReporter:
    """Reports attention calls between `open` and `close`, which nest.

    Covers `F.scaled_dot_product_attention` and `flex_attention`; in the files that ``modules`` come
    from, other names of these functions, too, and names of a compiled `flex_attention`.

    Args:
        modules: those that may call attention functions.
        report: a method, held weakly; called after each attention function of any thread, in that
            thread, with what reads a `Call` from its arguments, which may raise.
    """

    def __init__(self, modules: Iterable[nn.Module], report: Callable[[Callable[[], Call]], None]):
        self.report = weakref.WeakMethod(report)
        self.names: list[_Name] = [(vars(F), "scaled_dot_product_attention", read_sdpa)]
        if FLEX in sys.modules:
            self.names.append((vars(sys.modules[FLEX]), "flex_attention", read_flex))
        torch_files = {id(file) for file, _, _ in self.names}
        files = {
            id(file): file
            for file in (getattr(type(module).forward, "__globals__", {}) for module in modules)
            if id(file) not in torch_files
        }
        for file in files.values():
            readers = ((name, _reader_of(value)) for name, value in file.items())
            self.names += [(file, name, reader) for name, reader in readers if reader is not None]

    def open(self) -> None:
        _PATCH.change(lambda reporters: [*reporters, self])

    def close(self) -> None:
        """Reverses one `open`, if there was any that is not closed."""

        def without_one(reporters: list[CallReporter]) -> list[CallReporter]:
            at = reporters.index(self) if self in reporters else len(reporters)
            return reporters[:at] + reporters[at + 1 :]

        _PATCH.change(without_one)

    def close_all(self) -> None:
        """Reverses each `open`, whatever thread it was in."""
        _PATCH.change(
            lambda reporters: [reporter for reporter in reporters if reporter is not self]
        )


class _Patch:
    """Puts functions that report under the names of all open reporters, those of all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reporters: list[CallReporter] = []  # each as often as it is open
        self._pauses = 0
        self._replaced: dict[tuple[int, str], tuple[dict[str, Any], Callable]] = {}
        self._reporting: dict[Callable, Callable] = {}  # one each, Dynamo guards on identity
        self._replacing: dict[Callable, Callable] = {}  # the reverse

    def change(self, change: Callable[[list[CallReporter]], list[CallReporter]]) -> None:
        with self._lock:
            # Without those whose recorder is gone, left open by forwards that were interrupted.
            self._reporters = [r for r in change(self._reporters) if r.report() is not None]
            self._update()

    def function(self, value: Callable) -> Callable:
        """What a reporting function stands for; any other function itself."""
        return self._replacing.get(value, value)

    def _update(self) -> None:
        reporters = dict.fromkeys(() if self._pauses else self._reporters)
        wanted = {(id(name[0]), name[1]): name for reporter in reporters for name in reporter.names}
        for key in self._replaced.keys() - wanted.keys():
            file, reporting = self._replaced.pop(key)
            if file.get(key[1]) is reporting:
                file[key[1]] = self.function(reporting)
        for key, (file, name, reader) in wanted.items():
            if key not in self._replaced and name in file:
                function = self.function(file[name])
                if function not in self._reporting:
                    self._reporting[function] = reporting = self._reports(function, reader)
                    self._replacing[reporting] = function
                self._replaced[key] = (file, self._reporting[function])
                file[name] = self._reporting[function]

    def _reports(self, function: Callable, reader: Callable[..., Call]) -> Callable:
        def reporting(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            result = self._call(function, args, kwargs)
            for reporter in dict.fromkeys(self._reporters):
                report = reporter.report()
                if report is not None:
                    report(lambda: reader(result, *args, **kwargs))
            return result

        return reporting

    def _call(self, function: Callable, args: Any, kwargs: Any) -> Any:
        if not has_torch_function((*args, *kwargs.values())):
            return function(*args, **kwargs)
        # A handler may ask whether this is F.scaled_dot_product_attention. What other threads call
        # meanwhile is not seen.
        self._pause(1)
        try:
            return function(*args, **kwargs)
        finally:
            self._pause(-1)

    def _pause(self, more: int) -> None:
        with self._lock:
            self._pauses += more
            self._update()


_PATCH = _Patch()


def _reader_of(value: Any) -> Optional[Callable[..., Call]]:
    if isinstance(value, FunctionType):
        value = _PATCH.function(value)
    if value is _PATCH.function(F.scaled_dot_product_attention):
        return read_sdpa
    flex = getattr(sys.modules.get(FLEX), "flex_attention", None)
    if flex is None:
        return None
    flex = _PATCH.function(flex)
    is_flex = value is flex or getattr(value, "_torchdynamo_orig_callable", None) is flex
    return read_flex if is_flex else None


def read_sdpa(
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
    """Reads a call of `F.scaled_dot_product_attention`."""
    materialize = getattr(attn_mask, "_materialize", None)  # of torch.nn.attention.bias
    if materialize is not None:
        attn_mask = materialize(query.device)
    return read(query, key, scale, is_causal, {"attn_mask": attn_mask})


def read_flex(
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
    """Reads a call of `flex_attention`: its own largest scores where it was asked for them."""
    if getattr(return_aux, "max_scores", False):
        return read_scores(result[1].max_scores, query.shape[-1])
    mask_mod = None if block_mask is None else block_mask.mask_mod
    return read(query, key, scale, False, {"mask_mod": mask_mod})


def read_scores(max_scores: Tensor, head_dim: int = 0) -> Call:
    """A call by its largest logits (B, Hq, Tq), maybe a DTensor."""
    if max_scores.ndim != 3:
        raise ValueError(f"has max_scores of shape {tuple(max_scores.shape)}, not (B, Hq, Tq)")
    local, heads = _local_heads(max_scores, 1)
    return Call(max_scores=local, head_dim=head_dim, heads=heads)


def read(
    q: Tensor,
    k: Tensor,
    scale: Optional[float],
    causal: bool,
    masks: dict[str, Any],
) -> Call:
    """A call by queries and keys as scaled dot product attention takes them, maybe DTensors.

    Args:
        q, k: (…, heads, T, D) or (T, D), broadcast against each other in all but the last two.
        masks: further arguments of `max_qk_logits`; those that are None are left out.

    Raises:
        ValueError: nested tensors, or DTensors that are sharded by more than heads and batch.
    """
    if q.is_nested or k.is_nested:
        raise ValueError("attends to nested tensors")
    masks = {name: mask for name, mask in masks.items() if mask is not None}
    placements = getattr(q, "placements", ())
    is_shared = k.ndim > 2 and k.shape[-3] == 1
    local_q, heads = _local_heads(q, q.ndim - 3)
    k = _local_with_queries(k, placements, q.ndim == k.ndim, "keys", is_shared)
    for name, mask in masks.items():
        if isinstance(mask, Tensor):
            has_all_dims = mask.ndim == q.ndim
            masks[name] = _local_with_queries(mask, placements, has_all_dims, name, True)
    q = local_q
    head_dim = q.shape[-1] + (masks["q_rope"].shape[-1] if "q_rope" in masks else 0)
    if q.dtype != k.dtype:  # attention under autocast takes that
        dtype = torch.promote_types(q.dtype, k.dtype)
        q, k = q.to(dtype), k.to(dtype)
    if q.ndim != 4 or k.ndim != 4 or q.shape[0] != k.shape[0] or q.shape[1] % k.shape[1]:
        q, k, mask = _in_four_dims(q, k, masks.get("attn_mask"))
        if mask is not None:
            masks["attn_mask"] = mask
    return Call(q, k, scale, causal, masks, None, head_dim, heads)


def _in_four_dims(
    q: Tensor, k: Tensor, mask: Optional[Tensor]
) -> tuple[Tensor, Tensor, Optional[Tensor]]:
    q, k = (tensor[None] if tensor.ndim == 2 else tensor for tensor in (q, k))
    batch = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3])
    heads = k.shape[-3] if q.shape[-3] == 1 else q.shape[-3]
    count = math.prod(batch)
    q = q.expand(*batch, heads, *q.shape[-2:]).reshape(count, heads, *q.shape[-2:])
    k = k.expand(*batch, *k.shape[-3:]).reshape(count, *k.shape[-3:])
    if mask is not None and mask.ndim > 4:
        mask = mask.expand(*batch, *mask.shape[-3:]).reshape(count, *mask.shape[-3:])
    return q, k, mask


def _local_heads(tensor: Any, head_dim: int) -> tuple[Tensor, Optional[tuple[Any, int, int]]]:
    """The local tensor; the mesh, its dimension that shards ``head_dim``, and how many heads."""
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


def _local_with_queries(
    tensor: Any, placements: Any, has_all_dims: bool, name: str, may_replicate: bool
) -> Tensor:
    """The local tensor of keys or a mask, where it fits queries with these ``placements``."""
    if not is_dtensor(tensor):
        return tensor
    for placement, query in zip(tensor.placements, placements):
        is_equal = has_all_dims and placement == query
        if not (is_equal or (may_replicate and placement.is_replicate())):
            raise ValueError(f"attends with {name} placed {placement} and queries placed {query}")
    return tensor.to_local()
