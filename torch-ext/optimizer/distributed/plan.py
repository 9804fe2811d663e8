"""What one step does, as data: who orthogonalizes which matrix, what travels where, in which order.

A plan is made for one rank, from facts that it shares with the others; no process group is needed.
The ranks that hold parts of a matrix gather it on one of them, its owner, and get their parts of
the update back. Every rank computes the same owners and chunks, and only its own pieces.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import heapq
import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Optional

import torch

from . import layout
from .chunks import (
    DEFAULT_RUN_BYTES,
    RUN_BYTES,
    Batch,
    Bundle,
    Chunk,
    ChunkBuilder,
    Part,
    Run,
    Traffic,
)
from .layout import Interval
from .units import Entry, Unit, runs_of

__all__ = [
    "Batch",
    "Bundle",
    "Chunk",
    "Entry",
    "Lane",
    "Part",
    "Plan",
    "Run",
    "Traffic",
    "Unit",
    "make_plan",
]

# Matrices orthogonalized as one batch, in bytes of their wide copy: a few of them fill an
# accelerator; on CPUs a batch that stays in the cache is faster than a large one.
BATCH_BYTES = {"cpu": 2 << 20}
DEFAULT_BATCH_BYTES = 256 << 20

# The same as a share of what a rank holds, where that is less (but not less than a chunk).
BATCH_SHARE = 0.125

# What a rank sends in one chunk, in bytes: the least that makes a collective worth its latency, and
# the most that helps. Between them, there are so many chunks.
CHUNK_BYTES = {"cpu": (512 << 10, 2 << 20)}
DEFAULT_CHUNK_BYTES = (4 << 20, 64 << 20)
CHUNKS = 6

# What chunks in flight are chosen by, in bytes of the local weights and of the largest matrix: a
# little less than the bound on the memory of a step, for small tensors that are not counted.
STAGING_OF_LOCAL = 1.45
STAGING_OF_LARGEST = 3.85

# Bytes to which the bound need not keep: of an accelerator's memory they are nothing.
LEAST_STAGING = {"cpu": 0}
DEFAULT_LEAST_STAGING = 512 << 20

# Chunks in flight that hide the traffic of both ways: one on its way there, one computed, one on
# its way back.
HIDING = 3

# Waiting for other owners, as a share of a rank's FLOPs: what is not worth larger chunks, and what
# is worth one chunk less in flight.
EVEN, UNEVEN = 0.02, 0.145


@dataclass(frozen=True)
class Lane:
    """Chunks that the same ranks exchange in the same format; one rank alone exchanges nothing.

    Args:
        peers: global ranks, ascending.
        me: number of this rank among them.
        everywhere: every peer orthogonalizes every matrix, and nothing is given back.
        wire: dtype of the buffers.
        wide: of element-wise arithmetic.
        device: of the local tensors.
        chunks: in order.
        in_flight: how many chunks may be under way at once.
        rounds: of each chunk the units with the number of their owner (None: everyone), equal on
            all peers.
        digest: of owners and chunks, equal on all peers.
    """

    peers: tuple[int, ...]
    me: int
    everywhere: bool
    wire: torch.dtype
    wide: torch.dtype
    device: torch.device
    chunks: tuple[Chunk, ...]
    in_flight: int
    rounds: tuple[tuple[tuple[Unit, Optional[int]], ...], ...]
    digest: str

    @functools.cached_property
    def owners(self) -> tuple[tuple[Unit, Optional[int]], ...]:
        """The units of all chunks with the number of their owner."""
        return tuple(itertools.chain.from_iterable(self.rounds))

    @property
    def scaled(self) -> bool:
        """Whether what is gathered is scaled, part by part, to the range of its format."""
        return self.wire == torch.float16 and len(self.peers) > 1


@dataclass(frozen=True)
class Plan:
    """What a rank does in a step.

    Args:
        rank: global rank of whom it is for.
        entries: Muon's parameters that take part.
        lanes: with traffic, in the order in which all ranks go through them.
        alone: lanes without traffic.
        elsewhere: units that lie whole on another rank among this one's peers, with that rank, for
            summaries.
    """

    rank: int
    entries: tuple[Entry, ...]
    lanes: tuple[Lane, ...]
    alone: tuple[Lane, ...]
    elsewhere: tuple[tuple[Unit, int], ...] = ()

    @functools.cached_property
    def reads(self) -> Counter[int]:
        """How many units each entry's gradient is read for on this rank."""
        return Counter(
            unit.entry
            for lane in (*self.lanes, *self.alone)
            for chunk in lane.chunks
            for bundle in chunk.read
            for unit in bundle.units
        )


