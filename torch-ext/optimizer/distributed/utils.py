"""Converts DTensors to plain data and back, so that planning knows no meshes and placements."""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Optional, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import has_backend
from .regions import ShardedDim, Sharding, shape_of, slices
from .replicas import Replicas

if dist.is_available():
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor.placement_types import _StridedShard  # no subclass of Shard
else:
    DTensor = ()  # type: ignore[assignment, misc]  # nothing is an instance of this


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def world() -> Any:
    """The default process group.

    Raises:
        ValueError: there is none.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "torch.distributed has no initialized process group: call init_process_group() first, "
            "or use MuonAdamW on one process"
        )
    return dist.group.WORLD


_Function = TypeVar("_Function", bound=Callable[..., Any])


def refuses_groups_before_init(argument: str) -> Callable[[_Function], _Function]:
    """Decorates a function whose ``argument`` is a process group, or None for no group.

    Before ``init_process_group``, ``torch.distributed.group.WORLD`` is None, and would be taken for
    no group. So the function refuses a None that a caller passes, if torchrun has started ranks but
    no process group is initialized. A caller may pass None on one process, and may always leave the
    argument out.
    """

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            was_launched = dist.is_available() and dist.is_torchelastic_launched()
            if was_launched and not dist.is_initialized():
                passed = inspect.signature(function).bind_partial(*args, **kwargs).arguments
                if argument in passed and passed[argument] is None:
                    raise ValueError(
                        f"{argument} is None, as torch.distributed.group.WORLD is before "
                        "init_process_group(), and torchrun has started ranks: call "
                        f"init_process_group() first, or leave {argument} out"
                    )
            return function(*args, **kwargs)

        return cast(_Function, checked)

    return decorate


def is_dtensor(tensor: Optional[Tensor]) -> bool:
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, or a plain tensor, detached: a new tensor on its storage.

    To be called under ``no_grad``: a DTensor's own ``detach`` costs a dispatch of 100 µs.
    """
    return (tensor.to_local() if is_dtensor(tensor) else tensor).detach()  # type: ignore[attr-defined]


def raw_local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, or the plain tensor itself; only to be read.

    It makes no new tensor object, so it costs a step less than `local`.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def raw_locals(tensors: Iterable[Any]) -> list[Any]:
    """`raw_local` of each tensor; anything else stays as it is."""
    return [t._local_tensor if isinstance(t, DTensor) else t for t in tensors]


def addresses(tensors: Iterable[Tensor]) -> list[int]:
    """Where this rank's elements of tensors lie in memory."""
    return [tensor.data_ptr() for tensor in raw_locals(tensors)]


def lacks_memory(tensor: Tensor) -> bool:
    """Whether the storage of this rank's elements was freed, as FSDP2 frees whole parameters."""
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
    """The dtype that holds a parameter's gradients, also where there is none on this rank.

    A parameter whose ``grad_dtype`` is None takes gradients of any dtype. They count as fp32, or as
    the parameter's dtype if that is wider: so all ranks know the dtype before any gradient, and the
    zeros of torch.distributed.checkpoint do not decide it.
    """
    if not param.is_leaf:  # torch raises for tensors that are no leaves
        return param.dtype
    dtype = getattr(param, "grad_dtype", param.dtype)
    return torch.promote_types(param.dtype, torch.float32) if dtype is None else dtype


def facts_of(params: Sequence[Any]) -> list[tuple]:
    """What a plan depends on of each parameter, comparable; in one call, since every step asks."""
    strided = torch.strided
    return [
        (
            id(p),
            p.shape,
            p.dtype,
            p.requires_grad,
            getattr(p, "grad_dtype", p.dtype) if p.is_leaf else p.dtype,
            p.device,
            # A DTensor's specification says strides, mesh and placements.
            p._spec if isinstance(p, DTensor) else p.stride() if p.layout is strided else p.layout,
        )
        for p in params
    ]


def check_placements(tensor: Tensor) -> None:
    """Refuses DTensors whose local shards don't follow from their placements.

    Raises:
        ValueError: no process group, or none for its device; a placement other than Shard and
            Replicate; strided shards that are no intervals.
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
    """Refuses strided shards unless every local shard is one interval of the dimension."""
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
                f"dimensions cut unevenly ({list(placements)}); make it a multiple"
            )


def describe(tensor: Tensor) -> str:
    """Placement for messages and tables: ``plain``, or ``[Shard(0)] on (dp=4)``."""
    if not is_dtensor(tensor):
        return "plain"
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    names = mesh.mesh_dim_names or [f"dim{i}" for i in range(mesh.ndim)]
    sizes = ", ".join(f"{name}={size}" for name, size in zip(names, mesh.shape))
    return f"{list(tensor.placements)} on ({sizes})"  # type: ignore[attr-defined]


def mesh_placements_of(tensor: Tensor) -> Optional[tuple]:
    """Mesh and placements of a DTensor, comparable; None for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return None
    return tensor._spec.mesh, tensor._spec.placements  # the properties take twice as long


def ranks_of(tensor: Tensor) -> Optional[tuple[int, ...]]:
    """All ranks of a DTensor's mesh, ascending; None for a plain tensor."""
    sharding = sharding_of(tensor)
    return None if sharding is None else tuple(sorted(sharding.ranks))


def is_sharded(tensor: Tensor) -> bool:
    """Whether other ranks hold parts of the tensor that this one lacks."""
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
    """Mesh and placements of a DTensor, if only its first ``experts`` dimensions were cut."""
    if not is_dtensor(param):
        return None
    placements = (
        placement if getattr(placement, "dim", experts) < experts else Replicate()
        for placement in param.placements  # type: ignore[attr-defined]
    )
    return param.device_mesh, tuple(placements)  # type: ignore[attr-defined]


