"""Decides whether replicas of shards (HSDP) share the work or each do all of it.

``redundant``: each replica orthogonalizes every matrix; nothing travels between replicas.
``spread``: each matrix has one owner among all replicas, which gathers it within its own replica
and scatters the update to all. Replicas do a fraction of the arithmetic, and exchange updates.
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

MODES = ("auto", "spread", "redundant")


def share_work(
    entries: Sequence[Entry], rank: int, mode: str, machine: Optional[Machine] = None
) -> list[Entry]:
    """The entries, with ``spread`` set on those whose replicas share the work.

    Entries with the same holders get the same ``spread``, on all of their holders.

    Args:
        entries: all Muon parameters.
        rank: global rank.
        mode: one of `MODES`; ``"auto"`` takes what `estimated_seconds` says is faster.
        machine: the machine to estimate for; None takes that of the device type in
            `machine.MACHINES`.
    """
    by_holders: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, entry in enumerate(entries):
        if len(entry.holders(rank)) > len(entry.holders(rank, replicas=False)):
            by_holders[entry.holders(rank)].append(number)
    result = list(entries)
    for numbers in by_holders.values():
        alike = [entries[number] for number in numbers]
        speeds = machine or MACHINES.get(alike[0].device.type, DEFAULT_MACHINE)
        spread = mode == "spread"
        if mode == "auto":
            redundant = estimated_seconds(alike, rank, speeds)
            spread = estimated_seconds(alike, rank, speeds, spread=True) < redundant
        for number in numbers:
            if entries[number].momentum is None:
                result[number] = replace(entries[number], spread=spread)
    return result


def estimated_seconds(
    entries: Sequence[Entry], rank: int, machine: Machine, spread: bool = False
) -> float:
    """Estimated time of a step's orthogonalization and traffic, for entries with the same holders.

    Arithmetic and traffic overlap, except for one chunk. Each of them takes as long as on a rank
    with an equal share, or as the costliest matrix takes its owner if that is longer. All owners
    are assumed to be as far from their peers as the first rank is from its peers.
    """
    flops = costliest = 0.0  # a rank's on average, and the costliest matrix's
    sent = costliest_sent = (0.0, 0.0)  # bytes within a host, and to other hosts
    for entry in entries:
        holders = entry.holders(rank)
        shards = entry.holders(holders[0], replicas=False)
        replicas = len(holders) // len(shards) if spread else 1
        beside_first = set(shards[1:])
        # The first rank, and all ranks of other replicas.
        first_and_others = [holder for holder in holders if holder not in beside_first]
        m = entry.matrices
        experts = regions.numel(entry.region(rank)[: m.row_dim])
        for block in m.blocks if experts else ():
            cost, count = entry.cost(block), experts * m.count(block)
            size = block.rows * block.cols * entry.wire.itemsize
            # An owner gathers and scatters within its replica, and scatters to other replicas.
            within = _by_link(2 * size * (len(shards) - 1) / len(shards), shards, machine)
            between = _by_link(size * (replicas - 1), first_and_others, machine)
            by_link = (within[0] + between[0], within[1] + between[1])
            owned = count / (len(shards) * replicas)
            flops += owned * cost
            sent = (sent[0] + owned * by_link[0], sent[1] + owned * by_link[1])
            if cost > costliest:
                costliest, costliest_sent = cost, by_link
    compute = max(flops, costliest) / machine.flops
    wire = max(
        max(sent[0], costliest_sent[0]) / machine.host_bytes,
        max(sent[1], costliest_sent[1]) / machine.network_bytes,
    )
    latency = 2 * CHUNKS * machine.latency if wire else 0.0
    return max(compute, wire) + min(compute, wire) / CHUNKS + latency


def _by_link(size: float, ranks: Sequence[int], machine: Machine) -> tuple[float, float]:
    """How many of ``size`` bytes the first rank sends to the others within its host, and beyond."""
    if len(ranks) == 1:
        return (0.0, 0.0)
    first_host = machine.host(ranks[0])
    share_within = sum(machine.host(rank) == first_host for rank in ranks[1:]) / (len(ranks) - 1)
    return (size * share_within, size * (1 - share_within))
