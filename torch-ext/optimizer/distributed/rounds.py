"""Divides the owners' work into rounds, one per chunk, so that owners wait little for each other.

A chunk is exchanged by all owners together, so it lasts as long as the one with most to do: the
makespan of a step is the sum of that over its chunks.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

from .staging import HIDING_IN_FLIGHT, GatheredBytes, Staging

# Waiting for other owners, as a share of a rank's FLOPs: what is not worth larger chunks, and what
# is worth one chunk less in flight.
NEGLIGIBLE_WAIT, BEARABLE_WAIT = 0.02, 0.145

# How much more than the costliest unit others may do beside it: two that cost 55 % of it each are
# better done in its round than one of them in a round of its own.
SLACKS = (1.0, 1.05, 1.1, 1.2, 1.35, 1.5)


class UnitCost(NamedTuple):
    """What a unit costs its owner: FLOPs, bytes on the wire, and matrices."""

    flops: int
    bytes: int
    matrices: int


Queue = tuple[tuple[UnitCost, int], ...]  # of an owner: units of each cost, costliest first
Counts = dict[Queue, list[int]]  # of owners with these queues: so many units of each cost


class Partition(NamedTuple):
    """Queues partitioned into rounds.

    Args:
        rounds: the units that owners take, one item for each chunk.
        makespan: FLOPs until all chunks are done, where each waits for its busiest owner.
        gathered: bytes that owners gather in each chunk.
    """

    rounds: list[Counts]
    makespan: int
    gathered: list[GatheredBytes]


class Partitioner:
    """Partitions the queues of owners into rounds.

    Args:
        owners: how many have which queue.
        staging: of the lane.
    """

    def __init__(self, owners: dict[Queue, int], staging: Staging):
        self.owners = owners
        self.staging = staging
        self.all: Counts = {queue: [number for _, number in queue] for queue in owners if queue}

    def partition(self, most_bytes: int = 0, slack: float = 1.0) -> Partition:
        """Rounds in which the owners have about as much to do.

        A round ends for an owner where nothing is left that keeps it within ``slack`` times the
        cost of the costliest next unit, or within an equal share of all rounds where that is more,
        and within its bytes: a chunk's, or, beside a unit that costs more than that share,
        ``most_bytes`` where these are more.
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
        """The costliest units that fit into what remains, one after the other."""
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

        Beside a unit that costs more than what the others gather in a chunk, these idle. They
        gather more in such a round then, as far as chunks go on to hide each other's traffic, or,
        where they would wait long otherwise, two chunks do.

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
        """The partition, or one with larger rounds that ends sooner, of which ``in_flight`` fit.

        Args:
            best: none of whose rounds is larger than a chunk's bytes.
            enough: a makespan that is not worth larger rounds.
            slack: see `partition`.
            in_flight: chunks that have to fit into memory.
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
