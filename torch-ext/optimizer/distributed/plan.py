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
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Optional

import torch

from . import layout
from .chunks import Batch, Bundle, Chunk, ChunkBuilder, Part, Run, Traffic
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

# What chunks in flight are chosen by, in bytes of the local weights and of the largest matrix: two
# thirds of the bound on the memory of a step, because freed buffers do not fit the next exactly.
STAGING_OF_LOCAL = 1.0
STAGING_OF_LARGEST = 3.0


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

    @property
    def order(self) -> tuple:
        return (-len(self.peers), self.peers, str(self.wire), str(self.wide), str(self.device))


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
        local = sum(layout.numel(unit.box) for unit in draft.units) // len(draft.peers)
        least, _ = CHUNK_BYTES.get(draft.device.type, DEFAULT_CHUNK_BYTES)
        return max(least, int(BATCH_SHARE * local * draft.wide.itemsize))

    # -- owners ----------------------------------------------------------------------------

    def lanes(self) -> list[Lane]:
        # All ranks go through their lanes in this order, or two could wait for each other.
        return [self._lane(self.drafts[order]) for order in sorted(self.drafts)]

    def _lane(self, draft: _Draft) -> Lane:
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
        """Cuts the owners' queues, costliest units first, into chunks that give all of them work.

        A chunk ends for an owner where it has as much to do as the owner with the costliest next
        unit, or as much as an equal share of all chunks, or where its bytes are used up.
        """
        size = draft.wire.itemsize
        budget = self._chunk_bytes(draft)
        bytes_of = [sum(layout.numel(unit.box) for unit in queue) * size for queue in queues]
        cost_of = [sum(map(self._cost, queue)) for queue in queues]
        share = max(cost_of) / max(1, -(-max(bytes_of) // budget))
        rounds, taken = [], [0] * len(queues)
        while any(at < len(queue) for at, queue in zip(taken, queues)):
            heads = [queue[at] for at, queue in zip(taken, queues) if at < len(queue)]
            most_cost = max(share, max(map(self._cost, heads))) * (1 + 1e-9)
            most_bytes = max(budget, max(layout.numel(unit.box) for unit in heads) * size)
            owned: dict[int, list[Unit]] = {}
            for peer, queue in enumerate(queues):
                cost = used = count = 0
                first = taken[peer]
                for unit in queue[first:]:
                    cost += self._cost(unit)
                    used += layout.numel(unit.box) * size
                    count += self.count(unit)
                    full = cost > most_cost or used > most_bytes
                    if taken[peer] > first and (full or 0 < self.chunk_size < count):
                        break
                    taken[peer] += 1
                if taken[peer] > first:
                    owned[peer] = queue[first : taken[peer]]
            rounds.append(owned)
        return rounds

    def _chunk_bytes(self, draft: _Draft) -> int:
        """What one owner gathers in a chunk, as a rule."""
        kind = draft.device.type
        if len(draft.peers) == 1:
            return BATCH_BYTES.get(kind, DEFAULT_BATCH_BYTES)
        least, most = CHUNK_BYTES.get(kind, DEFAULT_CHUNK_BYTES)
        elements = sum(layout.numel(unit.box) for unit in draft.units) // len(draft.peers)
        share = elements * draft.wire.itemsize // CHUNKS
        return max(least, min(most, share))

    def _in_flight(
        self, draft: _Draft, rounds: Sequence[dict[int, list[Unit]]], everywhere: bool
    ) -> int:
        """How many chunks fit into the bound on memory; the same number on all peers.

        While one of them is computed, its buffers there and back are held beside those of the
        others, and what it is computed in: matrices twice, and two products of their shorter sides.
        """
        peers, size = len(draft.peers), draft.wire.itemsize
        staged = []
        for owned in rounds:
            elements = [sum(layout.numel(u.box) for u in units) for units in owned.values()]
            staged.append(size * (max(elements) + sum(elements) // (1 if everywhere else peers)))
        largest = max(draft.units, key=self._bytes)
        room = STAGING_OF_LOCAL * sum(map(self._bytes, draft.units)) / peers
        room += STAGING_OF_LARGEST * self._bytes(largest)
        room -= max(staged) + size * max(map(self._elements_of_work, draft.units))
        depth = 1
        while depth <= min(self.warmup_step, len(staged) - 1):
            windows = (sum(staged[at : at + depth + 1]) for at in range(len(staged) - depth))
            if max(windows) > room:
                break
            depth += 1
        return depth

    def _elements_of_work(self, unit: Unit) -> int:
        numel, cols = layout.numel(unit.box), self.entries[unit.entry].matrices.cols
        return 2 * numel + 2 * self.count(unit) * min(unit.rows, cols) ** 2

    def _bytes(self, unit: Unit) -> int:
        return layout.numel(unit.box) * self.entries[unit.entry].dtype.itemsize
