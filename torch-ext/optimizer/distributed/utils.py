"""From DTensors to layouts and back: the one place that knows about placements and meshes."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from .layout import Region, whole

if dist.is_available():
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import _StridedShard  # no subclass of Shard


def is_dtensor(tensor: Optional[Tensor]) -> bool:
    return dist.is_available() and isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, or the tensor itself, sharing its storage, without a graph.

    To be called under ``no_grad``: a DTensor's own ``detach`` costs a dispatch of 100 µs.
    """
    return (tensor.to_local() if is_dtensor(tensor) else tensor).detach()  # type: ignore[attr-defined]


def check_placements(tensor: Tensor) -> None:
    """Refuses DTensors whose pieces can't be told from their placements.

    Raises:
        ValueError: no process group, or a placement other than Shard and Replicate.
    """
    if not is_dtensor(tensor):
        return
    if not dist.is_initialized():
        raise ValueError("is a DTensor but torch.distributed has no initialized process group")
    for placement in tensor.placements:  # type: ignore[attr-defined]
        if not isinstance(placement, (Shard, _StridedShard, Replicate)):
            raise ValueError(
                f"has placement {placement!r}; Shard and Replicate are supported, "
                "reduce a Partial tensor first: tensor.redistribute(placements=[Replicate(), …])"
            )
    for index, placement in enumerate(tensor.placements):  # type: ignore[attr-defined]
        if isinstance(placement, _StridedShard):
            later = zip(tensor.placements[index + 1 :], tensor.device_mesh.shape[index + 1 :])  # type: ignore[attr-defined]
            parts = math.prod(
                size
                for other, size in later
                if isinstance(other, (Shard, _StridedShard)) and other.dim == placement.dim
            )
            if parts != placement.split_factor:  # the local shard is no interval of rows
                raise ValueError(f"has placement {placement!r} without the shards it strides over")


def describe(tensor: Tensor) -> str:
    """Placement for messages and tables: ``plain``, or ``[Shard(0)] on (dp=4)``."""
    if not is_dtensor(tensor):
        return "plain"
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    names = mesh.mesh_dim_names or [f"dim{i}" for i in range(mesh.ndim)]
    sizes = ", ".join(f"{name}={size}" for name, size in zip(names, mesh.shape))
    return f"{list(tensor.placements)} on ({sizes})"  # type: ignore[attr-defined]


def layout_of(tensor: Tensor) -> Optional[tuple]:
    """Mesh and placements, comparable; None for a plain tensor."""
    return (tensor.device_mesh, tensor.placements) if is_dtensor(tensor) else None  # type: ignore[attr-defined]


def ranks_of(tensor: Tensor) -> Optional[tuple[int, ...]]:
    """All ranks of a DTensor's mesh, ascending; None for a plain tensor."""
    return _ranks_of_mesh(tensor.device_mesh) if is_dtensor(tensor) else None  # type: ignore[attr-defined]


@functools.cache
def _ranks_of_mesh(mesh: Any) -> tuple[int, ...]:
    return tuple(sorted(mesh.mesh.flatten().tolist()))  # a CPU tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether other ranks hold parts of the tensor that this one lacks."""
    if not is_dtensor(tensor):
        return False
    return any(
        not isinstance(placement, Replicate) and size > 1
        for placement, size in zip(tensor.placements, tensor.device_mesh.shape)  # type: ignore[attr-defined]
    )


def region_of(tensor: Tensor) -> Region:
    """Which part of the whole tensor this rank holds."""
    if not is_dtensor(tensor):
        return whole(tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape,
        tensor.device_mesh,  # type: ignore[attr-defined]
        tensor.placements,  # type: ignore[attr-defined]
    )
    return tuple((start, start + size) for start, size in zip(offset, shape))


def all_gather(shards: Sequence[Tensor], like: Tensor) -> Tensor:
    """Whole tensors on every rank, stacked, by one gather of shards laid out like ``like``."""
    assert isinstance(like, DTensor)
    stacked = torch.stack(list(shards))
    shape = (len(shards), *like.shape)
    distributed = DTensor.from_local(
        stacked,
        like.device_mesh,
        [_behind_a_new_dimension(placement) for placement in like.placements],
        run_check=False,
        shape=torch.Size(shape),
        stride=_contiguous_stride(shape),
    )
    return distributed.full_tensor()


def _behind_a_new_dimension(placement: Any) -> Any:
    if isinstance(placement, _StridedShard):
        return _StridedShard(placement.dim + 1, split_factor=placement.split_factor)
    return Shard(placement.dim + 1) if isinstance(placement, Shard) else placement


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    stride = [1]
    for size in reversed(shape[1:]):
        stride.append(stride[-1] * size)
    return tuple(reversed(stride))
