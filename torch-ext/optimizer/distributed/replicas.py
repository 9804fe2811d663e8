"""Plain parameters that all ranks of a process group hold, as under DDP and in ZeRO-2."""

from __future__ import annotations

import functools
from typing import Any, Optional

import torch
import torch.distributed as dist

from .layout import Sharding, Split

if dist.is_available():
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard


class Replicas:
    """A process group whose ranks hold the same plain parameters and divide their state by rows.

    Copies share it. Pickles don't hold it: a process group belongs to its process.

    Args:
        group: the process group, or a mesh of one dimension.

    Raises:
        ValueError: something else, or a group that this rank is not in.
    """

    def __init__(self, group: Any):
        if dist.is_available() and isinstance(group, DeviceMesh) and group.ndim == 1:
            group = group.get_group()
        if not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
            raise ValueError(
                "process_group must be a process group that this rank is in, or a mesh of one "
                f"dimension, found {group!r}"
            )
        self.group = group
        self.ranks = tuple(dist.get_process_group_ranks(group))
        whole: list[Optional[Split]] = [None]
        self.weights = Sharding((len(self.ranks),), self.ranks, tuple(whole))
        self.state = Sharding((len(self.ranks),), self.ranks, (Split(0),))

    def layout(self, device_type: str) -> tuple:
        """Mesh and placements of state that is divided by rows."""
        return self._mesh(device_type), (Shard(0),)

    @functools.cached_property
    def _meshes(self) -> dict[str, Any]:
        return {}

    def _mesh(self, device_type: str) -> Any:
        if device_type not in self._meshes:
            self._meshes[device_type] = DeviceMesh.from_group(self.group, device_type)
        return self._meshes[device_type]

    def has_backend(self, device: torch.device) -> bool:
        try:
            self.group._get_backend(device)
        except RuntimeError:
            return device.type == "meta"
        return True

    def __repr__(self) -> str:
        return f"ranks {list(self.ranks)}"

    def __deepcopy__(self, memo: Any) -> Replicas:
        return self

    def __reduce__(self) -> tuple:
        return _forgotten, ()


def _forgotten() -> None:
    """What a pickle holds of a process group."""
