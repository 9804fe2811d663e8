"""What one step does, as data: who orthogonalizes which matrix, what travels where, in which order.

A plan is made for one rank, from facts that it shares with the others; no process group is needed.
The ranks that hold parts of a matrix gather it on one of them, its owner, and get their parts of
the update back. Every rank computes the same owners and chunks, and only its own pieces.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import heapq
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional

import torch

from . import layout
from .chunks import Batch, Bundle, Chunk, ChunkBuilder, Part, Run, Traffic
from .layout import Interval
from .rounds import HIDING, Cutter, Kind, even_rounds
from .staging import Gathered, Staging, matrices_per_batch
from .units import Entry, Unit, runs_of

__all__ = [
    "Batch",
    "Bundle",
    "Chunk",
    "Entry",
    "Lane",
    "Part",
    "Plan",
    "Planner",
    "Run",
    "Traffic",
    "Unit",
    "make_plan",
]


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
        entries: Muon's parameters, as they are numbered in units.
        lanes: with traffic, in the order in which all ranks go through them.
        alone: lanes without traffic. Their units are skipped in a step in which they have no
            gradient.
        elsewhere: units that lie whole on another rank among this one's peers, with that rank, for
            summaries.
    """

    rank: int
    entries: tuple[Entry, ...]
    lanes: tuple[Lane, ...]
    alone: tuple[Lane, ...]
    elsewhere: tuple[tuple[Unit, int], ...] = ()

    @functools.cached_property
    def all_lanes(self) -> tuple[Lane, ...]:
        """Those with traffic, then those without, as events number them."""
        return (*self.lanes, *self.alone)

    def count(self, batch: Batch) -> int:
        """Matrices in a batch."""
        unit = batch.units[0]
        return len(batch.units) * self.entries[unit.entry].matrices.count(unit.box, unit.rows)

    def flops(self, batch: Batch) -> int:
        """FLOPs to orthogonalize a batch."""
        unit = batch.units[0]
        return self.count(batch) * self.entries[unit.entry].cost(unit.rows)


# Plans that are kept, of steps in which other entries have gradients.
MOST_PLANS = 8

NOTHING = Plan(0, (), (), ())


def make_plan(entries: Sequence[Entry], rank: int = 0, **options: Any) -> Plan:
    """The plan of ``rank`` for entries that all take part; options as of `Planner`."""
    return Planner(entries, rank, **options).plan()


def turn_of(peers: tuple[int, ...]) -> tuple:
    """Sorts the sets of ranks that exchange something into the order in which all ranks do."""
    return (-len(peers), peers)


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
        return (*turn_of(self.peers), str(self.wire), str(self.wide), str(self.device))

    def without(self, absent: Collection[int]) -> _Draft:
        """Without the units of some entries."""
        if not absent:
            return self
        pairs = list(zip(self.units, self.holders or itertools.repeat(())))
        left = [(unit, holders) for unit, holders in pairs if unit.entry not in absent]
        return replace(self, units=[unit for unit, _ in left], holders=[of for _, of in left])