def state_placements_of(param: Tensor, replicas: Optional[Replicas]) -> Optional[tuple]:
    """Mesh and placements of state that replicas of a plain parameter divide by rows.

    None for a DTensor, or if there are no replicas.
    """
    if replicas is None or is_dtensor(param):
        return None
    return replicas.state_mesh_placements(param.device.type)


def shard_tensor(tensor: Tensor, mesh_placements: tuple) -> Tensor:
    """Makes a DTensor of a plain tensor that all ranks have; copies this rank's shard on the
    tensor's device, and sends nothing."""
    region = _sharding(*mesh_placements).region(tensor.shape, dist.get_rank())
    shard = tensor.detach()[slices(region)].clone(memory_format=torch.contiguous_format)
    return dtensor_of(shard, mesh_placements, tensor.shape, contiguous_stride(tensor.shape))


def local_shape(shape: Sequence[int], mesh_placements: tuple) -> tuple[int, ...]:
    """Shape of this rank's shard of a DTensor of ``shape``."""
    sharding, rank = _sharding(*mesh_placements), dist.get_rank()
    if rank not in sharding.ranks:
        return (0,)  # what torch gives ranks that are not in the mesh
    return shape_of(sharding.region(shape, rank))


def dtensor_of(
    local_tensor: Tensor, mesh_placements: tuple, shape: Sequence[int], stride: Sequence[int]
) -> Tensor:
    """Makes a DTensor of ``shape`` and ``stride`` around this rank's shard, which is not copied.

    The shard may lie on another device than the mesh's: `DTensor.from_local` would copy a shard in
    host memory to the mesh's accelerator.
    """
    mesh, placements = mesh_placements
    meta = TensorMeta(torch.Size(shape), tuple(stride), local_tensor.dtype)
    spec = DTensorSpec(mesh, placements, tensor_meta=meta)
    return DTensor(local_tensor, spec, requires_grad=False)  # as FSDP2 makes its parameters


def gathered(local_tensor: Tensor, like: Tensor) -> Tensor:
    """The whole tensor, of whose parts, placed as ``like`` is, each rank passes its own."""
    mesh_placements = mesh_placements_of(like)
    if mesh_placements is None:
        return local_tensor
    stride = contiguous_stride(like.shape)
    return dtensor_of(local_tensor, mesh_placements, like.shape, stride).full_tensor()  # type: ignore[attr-defined]


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, as torch has them, also for tensors without elements."""
    sizes = [max(1, size) for size in shape]
    return tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(shape)))


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill an interval of memory, in any order of dimensions."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.numel() in (0, last + 1)


class GroupCache(dict[tuple[int, ...], Any]):
    """Process groups, or what is made of them, by their ranks; all optimizers share a cache.

    Its content is valid as long as the default process group lives.
    """

    _world: Callable[[], Any] = staticmethod(lambda: None)

    def current(self) -> GroupCache:
        """This cache, emptied if the default process group is another one than before."""
        if self._world() is not dist.group.WORLD:
            self.clear()
            self._world = weakref.ref(dist.group.WORLD)
        return self


def world_timeout(*device_types: str) -> timedelta:
    """The timeout of the default process group: that of its backend for the first of these device
    types that has one; torch's default if none has."""
    world: Any = dist.group.WORLD
    for device_type in device_types or ("cpu", "cuda", "xpu"):
        try:
            return world._get_backend(torch.device(device_type)).options._timeout
        except (AttributeError, RuntimeError, TypeError):  # no backend, or none with options
            continue
    return dist.distributed_c10d.default_pg_timeout


def key_of_ranks(ranks: Sequence[int]) -> str:
    """A short name for a set of ranks, for keys of a store: a list of all ranks could be long."""
    return hashlib.sha256(repr(tuple(ranks)).encode()).hexdigest()


_groups = GroupCache()


def process_group(tensor: Tensor, ranks: Sequence[int], replicas: Optional[Replicas] = None) -> Any:
    """A process group of ``ranks``, for a DTensor or for a tensor that replicas hold.

    This is a group of the DTensor's mesh, that of the replicas, or the default one, if one of them
    has these ranks, else a new one. All of ``ranks`` make this call at the same place of their
    programs; no other rank takes part. `dist.new_group` would not do. Either all ranks of the world
    have to call it, or it names a group by how many groups a rank is in already, so that ranks in
    different numbers of groups wait for each other under different names.
    """
    if is_dtensor(tensor):
        mesh = tensor.device_mesh  # type: ignore[attr-defined]
        existing, device_type = mesh.get_all_groups(), mesh.device_type
    else:
        assert replicas is not None
        existing, device_type = [replicas.group], tensor.device.type
    for group in (*existing, dist.group.WORLD):
        if dist.get_process_group_ranks(group) == list(ranks):
            return group
    c10d, groups, ranks = dist.distributed_c10d, _groups.current(), tuple(ranks)
    if ranks not in groups:
        world = c10d._get_default_group()
        backend, store = c10d._world.pg_map[world]
        timeout = world_timeout(device_type)
        # With a bound device, all ranks of the world would have to take part.
        bound, world.bound_device_id = world.bound_device_id, None
        try:
            group_rank = ranks.index(dist.get_rank())
            name: Any = f"optimizer/{key_of_ranks(ranks)}"
            group, _ = c10d._new_process_group_helper(
                len(ranks), group_rank, list(ranks), backend, store, name, timeout=timeout
            )
        finally:
            world.bound_device_id = bound
        c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
        groups[ranks] = group
    return groups[ranks]
