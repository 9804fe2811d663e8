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
    """Which matrices are updated in a step.

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
            units: that may be skipped, alike on all peers.
            parts: of them that this rank has, with their boxes, and the gradient or momentum there.
            group: of the lane's peers; None without any.
        """
        counts = [self._entries[unit.entry].matrices.count(unit.box, unit.rows) for unit in units]
        finite = torch.ones(sum(counts), dtype=torch.uint8, device=lane.device)
        flags_by_unit = {id(unit): flags for unit, flags in zip(units, finite.split(counts))}
        for unit, box, part in parts:
            row_dim = self._entries[unit.entry].matrices.row_dim
            rows = torch.isfinite(part).flatten(row_dim + 1).all(dim=-1)  # (experts…, rows here)
            whole = rows.new_ones(regions.shape_of(unit.box[: row_dim + 1]))
            whole[(..., slice(*box[row_dim]))] = rows
            flags = whole.unflatten(-1, (-1, unit.rows)).all(dim=-1).flatten()
            flags_by_unit[id(unit)].copy_(flags)
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
        """Whether to update, for the elements of a part of a unit; broadcasts to them."""
        row_dim = self._entries[unit.entry].matrices.row_dim
        experts = regions.shape_of(unit.box[:row_dim])
        by_matrix = self.of(unit).view(*experts, -1, 1)
        rows = by_matrix.expand(*by_matrix.shape[:-1], unit.rows).flatten(-2)
        rows = rows[(..., slice(*box[row_dim]))]
        return rows.view(*rows.shape, *(1 for _ in box[row_dim + 1 :]))
