"""Cuts what owners have to do into rounds, one for each chunk, in which they wait little.

A chunk is exchanged by all owners together, so it lasts as long as the one with most to do: the
makespan of a step is the sum of that over its chunks.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

from .staging import Gathered, Staging

# Chunks in flight that hide the traffic of both ways: one on its way there, one computed, one on
# its way back.
HIDING = 3

# Waiting for other owners, as a share of a rank's FLOPs: what is not worth larger chunks, and what
# is worth one chunk less in flight.
EVEN, UNEVEN = 0.02, 0.145

# How much more than the costliest unit others may do beside it: two that cost 55 % of it each are
# better done in its round than one of them in a round of its own.
SLACKS = (1.0, 1.05, 1.1, 1.2, 1.35, 1.5)


class Kind(NamedTuple):
    """Units that are alike: FLOPs, bytes on the wire and matrices of each."""

    cost: int
    bytes: int
    matrices: int


Queue = tuple[tuple[Kind, int], ...]  # of an owner: so many units of a kind, costliest first
Round = dict[Queue, list[int]]  # what owners with these queues take: so many of each kind


class Cut(NamedTuple):
    """Queues cut into rounds.

    Args:
        rounds: one for each chunk.
        makespan: FLOPs until all chunks are done, where each waits for its busiest owner.
        gathered: of each chunk the bytes that the busiest owner gathers, and those of all owners.
    """

    rounds: list[Round]
    makespan: int
    gathered: list[Gathered]


class Cutter:
    """Cuts the queues of owners into rounds, one for each chunk.

    Args:
        owners: how many have which queue.
        staging: of the lane.
    """

    def __init__(self, owners: dict[Queue, int], staging: Staging):
        self.owners = owners
        self.staging = staging
        self.all: Round = {queue: [number for _, number in queue] for queue in owners if queue}

    def cut(self, widest: int = 0, slack: float = 1.0) -> Cut:
        """Rounds in which the owners have about as much to do.

        A round ends for an owner where nothing is left that keeps it within ``slack`` times the
        cost of the costliest next unit, or within an equal share of all rounds where that is more,
        and within its bytes: a chunk's, or, in rounds of such a unit, ``widest`` if that is more.
        """
        budget, left = self.staging.chunk_bytes, self.all
        rounds, makespan, gathered = [], 0, []
        while left:
            share = -(-max(_loads(left)) // -(-max(_bytes(left)) // budget))
            heads = [next(kind for (kind, _), n in zip(q, of) if n) for q, of in left.items()]
            head = int(slack * max(kind.cost for kind in heads))
            most_bytes = max(budget, *(kind.bytes for kind in heads))
            if head > share:
                most_bytes = max(most_bytes, widest)
            taken = {q: self._take(q, of, max(share, head), most_bytes) for q, of in left.items()}
            rounds.append(taken)
            makespan += max(_loads(taken))
            sizes = _bytes(taken)
            gathered.append((max(sizes), sum(self.owners[q] * n for q, n in zip(taken, sizes))))
            left = {q: [n - t for n, t in zip(of, taken[q])] for q, of in left.items()}
            left = {queue: numbers for queue, numbers in left.items() if any(numbers)}
        return Cut(rounds, makespan, gathered)

    def _take(self, queue: Queue, left: list[int], cost: int, most_bytes: int) -> list[int]:
        """The costliest units that fit into what remains, one after the other."""
        taken, matrices = [], self.staging.chunk_size
        for (kind, _), number in zip(queue, left):
            number = min(number, cost // kind.cost, most_bytes // kind.bytes)
            if self.staging.chunk_size > 0:
                number = min(number, matrices // kind.matrices)
            taken.append(number)
            cost -= number * kind.cost
            most_bytes -= number * kind.bytes
            matrices -= number * kind.matrices
        return taken

    def even(self, load: int) -> Cut:
        """Rounds in which the owners wait little for each other, as far as memory allows.

        Beside a unit that costs more than the others' bytes let them do meanwhile, they idle. They
        gather more in such a round then, as far as chunks go on to hide each other's traffic, or,
        where they would wait long otherwise, two chunks do.

        Args:
            load: FLOPs of the busiest of them, with what does not travel.
        """
        enough, bearable = (max(_loads(self.all)) + share * load for share in (EVEN, UNEVEN))
        best: Optional[Cut] = None
        for slack in SLACKS:
            cut = self.cut(slack=slack)
            if cut.makespan > enough:
                depth = min(HIDING, self.staging.depth(cut.gathered))
                wider = self._widened(cut, enough, slack, depth)
                if depth > 2 and wider.makespan > bearable:
                    widest = self._widened(cut, enough, slack, 2)
                    wider = widest if widest.makespan <= bearable else wider
                cut = wider
            if best is None or cut.makespan < best.makespan:
                best = cut
            if best.makespan <= enough:
                break
        assert best is not None
        return best

    def _widened(self, best: Cut, enough: float, slack: float, in_flight: int) -> Cut:
        """The cut, or one with wider rounds, so many of which fit into memory, that ends sooner.

        Args:
            best: none of whose rounds is wider than a chunk's bytes.
            enough: a makespan that is not worth wider rounds.
            slack: see `cut`.
            in_flight: chunks.
        """
        low, high = self.staging.chunk_bytes, max(_bytes(self.all))
        while high - low > self.staging.chunk_bytes // 16:
            widest = (low + high) // 2
            cut = self.cut(widest, slack)
            fits = self.staging.fit(cut.gathered, in_flight)
            if fits and (cut.makespan <= enough or cut.makespan < best.makespan):
                best = cut
            if fits and best.makespan > enough:
                low = widest
            else:
                high = widest
        return best


def _loads(numbers: Round) -> list[int]:
    return [sum(kind.cost * n for (kind, _), n in zip(q, of)) for q, of in numbers.items()]


def _bytes(numbers: Round) -> list[int]:
    return [sum(kind.bytes * n for (kind, _), n in zip(q, of)) for q, of in numbers.items()]
