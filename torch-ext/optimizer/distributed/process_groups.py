"""Creates process groups for any ranks when a lane needs them, and finds the default group."""

from __future__ import annotations

import functools
import hashlib
import inspect
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Optional, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .dtensors import is_dtensor
from .replicas import Replicas


def world() -> Any:
    """The default process group.

    Raises:
        ValueError: torch.distributed isn't initialized.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "torch.distributed has no initialized process group: call init_process_group() first, "
            "or use MuonAdamW in a single process"
        )
    return dist.group.WORLD


_Function = TypeVar("_Function", bound=Callable[..., Any])


def refuses_groups_before_init(argument: str) -> Callable[[_Function], _Function]:
    """Decorates a function whose ``argument`` is a process group, or None for no group.

    Before ``init_process_group``, ``torch.distributed.group.WORLD`` is None and would mean no
    group. So if torchrun has started ranks but no process group is initialized, the function raises
    ValueError for an explicit None. None is fine in a single process, and omitting the argument
    always is.
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
                        "init_process_group(), but torchrun has started ranks: call "
                        f"init_process_group() first, or omit {argument}"
                    )
            return function(*args, **kwargs)

        return cast(_Function, checked)

    return decorate


class GroupCache(dict[tuple[int, ...], Any]):
    """Process groups, or objects made from them, by their ranks; all optimizers share a cache.

    The cache is valid for the lifetime of the default process group.
    """

    _world: Callable[[], Any] = staticmethod(lambda: None)

    def current(self) -> GroupCache:
        """Returns this cache, emptied if the default process group was replaced."""
        if self._world() is not dist.group.WORLD:
            self.clear()
            self._world = weakref.ref(dist.group.WORLD)
        return self


def world_timeout(*device_types: str) -> timedelta:
    """The timeout of the default process group: its backend's for the first of these device types
    that has one, else torch's default."""
    world: Any = dist.group.WORLD
    for device_type in device_types or ("cpu", "cuda", "xpu"):
        try:
            return world._get_backend(torch.device(device_type)).options._timeout
        except (AttributeError, RuntimeError, TypeError):  # no backend, or none with options
            continue
    return dist.distributed_c10d.default_pg_timeout


def key_of_ranks(ranks: Sequence[int]) -> str:
    """A short name of a set of ranks, for keys of a store: a list of ranks may be long."""
    return hashlib.sha256(repr(tuple(ranks)).encode()).hexdigest()


_groups = GroupCache()


def process_group(tensor: Tensor, ranks: Sequence[int], replicas: Optional[Replicas] = None) -> Any:
    """Returns a process group of ``ranks``, for a DTensor or for a tensor that replicas hold.

    A group of the DTensor's mesh, the replicas' group or the default group is used if it has these
    ranks; otherwise a new group is created. All of ``ranks``, and no others, must make this call at
    the same point of their programs. `dist.new_group` doesn't work here: either all ranks of the
    world have to call it, or it names a group by how many groups a rank is in already, and ranks in
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
        # With a bound device, all ranks of the world would have to make this call.
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
