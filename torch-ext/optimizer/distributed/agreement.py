"""Ranks compare notes before the first collective of a step, so that all go on or all raise.

Every rank sends one record of fixed size: a hash of its plan, a hash of which gradients it has, and
whether its own checks failed. The exchange runs on the CPU, over a gloo group of the ranks that
share a mesh; hosts wait for each other, devices don't. Only when records differ do ranks send more,
to name what differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch
import torch.distributed as dist

CHECKS = ("step", "plan", "off")

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Notes:
    """What a rank is about to do.

    Args:
        plan: one line per fact that all ranks must share: parameters, layouts, options.
        gradients: names of the sharded matrices that have a gradient.
        error: what this rank's checks found, or None.
    """

    plan: Sequence[str]
    gradients: Sequence[str]
    error: Optional[str]

    def record(self) -> torch.Tensor:
        return torch.tensor(
            [_digest(self.plan), _digest(self.gradients), int(self.error is not None)]
        )


class Agreement:
    """The gloo groups over which ranks compare notes, made at the first exchange."""

    def __init__(self) -> None:
        self._groups: dict[Ranks, Any] = {}

    def check(self, meshes: Iterable[Ranks], notes: Notes) -> Optional[str]:
        """Compares notes with the ranks of every mesh this rank is part of.

        Args:
            meshes: ranks of each mesh; all of its ranks make this call.
            notes: this rank's.

        Returns:
            None where all agree; else what is wrong, the same decision on every rank of a mesh.
        """
        records: dict[Ranks, torch.Tensor] = {}
        mine = notes.record()
        for ranks in sorted(
            set(meshes)
        ):  # one order on all ranks, or two could wait for each other
            gathered = [torch.empty_like(mine) for _ in ranks]
            dist.all_gather(gathered, mine, group=self._group(ranks))
            records[ranks] = torch.stack(gathered)
        problems = [
            self._explain(ranks, notes)
            for ranks, gathered in records.items()
            if bool((gathered != gathered[0]).any()) or bool(gathered[:, 2].any())
        ]
        return problems[0] if problems else None

    def _group(self, ranks: Ranks) -> Any:
        if ranks not in self._groups:
            is_world = list(ranks) == list(range(dist.get_world_size()))
            if is_world and "gloo" in dist.get_backend_config():
                self._groups[ranks] = dist.group.WORLD
            else:
                self._groups[ranks] = dist.new_group(
                    list(ranks), backend="gloo", use_local_synchronization=True
                )
        return self._groups[ranks]

    def _explain(self, ranks: Ranks, notes: Notes) -> str:
        everyone: list[Any] = [None] * len(ranks)
        dist.all_gather_object(everyone, notes, group=self._group(ranks))
        for rank, other in zip(ranks, everyone):
            if other.error is not None:
                return f"rank {rank}: {other.error}"
        for rank, other in zip(ranks, everyone):
            if list(other.plan) != list(everyone[0].plan):
                return (
                    f"ranks {ranks[0]} and {rank} would do different things; give all ranks the "
                    f"same parameters and options in the same order. "
                    f"{_first_difference(ranks[0], everyone[0].plan, rank, other.plan)}"
                )
        present = [set(other.gradients) for other in everyone]
        missing = {
            name: [rank for rank, names in zip(ranks, present) if name not in names]
            for name in sorted(set.union(*present) - set.intersection(*present))
        }
        listed = "; ".join(f"{name} on ranks {where}" for name, where in list(missing.items())[:8])
        return (
            f"gradients are missing on some ranks only: {listed}. Let every rank compute one for "
            'it, or set missing_grad="zero"'
        )


def is_due(consistency_check: str, agreed_before: bool) -> bool:
    """Whether this step compares notes; with a fake process group there is nobody to ask."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_backend() == "fake":
        return False
    return consistency_check == "step" or (consistency_check == "plan" and not agreed_before)


def _digest(lines: Sequence[str]) -> int:
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _first_difference(rank: int, plan: Sequence[str], other: int, others: Sequence[str]) -> str:
    for ours, theirs in zip(plan, others):
        if ours != theirs:
            return f"Rank {rank} has {ours!r}, rank {other} has {theirs!r}"
    longer, line = (rank, plan) if len(plan) > len(others) else (other, others)
    return f"Only rank {longer} has {line[min(len(plan), len(others))]!r}"
