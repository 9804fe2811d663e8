"""Describes which ranks hold the same plain parameters, and checks that their copies are equal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from ..regions import ShardedDim, Sharding
from .collectives import gather_over_ranks

if dist.is_available():
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard


# Largest accepted relative difference of averaged gradients: ranks may sum in different orders.
GRADIENT_ROUNDING = 1e-3

# Tensors with fewer elements aren't divided: their state is too small to be worth it.
SMALL_NUMEL = 1024


class Replicas:
    """A process group whose ranks hold the same plain parameters and divide their state by rows.

    A deep copy is the object itself. A pickle contains None instead: a process group belongs to its
    process.

    Args:
        group: the process group, or a mesh of one dimension.

    Raises:
        ValueError: ``group`` is something else, or doesn't contain this rank.
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
        self.check_alive()
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.weights = Sharding((len(self.ranks),), self.ranks, (None,))
        self.state = Sharding((len(self.ranks),), self.ranks, (ShardedDim(0),))
        self._meshes: dict[str, Any] = {}  # by device type

    def check_alive(self) -> None:
        """Raises ValueError if the process group was destroyed."""
        try:
            dist.get_process_group_ranks(self.group)
        except (KeyError, ValueError):
            raise ValueError(
                "process_group was destroyed: set optim.process_group to a group that exists"
            ) from None

    def state_mesh_placements(self, device_type: str) -> tuple:
        """Mesh and placements of state that is divided by rows."""
        if device_type not in self._meshes:
            self._meshes[device_type] = DeviceMesh.from_group(self.group, device_type)
        return self._meshes[device_type], (Shard(0),)

    def difference(
        self, params: Iterable[tuple[str, Tensor, Optional[Tensor]]], averaged: bool
    ) -> Optional[str]:
        """Describes the first weight or gradient that differs, or state that should but doesn't.

        All ranks return the same text, or None if all is well. Each rank should have different rows
        of state; if two ranks have the same, both have loaded the shard that one rank saved. The
        comparison waits for the device, so it runs only before the first step.

        Args:
            params: name, plain parameter and, if any, this rank's shard of its state; the same
                parameters on all ranks, with or without a gradient.
            averaged: True if gradients should be equal already, up to the order of sums.
        """
        by_device: dict[torch.device, list[tuple[str, Tensor, Optional[Tensor]]]] = {}
        for name, param, state in params:
            by_device.setdefault(param.device, []).append((name, param, state))
        first = self.ranks[0]
        for device, on_device in by_device.items():
            names = [name for name, _, _ in on_device]
            bits = self._gather(_sum_of_bits(param) for _, param, _ in on_device)
            norms = self._gather(_norm_of_gradient(param) for _, param, _ in on_device)
            for rank, index in (bits != bits[0]).nonzero().tolist():
                return (
                    f"{names[index]} has other weights on rank {self.ranks[rank]} than on "
                    f"rank {first}: start with the same weights on all ranks of process_group"
                )
            sums = self._gather(_sum_of_rows(state).to(device) for _, _, state in on_device)
            # Only parameters whose rows differ, since only their checksums identify a rank's rows.
            indices = sums[0].nonzero().flatten().tolist()
            for rank, its_sums in zip(self.ranks[1:], sums[1:]):
                if indices and torch.equal(its_sums[indices], sums[0, indices]):
                    return (
                        f"state of {names[indices[0]]} has the same rows on ranks {first} and "
                        f"{rank}, and so has all other state: both have loaded the part that one "
                        "rank saved. Save with torch.distributed.checkpoint, or one file per rank. "
                        "If a trainer saves on one rank only, leave process_group out: then each "
                        "rank has the whole state"
                    )
            differ = (norms - norms[0]).abs() > GRADIENT_ROUNDING * norms.maximum(norms[0])
            for rank, index in differ.nonzero().tolist() if averaged else ():
                return (
                    f"the gradient of {names[index]} on rank {self.ranks[rank]} differs from "
                    f"rank {first}'s: average gradients in backward with DistributedDataParallel, "
                    'or in step() with grad_reduce="mean"'
                )
        return None

    def _gather(self, scalars: Iterable[Tensor]) -> Tensor:
        """Gathers scalars from all ranks: (ranks, scalars), on the CPU."""
        return gather_over_ranks(torch.stack(list(scalars)), self.group).cpu()

    def __repr__(self) -> str:
        return f"ranks {list(self.ranks)}"

    def __deepcopy__(self, memo: Any) -> Replicas:
        return self

    def __reduce__(self) -> tuple:
        return type(None), ()


def is_divided(shape: Sequence[int], ranks: int) -> bool:
    """True if each rank updates only its rows of one of AdamW's tensors."""
    return len(shape) > 0 and shape[0] >= ranks and math.prod(shape) >= SMALL_NUMEL


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """A checksum, () in int64, that doesn't depend on the order of elements."""
    if tensor.untyped_storage().nbytes() == 0:  # no elements, or their memory was freed
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    return tensor.detach().contiguous().view(integers).sum(dtype=torch.int64)


def _sum_of_rows(state: Optional[Tensor]) -> Tensor:
    """A checksum of a shard's rows, () in int64; 0 if all rows are equal, as in new state."""
    if state is None or not len(state):
        return torch.zeros((), dtype=torch.int64)
    return _sum_of_bits(state).where((state != state[0]).any(), 0)


def _norm_of_gradient(param: Tensor) -> Tensor:
    """The sum of a gradient's magnitudes, () in fp32; NaN if there is no gradient.

    Sums of squares could underflow.
    """
    if param.grad is None:
        return torch.full((), float("nan"), device=param.device)
    return param.grad.detach().abs().sum(dtype=torch.float32)
