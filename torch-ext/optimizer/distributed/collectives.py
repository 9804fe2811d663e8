"""Calls torch's collectives of single tensors by the names that the installed version has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def has_backend(group: Any, device: torch.device) -> bool:
    """Whether a process group can exchange tensors of a device."""
    try:
        group._get_backend(device)
    except RuntimeError:
        return device.type == "meta"
    return True


def single_tensor_collective(name: str) -> Callable[..., Any]:
    """``all_gather`` or ``reduce_scatter`` of single tensors: torch 2.13 warns of the old names."""
    old = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}
    return getattr(dist, f"{name}_single", None) or getattr(dist, old[name])


def all_gather_slots(buffer: Tensor, group: Any) -> Any:
    """Starts to fill a flat buffer of one slot for each rank, of which this rank's is filled."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    sent = buffer.chunk(ranks)[rank]
    return single_tensor_collective("all_gather")(buffer, sent, group=group, async_op=True)


def max_over_ranks(tensor: Tensor, group: Any) -> Any:
    """Starts to set each element to its maximum over ranks; backends differ in the order of NaN."""
    return dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group, async_op=True)
