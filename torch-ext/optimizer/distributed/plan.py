"""What one step does, as data: who orthogonalizes which matrix, what travels where, in which order.

A plan is made for one rank, from facts that it shares with the others; no process group is needed.
The ranks that hold parts of a matrix gather it on one of them, its owner, and get their parts of
the update back. Every rank computes the same owners and chunks, and only its own pieces.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Optional

import torch

from ..core import Blocks, Matrices
from ..newton_schulz import Triple, flops
from . import layout
from .layout import Interval, Region, Sharding

# Matrices orthogonalized as one batch, in bytes of their wide copy: a few of them fill an
# accelerator; on CPUs a batch that stays in the cache is faster than a large one.
BATCH_BYTES = {"cpu": 2 << 20}
DEFAULT_BATCH_BYTES = 256 << 20

# The same as a share of what a rank holds, where that is less (but not less than a chunk).
BATCH_SHARE = 0.125

# What element-wise arithmetic is done on at once, in bytes of a wide copy.
RUN_BYTES = {"cpu": 256 << 10}
DEFAULT_RUN_BYTES = 64 << 20

# What a rank sends in one chunk, in bytes: the least that makes a collective worth its latency, and
# the most that helps. Between them, there are so many chunks.
CHUNK_BYTES = {"cpu": (512 << 10, 2 << 20)}
DEFAULT_CHUNK_BYTES = (4 << 20, 64 << 20)
CHUNKS = 6

# Staging of the chunks in flight, as a multiple of the local parameters' bytes.
STAGING = 0.75


@dataclass(frozen=True)
class Entry:
    """One Muon parameter as a plan sees it.

    Args:
        name: its FQN, or its place in the groups where it has no name.
        group: number of its parameter group.
        index: its place in that group.
        matrices: how the whole tensor is read as matrices.
        sharding: how it lies on a mesh; None where this rank holds everything.
        dtype: of the parameter.
        device: of its local tensor.
        wire: format in which momentum and update travel.
        triples: polynomials of its orthogonalization, which set its cost.
        second_moment: whether owners send the mean squares of the update along.
    """

    name: str
    group: int
    index: int
    matrices: Matrices
    sharding: Optional[Sharding]
    dtype: torch.dtype
    device: torch.device
    wire: torch.dtype
    triples: tuple[Triple, ...]
    second_moment: bool = False

    @property
    def wide(self) -> torch.dtype:
        """What element-wise arithmetic is done in."""
        return torch.promote_types(self.dtype, torch.float32)

    def region(self, rank: int) -> Region:
        """The part of the stored tensor that a rank holds."""
        shape = self.matrices.shape
        return layout.whole(shape) if self.sharding is None else self.sharding.region(shape, rank)

    def peers(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold parts of the matrices of which ``rank`` does; ascending."""
        if self.sharding is None:
            return (rank,)
        dims = range(self.matrices.row_dim, len(self.matrices.shape))
        return self.sharding.peers(rank, dims)

    def cost(self, rows: int) -> int:
        """FLOPs for one matrix of so many rows."""
        return flops(rows, self.matrices.cols, self.triples)


@dataclass(frozen=True)
class Unit:
    """Matrices of one parameter that have one owner: a box of the stored tensor.

    Args:
        entry: number of its entry.
        box: experts, rows, and all columns; rows are one or several blocks of ``rows``.
        rows: of each matrix.
    """

    entry: int
    box: Region
    rows: int


@dataclass(frozen=True)
class Bundle:
    """This rank's parts of some units of one batch, whoever owns it; all of one shape.

    Args:
        units: consecutive ones of the batch.
        box: the part of each, in coordinates of the unit's box.
        indices: slices that take the part out of the parameter's local tensor; None takes it all.
        sent: where the parts begin in the buffer of momentum on its way to the owners.
        received: where they begin in the buffer of updates that come back.
        exponents: where their exponents are in the former.
        moments: where their mean squares are in the latter.
    """

    units: tuple[Unit, ...]
    box: Region
    indices: tuple[Optional[tuple[slice, ...]], ...]
    sent: int
    received: int
    exponents: int
    moments: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.units), *layout.shape_of(self.box))

    @property
    def numel(self) -> int:
        return len(self.units) * layout.numel(self.box)


