"""Finds matrices with Inf or NaN, which ``nonfinite="skip"`` leaves as they are on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed import regions
from ..distributed.plan import Lane, Plan, Unit


class FiniteMask:
    """Which matrices are finite, and so are updated in a step.

    Args:
        plan: of the step.
    """

    def __init__(self, plan: Plan):
        self._entries = plan.entries
        self._flags: dict[int, Tensor] = {}  # by id of a unit, (matrices,)
        self._work: list[Any] = []

    def flag(
        self,
        lane: Lane,
        units: Sequence[Unit],
        parts: Iterable[tuple[Unit, regions.Region, Tensor]],
        group: Any,
    ) -> None:
        """Finds out which matrices of a lane are finite, on all ranks.

        Args:
            lane: of the units.
            units: the units that may be skipped, alike on all peers.
            parts: this rank's parts of these units: unit, box, and the gradient or momentum there.
            group: the process group of the lane's peers; None for a rank that is alone.
        """
        counts = {unit.matrices: unit.count for unit in units}  # once for all slices
        finite = torch.ones(sum(counts.values()), dtype=torch.uint8, device=lane.device)
        flags = dict(zip(counts, finite.split(list(counts.values()))))
        flags_by_unit = {id(unit): flags[unit.matrices] for unit in units}
        for unit, box, part in parts:
            counting_axes = unit.block.row_axis  # the first axes count matrices
            unit_flags = flags_by_unit[id(unit)].view(unit.shape[:counting_axes])
            is_finite = torch.isfinite(part).flatten(counting_axes).all(dim=-1)
            unit_flags[regions.slices(box[:counting_axes])].mul_(is_finite.to(finite.device))
        if group is not None:
            op = dist.ReduceOp.MIN
            self._work.append(dist.all_reduce(finite, op, group=group, async_op=True))
        self._flags.update(flags_by_unit)

    def of(self, unit: Unit) -> Tensor:
        """Whether each matrix of a unit is finite, (matrices,)."""
        while self._work:
            self._work.pop().wait()
        flags = self._flags[id(unit)]
        if flags.dtype != torch.bool:
            flags = self._flags[id(unit)] = flags.bool()
        return flags

    def keep(self, unit: Unit, box: regions.Region) -> Tensor:
        """Which elements of a part of a unit to update; broadcasts to the part."""
        counting_axes = unit.block.row_axis
        flags = self.of(unit).view(unit.shape[:counting_axes])
        flags = flags[regions.slices(box[:counting_axes])]
        return flags.view(*flags.shape, *(1 for _ in box[counting_axes:]))
