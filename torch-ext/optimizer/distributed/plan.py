"""Decides who owns which matrix and what travels where, chunk by chunk: a plan, as pure data.

A plan is made for one rank, from facts that it shares with the others; no process group is needed.
The ranks that hold parts of a matrix gather it on one of them, its owner, which scatters the update
to them. All peers compute the same owners and rounds, and each lays the chunks out in its buffers.
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
from dataclasses import dataclass, replace
from typing import Any, Optional

from ..matrices import Block
from . import regions
from .chunks import Batch, Chunk, ChunkBuilder
from .regions import Region
from .rounds import Partitioner, Queue, UnitCost
from .staging import HIDING_IN_FLIGHT, GatheredBytes, Limits, Staging
from .units import Channel, Entry, Unit, boxes_and_holders


@dataclass(frozen=True)
class Lane(Channel):
    """Chunks that the same ranks exchange in the same format.

    Args:
        chunks: in order.
        in_flight: how many chunks may be under way at once.
        ahead: how many of its first chunks are gathered at the very beginning of a step; the first
            lane gathers all that may be in flight there.
        rounds: for each chunk its units, each with its owner: the number of a peer, or None if all
            peers own it; equal on all peers.
        digest: a hash of the rounds, equal on all peers.
    """

    chunks: tuple[Chunk, ...]
    in_flight: int
    ahead: int
    rounds: tuple[tuple[tuple[Unit, Optional[int]], ...], ...]
    digest: str

    @functools.cached_property
    def owners(self) -> tuple[tuple[Unit, Optional[int]], ...]:
        """The units of all chunks, each with its owner."""
        return tuple(itertools.chain.from_iterable(self.rounds))


@dataclass(frozen=True)
class Plan:
    """What a rank does in a step.

    Args:
        rank: global rank that the plan is for.
        entries: Muon's parameters; units refer to them by number.
        lanes: those with traffic, in the order in which all ranks go through them.
        local_lanes: those without traffic. Their units stay in the plan if they have no gradient;
            the step passes over them.
        whole_on_peers: the units that one other rank among this rank's peers holds alone, each with
            the global number of that rank; for summaries.
    """

    rank: int
    entries: tuple[Entry, ...]
    lanes: tuple[Lane, ...]
    local_lanes: tuple[Lane, ...]
    whole_on_peers: tuple[tuple[Unit, int], ...] = ()

    @functools.cached_property
    def all_lanes(self) -> tuple[Lane, ...]:
        """Lanes with traffic, then local ones, as events number them."""
        return (*self.lanes, *self.local_lanes)

    def flops(self, batch: Batch) -> int:
        """FLOPs to orthogonalize a batch."""
        unit = batch.units[0]
        return batch.matrices * self.entries[unit.entry].cost(unit.block)


# How many plans a planner keeps, one for each set of absent entries; and how many lists of lanes.
MOST_PLANS = 8

EMPTY_PLAN = Plan(0, (), (), ())

UnitHolders = tuple[Unit, tuple[int, ...]]  # a unit, and the peers that hold parts of it
UnitsByCost = dict[UnitCost, list[Unit]]  # the units that a peer owns


def make_plan(entries: Sequence[Entry], rank: int = 0, **options: Any) -> Plan:
    """The plan of ``rank`` for entries that all take part; ``options`` are those of `Planner`."""
    return Planner(entries, rank, **options).plan()


def ranks_sort_key(ranks: tuple[int, ...]) -> tuple:
    """Sorts sets of ranks into the order in which all ranks go through their exchanges."""
    return (-len(ranks), ranks)


def _counted(queue: UnitsByCost) -> Queue:
    """A peer's queue with the number of units of each cost in place of the units."""
    return tuple((cost, len(alike)) for cost, alike in queue.items())


