"""Ranks compare notes before the first collective of a step, so that all go on or all raise.

Every rank sends one record of fixed size: a hash of its plan, a hash of which gradients it has, and
whether its own checks failed. The exchange runs on the CPU, over a gloo group of the ranks that
share a mesh; hosts wait for each other, devices don't. Only when records differ do ranks send more,
to name what differs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
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
            [_digest(self.plan), _digest(self.gradients), int(self.error is not None)],
            device="cpu",  # whatever the default device is
        )


def check(notes: Mapping[Ranks, Notes]) -> Optional[str]:
    """Compares notes with the ranks of every mesh this rank is part of.

    Args:
        notes: this rank's, for the ranks of each mesh; all of them make this call.

    Returns:
        None where all agree; else what is wrong, the same decision on every rank of a mesh.
    """
    records = {}
    for ranks in sorted(notes):  # in one order on all ranks, or two wait for each other
        records[ranks] = torch.stack(_all_gather(ranks, notes[ranks].record()))
    problems = [
        _explain(ranks, notes[ranks])
        for ranks, gathered in records.items()
        if bool((gathered != gathered[0]).any()) or bool(gathered[:, 2].any())
    ]
    return problems[0] if problems else None


def _explain(ranks: Ranks, notes: Notes) -> str:
    everyone = _all_gather_notes(ranks, notes)
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
    present: list[set[str]] = [set(other.gradients) for other in everyone]
    missing = {
        name: [rank for rank, names in zip(ranks, present) if name not in names]
        for name in sorted(set().union(*present) - present[0].intersection(*present[1:]))
    }
    listed = "; ".join(f"{name} on ranks {where}" for name, where in list(missing.items())[:8])
    return (
        f"gradients are missing on some ranks only: {listed}. Let every rank compute one for "
        'it, or set missing_grad="zero"'
    )


def _all_gather(ranks: Ranks, tensor: torch.Tensor) -> list[torch.Tensor]:
    gathered = [torch.empty_like(tensor) for _ in ranks]
    _group(ranks).allgather([gathered], [tensor]).wait()
    return gathered


def _all_gather_notes(ranks: Ranks, notes: Notes) -> list[Notes]:
    encoded = json.dumps([list(notes.plan), list(notes.gradients), notes.error]).encode()
    payload = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    sizes = [int(n) for n in _all_gather(ranks, torch.tensor([len(payload)], device="cpu"))]
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
    padded[: len(payload)] = payload
    gathered = _all_gather(ranks, padded)
    return [Notes(*json.loads(bytes(g[:n].tolist()))) for g, n in zip(gathered, sizes)]


# One group for the same ranks in all optimizers, as long as the process group lives.
_groups: dict[tuple[int, Ranks], Any] = {}


def _group(ranks: Ranks) -> Any:
    """A gloo group of ``ranks``, which no other rank needs to hear of.

    `dist.new_group` names groups by how many a rank is in already, so ranks that are in different
    numbers of groups would wait for each other under different names: this one names its own.
    """
    world = dist.group.WORLD
    key = (id(world), ranks)
    if key not in _groups:
        is_world = list(ranks) == list(range(dist.get_world_size()))
        if is_world and "gloo" in dist.get_backend_config():
            _groups[key] = world
        else:
            store = dist.PrefixStore(
                f"optimizer-agreement/{'-'.join(map(str, ranks))}",
                dist.distributed_c10d._get_default_store(),
            )
            rank = ranks.index(dist.get_rank())
            timeout = dist.distributed_c10d.default_pg_timeout
            _groups[key] = dist.ProcessGroupGloo(store, rank, len(ranks), timeout)
    return _groups[key]


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
