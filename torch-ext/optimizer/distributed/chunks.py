"""What travels in a chunk and where it lies in the buffers, as one rank sees it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Optional

from . import regions
from .regions import Region
from .staging import DEFAULT_SPAN_BYTES, SPAN_BYTES, Staging, matrices_per_batch
from .units import Entry, Unit

# The most that slots of an all-gather may take, in bytes of what they hold.
MOST_PADDED = 1.25

# Where a matrix lies in memory decides which of their paths CPU kernels take, and so its last bits:
# one that is whole on its rank begins a cache line, as one that was gathered does.
ALIGNMENT = 64

NOTHING: Region = ((0, 0),)


@dataclass(frozen=True)
class Bundle:
    """This rank's parts of some units of one batch, whoever owns it; all of one shape.

    Args:
        units: consecutive ones of the batch.
        box: the part of each, in coordinates of the unit's box.
        indices: slices that take the part out of the local tensor; None takes it all.
        start: where the parts begin in the chunk's buffer.
        along: where what goes along with them begins there: exponents, or mean squares.
        travels: whether there is such a buffer: not for momentum that a replica sends.
    """

    units: tuple[Unit, ...]
    box: Region
    indices: tuple[Optional[tuple[slice, ...]], ...]
    start: int
    along: int
    travels: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.units), *regions.shape_of(self.box))

    @property
    def numel(self) -> int:
        return len(self.units) * regions.numel(self.box)


# What element-wise arithmetic is done on at once: bundles of one group and, of weights, one scale.
Span = tuple[Bundle, ...]


class PeerPart(NamedTuple):
    """One peer's parts of the units of a batch in one direction, as the owner keeps them.

    Args:
        peer: number of the peer in its lane.
        box: the part of each unit, in coordinates of the unit's box.
        start: where they begin in what comes from the peers, or goes back to them; where the peer
            is the owner itself, in its own buffer.
    """

    peer: int
    box: Region
    start: int


@dataclass(frozen=True)
class Batch:
    """Units that are orthogonalized together: of one group, of one shape, laid out alike.

    Args:
        units: of the batch.
        gathered: what each peer sends of their momentum.
        returned: what each peer gets back of their updates; where none gets anything alone, what
            this rank does.
    """

    units: tuple[Unit, ...]
    gathered: tuple[PeerPart, ...]
    returned: tuple[PeerPart, ...]


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
        momentum, weights: this rank's parts of all batches, in the order of those buffers, with as
            much in one span as element-wise arithmetic is best done on at once.
        batches: what this rank owns.
        gather, scatter: the traffic.
        kept, kept_back: elements at the beginning of the two buffers that stay on this rank.
        in_place: updates take the places of the momentum that they are made of.
        slot: where all peers get all updates, the elements that each gives to all others, padded
            to be equal: the buffer of updates has one for each, in their order. 0 where not.
    """

    momentum: tuple[Span, ...]
    weights: tuple[Span, ...]
    batches: tuple[Batch, ...]
    gather: Traffic
    scatter: Traffic
    kept: int
    kept_back: int
    in_place: bool
    slot: int


class _Way(NamedTuple):
    """One direction of a chunk: where this rank's parts and those of its batches lie.

    Args:
        spans: this rank's parts.
        parts: every peer's parts of each batch owned here.
        of_owners: elements that this rank's parts take, by the owner.
        of_peers: elements that parts of batches owned here take, by the peer.
    """

    spans: tuple[Span, ...]
    parts: list[tuple[PeerPart, ...]]
    of_owners: list[int]
    of_peers: list[int]