def _evict(cache: dict) -> None:
    """Clears a cache that is full: if absent entries always change, old plans are of no use."""
    if len(cache) >= MOST_PLANS:
        cache.clear()


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Turns garbage collection off, which finds nothing in planning and would double its time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _fitted(
    owned_in: list[dict[int, list[Unit]]], staging: Staging
) -> tuple[list[dict[int, list[Unit]]], list[GatheredBytes]]:
    """Divides rounds into rounds of fewer owners if chunks would not fit otherwise.

    This is done only if all peers get all updates: then a round of many owners is a large chunk on
    every peer, and three such chunks have to fit to hide their traffic. Otherwise each peer gets
    only a share. Rounds of few bytes stay as they are, unless the user bounds staging.

    Returns:
        The rounds, and the bytes that are gathered in each.
    """
    channel, itemsize = staging.channel, staging.channel.wire.itemsize
    in_flight = min(HIDING_IN_FLIGHT, staging.limits.in_flight)
    most_owners, parts = max(map(len, owned_in)), 1
    while True:
        size = -(-most_owners // parts)
        divided = [
            dict(itertools.islice(owned.items(), at, at + size))
            for owned in owned_in
            for at in range(0, len(owned), size)
        ]
        gathered = []
        for owned in divided:
            sizes = [sum(regions.numel(u.box) for u in units) for units in owned.values()]
            # If all peers own all units, every peer gathers all of them.
            count = len(channel.peers) if channel.owned_by_all else 1
            gathered.append((max(sizes) * itemsize, sum(sizes) * itemsize * count))
        is_little = max(total for _, total in gathered) <= staging.least_bytes
        may_divide = staging.shares and size > 1 and not is_little
        if not may_divide or staging.has_room(gathered, in_flight):
            return divided, gathered
        parts *= 2


class Planner:
    """Makes the plans of one rank, deterministic in its arguments.

    Args:
        entries: Muon's parameters, in one order on all ranks.
        rank: global rank.
        owned_by_all: whether every peer orthogonalizes every matrix, as a reference for tests.
        limits: fields of `Limits`.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        rank: int = 0,
        *,
        owned_by_all: bool = False,
        **limits: Any,
    ):
        self.entries = tuple(entries)
        self.rank = rank
        self.limits = Limits(**limits)
        self.owned_by_all = owned_by_all
        self.units: dict[Channel, list[UnitHolders]] = defaultdict(list)
        # By peers: entry, holder and FLOPs of the units that one of the peers holds whole.
        self.whole_flops: dict[tuple[int, ...], list[tuple[int, int, int]]] = defaultdict(list)
        self.whole_on_peers: list[tuple[Unit, int]] = []
        self.matrix_flops: dict[tuple, int] = {}  # by entry, rows and columns
        # Units of an expert, by matrices, sharding and peers.
        self.expert_units: dict[tuple, list[tuple[Block, Region, tuple[int, ...]]]] = {}
        with _without_collection():
            for number, entry in enumerate(self.entries):
                self._add(number, entry)
        # By peers: channels, and numbers of the entries that they exchange. All ranks go through
        # channels in this order; in different orders two ranks could block each other.
        self.channels: dict[tuple[int, ...], list[Channel]] = defaultdict(list)
        self.exchanged: dict[tuple[int, ...], set[int]] = defaultdict(set)
        for channel in sorted(
            self.units,
            key=lambda c: (*ranks_sort_key(c.peers), str(c.wire), str(c.opmath), str(c.device)),
        ):
            self.channels[channel.peers].append(channel)
            if len(channel.peers) > 1:
                numbers = (unit.entry for unit, _ in self.units[channel])
                self.exchanged[channel.peers].update(numbers)
        self.all_exchanged = frozenset().union(*self.exchanged.values())
        self.lanes: dict[tuple, list[Lane]] = {}  # by peers, and which entries are absent
        self.plans: dict[frozenset[int], Plan] = {}  # by which entries are absent

    def plan(self, absent: frozenset[int] = frozenset()) -> Plan:
        """The plan of a step in which some entries take no part.

        Only lanes that exchange absent entries are made anew. Units of absent entries that are
        whole on this rank stay in the plan.

        Args:
            absent: numbers of these entries, alike on all ranks that share them.
        """
        absent &= self.all_exchanged
        if absent not in self.plans:
            _evict(self.plans)
            with _without_collection():
                lanes = [lane for peers in self.channels for lane in self._lanes(peers, absent)]
            self.plans[absent] = Plan(
                self.rank,
                self.entries,
                tuple(lane for lane in lanes if len(lane.peers) > 1),
                tuple(lane for lane in lanes if len(lane.peers) == 1),
                tuple(self.whole_on_peers),
            )
        return self.plans[absent]

    def _add(self, number: int, entry: Entry) -> None:
        """Sorts the matrices of an entry into the channels that they travel by."""
        peers = entry.peers(self.rank)
        if not peers:
            return
        # Local units keep a wire of 32 or 64 bits, so that they are rounded as on layouts with
        # traffic. In place of a wire of 16 bits they have opmath, which rounds nothing.
        local_wire = entry.wire if entry.wire.itemsize >= 4 else entry.opmath
        formats = (entry.opmath, entry.device)
        local = exchanged = self.units[Channel((self.rank,), 0, False, local_wire, *formats)]
        if len(peers) > 1:
            this_peer = peers.index(self.rank)
            channel = Channel(peers, this_peer, self.owned_by_all, entry.wire, *formats)
            exchanged = self.units[channel]
        for unit, holders in self._units(number, entry, peers):
            # Every peer keeps the second moment, so owners send it mean squares in any case.
            if len(holders) > 1 or (entry.second_moment and len(peers) > 1):
                exchanged += [(piece, holders) for piece in self._divide(unit)]
                continue
            (holder,) = holders
            self.whole_flops[peers].append((number, holder, self._flops(unit)))
            if peers[holder] == self.rank:
                local += [(piece, (0,)) for piece in self._divide(unit)]
            else:
                self.whole_on_peers.append((unit, peers[holder]))

    def _units(self, number: int, entry: Entry, peers: tuple[int, ...]) -> Iterator[UnitHolders]:
        """Yields the units of an entry of which this rank and its peers hold parts."""
        m = entry.matrices
        experts = entry.region(self.rank)[: m.row_dim]
        if regions.numel(experts) * math.prod(m.shape[m.row_dim :]) == 0:
            return
        if len(peers) == 1:
            for block in m.blocks:
                yield (
                    Unit(number, block, (*experts, *regions.whole(block.shape[m.row_dim :]))),
                    (0,),
                )
            return
        key = (m, entry.sharding, peers)
        if key not in self.expert_units:
            held = [entry.region(rank) for rank in peers]
            self.expert_units[key] = list(boxes_and_holders(m, held))
        for expert in itertools.product(*(range(start, stop) for start, stop in experts)):
            index = tuple((at, at + 1) for at in expert)
            for block, box, holders in self.expert_units[key]:
                yield Unit(number, block, (*index, *box)), holders

    def _divide(self, unit: Unit) -> list[Unit]:
        """A unit in pieces that are small enough for one batch."""
        limit = self.limits.matrices_per_batch(self.entries[unit.entry], unit.block)
        if unit.count <= limit:
            return [unit]
        sizes = unit.shape[: unit.block.row_axis]
        axis = next(axis for axis, size in enumerate(sizes) if size > 1)
        step = max(1, limit // (unit.count // sizes[axis]))
        start, stop = unit.box[axis]
        pieces = []
        for at in range(start, stop, step):
            box = (*unit.box[:axis], (at, min(at + step, stop)), *unit.box[axis + 1 :])
            pieces += self._divide(replace(unit, box=box))
        return pieces

    def _flops(self, unit: Unit) -> int:
        """FLOPs to orthogonalize a unit."""
        block = unit.block
        key = (unit.entry, block.rows, block.cols)
        if key not in self.matrix_flops:
            self.matrix_flops[key] = self.entries[unit.entry].cost(block)
        return unit.count * self.matrix_flops[key]

    def _lanes(self, peers: tuple[int, ...], absent: frozenset[int]) -> list[Lane]:
        """All lanes of these peers; their owners are chosen together, to balance loads of peers."""
        absent &= self.exchanged.get(peers, set())
        if (peers, absent) not in self.lanes:
            _evict(self.lanes)
            loads = [0] * len(peers)  # FLOPs of each peer
            for number, holder, flops in self.whole_flops[peers]:
                if number not in absent:
                    loads[holder] += flops
            lanes = []
            for channel in self.channels[peers]:
                units = [pair for pair in self.units[channel] if pair[0].entry not in absent]
                if units:
                    lanes.append(self._lane(channel, units, loads))
            self.lanes[peers, absent] = lanes
        return self.lanes[peers, absent]

    def _lane(self, channel: Channel, units: Sequence[UnitHolders], loads: list[int]) -> Lane:
        """The lane of these units; adds what each peer owns to its load in ``loads``."""
        staging = Staging(self.entries, channel, [unit for unit, _ in units], self.limits)
        queues = self._queues(channel, units, loads)
        counted = list(map(_counted, queues))
        partitioner = Partitioner(Counter(counted), staging)
        has_one_queue = channel.owned_by_all or len(queues) == 1
        partition = partitioner.partition() if has_one_queue else partitioner.balanced(max(loads))
        remaining = [[iter(alike) for alike in queue.values()] for queue in queues]
        owned_in: list[dict[int, list[Unit]]] = []  # each round, by peer
        for counts in partition.rounds:
            owned: dict[int, list[Unit]] = {}
            for peer, (queue, by_cost) in enumerate(zip(counted, remaining)):
                taken = map(itertools.islice, by_cost, counts.get(queue, ()))
                owned[peer] = list(itertools.chain.from_iterable(taken))
            owned_in.append({peer: members for peer, members in owned.items() if members})
        owned_in, gathered = _fitted(owned_in, staging)
        digest, builder = hashlib.sha256(), ChunkBuilder(staging)
        chunks, rounds = [], []
        for owned in owned_in:
            pairs = [(unit, peer) for peer, members in owned.items() for unit in members]
            listed = [
                (peer, self.entries[unit.entry].name, unit.block.starts, unit.box)
                for unit, peer in pairs
            ]
            digest.update(repr(listed).encode())
            chunks.append(builder.chunk(owned))
            rounds.append(
                tuple((unit, None if channel.owned_by_all else peer) for unit, peer in pairs)
            )
        return Lane(
            **vars(channel),
            chunks=tuple(chunks),
            in_flight=staging.in_flight(gathered),
            ahead=staging.gathers_ahead(gathered),
            rounds=tuple(rounds),
            digest=digest.hexdigest(),
        )

    def _queues(
        self, channel: Channel, units: Sequence[UnitHolders], loads: list[int]
    ) -> list[UnitsByCost]:
        """Chooses owners, and adds their work to ``loads``; returns each peer's units by cost.

        The costliest unit is given away first, to the owner with the fewest FLOPs, and of several
        such owners to the one with the fewest elements (longest processing time first); so each
        peer's units come in order of cost, costliest first. Only holders of parts of a
        unit may own it. A peer that alone has the momentum of a unit owns it if its load stays
        within a fair share.
        """
        queues: list[UnitsByCost] = [{} for _ in loads]
        elements = [0] * len(loads)  # of the units that each peer owns
        heap = [(load, 0, peer) for peer, load in enumerate(loads)]
        heapq.heapify(heap)
        with_flops = [(self._flops(unit), unit, holders) for unit, holders in units]
        fair = (sum(loads) + sum(flops for flops, _, _ in with_flops)) / len(loads)
        for flops, unit, holders in sorted(with_flops, key=lambda item: -item[0]):
            if channel.owned_by_all:
                owner = 0
            elif len(holders) == len(loads):
                while heap[0][:2] != (loads[heap[0][2]], elements[heap[0][2]]):  # is outdated
                    heapq.heappop(heap)
                owner = heap[0][2]
                home = self.entries[unit.entry].momentum_holder(unit.box)
                if home is not None and loads[home] + flops <= fair:
                    owner = home
            else:
                owner = min(holders, key=lambda peer: (loads[peer], elements[peer], peer))
            numel = regions.numel(unit.box)
            loads[owner] += flops
            elements[owner] += numel
            heapq.heappush(heap, (loads[owner], elements[owner], owner))
            cost = UnitCost(flops, numel * channel.wire.itemsize, unit.count)
            queues[owner].setdefault(cost, []).append(unit)
        return queues
