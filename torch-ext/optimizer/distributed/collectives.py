"""Calls torch's single-tensor collectives by their names in the installed version."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def has_backend(group: Any, device: torch.device) -> bool:
    """True if a process group can exchange tensors on a device."""
    try:
        group._get_backend(device)
    except RuntimeError:
        return device.type == "meta"
    return True


def single_tensor_collective(name: str) -> Callable[..., Any]:
    """Single-tensor ``all_gather`` or ``reduce_scatter``; torch 2.13 deprecates the old names."""
    old = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}
    return getattr(dist, f"{name}_single", None) or getattr(dist, old[name])


def all_to_all(
    received: Tensor,
    sent: Tensor,
    received_sizes: Sequence[int],
    sent_sizes: Sequence[int],
    group: Any,
) -> Any:
    """Starts an all-to-all between flat buffers that have a part for each rank."""
    sizes = list(received_sizes), list(sent_sizes)
    return dist.all_to_all_single(received, sent, *sizes, group=group, async_op=True)


def all_gather_slots(buffer: Tensor, group: Any) -> Any:
    """Starts an all-gather from this rank's slot of a flat buffer into the slots of all ranks."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    sent = buffer.chunk(ranks)[rank]
    return single_tensor_collective("all_gather")(buffer, sent, group=group, async_op=True)


def share_slots(buffer: Tensor, slots: Sequence[int], group: Any) -> list[Any]:
    """Starts to gather slots of these sizes: by `all_gather_slots` if equal, else by broadcasts."""
    if len(set(slots)) == 1:
        return [all_gather_slots(buffer, group)]
    return [
        dist.broadcast(slot, group=group, group_src=rank, async_op=True)
        for rank, slot in enumerate(buffer.split(list(slots)))
        if len(slot)
    ]


def gather_over_ranks(tensor: Tensor, group: Any) -> Tensor:
    """The tensors of all ranks, stacked in their order; the current stream waits for them."""
    gathered = tensor.new_empty((dist.get_world_size(group), *tensor.shape))
    gathered[dist.get_rank(group)] = tensor
    all_gather_slots(gathered.view(-1), group).wait()
    return gathered


def max_over_ranks(tensor: Tensor, group: Any) -> Any:
    """Starts to replace each element by its maximum over ranks; NaN depends on the backend."""
    return dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group, async_op=True)