NOTHING = Plan(0, (), (), ())


def make_plan(
    entries: Sequence[Entry],
    rank: int = 0,
    *,
    chunk_size: int = -1,
    warmup_step: int = 5,
    everywhere: bool = False,
) -> Plan:
    """The plan of ``rank``, deterministic in its arguments.

    Args:
        entries: Muon's parameters that take part, in one order on all ranks.
        rank: global rank.
        chunk_size: matrices that a rank orthogonalizes per chunk; −1 chooses by bytes.
        warmup_step: chunks in flight ahead of the one being orthogonalized.
        everywhere: every peer gathers every matrix, as a reference for tests.
    """
    planner = _Planner(entries, rank, chunk_size, warmup_step, everywhere)
    collects = gc.isenabled()
    gc.disable()  # nothing here is garbage, and looking for it takes half of the time
    try:
        for number, entry in enumerate(entries):
            planner.add(number, entry)
        lanes = planner.lanes()
    finally:
        if collects:
            gc.enable()
    return Plan(
        rank,
        tuple(entries),
        tuple(lane for lane in lanes if len(lane.peers) > 1),
        tuple(lane for lane in lanes if len(lane.peers) == 1),
        tuple(planner.elsewhere),
    )


@dataclass
class _Draft:
    """A lane while its units are collected; ``holders`` are numbers of peers, for each unit."""

    peers: tuple[int, ...]
    wire: torch.dtype
    wide: torch.dtype
    device: torch.device
    units: list[Unit]
    holders: list[tuple[int, ...]]
    copies: float = 1.0  # of each weight, among the peers, as a mean

    @property
    def order(self) -> tuple:
        return (-len(self.peers), self.peers, str(self.wire), str(self.wide), str(self.device))


class _Staged(NamedTuple):
    """Bytes of a chunk: of its buffers there, or back, and of a wide copy of what is sent."""

    buffers: int
    wide: int


def _most_staged(staged: Sequence[_Staged], in_flight: int) -> int:
    """Bytes of the chunks in flight, and of the way back of one that is computed."""
    windows = (staged[at : at + in_flight] for at in range(len(staged)))
    of_windows = max(sum(chunk.buffers for chunk in window) for window in windows)
    return of_windows + max(map(sum, staged))


class _Kind(NamedTuple):
    """Units that are alike: FLOPs, bytes on the wire and matrices of each."""

    cost: int
    bytes: int
    matrices: int


_Queue = tuple[tuple[_Kind, int], ...]  # of an owner: so many units of a kind, costliest first
_Round = dict[_Queue, list[int]]  # what owners with these queues take: so many of each kind


