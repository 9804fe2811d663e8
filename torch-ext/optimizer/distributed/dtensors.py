"""Converts DTensors to plain data and back, so that planning needs no meshes or placements."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from ..regions import ShardedDim, Sharding, shape_of, slices
from .collectives import has_backend
from .replicas import Replicas

if dist.is_available():
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor.placement_types import _StridedShard  # no subclass of Shard
else:
    DTensor = ()  # type: ignore[assignment, misc]  # nothing is an instance of this


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_dtensor(tensor: Optional[Tensor]) -> bool:
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, or a plain tensor, detached: a new tensor on its storage.

    Call it under ``no_grad``: a DTensor's own ``detach`` costs a dispatch of 100 µs.
    """
    return (tensor.to_local() if is_dtensor(tensor) else tensor).detach()  # type: ignore[attr-defined]


def raw_local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, or the plain tensor itself; read-only.

    Cheaper than `local`, since it makes no new tensor object.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def raw_locals(tensors: Iterable[Any]) -> list[Any]:
    """`raw_local` of each tensor; other objects are returned unchanged."""
    return [t._local_tensor if isinstance(t, DTensor) else t for t in tensors]


def addresses(tensors: Iterable[Tensor]) -> list[int]:
    """The addresses of this rank's elements of tensors."""
    return [tensor.data_ptr() for tensor in raw_locals(tensors)]


def lacks_memory(tensor: Tensor) -> bool:
    """True if the storage of this rank's elements was freed, as FSDP2 frees whole parameters."""
    held = raw_local(tensor)
    return held.untyped_storage().nbytes() == 0 and held.numel() > 0


def with_local(tensor: Tensor, local_tensor: Tensor) -> Tensor:
    """A tensor placed like ``tensor``, around another local shard of the same shape and dtype.

    The shard stays on its device: `DTensor.from_local` would move it to the mesh's.
    """
    if not is_dtensor(tensor):
        return local_tensor
    return DTensor(local_tensor, tensor._spec, requires_grad=False)  # type: ignore[attr-defined]