class ChunkBuilder:
    """Lays chunks of one lane out in the buffers of this rank."""

    def __init__(self, staging: Staging):
        self.staging = staging
        self.entries = staging.entries
        self.channel = channel = staging.channel
        span_bytes = SPAN_BYTES.get(channel.device.type, DEFAULT_SPAN_BYTES)
        self.span_numel = span_bytes // channel.opmath.itemsize

    def chunk(self, owned: Mapping[int, Sequence[Unit]]) -> Chunk:
        """The chunk in which each owner, by its number, orthogonalizes these units."""
        me, peers = self.channel.me, range(len(self.channel.peers))
        if self.channel.everywhere:
            owned = {me: [unit for units in owned.values() for unit in units]}
        numbers = {unit.entry for units in owned.values() for unit in units}
        entries = [self.entries[number] for number in numbers]
        slot = self._slot(owned, entries)
        owners = sorted(owned, key=lambda peer: (peer != me, peer))
        batches = {owner: self._batches(owned[owner]) for owner in owners}
        out, back = self._way(batches), self._way(batches, slot, back=True)
        kept, kept_back = out.of_owners[me], back.of_owners[me]
        sent, received = out.of_owners, back.of_owners
        if self.channel.everywhere:
            sent = [kept for _ in peers]
        sent[me] = received[me] = 0
        returned = back.of_peers
        if slot:
            kept_back = slot
            returned = received = [slot * (peer != me) for peer in peers]
        return Chunk(
            out.spans,
            back.spans,
            tuple(map(Batch, batches.get(me, ()), out.parts, back.parts)),
            Traffic(tuple(sent), tuple(out.of_peers)),
            Traffic(tuple(returned), tuple(received)),
            kept,
            kept_back,
            all(entry.goes_back_in_place for entry in entries),
            slot,
        )

    def _slot(self, owned: Mapping[int, Sequence[Unit]], entries: Sequence[Entry]) -> int:
        """What each peer gives to all, where all of them get everything; 0 for an all-to-all.

        Gathering sends nothing twice over the same link, but pads. That has to be little: with the
        way there, at most 2 + 2/P bytes per element in bf16 on P ranks.
        """
        count, rank = len(self.channel.peers), self.channel.rank
        if count == 1 or self.channel.everywhere or any(e.copies(rank) < count for e in entries):
            return 0
        sizes = [
            sum(self._size([unit], unit.box, back=True) for unit in units)
            for units in owned.values()
        ]
        slot, together = max(sizes), sum(sizes)
        within_bound = (count - 1) * slot <= together * (1 + 1 / count - (count - 1) / count**2)
        return slot if within_bound and count * slot <= MOST_PADDED * together else 0

    def _batches(self, units: Sequence[Unit]) -> list[tuple[Unit, ...]]:
        """Units that can be orthogonalized together, in batches of a limited size."""
        alike: dict[tuple, list[Unit]] = {}
        for unit in units:
            entry = self.entries[unit.entry]
            m = entry.matrices
            shape = regions.shape_of(unit.box)
            key: tuple = (entry.group, entry.dtype, entry.recipe, shape, m.row_dim, unit.rows)
            if len(self.channel.peers) > 1:  # every peer's part must be the same of all
                key += (entry.sharding, m.shape[m.row_dim :], unit.box[m.row_dim])
                key += (entry.momentum, entry.momentum_part(unit.box))
            alike.setdefault(key, []).append(unit)
        batches = []
        for group in alike.values():
            unit, entry = group[0], self.entries[group[0].entry]
            most = matrices_per_batch(
                entry, unit.rows, self.staging.chunk_size, self.staging.batch_bytes
            )
            size = max(1, most // entry.matrices.count(unit.box, unit.rows))
            batches += [tuple(group[at : at + size]) for at in range(0, len(group), size)]
        return batches

    def _way(
        self, batches: Mapping[int, Sequence[tuple[Unit, ...]]], slot: int = 0, back: bool = False
    ) -> _Way:
        """Lays one direction of a chunk out.

        Args:
            batches: of each owner; this rank comes first.
            slot: distance of the owners in the buffer of this rank; 0 puts them behind each other.
            back: updates go back, else momentum comes.
        """
        me, peers = self.channel.me, range(len(self.channel.peers))
        bundles: list[Bundle] = []
        parts: list[list[PeerPart]] = []  # of each batch owned here
        of_owners, of_peers = [0 for _ in peers], [0 for _ in peers]
        place = aside = 0
        for owner, of_owner in batches.items():
            begin = place = owner * slot if slot else place
            for units in of_owner:
                box = self._box(units[0], me, back)
                travels = back or self._serves(units[0], me, owner)
                if len(peers) == 1:
                    aligned = ALIGNMENT // self.channel.wire.itemsize
                    place = -(-place // aligned) * aligned
                if owner == me:
                    parts.append([PeerPart(me, box, place)])
                bundles += self._bundles(units, box, place if travels else aside, travels, back)
                if travels:
                    place += self._size(units, box, back)
                else:
                    aside += self._size(units, box, back)
            of_owners[owner] = place - begin
        place = 0
        others = [peer for peer in peers if peer != me]
        if back and (slot or self.channel.everywhere):  # nothing is for one of them alone
            others = []
        for peer in others:
            begin = place
            for units, of_batch in zip(batches.get(me, ()), parts):
                travels = back or self._serves(units[0], peer, me)
                box = self._box(units[0], peer, back) if travels else NOTHING
                of_batch.append(PeerPart(peer, box, place))
                place += self._size(units, box, back)
            of_peers[peer] = place - begin
        by_peer = [tuple(sorted(of_batch)) for of_batch in parts]
        return _Way(self._spans(bundles, back), by_peer, of_owners, of_peers)

    def _bundles(
        self, units: tuple[Unit, ...], box: Region, start: int, travels: bool, back: bool
    ) -> Iterator[Bundle]:
        """This rank's parts of a batch, of which the first begins at ``start``."""
        size, along = regions.numel(box), self._along(units[0], box, back)
        step = max(1, self.span_numel // size) if size else len(units)
        for first in range(0, len(units), step):
            some = units[first : first + step]
            yield Bundle(
                some,
                box,
                tuple(_index(unit, box, self._held(unit, self.channel.me, back)) for unit in some),
                start + first * size,
                start + len(units) * size + first * along,
                travels,
            )

    def _spans(self, bundles: Iterable[Bundle], back: bool) -> tuple[Span, ...]:
        """Bundles that are updated alike and lie one behind the other in a buffer, while they fit.

        Alike are those of one group and, of weights, one scale.
        """
        spans: list[list[Bundle]] = []
        numel, last = 0, None  # of the last span
        for bundle in sorted(bundles, key=lambda bundle: (not bundle.travels, bundle.start)):
            unit = bundle.units[0]
            entry = self.entries[unit.entry]
            kind = (bundle.travels, entry.group, entry.scale(unit.rows) if back else None)
            if kind != last or numel + bundle.numel > self.span_numel:
                spans.append([])
                numel, last = 0, kind
            spans[-1].append(bundle)
            numel += bundle.numel
        return tuple(map(tuple, spans))

    def _serves(self, unit: Unit, peer: int, owner: int) -> bool:
        return self.entries[unit.entry].serves(self.channel.peers[peer], self.channel.peers[owner])

    def _held(self, unit: Unit, peer: int, back: bool) -> Region:
        """What a peer holds of a unit's parameter: weights on the way back, else momentum."""
        entry, rank = self.entries[unit.entry], self.channel.peers[peer]
        return entry.region(rank) if back else entry.momentum_region(rank)

    def _box(self, unit: Unit, peer: int, back: bool) -> Region:
        """The same of a unit, in coordinates of its box."""
        held = self._held(unit, peer, back)
        return regions.relative(regions.intersect(unit.box, held), unit.box)

    def _along(self, unit: Unit, box: Region, back: bool) -> int:
        """Elements that go along with a part: an exponent, or mean squares of an update.

        Where updates go back in place, exponents leave their elements free.
        """
        entry = self.entries[unit.entry]
        if back and entry.second_moment:
            numbers = max(unit.rows, entry.matrices.cols) * max(1, 4 // self.channel.wire.itemsize)
            return entry.matrices.count(unit.box, unit.rows) * numbers
        if self.channel.scaled and regions.numel(box):
            return int(entry.goes_back_in_place or not back)
        return 0

    def _size(self, units: Sequence[Unit], box: Region, back: bool) -> int:
        """Elements that the parts of a batch take, with what goes along."""
        return len(units) * (regions.numel(box) + self._along(units[0], box, back))


def _index(unit: Unit, part: Region, held: Region) -> Optional[tuple[slice, ...]]:
    """Where a part of a unit lies in the local tensor, which holds that region."""
    stored = tuple((a + o, b + o) for (a, b), (o, _) in zip(part, unit.box))
    if stored == held:
        return None
    return regions.slices(regions.relative(stored, held))
