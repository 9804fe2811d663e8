"""Replicas of shards (HSDP): whether each does all the work, or all of them share it.

``redundant``: each replica orthogonalizes every matrix; nothing travels between replicas.
``spread``: each matrix has one owner among all replicas, which gathers it in its own one and gives
the update to all. It is a fraction of the arithmetic, for updates that come from other replicas.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Optional

from . import regions
from .machine import DEFAULT_MACHINE, MACHINES, Machine
from .staging import CHUNKS
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
    shared = list(entries)
    for numbers in sets.values():
        alike = [entries[number] for number in numbers]
        speeds = machine or MACHINES.get(alike[0].device.type, DEFAULT_MACHINE)
        spread = choice == "spread" or (
            choice == "auto" and seconds(alike, rank, speeds, True) < seconds(alike, rank, speeds)
        )
        for number in numbers:
            if shared[number].momentum is None:
                shared[number] = replace(shared[number], spread=spread)
    return shared


def seconds(entries: Sequence[Entry], rank: int, machine: Machine, spread: bool = False) -> float:
    """Estimated time of a step's orthogonalization and traffic, for the replicas of some entries.

    Arithmetic and traffic hide under each other but for one chunk. Either takes as long as on a
    rank with an equal share, or as the costliest matrix takes its owner where that is more. All
    links are taken to be as far from each other as those of the first rank.
    """
    flops = costliest = 0.0  # of a rank on average, of the costliest matrix
    sent = of_costliest = (0.0, 0.0)  # bytes within a host, and to other hosts
    for entry in entries:
        everyone = entry.holders(rank)
        shards = entry.holders(everyone[0], replicas=False)
        replicas = len(everyone) // len(shards) if spread else 1
        beside_first = set(shards[1:])
        others = [r for r in everyone if r not in beside_first]
        m = entry.matrices
        experts = regions.numel(entry.region(rank)[: m.row_dim])
        for block in m.blocks if experts else ():
            cost, count = entry.cost(block.rows), experts * block.count
            size = block.rows * m.cols * entry.wire.itemsize
            # An owner gathers and gives back within its replica, then gives to the others.
            within = _by_link(2 * size * (len(shards) - 1) / len(shards), shards, machine)
            between = _by_link(size * (replicas - 1), others, machine)
            of_owner = (within[0] + between[0], within[1] + between[1])
            owned = count / (len(shards) * replicas)
            flops += owned * cost
            sent = (sent[0] + owned * of_owner[0], sent[1] + owned * of_owner[1])
            if cost > costliest:
                costliest, of_costliest = cost, of_owner
    compute = max(flops, costliest) / machine.flops
    wire = max(
        max(sent[0], of_costliest[0]) / machine.host_bytes,
        max(sent[1], of_costliest[1]) / machine.network_bytes,
    )
    latency = 2 * CHUNKS * machine.latency if wire else 0.0
    return max(compute, wire) + min(compute, wire) / CHUNKS + latency


def _by_link(size: float, ranks: Sequence[int], machine: Machine) -> tuple[float, float]:
    """Of bytes to all of ``ranks`` alike from the first: those in its host, and those away."""
    if len(ranks) == 1:
        return (0.0, 0.0)
    home = machine.host(ranks[0])
    near = sum(machine.host(rank) == home for rank in ranks[1:]) / (len(ranks) - 1)
    return (size * near, size * (1 - near))
