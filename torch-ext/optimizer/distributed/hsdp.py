"""Decides whether replicas of shards (HSDP) share the work, or each does all of it.

``redundant``: each replica orthogonalizes every matrix; nothing travels between replicas.
``spread``: each matrix has one owner among all replicas, which gathers it within its own replica
and scatters the update to all. Replicas do a fraction of the arithmetic, and exchange updates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from .. import regions
from .units import Entry

MODES = ("auto", "spread", "redundant")

# FLOPs that a rank does while it sends a byte to another replica. Accelerators: 400 TFLOP/s and 33
# GB/s, which a host of eight H100s reaches with replicas on different hosts.
FLOPS_PER_BYTE = {"cpu": 400}
DEFAULT_FLOPS_PER_BYTE = 12_000
RANKS_PER_HOST = 8  # ranks 8k to 8k + 7 share a host


def share_work(entries: Sequence[Entry], rank: int, mode: str) -> list[Entry]:
    """Returns the entries, with ``spread`` set on those whose replicas share the work.

    Entries with the same holders get the same ``spread``, on all of these ranks.

    Args:
        entries: all Muon parameters.
        rank: global rank.
        mode: one of `MODES`; ``"auto"`` decides by `is_worth_sharing`.
    """
    by_holders: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, entry in enumerate(entries):
        if len(entry.holders(rank)) > len(entry.holders(rank, replicas=False)):
            by_holders[entry.holders(rank)].append(number)
    result = list(entries)
    for numbers in by_holders.values():
        alike = [entries[number] for number in numbers]
        spread = mode == "spread" or (mode == "auto" and is_worth_sharing(alike, rank))
        for number in numbers:
            if entries[number].momentum_sharding is None:
                result[number] = replace(entries[number], spread=spread)
    return result


def is_worth_sharing(entries: Sequence[Entry], rank: int) -> bool:
    """True if the arithmetic that a rank saves takes longer than sending updates to replicas.

    A rank does its share of one replica's FLOPs (of all replicas' if they share the work), but at
    least the costliest matrix's. If they share, it sends its updates to all other replicas.

    Args:
        entries: entries with the same holders.
        rank: one of the holders.
    """
    ranks = entries[0].holders(rank)
    holders = len(ranks)
    # FLOPs of a rank alone, of a rank that shares, and of the costliest matrix; bytes to others.
    alone = shared = costliest = sent = 0.0
    for entry in entries:
        shards, m = len(entry.holders(rank, replicas=False)), entry.matrices
        experts = regions.numel(entry.region(rank)[: m.row_dim])
        for block in m.blocks if experts else ():
            matrices, cost = experts * m.count(block), entry.cost(block)
            alone += matrices * cost / shards
            shared += matrices * cost / holders
            costliest = max(costliest, cost)
            nbytes = matrices * block.rows * block.cols * entry.wire.itemsize
            sent += nbytes * (holders // shards - 1) / holders
    # Bytes travel ten times as fast within a host.
    one_host = min(ranks) // RANKS_PER_HOST == max(ranks) // RANKS_PER_HOST
    default = DEFAULT_FLOPS_PER_BYTE / (10 if one_host else 1)
    per_byte = FLOPS_PER_BYTE.get(entries[0].device.type, default)
    return max(alone, costliest) - max(shared, costliest) > sent * per_byte
