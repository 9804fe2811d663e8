"""Gets the gradients of Muon's parameters for one step, as they are or averaged (ZeRO-2)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Optional

import torch
from torch import Tensor

from ..distributed import regions
from ..distributed import utils as dtensors
from ..distributed.plan import Plan
from ..distributed.replicas import Replicas
from ..parameters.options import Group
from ..scratch import Scratch

if TYPE_CHECKING:
    from ..distributed.zero2 import MeanGradients


class Gradients:
    """The gradients of Muon's parameters: of each, the part whose momentum this rank has.

    In ZeRO-2 the gradients of plain parameters are averaged over the replicas, and each replica
    gets its rows of the mean.

    Args:
        plan: the plan whose entries the parameters are.
        params: in the order of the entries.
        groups: of the optimizer.
        absent: numbers of entries that take no part.
        replicas: the replicas that average gradients, in ZeRO-2; else None.
        scratch: what buffers are taken from.

    Attributes:
        means: averages gradients; in ZeRO-2 only.
        has_released: whether some gradients were set to None.
    """

    means: MeanGradients

    def __init__(
        self,
        plan: Plan,
        params: Sequence[Tensor],
        groups: Sequence[Group],
        absent: Collection[int],
        replicas: Optional[Replicas],
        scratch: Scratch,
    ):
        self._plan = plan
        self._params = params
        self._groups = groups
        self._held: dict[int, Tensor] = {}
        self.has_released = False
        # By number of an entry, its number among averaged gradients, in the order of chunks.
        self._averaged: dict[int, int] = {}
        if replicas is None:
            return
        from ..distributed.zero2 import MeanGradients  # loaded where it is used

        # How many averaged gradients this chunk and the chunks before it need.
        self._needed: dict[tuple[int, int], int] = {}
        for lane_number, lane in enumerate(plan.all_lanes):
            for chunk, units in enumerate(lane.units):
                for unit, _ in units:
                    divided = plan.entries[unit.entry].momentum is not None
                    if divided and unit.entry not in absent:
                        self._averaged.setdefault(unit.entry, len(self._averaged))
                self._needed[lane_number, chunk] = len(self._averaged)
        entries = list(self._averaged)
        self.means = MeanGradients(
            [params[entry] for entry in entries],
            [True] * len(entries),
            replicas.group,
            on_read=lambda index: self.release(entries[index]),
            scratch=scratch,
        )

    def buckets_needed(self) -> dict[tuple[int, int], int]:
        """For each chunk, how many buckets of gradients have to be averaged before it."""
        counts = self.means.bucket_plan.prefix_counts
        return {chunk: counts[count] for chunk, count in self._needed.items()}

    def of(self, number: int) -> Tensor:
        """The gradient of an entry; zeros where there is none."""
        if number not in self._held:
            self._held[number] = self._find(number)
        return self._held[number]

    def release(self, number: int) -> None:
        """Sets the gradient of an entry, which has been read, to None if its group asks for that.

        Gradients of capturable groups stay: the backward of a replayed graph writes to the memory
        that it wrote to when it was captured.
        """
        self._held.pop(number, None)
        group = self._groups[self._plan.entries[number].group]
        if group.none_grad and not group.capturable:
            self.has_released = True
            self._params[number].grad = None

    def _find(self, number: int) -> Tensor:
        if number in self._averaged:
            return self.means.result(self._averaged[number])
        param, entry = self._params[number], self._plan.entries[number]
        grad = param.grad
        grad = torch.zeros_like(dtensors.local(param)) if grad is None else dtensors.raw_local(grad)
        if entry.momentum is not None:  # replicas divide the momentum, not the gradient
            grad = grad[regions.slices(entry.momentum_region(self._plan.rank))]
        return grad
