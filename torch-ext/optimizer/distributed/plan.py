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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from . import regions
from .chunks import Batch, Chunk, ChunkBuilder
from .regions import Interval
from .rounds import HIDING, Cutter, Kind
from .staging import Staging, matrices_per_batch
from .units import Channel, Entry, Unit, unit_rows


@dataclass(frozen=True)
class Lane(Channel):
    """Chunks that the same ranks exchange in the same format.

    Args:
        chunks: in order.
        in_flight: how many chunks may be under way at once.
        rounds: of each chunk the units with the number of their owner (None: everyone), equal on
            all peers.
        digest: of owners and chunks, equal on all peers.
    """

    chunks: tuple[Chunk, ...]
    in_flight: int
    rounds: tuple[tuple[tuple[Unit, Optional[int]], ...], ...]
    digest: str

    @functools.cached_property
    def owners(self) -> tuple[tuple[Unit, Optional[int]], ...]:
        """The units of all chunks with the number of their owner."""
        return tuple(itertools.chain.from_iterable(self.rounds))


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

HeldUnit = tuple[Unit, tuple[int, ...]]  # with the numbers of the peers that hold parts of it


def make_plan(entries: Sequence[Entry], rank: int = 0, **options: Any) -> Plan:
    """The plan of ``rank`` for entries that all take part; options as of `Planner`."""
    return Planner(entries, rank, **options).plan()


def lane_order(peers: tuple[int, ...]) -> tuple:
    """Sorts the sets of ranks that exchange something into the order in which all ranks do."""
    return (-len(peers), peers)


