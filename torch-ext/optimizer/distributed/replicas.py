"""Plain parameters that all ranks of a process group hold, as under DDP and in ZeRO-2."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import all_gather_slots
from .regions import ShardedDim, Sharding

if dist.is_available():
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard


# By how much averaged gradients may differ between ranks: some ranks sum in an order of their own.
GRADIENT_ROUNDING = 1e-3


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
        self.check_alive()
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.weights = Sharding((len(self.ranks),), self.ranks, (None,))
        self.state = Sharding((len(self.ranks),), self.ranks, (ShardedDim(0),))
        self._meshes: dict[str, Any] = {}  # by device type

    def check_alive(self) -> None:
        """Raises ValueError where the process group was destroyed."""
        try:
            dist.get_process_group_ranks(self.group)
        except (KeyError, ValueError):
            raise ValueError(
                "process_group was destroyed: set optim.process_group to one that exists"
            ) from None

    def layout(self, device_type: str) -> tuple:
        """Mesh and placements of state that is divided by rows."""
        if device_type not in self._meshes:
            self._meshes[device_type] = DeviceMesh.from_group(self.group, device_type)
        return self._meshes[device_type], (Shard(0),)

    def difference(
        self, params: Iterable[tuple[str, Tensor, Optional[Tensor]]], averaged: bool
    ) -> Optional[str]:
        """In words, weights or gradients that differ between ranks, or state that doesn't.

        All ranks get the same answer. State is divided, so two ranks hold the same only where both
        have loaded a checkpoint that one rank has written of its own part. The comparison waits for
        the device, so it is for a first step.

        Args:
            params: name, plain parameter and this rank's part of its state, if there is any; on all
                ranks the same parameters, with a gradient or without.
            averaged: whether gradients should be equal already, up to the order of sums.
        """
        by_device: dict[torch.device, list[tuple[str, Tensor, Optional[Tensor]]]] = {}
        for of_param in params:
            by_device.setdefault(of_param[1].device, []).append(of_param)
        first = self.ranks[0]
        for device, on_device in by_device.items():
            names = [name for name, _, _ in on_device]
            bits = self._gather([_sum_of_bits(param) for _, param, _ in on_device])
            norms = self._gather([_norm_of_gradient(param) for _, param, _ in on_device])
            for rank, at in (bits != bits[0]).nonzero().tolist():
                return (
                    f"{names[at]} has other weights on rank {self.ranks[rank]} than on "
                    f"rank {first}: let all ranks of process_group start from the same"
                )
            rows = self._gather([_sum_of_rows(part).to(device) for _, _, part in on_device])
            held = rows[0].nonzero().flatten().tolist()  # of what the first rank has rows
            for rank, of_rank in zip(self.ranks[1:], rows[1:]):
                if held and torch.equal(of_rank[held], rows[0, held]):
                    return (
                        f"state of {names[held[0]]} is that of the same rows on ranks "
                        f"{first} and {rank}, and so is all other: they have loaded what one rank "
                        "saved, its own part. Save by torch.distributed.checkpoint, or each rank a "
                        "file. Where a trainer saves on one rank, leave process_group out: then "
                        "each rank has whole state"
                    )
            apart = (norms - norms[0]).abs() > GRADIENT_ROUNDING * norms.maximum(norms[0])
            for rank, at in apart.nonzero().tolist() if averaged else ():
                return (
                    f"the gradient of {names[at]} on rank {self.ranks[rank]} is another "
                    f"than on rank {first}: DistributedDataParallel averages them in "
                    'backward, or step() does, with grad_reduce="mean"'
                )
        return None

    def _gather(self, numbers: Sequence[Tensor]) -> Tensor:
        """Numbers, () each, of all ranks: (ranks, numbers), on the CPU."""
        sent = torch.stack(list(numbers))
        gathered = sent.new_empty((len(self.ranks), len(sent)))
        gathered[self.group.rank()] = sent
        all_gather_slots(gathered.view(-1), self.group).wait()
        return gathered.cpu()

    def __repr__(self) -> str:
        return f"ranks {list(self.ranks)}"

    def __deepcopy__(self, memo: Any) -> Replicas:
        return self

    def __reduce__(self) -> tuple:
        return type(None), ()  # a pickle holds None in its place


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """A checksum that depends on no order, () in int64."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    numbers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    return tensor.detach().contiguous().view(numbers).sum(dtype=torch.int64)


def _sum_of_rows(part: Optional[Tensor]) -> Tensor:
    """A checksum of a part's rows, () in int64; 0 if they are alike, as other parts' may be too."""
    if part is None or not len(part):
        return torch.zeros((), dtype=torch.int64)
    return _sum_of_bits(part).where((part != part[0]).any(), 0)


def _norm_of_gradient(param: Tensor) -> Tensor:
    """The sum of magnitudes, which does not underflow, () in fp32; NaN where there is none."""
    if param.grad is None:
        return torch.full((), float("nan"), device=param.device)
    return param.grad.detach().abs().sum(dtype=torch.float32)