def this_rank() -> int:
    """The global rank; 0 without torch.distributed."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def compute_device(tensor: Tensor) -> torch.device:
    """The device of a parameter's arithmetic: the parameter's own, or its mesh's if FSDP2's
    CPUOffloadPolicy keeps the parameter in host memory."""
    if tensor.device.type == "cpu" and is_dtensor(tensor):
        device_type = tensor.device_mesh.device_type  # type: ignore[attr-defined]
        if device_type != "cpu":
            return torch.device(device_type, torch.get_device_module(device_type).current_device())
    return tensor.device


def grad_dtype(param: Tensor) -> torch.dtype:
    """The dtype of a parameter's gradients, even if it has none on this rank.

    A parameter whose ``grad_dtype`` is None accepts gradients of any dtype. They count as fp32, or
    as the parameter's dtype if that is wider. So all ranks know the dtype before any gradient, and
    it doesn't depend on the zeros that torch.distributed.checkpoint sets.
    """
    if not param.is_leaf:  # torch raises for non-leaf tensors
        return param.dtype
    dtype = getattr(param, "grad_dtype", param.dtype)
    return torch.promote_types(param.dtype, torch.float32) if dtype is None else dtype


def facts_of(params: Sequence[Any]) -> list[tuple]:
    """For each parameter, the facts that a plan depends on, to compare in every step."""
    strided = torch.strided
    return [
        (
            id(p),
            p.shape,
            p.dtype,
            p.requires_grad,
            getattr(p, "grad_dtype", p.dtype) if p.is_leaf else p.dtype,
            p.device,
            # A DTensor's spec has strides, mesh, and placements.
            p._spec if isinstance(p, DTensor) else p.stride() if p.layout is strided else p.layout,
        )
        for p in params
    ]


def check_placements(tensor: Tensor) -> None:
    """Rejects DTensors whose local shards don't follow from their placements.

    Raises:
        ValueError: no process group, or none for the device; a placement other than Shard and
            Replicate; strided shards that aren't intervals; shards out of the mesh's order.
    """
    if not is_dtensor(tensor):
        return
    if not dist.is_initialized():
        raise ValueError("is a DTensor but torch.distributed has no initialized process group")
    for placement in tensor.placements:  # type: ignore[attr-defined]
        if not isinstance(placement, (Shard, _StridedShard, Replicate)):
            raise ValueError(
                f"has placement {placement!r}; only Shard and Replicate are supported. Reduce a "
                "Partial tensor first: tensor.redistribute(placements=[Replicate(), …])"
            )
    if unusual_shard_order(tensor) is not None:
        raise ValueError(
            f"is {describe(tensor)}; only shards in the order of mesh dimensions are supported, as "
            "distribute_tensor(tensor.full_tensor(), tensor.device_mesh, tensor.placements) makes "
            "them"
        )
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    _check_strides(tuple(tensor.shape), mesh.shape, tensor.placements)  # type: ignore[attr-defined]
    if not is_sharded(tensor):
        return
    try:
        group = mesh.get_all_groups()[0]
    except (IndexError, RuntimeError):  # a mesh for plans only: no group, or none with this rank
        return
    if not has_backend(group, compute_device(tensor)):
        raise ValueError(
            f"is on {tensor.device.type}, for which the process group of its mesh has no backend; "
            'name one for each device: init_process_group("cpu:gloo,cuda:nccl")'
        )


def _check_strides(shape: Sequence[int], mesh: Sequence[int], placements: Sequence) -> None:
    """Rejects strided shards unless every local shard is one interval of the dimension."""
    for index, placement in enumerate(placements):
        if not isinstance(placement, _StridedShard):
            continue
        dim = placement.dim
        cuts = [getattr(other, "dim", None) == dim for other in placements]
        shards = [size if cut else 1 for size, cut in zip(mesh, cuts)]  # of each mesh dimension
        if math.prod(shards[index + 1 :]) != placement.split_factor:
            raise ValueError(f"has placement {placement!r} without the shards it strides over")
        count = math.prod(shards)
        if sum(size > 1 for size in shards) > 2 and shape[dim] % count:
            raise ValueError(
                f"has {shape[dim]} indices in dimension {dim}, which {count} shards of three mesh "
                f"dimensions cut unevenly ({list(placements)}); make it a multiple of {count}"
            )


def unusual_shard_order(tensor: Tensor) -> Optional[tuple[int, tuple[int, ...]]]:
    """A dimension of a DTensor that mesh dimensions cut out of order, and the order that they use;
    None if there is none.

    torch stores the order apart from placements. Strided shards imply theirs: for these torch 2.10
    derives an order, and later releases have none.
    """
    if not isinstance(tensor, DTensor):
        return None
    mesh_shape, placements = tensor._spec.mesh.shape, tensor._spec.placements
    for dim, mesh_dims in getattr(tensor._spec, "shard_order", None) or ():
        if any(isinstance(placements[index], _StridedShard) for index in mesh_dims):
            continue
        cuts = tuple(index for index in mesh_dims if mesh_shape[index] > 1)
        if list(cuts) != sorted(cuts):
            return dim, cuts
    return None


def describe(tensor: Tensor) -> str:
    """The placement for messages and tables: ``plain``, or ``[Shard(0)] on (dp=4)``."""
    if not is_dtensor(tensor):
        return "plain"
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    names = mesh.mesh_dim_names or [f"dim{i}" for i in range(mesh.ndim)]
    sizes = ", ".join(f"{name}={size}" for name, size in zip(names, mesh.shape))
    order, unusual = "", unusual_shard_order(tensor)
    if unusual is not None:
        dim, cuts = unusual
        order = f", dimension {dim} cut by {' before '.join(names[index] for index in cuts)}"
    return f"{list(tensor.placements)} on ({sizes}){order}"  # type: ignore[attr-defined]


def mesh_placements_of(tensor: Tensor) -> Optional[tuple]:
    """Mesh and placements of a DTensor, to compare; None for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return None
    return tensor._spec.mesh, tensor._spec.placements  # the properties take twice as long


def is_placed(tensor: Tensor, mesh_placements: Optional[tuple]) -> bool:
    """True if a DTensor has this mesh and placements, and shards in the order of the mesh; for
    None, True if it is a plain tensor."""
    return mesh_placements_of(tensor) == mesh_placements and unusual_shard_order(tensor) is None


def ranks_of(tensor: Tensor) -> Optional[tuple[int, ...]]:
    """All ranks of a DTensor's mesh, ascending; None for a plain tensor."""
    sharding = sharding_of(tensor)
    return None if sharding is None else tuple(sorted(sharding.ranks))


