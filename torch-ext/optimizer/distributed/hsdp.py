"""Replicas of shards (HSDP): whether each does all the work, or all of them share it.

``redundant``: each replica orthogonalizes every matrix; nothing travels between replicas.
``spread``: each matrix has one owner among all replicas, which gathers it in its own one and gives
the update to all. It is a fraction of the arithmetic, for updates that come from other replicas.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Optional

from . import layout
from .machine import DEFAULT_MACHINE, MACHINES, Machine
from .plan import CHUNKS
from .units import Entry

CHOICES = ("auto", "spread", "redundant")


def share_work(
    entries: Sequence[Entry], rank: int, choice: str, machine: Optional[Machine] = None
) -> list[Entry]:
    """The entries, those with replicas told whether these share the work.

    All that hold parts or replicas of the same matrices are told alike, on all their ranks.

    Args:
        entries: all Muon parameters.
        rank: global rank.
        choice: one of `CHOICES`; ``"auto"`` takes what `seconds` estimates to be faster.
        machine: by what to estimate; None is that of the device type in `machine.MACHINES`.
    """
    sets: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, entry in enumerate(entries):
        if len(entry.holders(rank)) > len(entry.holders(rank, replicas=False)):
            sets[entry.holders(rank)].append(number)
    told = list(entries)
    for numbers in sets.values():
        alike = [entries[number] for number in numbers]
        speeds = machine or MACHINES.get(alike[0].device.type, DEFAULT_MACHINE)
        spread = choice == "spread" or (
            choice == "auto" and seconds(alike, rank, speeds, True) < seconds(alike, rank, speeds)
        )
        for number in numbers:
            if told[number].momentum is None:
                told[number] = replace(told[number], spread=spread)
    return told


def seconds(entries: Sequence[Entry], rank: int, machine: Machine, spread: bool = False) -> float:
    """Estimated time of a step's orthogonalization and traffic, for the replicas of some entries.

    Arithmetic and traffic hide under each other but for one chunk. The owners' arithmetic is the
    mean of all ranks that share it, or the largest matrix where that is more. All links are taken
    to be as far from each other as those of the first rank.
    """
    work = _Work()
    for entry in entries:
        work.add(entry, rank, machine, spread)
    compute = max(work.flops, work.largest) / machine.flops
    wire = max(work.host_bytes / machine.host_bytes, work.network_bytes / machine.network_bytes)
    latency = 2 * CHUNKS * machine.latency if wire else 0.0
    return max(compute, wire) + min(compute, wire) / CHUNKS + latency


@dataclass
class _Work:
    """What one rank does on average: FLOPs, those of the largest matrix, and bytes it sends."""

    flops: float = 0.0
    largest: float = 0.0
    host_bytes: float = 0.0
    network_bytes: float = 0.0

    def add(self, entry: Entry, rank: int, machine: Machine, spread: bool) -> None:
        everyone = entry.holders(rank)
        shards = entry.holders(everyone[0], replicas=False)
        replicas = len(everyone) // len(shards)
        m = entry.matrices
        experts = layout.numel(entry.region(rank)[: m.row_dim])
        flops = experts * sum(block.count * entry.cost(block.rows) for block in m.blocks)
        local = experts * m.rows * m.cols * entry.wire.itemsize / len(shards)
        self.flops += flops / len(everyone if spread else shards)
        costs = [entry.cost(block.rows) for block in m.blocks if experts]
        self.largest = max([self.largest, *costs])
        owned = local / (replicas if spread else 1)  # gathered by the rank, and given back
        self._send(2 * owned * (len(shards) - 1) / len(shards), shards, machine)
        if spread:
            others = tuple(r for r in everyone if r == everyone[0] or r not in shards)
            self._send(owned * (replicas - 1), others, machine)

    def _send(self, size: float, ranks: Sequence[int], machine: Machine) -> None:
        """To all of the others alike, from the first of ``ranks``."""
        others = [rank for rank in ranks if rank != ranks[0]]
        if not others:
            return
        near = sum(machine.host(rank) == machine.host(ranks[0]) for rank in others) / len(others)
        self.host_bytes += size * near
        self.network_bytes += size * (1 - near)