@dataclass(frozen=True)
class Part:
    """One peer's parts of the units of a batch, as the owner keeps them.

    Args:
        peer: number of the peer in its lane.
        box: the part of each unit, in coordinates of the unit's box.
        gathered: where they begin in what came from the peers, or, where the peer is the owner
            itself, in its own buffer of momentum.
        returned: the same for what goes back.
    """

    peer: int
    box: Region
    gathered: int
    returned: int

    @property
    def numel(self) -> int:
        return layout.numel(self.box)  # of one unit


@dataclass(frozen=True)
class Batch:
    """Units that are orthogonalized together: of one group, of one shape, laid out alike."""

    units: tuple[Unit, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Traffic:
    """Elements to and from each peer in one direction; none for this rank itself."""

    sent: tuple[int, ...]
    received: tuple[int, ...]


@dataclass(frozen=True)
class Chunk:
    """What is gathered, orthogonalized and given back together, as one rank sees it.

    The buffers of momentum sent and of updates received begin with what this rank owns itself;
    then comes what is for, or from, each peer. Between two ranks travel, batch by batch, the parts
    of the units one behind the other, then what goes along: an exponent for each unit on the way
    there (with an fp16 wire), mean squares of the update on the way back (with a second moment).

    Args:
        runs: this rank's parts of all batches, in the order of those buffers, with as much in one
            run as element-wise arithmetic is best done on at once.
        batches: what this rank owns.
        gather, scatter: the traffic.
        kept, kept_back: elements at the beginning of the two buffers that stay on this rank.
    """

    runs: tuple[tuple[Bundle, ...], ...]
    batches: tuple[Batch, ...]
    gather: Traffic
    scatter: Traffic
    kept: int
    kept_back: int

    @property
    def bundles(self) -> Iterator[Bundle]:
        return itertools.chain.from_iterable(self.runs)


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
        owners: the units with the number of their owner, in order, for summaries and comparison.
        names: of the entries, each once.
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
    owners: tuple[tuple[Unit, Optional[int]], ...]
    names: tuple[str, ...]
    digest: str

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
    """

    rank: int
    entries: tuple[Entry, ...]
    lanes: tuple[Lane, ...]
    alone: tuple[Lane, ...]

    @functools.cached_property
    def reads(self) -> Counter[int]:
        """How many units each entry's gradient is read for on this rank."""
        return Counter(
            unit.entry
            for lane in (*self.lanes, *self.alone)
            for chunk in lane.chunks
            for bundle in chunk.bundles
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
    for number, entry in enumerate(entries):
        planner.add(number, entry)
    lanes = planner.lanes()
    return Plan(
        rank,
        tuple(entries),
        tuple(lane for lane in lanes if len(lane.peers) > 1),
        tuple(lane for lane in lanes if len(lane.peers) == 1),
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
            self.runs[key] = list(_runs(m.blocks, held))
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
        builder = _ChunkBuilder(self, draft, everywhere)
        digest = hashlib.sha256()
        for owned in rounds:
            listed = [(peer, unit.box) for peer, units in owned.items() for unit in units]
            digest.update(repr(listed).encode())
        owner_of = {id(unit): owner for unit, owner in zip(draft.units, owners)}
        return Lane(
            draft.peers,
            draft.peers.index(self.rank),
            everywhere,
            draft.wire,
            draft.wide,
            draft.device,
            tuple(builder.chunk(owned) for owned in rounds),
            self._in_flight(draft, rounds, everywhere),
            tuple(
                (unit, None if everywhere else owner_of[id(unit)])
                for owned in rounds
                for units in owned.values()
                for unit in units
            ),
            tuple(dict.fromkeys(self.entries[unit.entry].name for unit in draft.units)),
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
        """How many chunks fit into the bound on staging; the same number on all peers."""
        peers, size = len(draft.peers), draft.wire.itemsize
        staged = []
        for owned in rounds:
            elements = [sum(layout.numel(u.box) for u in units) for units in owned.values()]
            staged.append(size * (max(elements) + sum(elements) // (1 if everywhere else peers)))
        room = max((self._bytes(unit) for unit in draft.units), default=0)
        room += int(STAGING * sum(map(self._bytes, draft.units))) // peers
        depth = 1
        while depth <= min(self.warmup_step, len(staged) - 1):
            windows = (sum(staged[at : at + depth + 1]) for at in range(len(staged) - depth))
            if max(windows) > room:
                break
            depth += 1
        return depth

    def _bytes(self, unit: Unit) -> int:
        return layout.numel(unit.box) * self.entries[unit.entry].dtype.itemsize


class _ChunkBuilder:
    """Lays chunks of one lane out in the buffers of this rank."""

    def __init__(self, planner: _Planner, draft: _Draft, everywhere: bool):
        self.planner = planner
        self.entries = planner.entries
        self.peers = draft.peers
        self.me = draft.peers.index(planner.rank)
        self.everywhere = everywhere
        kind = draft.device.type
        self.run_numel = RUN_BYTES.get(kind, DEFAULT_RUN_BYTES) // draft.wide.itemsize
        self.batch_bytes = None  # the default
        if len(draft.peers) > 1:
            local = sum(layout.numel(unit.box) for unit in draft.units) // len(draft.peers)
            least, _ = CHUNK_BYTES.get(kind, DEFAULT_CHUNK_BYTES)
            self.batch_bytes = max(least, int(BATCH_SHARE * local * draft.wide.itemsize))
        self.slots = max(1, 4 // draft.wire.itemsize)  # elements that hold a number in fp32
        self.exponents = int(draft.wire == torch.float16 and len(draft.peers) > 1)

    def chunk(self, owned: dict[int, list[Unit]]) -> Chunk:
        """The chunk in which each owner, by its number, orthogonalizes these units."""
        peers = range(len(self.peers))
        if self.everywhere:
            owned = {self.me: [unit for units in owned.values() for unit in units]}
        runs: list[list[Bundle]] = []
        mine: list[tuple[tuple[Unit, ...], Region, int, int]] = []
        out, back = [0] * len(peers), [0] * len(peers)
        place = place_back = 0
        for owner in sorted(owned, key=lambda peer: (peer != self.me, peer)):
            begin, begin_back = place, place_back
            for units in self._batches(owned[owner]):
                box = self._part(units[0], self.me)
                if owner == self.me:
                    mine.append((units, box, place, place_back))
                for bundle in self._bundles(units, box, place, place_back):
                    if runs and sum(b.numel for b in runs[-1]) + bundle.numel <= self.run_numel:
                        runs[-1].append(bundle)
                    else:
                        runs.append([bundle])
                place += self._size_out(units, box)
                place_back += self._size_back(units, box)
            out[owner], back[owner] = place - begin, place_back - begin_back
        kept, kept_back = out[self.me], back[self.me]
        out = [kept if self.everywhere else size for size in out]
        out[self.me] = back[self.me] = 0
        parts, came, returned = self._parts(mine)
        return Chunk(
            tuple(map(tuple, runs)),
            tuple(Batch(units, tuple(p)) for (units, *_), p in zip(mine, parts)),
            Traffic(tuple(out), tuple(came)),
            Traffic(tuple(returned), tuple(back)),
            kept,
            kept_back,
        )

    def _bundles(
        self, units: tuple[Unit, ...], box: Region, sent: int, received: int
    ) -> Iterator[Bundle]:
        """This rank's parts of a batch, of which the first begins at ``sent`` and ``received``."""
        size = layout.numel(box)
        exponents, moments = sent + len(units) * size, received + len(units) * size
        step = max(1, self.run_numel // size) if size else len(units)
        for first in range(0, len(units), step):
            some = units[first : first + step]
            yield Bundle(
                some,
                box,
                tuple(self._index(unit, box) for unit in some),
                sent + first * size,
                received + first * size,
                exponents + first * self.exponents,
                moments + first * self._moments(units[0]),
            )

    def _parts(
        self, mine: Sequence[tuple[tuple[Unit, ...], Region, int, int]]
    ) -> tuple[list[list[Part]], list[int], list[int]]:
        """Every peer's parts of the batches owned here, and how much goes to and fro."""
        parts: list[list[Part]] = [[] for _ in mine]
        came, returned = [0] * len(self.peers), [0] * len(self.peers)
        place = place_back = 0
        for peer in range(len(self.peers)):
            begin, begin_back = place, place_back
            for (units, own, sent, received), of_batch in zip(mine, parts):
                if peer == self.me:
                    of_batch.append(Part(peer, own, sent, received))
                    continue
                box = self._part(units[0], peer)
                of_batch.append(Part(peer, box, place, place_back))
                place += self._size_out(units, box)
                if not self.everywhere:
                    place_back += self._size_back(units, box)
            came[peer], returned[peer] = place - begin, place_back - begin_back
        return parts, came, returned

    def _batches(self, units: Sequence[Unit]) -> list[tuple[Unit, ...]]:
        """Units that can be orthogonalized together, in batches of a limited size."""
        alike: dict[tuple, list[Unit]] = {}
        for unit in units:
            entry = self.entries[unit.entry]
            m = entry.matrices
            shape = layout.shape_of(unit.box)
            key: tuple = (entry.group, entry.dtype, entry.triples, shape, m.row_dim, unit.rows)
            if len(self.peers) > 1:  # every peer's part must be the same of all
                key += (entry.sharding, m.shape[m.row_dim :], unit.box[m.row_dim])
            alike.setdefault(key, []).append(unit)
        batches = []
        for group in alike.values():
            count = self.planner.count(group[0])
            size = max(1, self.planner.matrices_per_batch(group[0], self.batch_bytes) // count)
            batches += [tuple(group[at : at + size]) for at in range(0, len(group), size)]
        return batches

    def _part(self, unit: Unit, peer: int) -> Region:
        """What a peer holds of a unit, in coordinates of its box."""
        entry = self.entries[unit.entry]
        row_dim = entry.matrices.row_dim
        held = entry.region(self.peers[peer])[row_dim:]
        experts = layout.whole(layout.shape_of(unit.box[:row_dim]))
        rest = layout.intersect(unit.box[row_dim:], held)
        return experts + layout.relative(rest, unit.box[row_dim:])

    def _index(self, unit: Unit, part: Region) -> Optional[tuple[slice, ...]]:
        """Where a part of a unit lies in the parameter's local tensor."""
        held = self.entries[unit.entry].region(self.peers[self.me])
        stored = tuple((a + o, b + o) for (a, b), (o, _) in zip(part, unit.box))
        if stored == held:
            return None
        return layout.slices(layout.relative(stored, held))

    def _size_out(self, units: Sequence[Unit], box: Region) -> int:
        size = layout.numel(box)
        return len(units) * (size + self.exponents) if size else 0

    def _size_back(self, units: Sequence[Unit], box: Region) -> int:
        return len(units) * (layout.numel(box) + self._moments(units[0]))

    def _moments(self, unit: Unit) -> int:
        """Elements that the mean squares of a unit's update take on the wire."""
        entry = self.entries[unit.entry]
        if not entry.second_moment:
            return 0
        return self.planner.count(unit) * max(unit.rows, entry.matrices.cols) * self.slots


def _runs(
    blocks: Sequence[Blocks], held: Sequence[Region]
) -> Iterator[tuple[Interval, int, tuple[int, ...]]]:
    """Rows of units, rows of each of their matrices, and the numbers of the peers that hold some.

    Args:
        blocks: how the rows of a stored matrix fall into matrices.
        held: the rows and columns that each peer has of it.
    """
    for run in blocks:
        of_run: list[tuple[Interval, int, tuple[int, ...]]] = []
        for start in range(run.start, run.stop, run.rows):
            rows = (start, start + run.rows)
            holders = tuple(
                peer
                for peer, region in enumerate(held)
                if layout.numel((layout.overlap(region[0], rows), *region[1:]))
            )
            if len(holders) == 1 and of_run and of_run[-1][2] == holders:
                rows = (of_run.pop()[0][0], rows[1])
            of_run.append((rows, run.rows, holders))
        yield from of_run
