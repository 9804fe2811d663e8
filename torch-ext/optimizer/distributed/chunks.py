"""What travels in a chunk and where it lies in the buffers, as one rank sees it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Optional

import torch

from . import layout
from .layout import Region
from .units import Entry, Unit

# What element-wise arithmetic is done on at once, in bytes of a wide copy.
RUN_BYTES = {"cpu": 256 << 10}
DEFAULT_RUN_BYTES = 64 << 20

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
    travels: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.units), *layout.shape_of(self.box))

    @property
    def numel(self) -> int:
        return len(self.units) * layout.numel(self.box)


# What element-wise arithmetic is done on at once: bundles of one group and, of weights, one scale.
Run = tuple[Bundle, ...]


@dataclass(frozen=True)
class Part:
    """One peer's parts of the units of a batch, as the owner keeps them.

    Args:
        peer: number of the peer in its lane.
        momentum: the part of each unit that it sends, in coordinates of the unit's box.
        weights: the part of each unit that it gets back.
        gathered: where the former begin in what came from the peers, or, where the peer is the
            owner itself, in its own buffer of momentum.
        returned: the same for what goes back.
    """

    peer: int
    momentum: Region
    weights: Region
    gathered: int
    returned: int


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
        momentum, weights: this rank's parts of all batches, in the order of those buffers, with as
            much in one run as element-wise arithmetic is best done on at once.
        batches: what this rank owns.
        gather, scatter: the traffic.
        kept, kept_back: elements at the beginning of the two buffers that stay on this rank.
        in_place: updates take the places of the momentum that they are made of.
        slot: where all peers get all updates, the elements that each gives to all others, padded
            to be equal: the buffer of updates has one for each, in their order. 0 where not.
    """

    momentum: tuple[Run, ...]
    weights: tuple[Run, ...]
    batches: tuple[Batch, ...]
    gather: Traffic
    scatter: Traffic
    kept: int
    kept_back: int
    in_place: bool
    slot: int = 0

    @property
    def read(self) -> Iterator[Bundle]:
        """The bundles whose gradients are read: of all units, once each."""
        return itertools.chain.from_iterable(self.momentum)


@dataclass(frozen=True)
class _Mine:
    """Units of a batch that this rank owns, and its own parts of them, for `ChunkBuilder`."""

    units: tuple[Unit, ...]
    momentum: Region
    weights: Region
    start: int
    start_back: int


