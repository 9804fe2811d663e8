"""Divides the owners' work into rounds, one per chunk, so that owners wait little for each other.

All owners exchange a chunk together, so it lasts until the owner with the most to do is done. The
makespan of a step is the sum of these times over its chunks.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

from .staging import HIDING_IN_FLIGHT, GatheredBytes, Staging

# How long owners wait for others, as a share of the busiest owner's FLOPs: up to the first share
# chunks are not enlarged; beyond the second they are, even if one chunk less fits in flight.
NEGLIGIBLE_WAIT, BEARABLE_WAIT = 0.02, 0.145

# An owner's load in a round may be so many times the cost of the round's costliest unit; the
# factors are tried in this order. With 1.1, two units of 55 % of that cost can share a round.
SLACKS = (1.0, 1.05, 1.1, 1.2, 1.35, 1.5)


class UnitCost(NamedTuple):
    """What a unit costs its owner: FLOPs, bytes on the wire, and matrices."""

    flops: int
    bytes: int
    matrices: int


# An owner's queue: how many units of each cost it has, costliest first.
Queue = tuple[tuple[UnitCost, int], ...]
# By queue: how many units of each cost in it the owners with this queue take, or have left.
Counts = dict[Queue, list[int]]


class Partition(NamedTuple):
    """Queues partitioned into rounds.

    Args:
        rounds: the units that owners take, one item for each chunk.
        makespan: FLOPs until all chunks are done, if each chunk waits for its busiest owner.
        gathered: bytes that owners gather in each chunk.
    """

    rounds: list[Counts]
    makespan: int
    gathered: list[GatheredBytes]


class Partitioner:
    """Partitions the queues of owners into rounds.

    Args:
        owners: how many owners have each queue.
        staging: of the lane.
    """

    def __init__(self, owners: dict[Queue, int], staging: Staging):
        self.owners = owners
        self.staging = staging
        self.all: Counts = {queue: [number for _, number in queue] for queue in owners if queue}

    def partition(self, most_bytes: int = 0, slack: float = 1.0) -> Partition:
        """Rounds in which owners have about the same load.

        In each round an owner takes units, costliest first, as long as they fit into two limits.
        The limit of FLOPs is an equal share (the busiest owner's, divided by the rounds that are
        left) or, if that is more, ``slack`` times the costliest unit that any owner has left. The
        limit of bytes is the larger of a chunk's and of the largest among the owners' next units.
        If the costliest unit sets the limit of FLOPs, the limit of bytes is at least
        ``most_bytes``.
        """
        chunk_bytes, left = self.staging.chunk_bytes, self.all
        rounds, makespan, gathered = [], 0, []
        while left:
            share = -(-max(_flops(left)) // -(-max(_bytes(left)) // chunk_bytes))
            heads = [next(cost for (cost, _), n in zip(q, ns) if n) for q, ns in left.items()]
            costliest = int(slack * max(head.flops for head in heads))
            limit = max(chunk_bytes, *(head.bytes for head in heads))
            if costliest > share:
                limit = max(limit, most_bytes)
            flops = max(share, costliest)
            taken = {q: self._take(q, ns, flops, limit) for q, ns in left.items()}
            rounds.append(taken)
            makespan += max(_flops(taken))
            sizes = _bytes(taken)
            gathered.append((max(sizes), sum(self.owners[q] * n for q, n in zip(taken, sizes))))
            left = {q: [n - t for n, t in zip(ns, taken[q])] for q, ns in left.items()}
            left = {queue: numbers for queue, numbers in left.items() if any(numbers)}
        return Partition(rounds, makespan, gathered)

    def _take(self, queue: Queue, left: list[int], flops: int, nbytes: int) -> list[int]:
        """How many units of each cost fit into ``flops`` and ``nbytes``, costliest units first."""
        taken, matrices = [], self.staging.limits.chunk_size
        for (cost, _), number in zip(queue, left):
            number = min(number, flops // cost.flops, nbytes // cost.bytes)
            if self.staging.limits.chunk_size > 0:
                number = min(number, matrices // cost.matrices)
            taken.append(number)
            flops -= number * cost.flops
            nbytes -= number * cost.bytes
            matrices -= number * cost.matrices
        return taken

    def balanced(self, load: int) -> Partition:
        """Rounds in which the owners wait little for each other, as far as memory allows.

        If a unit of one owner costs more than all that other owners gather in a chunk, these idle
        beside it. So they gather more in such a round, as long as enough chunks fit to hide their
        traffic. If owners would still wait long, two chunks are enough.

        Args:
            load: FLOPs of the busiest owner, those of local units included.
        """
        busiest = max(_flops(self.all))
        enough, bearable = busiest + NEGLIGIBLE_WAIT * load, busiest + BEARABLE_WAIT * load
        best: Optional[Partition] = None
        for slack in SLACKS:
            partition = self.partition(slack=slack)
            if partition.makespan > enough:
                in_flight = min(HIDING_IN_FLIGHT, self.staging.in_flight(partition.gathered))
                larger = self._enlarged(partition, enough, slack, in_flight)
                if in_flight > 2 and larger.makespan > bearable:
                    largest = self._enlarged(partition, enough, slack, 2)
                    larger = largest if largest.makespan <= bearable else larger
                partition = larger
            if best is None or partition.makespan < best.makespan:
                best = partition
            if best.makespan <= enough:
                break
        assert best is not None
        return best

    def _enlarged(self, best: Partition, enough: float, slack: float, in_flight: int) -> Partition:
        """The partition ``best``, or one with larger rounds that ends sooner.

        Args:
            best: a partition that was made without ``most_bytes``.
            enough: a makespan that need not be improved by larger rounds.
            slack: see `partition`.
            in_flight: how many chunks of the result have to fit into memory, if it is a new one.
        """
        low, high = self.staging.chunk_bytes, max(_bytes(self.all))
        while high - low > self.staging.chunk_bytes // 16:
            most_bytes = (low + high) // 2
            larger = self.partition(most_bytes, slack)
            fits = self.staging.has_room(larger.gathered, in_flight)
            if fits and (larger.makespan <= enough or larger.makespan < best.makespan):
                best = larger
            if fits and best.makespan > enough:
                low = most_bytes
            else:
                high = most_bytes
        return best


def _flops(counts: Counts) -> list[int]:
    return [sum(cost.flops * n for (cost, _), n in zip(q, ns)) for q, ns in counts.items()]


def _bytes(counts: Counts) -> list[int]:
    return [sum(cost.bytes * n for (cost, _), n in zip(q, ns)) for q, ns in counts.items()]
