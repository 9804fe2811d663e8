"""Cuts what owners have to do into rounds, one for each chunk, in which they wait little.

A chunk is exchanged by all owners together, so it lasts as long as the one with most to do: the
makespan of a step is the sum of that over its chunks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .staging import Staging

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


@dataclass
class Cutter:
    """Cuts the queues of owners into rounds, one for each chunk.

    Args:
        owners: how many have which queue.
        budget: bytes that an owner gathers in a chunk, as a rule.
        chunk_size: most matrices of an owner in a chunk; −1 for any number.
    """

    owners: dict[Queue, int]
    budget: int
    chunk_size: int

    @property
    def all(self) -> Round:
        return {queue: [number for _, number in queue] for queue in self.owners if queue}

    @property
    def busiest(self) -> int:
        """FLOPs of the owner that has most to do."""
        return max(self._loads(self.all))

    def cut(self, widest: int, slack: float = 1.0) -> list[Round]:
        """Rounds in which the owners have about as much to do.

        A round ends for an owner where nothing is left that keeps it within ``slack`` times the
        cost of the costliest next unit, or within an equal share of all rounds where that is more,
        and within its bytes: the budget, or ``widest`` in rounds of such a unit.
        """
        left, rounds = self.all, []
        while left:
            share = -(-max(self._loads(left)) // -(-max(self._bytes(left)) // self.budget))
            heads = [next(kind for (kind, _), n in zip(q, of) if n) for q, of in left.items()]
            head = int(slack * max(kind.cost for kind in heads))
            most_bytes = widest if head > share else self.budget
            most_bytes = max(most_bytes, *(kind.bytes for kind in heads))
            taken = {q: self._take(q, of, max(share, head), most_bytes) for q, of in left.items()}
            rounds.append(taken)
            left = {q: [n - t for n, t in zip(of, taken[q])] for q, of in left.items()}
            left = {queue: numbers for queue, numbers in left.items() if any(numbers)}
        return rounds

    def _take(self, queue: Queue, left: list[int], cost: int, most_bytes: int) -> list[int]:
        """The costliest units that fit into what remains, one after the other."""
        taken, matrices = [], self.chunk_size
        for (kind, _), number in zip(queue, left):
            number = min(number, cost // kind.cost, most_bytes // kind.bytes)
            if self.chunk_size > 0:
                number = min(number, matrices // kind.matrices)
            taken.append(number)
            cost -= number * kind.cost
            most_bytes -= number * kind.bytes
            matrices -= number * kind.matrices
        return taken

    @staticmethod
    def _loads(numbers: Round) -> list[int]:
        return [sum(k.cost * n for (k, _), n in zip(q, of)) for q, of in numbers.items()]

    @staticmethod
    def _bytes(numbers: Round) -> list[int]:
        return [sum(k.bytes * n for (k, _), n in zip(q, of)) for q, of in numbers.items()]

    def makespan(self, rounds: Sequence[Round]) -> int:
        """FLOPs until all chunks are done, where each waits for its busiest owner."""
        return sum(max(self._loads(taken)) for taken in rounds)

    def gathered(self, rounds: Sequence[Round]) -> list[tuple[int, int]]:
        """Of each chunk the bytes that the busiest owner gathers, and those of all owners."""
        by_queue = [(self._bytes(taken), map(self.owners.get, taken)) for taken in rounds]
        return [(max(of), sum(map(operator.mul, of, owners))) for of, owners in by_queue]

    def widened(
        self,
        rounds: list[Round],
        enough: float,
        slack: float,
        fit: Callable[[list[Round]], bool],
    ) -> list[Round]:
        """The rounds, or wider ones that fit into memory and have a shorter makespan.

        Args:
            rounds: none of which is wider than the budget.
            enough: a makespan that is not worth wider rounds.
            slack: see `cut`.
            fit: whether rounds do.
        """
        best, makespan = rounds, self.makespan(rounds)
        low, high = self.budget, max(self._bytes(self.all))
        while high - low > self.budget // 16:
            widest = (low + high) // 2
            rounds = self.cut(widest, slack)
            fits = fit(rounds)
            if fits and (self.makespan(rounds) <= enough or self.makespan(rounds) < makespan):
                best, makespan = rounds, self.makespan(rounds)
            if fits and makespan > enough:
                low = widest
            else:
                high = widest
        return best


def even_rounds(cutter: Cutter, load: int, staging: Staging) -> list[Round]:
    """Rounds in which the owners wait little for each other, as far as memory allows.

    Beside a unit that costs more than the others' bytes let them do meanwhile, they idle. They
    gather more in such a round then, as far as chunks go on to hide each other's traffic, or,
    where they would wait long otherwise, two chunks do.

    Args:
        cutter: of the owners.
        load: FLOPs of the busiest of them, with what does not travel.
        staging: of the lane.
    """
    enough, bearable = (cutter.busiest + share * load for share in (EVEN, UNEVEN))
    best: list[Round] = []
    for slack in SLACKS:
        rounds = _widened(cutter, staging, slack, enough, bearable)
        if not best or cutter.makespan(rounds) < cutter.makespan(best):
            best = rounds
        if cutter.makespan(best) <= enough:
            break
    return best


def _widened(
    cutter: Cutter, staging: Staging, slack: float, enough: float, bearable: float
) -> list[Round]:
    """Rounds with one slack, the budget, and, where owners would wait, wider ones."""
    rounds = cutter.cut(cutter.budget, slack)
    if cutter.makespan(rounds) <= enough:
        return rounds
    depth = min(HIDING, staging.depth(cutter.gathered(rounds)))

    def widened(in_flight: int) -> list[Round]:
        def fit(rounds: list[Round]) -> bool:
            return staging.fit(cutter.gathered(rounds), in_flight)

        return cutter.widened(rounds, enough, slack, fit)

    wider = widened(depth)
    if depth > 2 and cutter.makespan(wider) > bearable:
        widest = widened(2)
        return widest if cutter.makespan(widest) <= bearable else wider
    return wider
