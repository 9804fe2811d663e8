"""Decides which rank owns which matrix and what travels where, chunk by chunk: a plan is pure data.

A plan is made for one rank, from facts that all ranks share; it needs no process group. The ranks
that hold parts of a matrix gather it on one of them, its owner, which scatters the update to them.
All peers compute the same owners and chunks, and each lays out the chunks in its own buffers.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional

from .. import regions
from ..matrices import Block
from ..regions import Region
from .chunks import Batch, Chunk, ChunkBuilder
from .limits import MOST_SHARED, Limits
from .owners import Candidate, give_away, into_chunks
from .units import Channel, Entry, Unit, boxes_and_holders


@dataclass(frozen=True)
class Lane(Channel):
    """Chunks that the same ranks exchange in the same format.

    Args:
        chunks: the chunks, in order.
        in_flight: maximum number of chunks in flight at once.
        units: for each chunk, its units, each with its owner (an index in ``peers``); equal on all
            peers.
        digest: a hash of the units and their owners; equal on all peers.
    """

    chunks: tuple[Chunk, ...]
    in_flight: int
    units: tuple[tuple[tuple[Unit, int], ...], ...]
    digest: str

    @functools.cached_property
    def owners(self) -> tuple[tuple[Unit, int], ...]:
        """The units of all chunks, each with its owner."""
        return tuple(itertools.chain.from_iterable(self.units))


@dataclass(frozen=True)
class Plan:
    """What a rank does in a step.

    Args:
        rank: global rank that the plan is for.
        entries: Muon's parameters; units refer to them by number.
        lanes: lanes with traffic, in the order in which all ranks go through them.
        local_lanes: lanes without traffic. Units without a gradient stay in them, but the step
            skips these.
        whole_on_peers: the units held whole by a single other peer, each with that peer's global
            rank; only summaries use them.
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
        return batch.matrix_count * self.entries[unit.entry].cost(unit.block)


# Maximum size of each of a planner's two caches: plans by absent entries, and lists of lanes.
MOST_PLANS = 8

EMPTY_PLAN = Plan(0, (), (), ())

UnitHolders = tuple[Unit, tuple[int, ...]]  # a unit, and the peers that hold parts of it


def ranks_sort_key(ranks: tuple[int, ...]) -> tuple:
    """Sort key of the order in which all ranks go through exchanges with sets of ranks."""
    return (-len(ranks), ranks)


def _evict(cache: dict) -> None:
    """Clears a full cache: if absent entries change all the time, old plans are useless."""
    if len(cache) >= MOST_PLANS:
        cache.clear()


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Turns off garbage collection, which finds nothing in planning and would double its time."""
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
        has_lanes: False for a plan that only lists its entries.
        limits: fields of `Limits`.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        rank: int = 0,
        *,
        has_lanes: bool = True,
        **limits: Any,
    ):
        self.entries = tuple(entries)
        self.rank = rank
        self.limits = Limits(**limits)
        self.units: dict[Channel, list[UnitHolders]] = defaultdict(list)
        # By peers: entry, holder, and FLOPs of each unit that one of the peers holds whole.
        self.whole_flops: dict[tuple[int, ...], list[tuple[int, int, int]]] = defaultdict(list)
        self.whole_on_peers: list[tuple[Unit, int]] = []
        self.matrix_flops: dict[tuple, int] = {}  # by entry, rows, and columns
        # Units of an expert, by matrices, sharding, and peers.
        self.expert_units: dict[tuple, list[tuple[Block, Region, tuple[int, ...]]]] = {}
        with _without_collection():
            for number, entry in enumerate(self.entries if has_lanes else ()):
                self._add(number, entry)
        # By peers: channels, and numbers of the entries that they exchange. All ranks go through
        # channels in this order: with different orders, two ranks could block each other.
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
        """Returns the plan for a given set of missing gradients.

        Only lanes that exchange absent entries are planned again. Units of absent entries that are
        whole on this rank stay in the plan.

        Args:
            absent: numbers of the entries without a gradient, equal on all ranks that share them.
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
        """Sorts the matrices of an entry into the channels that they travel on."""
        peers = entry.peers(self.rank)
        if not peers:
            return
        # A wire of 32 or 64 bits applies to local units, too, so that they are rounded the same
        # with and without traffic. With a 16-bit wire, local units use opmath, unrounded.
        local_wire = entry.wire if entry.wire.itemsize >= 4 else entry.opmath
        formats = (entry.opmath, entry.device)
        local = exchanged = self.units[Channel((self.rank,), 0, local_wire, *formats)]
        if len(peers) > 1:
            this_peer = peers.index(self.rank)
            channel = Channel(peers, this_peer, entry.wire, *formats)
            exchanged = self.units[channel]
        for unit, holders in self._units(number, entry, peers):
            # Every peer stores the second moment, so owners must send mean squares to all peers.
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
        """Yields an entry's units in this rank's experts, each with the peers that hold parts."""
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
        """Divides a unit into pieces that are small enough for one batch."""
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
        """All lanes of these peers, whose owners are chosen together to balance the peers' work."""
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
        """Makes the lane of these units; adds each owner's FLOPs to ``loads``."""
        candidates = [self._candidate(*pair) for pair in units]
        owned_in = into_chunks(give_away(candidates, loads), *self._chunk_limits(channel, units))
        digest, builder = hashlib.sha256(), ChunkBuilder(self.entries, channel, self.limits)
        chunks, units_of_chunks = [], []
        for owned in owned_in:
            pairs = [(unit, peer) for peer, members in owned.items() for unit in members]
            listed = [
                (peer, self.entries[unit.entry].name, unit.block.starts, unit.box)
                for unit, peer in pairs
            ]
            digest.update(repr(listed).encode())
            chunks.append(builder.chunk(owned))
            units_of_chunks.append(tuple(pairs))
        return Lane(
            **vars(channel),
            chunks=tuple(chunks),
            in_flight=min(len(chunks), self.limits.in_flight),
            units=tuple(units_of_chunks),
            digest=digest.hexdigest(),
        )

    def _candidate(self, unit: Unit, holders: tuple[int, ...]) -> Candidate:
        home = self.entries[unit.entry].momentum_holder(unit.box)
        return Candidate(unit, holders, self._flops(unit), regions.numel(unit.box), home)

    def _chunk_limits(
        self, channel: Channel, units: Sequence[UnitHolders]
    ) -> tuple[int, Optional[int], Optional[int]]:
        """The bounds of a chunk, as `into_chunks` expects them."""
        matrices = self.limits.chunk_size if self.limits.chunk_size > 0 else None
        if len(channel.peers) == 1:  # nothing is gathered: a chunk has the size of a batch
            nbytes = self.limits.batch_bytes(channel.device)
            return nbytes // channel.wire.itemsize, None, matrices
        elements = self.limits.chunk_bytes(channel.device) // channel.wire.itemsize
        entries = (self.entries[number] for number in {unit.entry for unit, _ in units})
        shared = MOST_SHARED * elements if channel.shares_all(entries) else None
        return elements, shared, matrices