def _make_room(cache: dict) -> None:
    """Where what is present changes all the time, old plans are of no use."""
    if len(cache) >= MOST_PLANS:
        cache.clear()


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Nothing that a plan is made of is garbage, and looking for it takes half of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class Planner:
    """Makes the plans of one rank, deterministic in its arguments.

    Args:
        entries: Muon's parameters, in one order on all ranks.
        rank: global rank.
        chunk_size: matrices that a rank orthogonalizes per chunk; −1 chooses by bytes.
        warmup_step: chunks in flight ahead of the one being orthogonalized.
        everywhere: every peer gathers every matrix, as a reference for tests.
        streams: chunks have to wait for their momentum: only so many are begun ahead as hide each
            other's traffic.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        rank: int = 0,
        *,
        chunk_size: int = -1,
        warmup_step: int = 5,
        everywhere: bool = False,
        streams: bool = False,
    ):
        self.entries = tuple(entries)
        self.rank = rank
        self.chunk_size = chunk_size
        self.warmup_step = min(warmup_step, HIDING - 1) if streams else warmup_step
        self.everywhere = everywhere
        self.drafts: dict[tuple, _Draft] = {}
        # Of each set of peers, the FLOPs of an entry's matrices that are whole on one of them.
        self.whole: dict[tuple[int, ...], list[tuple[int, int, int]]] = defaultdict(list)
        self.loads: dict[tuple[int, ...], list[int]] = {}  # FLOPs of each peer
        self.costs: dict[tuple[int, int], int] = {}  # FLOPs of a matrix, by entry and rows
        self.runs: dict[tuple, list[tuple[Interval, int, tuple[int, ...]]]] = {}  # by layout
        self.elsewhere: list[tuple[Unit, int]] = []
        self.lanes: dict[tuple, tuple[Lane, ...]] = {}  # by peers, and which entries are absent
        self.plans: dict[frozenset[int], Plan] = {}  # by which entries are absent
        with _without_collection():
            for number, entry in enumerate(self.entries):
                self.add(number, entry)
        # Of each set of peers that exchange something, the entries.
        self.shared: dict[tuple[int, ...], set[int]] = defaultdict(set)
        for draft in self.drafts.values():
            if len(draft.peers) > 1:
                self.shared[draft.peers].update(unit.entry for unit in draft.units)
        self.shared_entries = frozenset(itertools.chain.from_iterable(self.shared.values()))

    def plan(self, absent: frozenset[int] = frozenset()) -> Plan:
        """The plan of a step in which some entries take no part.

        Only lanes in which others wait for these entries are made anew. What is whole on this rank
        stays in the plan.

        Args:
            absent: numbers of the entries, alike on all ranks that share them.
        """
        absent &= self.shared_entries
        if absent not in self.plans:
            _make_room(self.plans)
            with _without_collection():
                lanes = [lane for peers in self._turns() for lane in self._lanes(peers, absent)]
            self.plans[absent] = Plan(
                self.rank,
                self.entries,
                tuple(lane for lane in lanes if len(lane.peers) > 1),
                tuple(lane for lane in lanes if len(lane.peers) == 1),
                tuple(self.elsewhere),
            )
        return self.plans[absent]

    def _turns(self) -> list[tuple[int, ...]]:
        # All ranks go through their lanes in this order, or two could wait for each other.
        return sorted({draft.peers for draft in self.drafts.values()}, key=turn_of)

    def _lanes(self, peers: tuple[int, ...], absent: frozenset[int]) -> tuple[Lane, ...]:
        """All lanes of the same peers, whose owners have to be chosen together."""
        key = (peers, absent & self.shared.get(peers, set()))
        if key not in self.lanes:
            _make_room(self.lanes)
            loads = [0] * len(peers)
            for number, holder, cost in self.whole[peers]:
                if number not in absent:
                    loads[holder] += cost
            self.loads[peers] = loads
            drafts = [self.drafts[order] for order in sorted(self.drafts)]
            some = (draft.without(key[1]) for draft in drafts if draft.peers == peers)
            self.lanes[key] = tuple(self._lane(draft) for draft in some if draft.units)
        return self.lanes[key]

    # -- units -----------------------------------------------------------------------------

    def add(self, number: int, entry: Entry) -> None:
        """Sorts the matrices of an entry into the lanes they will travel in."""
        peers = entry.peers(self.rank)
        if not peers:
            return
        for unit, holders in self._units(number, entry, peers):
            if len(holders) == 1 and not (entry.second_moment and len(peers) > 1):
                self.whole[peers].append((number, holders[0], self._cost(unit)))
                if peers[holders[0]] == self.rank:
                    # Rounded as a wire of 32 or 64 bits rounds it on other layouts.
                    rounded = entry.wire if entry.wire.itemsize >= 4 else entry.wide
                    draft = self._draft(entry, (self.rank,), rounded)
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
        entry = self.entries[unit.entry]
        limit = matrices_per_batch(entry, unit.rows, self.chunk_size)
        count = self.count(unit)
        if count <= limit:
            return [unit]
        row_dim = entry.matrices.row_dim
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

    # -- owners ----------------------------------------------------------------------------

    def _lane(self, draft: _Draft) -> Lane:
        staging = self._staging(draft)
        everywhere = self.everywhere and len(draft.peers) > 1
        owners = [0] * len(draft.units) if everywhere else self._owners(draft)
        queues: list[list[Unit]] = [[] for _ in draft.peers]
        for number in sorted(range(len(draft.units)), key=lambda i: -self._cost(draft.units[i])):
            queues[owners[number]].append(draft.units[number])
        rounds, gathered = self._rounds(draft, queues, staging)
        if everywhere:  # every peer gathers what all own
            gathered = [(most, total * len(draft.peers)) for most, total in gathered]
        me = draft.peers.index(self.rank)
        builder = ChunkBuilder(
            self.entries,
            draft.peers,
            me,
            draft.wire,
            draft.wide,
            draft.device,
            everywhere,
            lambda unit: matrices_per_batch(
                self.entries[unit.entry], unit.rows, self.chunk_size, staging.batch_bytes
            ),
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
            staging.depth(gathered),
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

    def _staging(self, draft: _Draft) -> Staging:
        held: Counter[int] = Counter()  # elements of each entry
        for unit in draft.units:
            held[unit.entry] += layout.numel(unit.box)
        copies = sum(n * self.entries[number].copies(self.rank) for number, n in held.items())
        return Staging(
            self.entries,
            draft.units,
            len(draft.peers),
            copies / max(1, sum(held.values())),
            draft.wire,
            draft.wide,
            draft.device,
            self.chunk_size,
            self.warmup_step,
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

    def _rounds(
        self, draft: _Draft, queues: list[list[Unit]], staging: Staging
    ) -> tuple[list[dict[int, list[Unit]]], list[Gathered]]:
        """Cuts the owners' queues into chunks: what owners orthogonalize in each, and gather."""
        by_kind: list[dict[Kind, list[Unit]]] = [{} for _ in queues]
        for queue, of_owner in zip(queues, by_kind):
            for unit in queue:
                size = layout.numel(unit.box) * draft.wire.itemsize
                kind = Kind(self._cost(unit), size, self.count(unit))
                of_owner.setdefault(kind, []).append(unit)
        keys = [tuple((kind, len(units)) for kind, units in of.items()) for of in by_kind]
        cutter = Cutter(Counter(keys), staging.chunk_bytes, self.chunk_size)
        if len(draft.peers) == 1 or self.everywhere:
            cut = cutter.cut(cutter.budget)
        else:
            cut = even_rounds(cutter, max(self.loads[draft.peers]), staging)
        waiting = [[iter(units) for units in of_owner.values()] for of_owner in by_kind]
        rounds = []
        for taken in cut:
            owned: dict[int, list[Unit]] = {}
            for peer, (key, units_of) in enumerate(zip(keys, waiting)):
                some = map(itertools.islice, units_of, taken.get(key, ()))
                units = list(itertools.chain.from_iterable(some))
                if units:
                    owned[peer] = units
            rounds.append(owned)
        return rounds, cutter.gathered(cut)