class ChunkBuilder:
    """Lays chunks of one lane out in the buffers of this rank."""

    def __init__(
        self,
        entries: Sequence[Entry],
        peers: tuple[int, ...],
        me: int,
        wire: torch.dtype,
        wide: torch.dtype,
        device: torch.device,
        everywhere: bool,
        matrices_per_batch: Callable[[Unit], int],
    ):
        self.entries = entries
        self.peers = peers
        self.me = me
        self.everywhere = everywhere
        self.matrices_per_batch = matrices_per_batch
        self.run_numel = RUN_BYTES.get(device.type, DEFAULT_RUN_BYTES) // wide.itemsize
        self.aligned_numel = ALIGNMENT // wire.itemsize
        self.slots = max(1, 4 // wire.itemsize)  # elements that hold a number in fp32
        self.exponents = int(wire == torch.float16 and len(peers) > 1)

    def chunk(self, owned: dict[int, list[Unit]]) -> Chunk:
        """The chunk in which each owner, by its number, orthogonalizes these units."""
        peers = range(len(self.peers))
        if self.everywhere:
            owned = {self.me: [unit for units in owned.values() for unit in units]}
        momentum: list[Bundle] = []
        weights: list[Bundle] = []
        mine: list[_Mine] = []
        out, back = [0] * len(peers), [0] * len(peers)
        slot = self._slot(owned)
        place = place_back = aside = 0
        for owner in sorted(owned, key=lambda peer: (peer != self.me, peer)):
            place_back = owner * slot if slot else place_back
            begin, begin_back = place, place_back
            for units in self._batches(owned[owner]):
                sends = self._serves(units[0], self.me, owner)
                box, box_back = self._momentum(units[0], self.me), self._weights(units[0], self.me)
                if len(peers) == 1:
                    place, place_back = self._aligned(place), self._aligned(place_back)
                if owner == self.me:
                    mine.append(_Mine(units, box, box_back, place, place_back))
                momentum += self._read(units, box, place if sends else aside, sends)
                weights += self._written(units, box_back, place_back)
                if sends:
                    place += self._size_out(units, box)
                else:
                    aside += self._size_out(units, box)
                place_back += self._size_back(units, box_back)
            out[owner], back[owner] = place - begin, place_back - begin_back
        kept, kept_back = out[self.me], back[self.me]
        out = [kept if self.everywhere else size for size in out]
        out[self.me] = back[self.me] = 0
        parts, came, returned = self._parts(mine)
        if slot:
            kept_back = slot
            returned = back = [slot * (peer != self.me) for peer in peers]
        return Chunk(
            self._runs(momentum, self._group),
            self._runs(weights, self._rate),
            tuple(Batch(own.units, tuple(p)) for own, p in zip(mine, parts)),
            Traffic(tuple(out), tuple(came)),
            Traffic(tuple(returned), tuple(back)),
            kept,
            kept_back,
            all(
                self.entries[u.entry].goes_back_in_place for units in owned.values() for u in units
            ),
            slot,
        )

    def _slot(self, owned: dict[int, list[Unit]]) -> int:
        """What each peer gives to all, where all of them get everything; 0 for an all-to-all.

        Gathering sends nothing twice over the same link, but pads. That has to be little: with the
        way there, at most 2 + 2/P bytes per element in bf16 on P ranks.
        """
        entries = {self.entries[unit.entry] for units in owned.values() for unit in units}
        count, rank = len(self.peers), self.peers[self.me]
        if count == 1 or self.everywhere or any(e.copies(rank) < count for e in entries):
            return 0
        sizes = [
            sum(layout.numel(unit.box) + self._moments(unit) for unit in units)
            for units in owned.values()
        ]
        slot, together = max(sizes), sum(sizes)
        within_bound = (count - 1) * slot <= together * (1 + 1 / count - (count - 1) / count**2)
        return slot if within_bound and count * slot <= MOST_PADDED * together else 0

    def _read(
        self, units: tuple[Unit, ...], box: Region, start: int, travels: bool
    ) -> Iterator[Bundle]:
        """This rank's momentum of a batch, of which the first begins at ``start``."""
        return self._bundles(units, box, Entry.momentum_region, start, self.exponents, travels)

    def _written(self, units: tuple[Unit, ...], box: Region, start: int) -> Iterator[Bundle]:
        """This rank's weights of a batch, whose updates begin at ``start``."""
        along = self._moments(units[0]) or self._places(units[0])
        return self._bundles(units, box, Entry.region, start, along)

    def _bundles(
        self,
        units: tuple[Unit, ...],
        box: Region,
        held: Callable[[Entry, int], Region],
        start: int,
        along: int,
        travels: bool = True,
    ) -> Iterator[Bundle]:
        size, me = layout.numel(box), self.peers[self.me]
        step = max(1, self.run_numel // size) if size else len(units)
        for first in range(0, len(units), step):
            some = units[first : first + step]
            yield Bundle(
                some,
                box,
                tuple(_index(unit, box, held(self.entries[unit.entry], me)) for unit in some),
                start + first * size,
                start + len(units) * size + first * along,
                travels,
            )

    def _runs(self, bundles: Iterable[Bundle], rate: Callable[[Unit], Hashable]) -> tuple[Run, ...]:
        """Bundles of one rate that lie one behind the other in one buffer, as many as fit."""
        runs: list[list[Bundle]] = []
        numel, last = 0, None  # of the last run
        for bundle in sorted(bundles, key=lambda bundle: (not bundle.travels, bundle.start)):
            kind = (bundle.travels, rate(bundle.units[0]))
            if kind != last or numel + bundle.numel > self.run_numel:
                runs.append([])
                numel, last = 0, kind
            runs[-1].append(bundle)
            numel += bundle.numel
        return tuple(map(tuple, runs))

    def _group(self, unit: Unit) -> int:
        return self.entries[unit.entry].group

    def _rate(self, unit: Unit) -> tuple[int, float]:
        """What weights of a unit are updated with: its group's hyperparameters, and a scale."""
        return self._group(unit), self.entries[unit.entry].scale(unit.rows)

    def _parts(self, mine: Sequence[_Mine]) -> tuple[list[list[Part]], list[int], list[int]]:
        """Every peer's parts of the batches owned here, and how much goes to and fro."""
        parts: list[list[Part]] = [[] for _ in mine]
        came, returned = [0] * len(self.peers), [0] * len(self.peers)
        place = place_back = 0
        for peer in range(len(self.peers)):
            begin, begin_back = place, place_back
            for own, of_batch in zip(mine, parts):
                if peer == self.me:
                    of_batch.append(
                        Part(peer, own.momentum, own.weights, own.start, own.start_back)
                    )
                    continue
                box, box_back = NOTHING, self._weights(own.units[0], peer)
                if self._serves(own.units[0], peer, self.me):
                    box = self._momentum(own.units[0], peer)
                of_batch.append(Part(peer, box, box_back, place, place_back))
                place += self._size_out(own.units, box)
                if not self.everywhere:
                    place_back += self._size_back(own.units, box_back)
            came[peer], returned[peer] = place - begin, place_back - begin_back
        return parts, came, returned

    def _batches(self, units: Sequence[Unit]) -> list[tuple[Unit, ...]]:
        """Units that can be orthogonalized together, in batches of a limited size."""
        alike: dict[tuple, list[Unit]] = {}
        for unit in units:
            entry = self.entries[unit.entry]
            m = entry.matrices
            shape = layout.shape_of(unit.box)
            key: tuple = (entry.group, entry.dtype, entry.recipe, shape, m.row_dim, unit.rows)
            if len(self.peers) > 1:  # every peer's part must be the same of all
                key += (entry.sharding, m.shape[m.row_dim :], unit.box[m.row_dim])
                key += (entry.momentum, entry.momentum_part(unit.box))
            alike.setdefault(key, []).append(unit)
        batches = []
        for group in alike.values():
            size = max(1, self.matrices_per_batch(group[0]) // self._count(group[0]))
            batches += [tuple(group[at : at + size]) for at in range(0, len(group), size)]
        return batches

    def _serves(self, unit: Unit, peer: int, owner: int) -> bool:
        return self.entries[unit.entry].serves(self.peers[peer], self.peers[owner])

    def _momentum(self, unit: Unit, peer: int) -> Region:
        """The momentum that a peer holds of a unit, in coordinates of its box."""
        return self._part(unit, self.entries[unit.entry].momentum_region(self.peers[peer]))

    def _weights(self, unit: Unit, peer: int) -> Region:
        """The weights that a peer holds of a unit, in coordinates of its box."""
        return self._part(unit, self.entries[unit.entry].region(self.peers[peer]))

    def _part(self, unit: Unit, held: Region) -> Region:
        return layout.relative(layout.intersect(unit.box, held), unit.box)

    def _aligned(self, place: int) -> int:
        return -(-place // self.aligned_numel) * self.aligned_numel

    def _size_out(self, units: Sequence[Unit], box: Region) -> int:
        size = layout.numel(box)
        return len(units) * (size + self.exponents) if size else 0

    def _size_back(self, units: Sequence[Unit], box: Region) -> int:
        size = layout.numel(box)
        return len(units) * (
            size + self._moments(units[0]) + (self._places(units[0]) if size else 0)
        )

    def _moments(self, unit: Unit) -> int:
        """Elements that the mean squares of a unit's update take on the wire."""
        entry = self.entries[unit.entry]
        if not entry.second_moment:
            return 0
        return self._count(unit) * max(unit.rows, entry.matrices.cols) * self.slots

    def _places(self, unit: Unit) -> int:
        """Elements that an exponent leaves free, on the way back, where that is in place."""
        return self.exponents * self.entries[unit.entry].goes_back_in_place

    def _count(self, unit: Unit) -> int:
        return self.entries[unit.entry].matrices.count(unit.box, unit.rows)


def _index(unit: Unit, part: Region, held: Region) -> Optional[tuple[slice, ...]]:
    """Where a part of a unit lies in the local tensor, which holds that region."""
    stored = tuple((a + o, b + o) for (a, b), (o, _) in zip(part, unit.box))
    if stored == held:
        return None
    return layout.slices(layout.relative(stored, held))