@dataclass
class _Cutter:
    """Cuts the queues of owners into rounds, one for each chunk.

    Args:
        owners: how many have which queue.
        budget: bytes that an owner gathers in a chunk, as a rule.
        chunk_size: most matrices of an owner in a chunk; −1 for any number.
    """

    owners: dict[_Queue, int]
    budget: int
    chunk_size: int

    @property
    def all(self) -> _Round:
        return {queue: [number for _, number in queue] for queue in self.owners if queue}

    @property
    def busiest(self) -> int:
        """FLOPs of the owner that has most to do."""
        return max(self._loads(self.all))

    def cut(self, widest: int) -> list[_Round]:
        """Rounds in which the owners have about as much to do.

        A round ends for an owner where nothing is left that keeps it within the cost of the
        costliest next unit, or within an equal share of all rounds where that is more, and within
        its bytes: the budget, or ``widest`` in rounds of such a unit.
        """
        left, rounds = self.all, []
        while left:
            share = -(-max(self._loads(left)) // -(-max(self._bytes(left)) // self.budget))
            heads = [next(kind for (kind, _), n in zip(q, of) if n) for q, of in left.items()]
            head = max(kind.cost for kind in heads)
            most_bytes = widest if head > share else self.budget
            most_bytes = max(most_bytes, *(kind.bytes for kind in heads))
            taken = {q: self._take(q, of, max(share, head), most_bytes) for q, of in left.items()}
            rounds.append(taken)
            left = {q: [n - t for n, t in zip(of, taken[q])] for q, of in left.items()}
            left = {queue: numbers for queue, numbers in left.items() if any(numbers)}
        return rounds

    def _take(self, queue: _Queue, left: list[int], cost: int, most_bytes: int) -> list[int]:
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
    def _loads(numbers: _Round) -> list[int]:
        return [sum(k.cost * n for (k, _), n in zip(q, of)) for q, of in numbers.items()]

    @staticmethod
    def _bytes(numbers: _Round) -> list[int]:
        return [sum(k.bytes * n for (k, _), n in zip(q, of)) for q, of in numbers.items()]

    def makespan(self, rounds: Sequence[_Round]) -> int:
        """FLOPs until all chunks are done, where each waits for its busiest owner."""
        return sum(max(self._loads(taken)) for taken in rounds)

    def gathered(self, rounds: Sequence[_Round]) -> list[tuple[int, int]]:
        """Of each chunk the bytes that the busiest owner gathers, and those of all owners."""
        by_queue = [(self._bytes(taken), map(self.owners.get, taken)) for taken in rounds]
        return [(max(of), sum(map(operator.mul, of, owners))) for of, owners in by_queue]

    def widened(
        self, rounds: list[_Round], enough: float, fit: Callable[[list[_Round]], bool]
    ) -> list[_Round]:
        """The rounds, or wider ones that fit into memory and have a shorter makespan.

        Args:
            rounds: none of which is wider than the budget.
            enough: a makespan that is not worth wider rounds.
            fit: whether rounds do.
        """
        best, makespan = rounds, self.makespan(rounds)
        low, high = self.budget, max(self._bytes(self.all))
        while high - low > self.budget // 16:
            widest = (low + high) // 2
            rounds = self.cut(widest)
            fits = fit(rounds)
            if fits and (self.makespan(rounds) <= enough or self.makespan(rounds) < makespan):
                best, makespan = rounds, self.makespan(rounds)
            if fits and makespan > enough:
                low = widest
            else:
                high = widest
        return best


class _Planner:
    def __init__(
        self,
        entries: Sequence[Entry],
        rank: int,
        chunk_size: int,
        warmup_step: int,
        everywhere: bool,
    ):
        self.entries = entries
        self.rank = rank
        self.chunk_size = chunk_size
        self.warmup_step = warmup_step
        self.everywhere = everywhere
        self.drafts: dict[tuple, _Draft] = {}
        self.loads: dict[tuple[int, ...], list[int]] = {}  # FLOPs of each peer
        self.costs: dict[tuple[int, int], int] = {}  # FLOPs of a matrix, by entry and rows
        self.runs: dict[tuple, list[tuple[Interval, int, tuple[int, ...]]]] = {}  # by layout
        self.elsewhere: list[tuple[Unit, int]] = []

    # -- units -----------------------------------------------------------------------------

    def add(self, number: int, entry: Entry) -> None:
        """Sorts the matrices of an entry into the lanes they will travel in."""
        peers = entry.peers(self.rank)
        if not peers:
            return
        loads = self.loads.setdefault(peers, [0] * len(peers))
        for unit, holders in self._units(number, entry, peers):
            if len(holders) == 1 and not (entry.second_moment and len(peers) > 1):
                loads[holders[0]] += self._cost(unit)
                if peers[holders[0]] == self.rank:
                    draft = self._draft(entry, (self.rank,), entry.wide)
                    draft.units += self._cut(unit)
                else:
                    self.elsewhere.append((unit, peers[holders[0]]))
            else:
                draft = self._draft(entry, peers, entry.wire)
                pieces = self._cut(unit)
                draft.units += pieces
                draft.holders += [holders] * len(pieces)

    def _draft(self, entry: Entry, peers: tuple[int, ...], wire: torch.dtype) -> _Draft:
        draft = _Draft(peers, wire, entry.wide, entry.device, [], [])
        return self.drafts.setdefault(draft.order, draft)

    def _units(
        self, number: int, entry: Entry, peers: tuple[int, ...]
    ) -> Iterator[tuple[Unit, tuple[int, ...]]]:
        """The units of an entry that this rank and its peers hold, with the peers that do."""
        m = entry.matrices
        experts = entry.region(self.rank)[: m.row_dim]
        cols = layout.whole(m.shape[m.row_dim + 1 :])
        if layout.numel(experts) * m.rows * m.cols == 0:
            return
        if len(peers) == 1:
            for blocks in m.blocks:
                rows = (blocks.start, blocks.stop)
                yield Unit(number, (*experts, rows, *cols), blocks.rows), (0,)
            return
        key = (m, entry.sharding, peers)
        if key not in self.runs:
            held = [entry.region(peer)[m.row_dim :] for peer in peers]
            self.runs[key] = list(runs_of(m.blocks, held))
        runs = self.runs[key]
        for expert in itertools.product(*(range(start, stop) for start, stop in experts)):
            box = tuple((index, index + 1) for index in expert)
            for rows, each, holders in runs:
                yield Unit(number, (*box, rows, *cols), each), holders

    def _cut(self, unit: Unit) -> list[Unit]:
        """A unit in pieces that are small enough to be orthogonalized at once."""
        limit = self.matrices_per_batch(unit)
        count = self.count(unit)
        if count <= limit:
            return [unit]
        row_dim = self.entries[unit.entry].matrices.row_dim
        sizes = [stop - start for start, stop in unit.box[:row_dim]]
        sizes.append(count // math.prod(sizes))  # blocks of rows
        dim = next(dim for dim, size in enumerate(sizes) if size > 1)
        step = max(1, limit // (count // sizes[dim])) * (unit.rows if dim == row_dim else 1)
        start, stop = unit.box[dim]
        cuts = [
            Unit(unit.entry, (*unit.box[:dim], part, *unit.box[dim + 1 :]), unit.rows)
            for part in ((at, min(at + step, stop)) for at in range(start, stop, step))
        ]
        return [piece for cut in cuts for piece in self._cut(cut)]

    def count(self, unit: Unit) -> int:
        """Matrices in a unit."""
        return self.entries[unit.entry].matrices.count(unit.box, unit.rows)

    def _cost(self, unit: Unit) -> int:
        key = (unit.entry, unit.rows)
        if key not in self.costs:
            self.costs[key] = self.entries[unit.entry].cost(unit.rows)
        return self.count(unit) * self.costs[key]

    def matrices_per_batch(self, unit: Unit, most_bytes: Optional[int] = None) -> int:
        if self.chunk_size > 0:
            return self.chunk_size
        entry = self.entries[unit.entry]
        limit = BATCH_BYTES.get(entry.device.type, DEFAULT_BATCH_BYTES)
        limit = limit if most_bytes is None else min(limit, most_bytes)
        return max(1, limit // (unit.rows * entry.matrices.cols * entry.wide.itemsize))

    def _batch_bytes(self, draft: _Draft) -> Optional[int]:
        """The share of what a rank holds that bounds a batch; None where nothing is staged."""
        if len(draft.peers) == 1:
            return None
        held = sum(layout.numel(unit.box) for unit in draft.units) * draft.copies
        least, _ = CHUNK_BYTES.get(draft.device.type, DEFAULT_CHUNK_BYTES)
        return max(least, int(BATCH_SHARE * held * draft.wide.itemsize) // len(draft.peers))

    # -- owners ----------------------------------------------------------------------------

    def lanes(self) -> list[Lane]:
        # All ranks go through their lanes in this order, or two could wait for each other.
        return [self._lane(self.drafts[order]) for order in sorted(self.drafts)]

    def _lane(self, draft: _Draft) -> Lane:
        held: Counter[int] = Counter()  # elements of each entry
        for unit in draft.units:
            held[unit.entry] += layout.numel(unit.box)
        copies = sum(n * self.entries[number].copies(self.rank) for number, n in held.items())
        draft.copies = copies / max(1, sum(held.values()))
        everywhere = self.everywhere and len(draft.peers) > 1
        owners = [0] * len(draft.units) if everywhere else self._owners(draft)
        queues: list[list[Unit]] = [[] for _ in draft.peers]
        for number in sorted(range(len(draft.units)), key=lambda i: -self._cost(draft.units[i])):
            queues[owners[number]].append(draft.units[number])
        rounds = self._rounds(draft, queues)
        me = draft.peers.index(self.rank)
        builder = ChunkBuilder(
            self.entries,
            draft.peers,
            me,
            draft.wire,
            draft.wide,
            draft.device,
            everywhere,
            functools.partial(self.matrices_per_batch, most_bytes=self._batch_bytes(draft)),
        )
        digest = hashlib.sha256()
        for owned in rounds:
            listed = [
                (peer, self.entries[unit.entry].name, unit.box)
                for peer, units in owned.items()
                for unit in units
            ]
            digest.update(repr(listed).encode())
        return Lane(
            draft.peers,
            me,
            everywhere,
            draft.wire,
            draft.wide,
            draft.device,
            tuple(builder.chunk(owned) for owned in rounds),
            self._in_flight(draft, rounds, everywhere),
            tuple(
                tuple(
                    (unit, None if everywhere else owner)
                    for owner, units in owned.items()
                    for unit in units
                )
                for owned in rounds
            ),
            digest.hexdigest(),
        )

    def _owners(self, draft: _Draft) -> list[int]:
        """Longest processing time first over FLOPs, ties by bytes; only holders own."""
        if len(draft.peers) == 1:
            return [0] * len(draft.units)
        loads = self.loads[draft.peers]
        held = [0] * len(loads)  # elements
        heap = [(load, 0, peer) for peer, load in enumerate(loads)]
        heapq.heapify(heap)
        owners = [0] * len(draft.units)
        costs = [self._cost(unit) for unit in draft.units]
        for number in sorted(range(len(costs)), key=lambda i: -costs[i]):
            holders = draft.holders[number]
            if len(holders) == len(loads):
                while heap[0][:2] != (loads[heap[0][2]], held[heap[0][2]]):  # outdated
                    heapq.heappop(heap)
                owner = heap[0][2]
            else:
                owner = min(holders, key=lambda peer: (loads[peer], held[peer], peer))
            owners[number] = owner
            loads[owner] += costs[number]
            held[owner] += layout.numel(draft.units[number].box)
            heapq.heappush(heap, (loads[owner], held[owner], owner))
        return owners

    # -- chunks ----------------------------------------------------------------------------

    def _rounds(self, draft: _Draft, queues: list[list[Unit]]) -> list[dict[int, list[Unit]]]:
        """Cuts the owners' queues into chunks: of each, what its owners orthogonalize."""
        by_kind: list[dict[_Kind, list[Unit]]] = [{} for _ in queues]
        for queue, of_owner in zip(queues, by_kind):
            for unit in queue:
                size = layout.numel(unit.box) * draft.wire.itemsize
                kind = _Kind(self._cost(unit), size, self.count(unit))
                of_owner.setdefault(kind, []).append(unit)
        keys = [tuple((kind, len(units)) for kind, units in of.items()) for of in by_kind]
        waiting = [[iter(units) for units in of_owner.values()] for of_owner in by_kind]
        rounds = []
        for taken in self._cut_evenly(draft, Counter(keys)):
            owned: dict[int, list[Unit]] = {}
            for peer, (key, units_of) in enumerate(zip(keys, waiting)):
                some = map(itertools.islice, units_of, taken.get(key, ()))
                units = list(itertools.chain.from_iterable(some))
                if units:
                    owned[peer] = units
            rounds.append(owned)
        return rounds

    def _cut_evenly(self, draft: _Draft, owners: dict[_Queue, int]) -> list[_Round]:
        """Rounds in which the owners wait little for each other.

        Beside a unit that costs more than the others' bytes let them do meanwhile, they idle. They
        gather more in such a round then, as far as chunks go on to hide each other's traffic, or,
        where they would wait long otherwise, two chunks do.
        """
        cutter = _Cutter(owners, self._chunk_bytes(draft), self.chunk_size)
        rounds = cutter.cut(cutter.budget)
        if len(draft.peers) == 1 or self.everywhere:
            return rounds
        load = max(self.loads[draft.peers])  # with what does not travel
        enough, bearable = (cutter.busiest + share * load for share in (EVEN, UNEVEN))
        if cutter.makespan(rounds) <= enough:
            return rounds
        depth = min(HIDING, self._depth(draft, cutter.gathered(rounds)))

        def widened(in_flight: int) -> list[_Round]:
            def fit(rounds: list[_Round]) -> bool:
                staged = self._staged(draft, cutter.gathered(rounds))
                return _most_staged(staged, in_flight) <= room

            return cutter.widened(rounds, enough, fit)

        room = self._room(draft)
        wider = widened(depth)
        if depth > 2 and cutter.makespan(wider) > bearable:
            widest = widened(2)
            return widest if cutter.makespan(widest) <= bearable else wider
        return wider

    def _chunk_bytes(self, draft: _Draft) -> int:
        """What one owner gathers in a chunk, as a rule."""
        kind = draft.device.type
        if len(draft.peers) == 1:
            return BATCH_BYTES.get(kind, DEFAULT_BATCH_BYTES)
        least, most = CHUNK_BYTES.get(kind, DEFAULT_CHUNK_BYTES)
        held = sum(layout.numel(unit.box) for unit in draft.units) * draft.copies
        share = int(held * draft.wire.itemsize) // len(draft.peers) // CHUNKS
        # What comes back from an owner are as many copies.
        return int(max(least, min(most, share)) / draft.copies)

    def _in_flight(
        self, draft: _Draft, rounds: Sequence[dict[int, list[Unit]]], everywhere: bool
    ) -> int:
        """How many chunks fit into the bound on memory; the same number on all peers."""
        gathered = []
        for owned in rounds:
            sizes = [sum(layout.numel(u.box) for u in units) for units in owned.values()]
            sizes = [size * draft.wire.itemsize for size in sizes]
            gathered.append((max(sizes), sum(sizes) * (len(draft.peers) if everywhere else 1)))
        return self._depth(draft, gathered)

    def _depth(self, draft: _Draft, gathered: Sequence[tuple[int, int]]) -> int:
        staged, room = self._staged(draft, gathered), self._room(draft)
        depth = 1
        while depth <= min(self.warmup_step, len(staged) - 1):
            if _most_staged(staged, depth + 1) > room:
                break
            depth += 1
        return depth

    def _staged(self, draft: _Draft, gathered: Sequence[tuple[int, int]]) -> list[_Staged]:
        """Of each chunk, from the bytes that the busiest owner gathers and those of all owners."""
        size, wide = draft.wire.itemsize, draft.wide.itemsize
        run = RUN_BYTES.get(draft.device.type, DEFAULT_RUN_BYTES) if wide > size else 0
        # On the way back at most; on the way there are no copies.
        back = [
            (most * draft.copies, total * draft.copies / len(draft.peers))
            for most, total in gathered
        ]
        return [
            _Staged(int(most + held), min(run, int(held) * wide // size)) for most, held in back
        ]

    def _room(self, draft: _Draft) -> float:
        """Bytes for chunks in flight, beside what one is computed in."""
        local = sum(map(self._bytes, draft.units)) * draft.copies / len(draft.peers)
        room = STAGING_OF_LOCAL * local + STAGING_OF_LARGEST * max(map(self._bytes, draft.units))
        room = max(room, LEAST_STAGING.get(draft.device.type, DEFAULT_LEAST_STAGING))
        batch_bytes = self._batch_bytes(draft)
        return room - max(self._bytes_of_work(unit, batch_bytes) for unit in draft.units)

    def _bytes_of_work(self, unit: Unit, batch_bytes: Optional[int]) -> int:
        """For a batch: matrices twice, two products of their shorter sides, and wide copies."""
        entry = self.entries[unit.entry]
        numel, cols = layout.numel(unit.box), entry.matrices.cols
        count = self.count(unit)
        work = 2 * (numel + count * min(unit.rows, cols) ** 2) * entry.wire.itemsize
        if entry.wire == torch.float16:
            work += numel * entry.wide.itemsize  # what scales are undone in
        work *= max(1, self.matrices_per_batch(unit, batch_bytes) // count)
        if entry.second_moment:
            work += unit.rows * cols * entry.wide.itemsize  # squares, matrix by matrix
        return work

    def _bytes(self, unit: Unit) -> int:
        return layout.numel(unit.box) * self.entries[unit.entry].dtype.itemsize
