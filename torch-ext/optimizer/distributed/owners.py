"""Decides which rank orthogonalizes which matrix, and which matrices travel in one chunk.

Matrices are assigned one by one, the costliest first, each to the rank with the least work so far
(longest processing time first). So at any time all ranks have about equal work, and every stretch
of the list has work for all of them. A chunk is one stretch, except that small matrices fill gaps
in earlier chunks. Ranks meet in every chunk, and wait for the one with the most work.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Optional

from .units import Unit


class Candidate(NamedTuple):
    """A unit that needs an owner.

    Args:
        unit: the unit.
        holders: the peers that hold parts of it; only these may own it.
        flops: FLOPs to orthogonalize it.
        elements: elements that its owner gathers.
        home: the only peer with its momentum, if any (`Entry.momentum_holder`).
    """

    unit: Unit
    holders: tuple[int, ...]
    flops: int
    elements: int
    home: Optional[int] = None


Owned = tuple[Candidate, int]  # a unit, and the peer that owns it


def give_away(candidates: Sequence[Candidate], loads: list[int]) -> list[Owned]:
    """Chooses owners; returns the units in the order of assignment, each with its owner.

    If several peers have the least work, the one with the fewest elements gets the unit. The only
    peer with a unit's momentum owns the unit if its load stays within a fair share.

    Args:
        candidates: the candidates of one lane.
        loads: FLOPs of each peer so far; the FLOPs of the units are added.
    """
    turns: Counter[tuple[int, int]] = Counter()  # units so far, by cost and home

    def order(candidate: Candidate) -> tuple[int, int]:
        """Sort key: the costliest first; units of equal cost alternate between homes."""
        if candidate.home is None:
            return -candidate.flops, 0
        turns[candidate.flops, candidate.home] += 1
        return -candidate.flops, turns[candidate.flops, candidate.home]

    owned = []
    elements = [0] * len(loads)  # of the units that each peer owns
    heap = [(load, 0, peer) for peer, load in enumerate(loads)]
    heapq.heapify(heap)
    fair = (sum(loads) + sum(candidate.flops for candidate in candidates)) / len(loads)
    for candidate in sorted(candidates, key=order):
        _, holders, flops, numel, home = candidate
        if len(holders) == len(loads):
            while heap[0][:2] != (loads[heap[0][2]], elements[heap[0][2]]):  # is outdated
                heapq.heappop(heap)
            owner = heap[0][2]
            if home is not None and loads[home] + flops <= fair:
                owner = home
        else:
            owner = min(holders, key=lambda peer: (loads[peer], elements[peer], peer))
        loads[owner] += flops
        elements[owner] += numel
        heapq.heappush(heap, (loads[owner], elements[owner], owner))
        owned.append((candidate, owner))
    return owned


# How many of the last complete chunks a unit may join; searching all of them would take too long.
LOOK_BACK = 4

# A complete chunk: its units, and the elements and FLOPs that it has room for, by owner.
Ended = tuple[dict[int, list[Unit]], dict[int, tuple[int, int]]]


def into_chunks(
    owned: Sequence[Owned],
    most: int,
    most_shared: Optional[int] = None,
    most_matrices: Optional[int] = None,
) -> list[dict[int, list[Unit]]]:
    """Cuts the list of `give_away` into chunks, each a mapping from sorted owners to units.

    An owner may gather more than ``most`` elements, up to the size of the chunk's largest unit, if
    its FLOPs don't exceed the costliest unit's: while one owner has a large matrix, others may have
    several small ones.

    A unit that would begin a chunk joins an earlier one instead if its owner gathers less there
    than the average owner, and its FLOPs don't exceed the costliest unit's. Otherwise small
    matrices of only a few owners would fill chunks in which all others wait. Chunks limited by
    ``most_shared`` or ``most_matrices`` have no such room.

    Args:
        owned: as `give_away` returns it.
        most: maximum number of elements that an owner gathers in a chunk, unless one unit has more.
        most_shared: maximum number of elements that all owners gather together; None for no limit.
        most_matrices: maximum number of an owner's matrices in a chunk; None for no limit.
    """
    chunks: list[dict[int, list[Unit]]] = []
    ended: list[Ended] = []
    total = largest = costliest = 0
    gathered: dict[int, list[int]] = {}  # by owner: elements, FLOPs, and matrices in the last chunk
    for candidate, owner in owned:
        unit, _, flops, elements, _ = candidate
        so_far = gathered.get(owner, [0, 0, 0])
        of_owner = [n + more for n, more in zip(so_far, (elements, flops, unit.count))]
        ends = of_owner[0] > most and (
            of_owner[0] > max(largest, elements) or of_owner[1] > max(costliest, flops)
        )
        ends = ends or (most_shared is not None and total + elements > most_shared)
        ends = ends or (most_matrices is not None and of_owner[2] > most_matrices)
        ends = ends and total > 0
        if ends and _joins(candidate, owner, ended[-LOOK_BACK:]):
            continue
        if ends and most_shared is None and most_matrices is None:
            mean = total // len(gathered)
            room = {peer: (mean - n, costliest - f) for peer, (n, f, _) in gathered.items()}
            ended.append((chunks[-1], room))
        if ends or not chunks:
            chunks.append({})
            total = largest = costliest = 0
            gathered, of_owner = {}, [elements, flops, unit.count]
        chunks[-1].setdefault(owner, []).append(unit)
        gathered[owner] = of_owner
        total += elements
        largest, costliest = max(largest, elements), max(costliest, flops)
    return [dict(sorted(chunk.items())) for chunk in chunks]


def _joins(candidate: Candidate, owner: int, ended: Sequence[Ended]) -> bool:
    """Adds a unit to the first chunk in which its owner has room; returns False if none has."""
    for units, room in ended:
        elements, flops = room.get(owner, (-1, -1))
        if candidate.elements <= elements and candidate.flops <= flops:
            units[owner].append(candidate.unit)
            room[owner] = elements - candidate.elements, flops - candidate.flops
            return True
    return False