def _order(channel: Channel) -> tuple:
    formats = (channel.wire, channel.opmath, channel.device)
    return (lane_order(channel.peers), *map(str, formats))


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
        self.units: dict[Channel, list[HeldUnit]] = defaultdict(list)
        # Of each set of peers, the FLOPs of an entry's matrices that are whole on one of them.
        self.whole: dict[tuple[int, ...], list[tuple[int, int, int]]] = defaultdict(list)
        self.elsewhere: list[tuple[Unit, int]] = []
        self.costs: dict[tuple[int, int], int] = {}  # FLOPs of a matrix, by entry and rows
        self.unit_rows: dict[tuple, list[tuple[Interval, int, tuple[int, ...]]]] = {}  # by layout
        with _without_collection():
            for number, entry in enumerate(self.entries):
                self._add(number, entry)
        # By peers, in the order in which all ranks go through them, or two could wait for each
        # other: channels, and the numbers of the entries that are exchanged.
        self.channels: dict[tuple[int, ...], list[Channel]] = defaultdict(list)
        self.shared: dict[tuple[int, ...], set[int]] = defaultdict(set)
        for channel in sorted(self.units, key=_order):
            self.channels[channel.peers].append(channel)
            if len(channel.peers) > 1:
                numbers = (unit.entry for unit, _ in self.units[channel])
                self.shared[channel.peers].update(numbers)
        self.shared_entries = frozenset(itertools.chain.from_iterable(self.shared.values()))
        self.lanes: dict[tuple, list[Lane]] = {}  # by peers, and which entries are absent
        self.plans: dict[frozenset[int], Plan] = {}  # by which entries are absent

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
                lanes = [lane for peers in self.channels for lane in self._lanes(peers, absent)]
            self.plans[absent] = Plan(
                self.rank,
                self.entries,
                tuple(lane for lane in lanes if len(lane.peers) > 1),
                tuple(lane for lane in lanes if len(lane.peers) == 1),
                tuple(self.elsewhere),
            )
        return self.plans[absent]

    # -- units -----------------------------------------------------------------------------

    def _add(self, number: int, entry: Entry) -> None:
        """Sorts the matrices of an entry into the channels they will travel by."""
        peers = entry.peers(self.rank)
        if not peers:
            return
        # What stays is rounded as a wire of 32 or 64 bits rounds it on other layouts.
        rounded = entry.wire if entry.wire.itemsize >= 4 else entry.opmath
        staying = self.units[Channel((self.rank,), 0, False, rounded, entry.opmath, entry.device)]
        traveling = staying
        if len(peers) > 1:
            me = peers.index(self.rank)
            channel = Channel(peers, me, self.everywhere, entry.wire, entry.opmath, entry.device)
            traveling = self.units[channel]
        for unit, holders in self._units(number, entry, peers):
            if len(holders) > 1 or (entry.second_moment and len(peers) > 1):
                traveling += [(piece, holders) for piece in self._cut(unit)]
                continue
            (holder,) = holders
            self.whole[peers].append((number, holder, self._cost(unit)))
            if peers[holder] == self.rank:
                staying += [(piece, (0,)) for piece in self._cut(unit)]
            else:
                self.elsewhere.append((unit, peers[holder]))

    def _units(self, number: int, entry: Entry, peers: tuple[int, ...]) -> Iterator[HeldUnit]:
        """The units of an entry that this rank and its peers hold, with the peers that do."""
        m = entry.matrices
        experts = entry.region(self.rank)[: m.row_dim]
        cols = regions.whole(m.shape[m.row_dim + 1 :])
        if regions.numel(experts) * m.rows * m.cols == 0:
            return
        if len(peers) == 1:
            for blocks in m.blocks:
                rows = (blocks.start, blocks.stop)
                yield Unit(number, (*experts, rows, *cols), blocks.rows), (0,)
            return
        key = (m, entry.sharding, peers)
        if key not in self.unit_rows:
            held = [entry.region(peer)[m.row_dim :] for peer in peers]
            self.unit_rows[key] = list(unit_rows(m.blocks, held))
        for expert in itertools.product(*(range(start, stop) for start, stop in experts)):
            box = tuple((index, index + 1) for index in expert)
            for rows, each, holders in self.unit_rows[key]:
                yield Unit(number, (*box, rows, *cols), each), holders

    def _cut(self, unit: Unit) -> list[Unit]:
        """A unit in pieces that are small enough to be orthogonalized at once."""
        m = self.entries[unit.entry].matrices
        limit = matrices_per_batch(self.entries[unit.entry], unit.rows, self.chunk_size)
        count = m.count(unit.box, unit.rows)
        if count <= limit:
            return [unit]
        sizes = [stop - start for start, stop in unit.box[: m.row_dim]]
        sizes.append(count // math.prod(sizes))  # blocks of rows
        dim = next(dim for dim, size in enumerate(sizes) if size > 1)
        step = max(1, limit // (count // sizes[dim])) * (unit.rows if dim == m.row_dim else 1)
        start, stop = unit.box[dim]
        pieces = []
        for at in range(start, stop, step):
            box = (*unit.box[:dim], (at, min(at + step, stop)), *unit.box[dim + 1 :])
            pieces += self._cut(Unit(unit.entry, box, unit.rows))
        return pieces

    def _cost(self, unit: Unit) -> int:
        key, entry = (unit.entry, unit.rows), self.entries[unit.entry]
        if key not in self.costs:
            self.costs[key] = entry.cost(unit.rows)
        return entry.matrices.count(unit.box, unit.rows) * self.costs[key]

    # -- lanes -----------------------------------------------------------------------------

    def _lanes(self, peers: tuple[int, ...], absent: frozenset[int]) -> list[Lane]:
        """All lanes of the same peers, whose owners have to be chosen together."""
        absent &= self.shared.get(peers, set())
        if (peers, absent) not in self.lanes:
            _make_room(self.lanes)
            loads = [0] * len(peers)  # FLOPs of each peer
            for number, holder, cost in self.whole[peers]:
                if number not in absent:
                    loads[holder] += cost
            lanes = []
            for channel in self.channels[peers]:
                units = [pair for pair in self.units[channel] if pair[0].entry not in absent]
                if units:
                    lanes.append(self._lane(channel, units, loads))
            self.lanes[peers, absent] = lanes
        return self.lanes[peers, absent]

    def _lane(self, channel: Channel, units: Sequence[HeldUnit], loads: list[int]) -> Lane:
        """A lane of some units; ``loads`` of its peers grow by what they own."""
        staging = Staging(
            self.entries, channel, [unit for unit, _ in units], self.chunk_size, self.warmup_step
        )
        queues = self._queues(channel, units, loads)
        keys = [tuple((kind, len(of_kind)) for kind, of_kind in q.items()) for q in queues]
        cutter = Cutter(Counter(keys), staging)
        has_one_owner = channel.everywhere or len(channel.peers) == 1
        cut = cutter.cut() if has_one_owner else cutter.even(max(loads))
        waiting = [[iter(of_kind) for of_kind in queue.values()] for queue in queues]
        digest, builder = hashlib.sha256(), ChunkBuilder(staging)
        chunks, rounds = [], []
        for taken in cut.rounds:
            owned: dict[int, list[Unit]] = {}
            for peer, (key, kinds) in enumerate(zip(keys, waiting)):
                some = map(itertools.islice, kinds, taken.get(key, ()))
                owned[peer] = list(itertools.chain.from_iterable(some))
            owned = {peer: of_owner for peer, of_owner in owned.items() if of_owner}
            pairs = [(unit, peer) for peer, of_owner in owned.items() for unit in of_owner]
            listed = [(peer, self.entries[unit.entry].name, unit.box) for unit, peer in pairs]
            digest.update(repr(listed).encode())
            chunks.append(builder.chunk(owned))
            rounds.append(
                tuple((unit, None if channel.everywhere else peer) for unit, peer in pairs)
            )
        gathered = cut.gathered
        if channel.everywhere:  # every peer gathers what all own
            gathered = [(most, total * len(channel.peers)) for most, total in gathered]
        return Lane(
            **vars(channel),
            chunks=tuple(chunks),
            in_flight=staging.depth(gathered),
            rounds=tuple(rounds),
            digest=digest.hexdigest(),
        )

    def _queues(
        self, channel: Channel, units: Sequence[HeldUnit], loads: list[int]
    ) -> list[dict[Kind, list[Unit]]]:
        """What each owner does, by kind, costliest first.

        Longest processing time first over FLOPs, ties by bytes; only holders own.
        """
        queues: list[dict[Kind, list[Unit]]] = [{} for _ in loads]
        held = [0] * len(loads)  # elements
        heap = [(load, 0, peer) for peer, load in enumerate(loads)]
        heapq.heapify(heap)
        with_costs = [(self._cost(unit), unit, holders) for unit, holders in units]
        for cost, unit, holders in sorted(with_costs, key=lambda item: -item[0]):
            if channel.everywhere:
                owner = 0
            elif len(holders) == len(loads):
                while heap[0][:2] != (loads[heap[0][2]], held[heap[0][2]]):  # outdated
                    heapq.heappop(heap)
                owner = heap[0][2]
            else:
                owner = min(holders, key=lambda peer: (loads[peer], held[peer], peer))
            numel = regions.numel(unit.box)
            loads[owner] += cost
            held[owner] += numel
            heapq.heappush(heap, (loads[owner], held[owner], owner))
            count = self.entries[unit.entry].matrices.count(unit.box, unit.rows)
            kind = Kind(cost, numel * channel.wire.itemsize, count)
            queues[owner].setdefault(kind, []).append(unit)
        return queues
