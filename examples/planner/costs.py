"""What a plan costs every rank: FLOPs and bytes, counted exactly, for thousands of ranks at once.

A lane of the plan tells for all of its ranks who owns which matrix. What a rank holds of a matrix
follows from the layout, so bytes are sums of products: elements that a rank holds of each kind of
unit × how many of these an owner has. Ranks whose lanes differ in nothing but the numbers of their
members are planned once.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.averaging import Averages, Ring

Ints = NDArray[np.int64]

# Places on the axes of bytes: (way, direction, link, rank).
GATHER, SCATTER = 0, 1
SENT, RECEIVED = 0, 1
HOST, NETWORK = 0, 1  # between ranks of one host, or of two


@dataclass(frozen=True)
class LaneCosts:
    """A lane's chunks, for each of its ranks.

    Args:
        peers: global ranks, ascending.
        flops: of orthogonalization, (chunks, peers).
        bytes: on the wire, (chunks, ways, directions, links, peers).
        kept: bytes in the buffers that stay on their rank, (chunks, ways, peers).
        launched: collectives that scatter each chunk, (chunks,).
        in_flight: chunks under way at once.
        first_used: numbers of the entries that each chunk is the first to need.
    """

    peers: tuple[int, ...]
    flops: Ints
    bytes: Ints
    kept: Ints
    launched: Ints
    in_flight: int
    first_used: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Costs:
    """What a step costs every rank of a layout.

    Args:
        local_flops: of matrices that are whole where they lie, (ranks,).
        lanes: by their ranks, in the order in which each of these goes through its own.
        largest: FLOPs of the costliest matrix.
        averages: what ZeRO-2 does beside; None elsewhere.
    """

    local_flops: Ints
    lanes: tuple[LaneCosts, ...]
    largest: int
    averages: Averages | None = None

    @cached_property
    def flops(self) -> Ints:
        """(ranks,)"""
        total = self.local_flops.copy()
        for lane in self.lanes:
            total[list(lane.peers)] += lane.flops.sum(0)
        return total

    @cached_property
    def bytes(self) -> Ints:
        """(ways, directions, links, ranks)"""
        total = np.zeros((2, 2, 2, len(self.local_flops)), np.int64)
        for lane in self.lanes:
            total[..., list(lane.peers)] += lane.bytes.sum(0)
        return total

    def lanes_of(self, rank: int) -> list[LaneCosts]:
        return [lane for lane in self.lanes if rank in lane.peers]

    @property
    def busiest(self) -> int:
        """The rank with the most FLOPs."""
        return int(self.flops.argmax())

    @property
    def bound(self) -> float:
        """FLOPs that the most loaded rank has at least, however whole matrices are assigned."""
        return max(float(self.flops.mean()), float(self.largest))

    def limit(self, machine: Any) -> float:
        """Seconds that a step is measured against: with ideal overlap, but for one chunk of six.

        That is the longer of the arithmetic of the busiest owner and the traffic of the busiest
        link, a sixth of the shorter, and the latency of one collective each way.
        """
        compute = self.flops.max() / machine.flops
        here, away = self.bytes.sum(0).max((0, 2))  # over directions and ranks
        wire = max(here / machine.host_bytes, away / machine.network_bytes)
        latency = 2 * machine.latency if wire else 0.0
        return float(max(compute, wire) + min(compute, wire) / 6 + latency)

    @cached_property
    def makespan(self) -> int:
        """FLOPs that a step waits for: ranks meet in every chunk, each as long as its slowest."""
        return max(map(self._makespan, self._one_of_each_kind()), default=0)

    def _makespan(self, rank: int) -> int:
        lanes = self.lanes_of(rank)
        met = sorted({rank}.union(*(lane.peers for lane in lanes)))
        waits = sum(int(lane.flops.max(1).sum()) for lane in lanes)
        return int(self.local_flops[met].max()) + waits

    def _one_of_each_kind(self) -> Iterator[int]:
        """A rank of each set of lanes."""
        lanes_of: dict[int, list[int]] = defaultdict(list)
        for number, lane in enumerate(self.lanes):
            for rank in lane.peers:
                lanes_of[rank].append(number)
        seen = set()
        for rank in np.argsort(-self.local_flops, kind="stable").tolist():
            kind = tuple(lanes_of[rank])
            if kind not in seen:
                seen.add(kind)
                yield rank


def costs_of(
    kernel: Any, entries: Sequence[Any], ranks: int, ranks_per_host: int, **options: Any
) -> Costs:
    """The costs of a step of all entries, for ranks 0 to ``ranks`` − 1.

    Args:
        kernel: the package.
        entries: as `deployment.entries_of` makes them.
        ranks: how many.
        ranks_per_host: consecutive ranks that share a host.
        options: of `distributed.plan.Planner`.
    """
    hosts = np.arange(ranks) // ranks_per_host
    alike = {_anonymous(entry) for entry in entries}
    kinds: dict[tuple, list[int]] = defaultdict(list)
    for rank in range(ranks):
        kinds[_kind(alike, rank)].append(rank)
    local_flops = np.zeros(ranks, np.int64)
    counted: set[tuple] = set()
    lanes: dict[tuple, LaneCosts] = {}
    for members in kinds.values():
        plan = kernel.distributed.plan.Planner(entries, members[0], **options).plan()
        for lane in map(functools.partial(LaneUnits, entries), plan.lanes):
            for rank in members:
                peers = lane.entry.peers(rank)
                formats = (str(lane.lane.wire), str(lane.lane.opmath))
                order = (-len(peers), peers, *formats)
                if order not in lanes:
                    lanes[order] = lane.costs(peers, hosts[list(peers)])
        for entry, flops in _local_flops(plan).items():
            for rank in members:
                peers = entry.peers(rank)
                if (entry, peers) not in counted:
                    counted.add((entry, peers))
                    local_flops[list(peers)] += flops
    largest = max((e.cost(b) for e in alike for b in e.matrices.blocks), default=0)
    return Costs(local_flops, tuple(lanes[order] for order in sorted(lanes)), largest)


def _anonymous(entry: Any) -> Any:
    """Equal for entries that lie alike."""
    return replace(entry, name="", index=0)


def _kind(entries: Iterable[Any], rank: int) -> tuple:
    """Equal for ranks whose plans differ only in who their members are and in their own place."""
    first: dict[tuple[int, ...], int] = {}
    kind = []
    for number, entry in enumerate(entries):
        peers = entry.peers(rank)
        experts = entry.region(rank)[: entry.matrices.row_dim]
        which = first.setdefault(peers, number)  # those that meet in one lane
        kind.append((which, len(peers), tuple(stop - start for start, stop in experts)))
    return tuple(kind)


def _local_flops(plan: Any) -> dict[Any, Ints]:
    """FLOPs of what needs no traffic, for each peer, by how entries lie."""
    by_entry: dict[Any, Ints] = {}
    whole = [(unit, plan.rank) for lane in plan.local_lanes for unit, _ in lane.owners]
    for unit, owner in (*whole, *plan.whole_on_peers):
        entry = plan.entries[unit.entry]
        peers = entry.peers(plan.rank)
        flops = by_entry.setdefault(_anonymous(entry), np.zeros(len(peers), np.int64))
        flops[peers.index(owner)] += unit.count * entry.cost(unit.block)
    return by_entry


@dataclass(frozen=True)
class UnitKind:
    """Units that lie alike: every peer holds as many elements of each.

    Args:
        entry: one that they may be of.
        block: of their parameters.
        box: of one of them.
    """

    entry: Any
    block: Any
    box: tuple[tuple[int, int], ...]

    @property
    def matrices(self) -> int:
        """In each unit, per expert."""
        counting = self.box[self.entry.matrices.row_dim : self.block.row_axis]
        return math.prod(stop - start for start, stop in counting)

    @property
    def flops(self) -> int:
        return self.matrices * self.entry.cost(self.block)

    def weights(self, peers: tuple[int, ...]) -> Ints:
        """Elements of a unit, per expert, whose weights each peer has, (peers,)."""
        row_dim = self.entry.matrices.row_dim  # whose experts are others' elsewhere
        held = _regions(self.entry.sharding, self.entry.matrices.shape, peers)
        return self._elements(held, row_dim)

    def momentum(self, peers: tuple[int, ...]) -> Ints:
        """Elements of a unit, per expert, whose momentum each peer has, (peers,)."""
        if self.entry.momentum_sharding is None:
            return self.weights(peers)
        entry = self.entry
        return self._elements(_regions(entry.momentum_sharding, entry.matrices.shape, peers))

    def _elements(self, held: Ints, first_dim: int = 0) -> Ints:
        """Elements of a unit that lie in each of some regions, from a dimension on, (regions,)."""
        elements = np.ones(len(held), np.int64)
        for dim in range(first_dim, held.shape[1]):
            indices = np.array([self.block.starts[dim]])
            for axis, interval in zip(self.block.axes, self.box):
                if axis.dim == dim:
                    indices = (indices[:, None] + np.arange(*interval) * axis.stride).ravel()
            start, stop = np.searchsorted(np.sort(indices), held[:, dim].T)
            elements *= stop - start
        return elements

    def replica(self, peers: tuple[int, ...]) -> Ints:
        """Which replica of the momentum each peer has, (peers,)."""
        return _replicas(self.entry.momentum_sharding or self.entry.sharding, peers)


@functools.lru_cache(maxsize=64)
def _regions(sharding: Any, shape: tuple[int, ...], peers: tuple[int, ...]) -> Ints:
    """What each peer holds of a tensor, (peers, dimensions, 2)."""
    return np.array([sharding.region(shape, peer) for peer in peers], np.int64)


@functools.lru_cache(maxsize=64)
def _replicas(sharding: Any, peers: tuple[int, ...]) -> Ints:
    replicas = [sharding.replica(peer) for peer in peers]
    numbers = {replica: number for number, replica in enumerate(dict.fromkeys(replicas))}
    return np.array([numbers[replica] for replica in replicas], np.int64)


class LaneUnits:
    """The units of a lane, counted by kind, chunk and owner.

    Attributes:
        lane: as the plan of one of its ranks has it.
        entry: one whose peers are those of the lane.
        counts: of each kind how many, (chunks, peers).
        first_used: numbers of the entries that each chunk is the first to need.
    """

    def __init__(self, entries: Sequence[Any], lane: Any):
        self.lane, self.entry = lane, entries[lane.owners[0][0].entry]
        shape = (len(lane.units), len(lane.peers))
        members = dict.fromkeys(unit.entry for unit, _ in lane.owners)
        alike = {number: _anonymous(entries[number]) for number in members}
        numbers = {entry: number for number, entry in enumerate(dict.fromkeys(alike.values()))}
        number_of = {number: numbers[entry] for number, entry in alike.items()}
        by_key: dict[tuple, tuple[UnitKind, Ints]] = {}
        for chunk, owned in enumerate(lane.units):
            for unit, owner in owned:
                entry = alike[unit.entry]
                row_dim = entry.matrices.row_dim
                place = unit.block.starts, unit.box[row_dim:]
                lies = *place, entry.momentum_holder(unit.box)
                key = (number_of[unit.entry], *lies)
                if key not in by_key:
                    kind = UnitKind(entry, unit.block, unit.box)
                    by_key[key] = kind, np.zeros(shape, np.int64)
                experts = math.prod(stop - start for start, stop in unit.box[:row_dim])
                by_key[key][1][chunk, owner] += experts
        self.counts = tuple(by_key.values())
        seen: set[int] = set()
        used: list[tuple[int, ...]] = []
        for owned in lane.units:
            of_chunk = dict.fromkeys(unit.entry for unit, _ in owned)
            used.append(tuple(number for number in of_chunk if number not in seen))
            seen.update(of_chunk)
        self.first_used: tuple[tuple[int, ...], ...] = tuple(used)
        self.flops = np.zeros(shape, np.int64)
        for kind, counts in self.counts:
            self.flops += counts * kind.flops

    def costs(self, peers: tuple[int, ...], hosts: Ints) -> LaneCosts:
        """What these ranks exchange, if the lane is theirs; ``hosts`` of each, (peers,)."""
        wire, chunks = self.lane.wire.itemsize, len(self.lane.units)
        moved = np.zeros((chunks, 2, 2, 2, len(peers)), np.int64)
        kept = np.zeros((chunks, 2, len(peers)), np.int64)
        everyone = np.zeros(len(peers), np.int64)
        for kind, counts in self.counts:
            out = kind.momentum(peers) * wire
            back = kind.weights(peers) * wire
            at = np.flatnonzero(counts.any(1))  # chunks, seldom all of them
            moved[at, GATHER] += _exchanged(out, counts[at], kind.replica(peers), hosts)
            moved[at, SCATTER] += _exchanged(back, counts[at], everyone, hosts)[:, ::-1]
            kept[at, GATHER] += counts[at] * out
            kept[at, SCATTER] += counts[at] * back
        launched = np.ones(chunks, np.int64)
        for chunk, planned in enumerate(self.lane.chunks):
            if planned.slots:  # every rank sends on what it gets, in a ring
                total = sum(planned.slots) * wire
                sent = total * (len(peers) - 1) // len(peers)
                here, away = Ring(1, sent).by_link(len(peers), len(np.unique(hosts)))
                moved[chunk, SCATTER] = np.array([here, away]).round()[:, None]
                kept[chunk, SCATTER] = total - 2 * sent  # received in place
                if len(set(planned.slots)) > 1:  # broadcasts
                    launched[chunk] = np.count_nonzero(planned.slots)
            if planned.moments_slot:  # mean squares in fp32, by an all-gather of their own
                total = 4 * planned.moments_slot * len(peers)
                sent = total * (len(peers) - 1) // len(peers)
                here, away = Ring(1, sent).by_link(len(peers), len(np.unique(hosts)))
                moved[chunk, SCATTER] += np.array([here, away]).round().astype(np.int64)[:, None]
                kept[chunk, SCATTER] += total - 2 * sent
                launched[chunk] += 1
        return LaneCosts(
            peers, self.flops, moved, kept, launched, self.lane.in_flight, self.first_used
        )


def _exchanged(held: Ints, counts: Ints, replica: Ints, hosts: Ints) -> Ints:
    """Bytes that go to the owners of some units from all who have the same replica.

    Args:
        held: bytes that each peer has of a unit, (peers,).
        counts: units that each peer owns, (chunks, peers).
        replica: that each peer has, (peers,).
        hosts: of the peers, (peers,).

    Returns:
        (chunks, directions, links, peers)
    """
    result = np.zeros((len(counts), 2, 2, len(held)), np.int64)
    in_replica = _sums(held, counts, replica)
    in_host = _sums(held, counts, replica * (hosts.max() + 1) + hosts)
    kept = np.stack((held * counts, counts * held), 1)  # (chunks, directions, peers)
    result[:, :, HOST] = in_host - kept
    result[:, :, NETWORK] = in_replica - in_host
    return result


def _sums(held: Ints, counts: Ints, label: Ints) -> Ints:
    """Sent and received among peers of one label, own pieces included, (chunks, 2, peers)."""
    _, place = np.unique(label, return_inverse=True)
    order = np.argsort(place, kind="stable")
    starts = np.searchsorted(place[order], np.arange(place.max() + 1))
    owned = np.add.reduceat(counts[:, order], starts, axis=1)  # (chunks, labels)
    there = np.add.reduceat(held[order], starts)  # (labels,)
    return np.stack((held * owned[:, place], counts * there[place]), 1)