def is_sharded(tensor: Tensor) -> bool:
    """True if other ranks hold parts of the tensor that this rank lacks."""
    if not is_dtensor(tensor):
        return False
    return any(
        not isinstance(placement, Replicate) and size > 1
        for placement, size in zip(tensor.placements, tensor.device_mesh.shape)  # type: ignore[attr-defined]
    )


def sharding_of(tensor: Tensor) -> Optional[Sharding]:
    """How a DTensor lies on its mesh, as plain data; None for a plain tensor.

    Partial counts as Replicate.
    """
    mesh_placements = mesh_placements_of(tensor)
    return None if mesh_placements is None else _sharding(*mesh_placements)


@functools.lru_cache(maxsize=256)
def _sharding(mesh: Any, placements: tuple) -> Sharding:
    splits = [
        ShardedDim(placement.dim, strided=isinstance(placement, _StridedShard))
        if isinstance(placement, (Shard, _StridedShard))
        else None
        for placement in placements
    ]
    ranks = mesh.mesh.flatten().tolist()  # a CPU tensor
    return Sharding(tuple(mesh.mesh.shape), tuple(ranks), tuple(splits))


def expert_placements_of(param: Tensor, experts: int) -> Optional[tuple]:
    """Mesh and placements that a DTensor has if only its first ``experts`` dimensions are cut."""
    if not is_dtensor(param):
        return None
    placements = (
        placement if getattr(placement, "dim", experts) < experts else Replicate()
        for placement in param.placements  # type: ignore[attr-defined]
    )
    return param.device_mesh, tuple(placements)  # type: ignore[attr-defined]


def state_placements_of(param: Tensor, replicas: Optional[Replicas]) -> Optional[tuple]:
    """Mesh and placements of state that replicas of a plain parameter divide by rows.

    None for a DTensor, or without replicas.
    """
    if replicas is None or is_dtensor(param):
        return None
    return replicas.state_mesh_placements(param.device.type)


def shard_tensor(tensor: Tensor, mesh_placements: tuple) -> Tensor:
    """Makes a DTensor from a plain tensor that all ranks have. Copies this rank's shard on the
    tensor's device, without communication."""
    region = _sharding(*mesh_placements).region(tensor.shape, dist.get_rank())
    shard = tensor.detach()[slices(region)].clone(memory_format=torch.contiguous_format)
    return dtensor_of(shard, mesh_placements, tensor.shape, contiguous_stride(tensor.shape))


def local_shape(shape: Sequence[int], mesh_placements: tuple) -> tuple[int, ...]:
    """Shape of this rank's shard of a DTensor of ``shape``."""
    sharding, rank = _sharding(*mesh_placements), dist.get_rank()
    if rank not in sharding.ranks:
        return (0,)  # as in torch, on ranks outside the mesh
    return shape_of(sharding.region(shape, rank))


def dtensor_of(
    local_tensor: Tensor, mesh_placements: tuple, shape: Sequence[int], stride: Sequence[int]
) -> Tensor:
    """Wraps this rank's shard in a DTensor of ``shape`` and ``stride``, without a copy.

    The shard may be on a device other than the mesh's: `DTensor.from_local` would copy a shard in
    host memory to the mesh's accelerator.
    """
    mesh, placements = mesh_placements
    meta = TensorMeta(torch.Size(shape), tuple(stride), local_tensor.dtype)
    spec = DTensorSpec(mesh, placements, tensor_meta=meta)
    return DTensor(local_tensor, spec, requires_grad=False)  # as FSDP2 makes its parameters


def gathered(local_tensor: Tensor, like: Tensor) -> Tensor:
    """Gathers the whole tensor from each rank's local part, placed as ``like`` is."""
    mesh_placements = mesh_placements_of(like)
    if mesh_placements is None:
        return local_tensor
    stride = contiguous_stride(like.shape)
    return dtensor_of(local_tensor, mesh_placements, like.shape, stride).full_tensor()  # type: ignore[attr-defined]


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor; as in torch, even for tensors without elements."""
    sizes = [max(1, size) for size in shape]
    return tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(shape)))


def is_dense(tensor: Tensor) -> bool:
    """True if the elements fill an interval of memory, in any order of dimensions."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.numel() in (0, last + 1)
