"""What travels in a chunk and where it lies in the buffers, as one rank sees it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Optional

import torch

from . import layout
from .layout import Region
from .units import Entry, Unit

# What element-wise arithmetic is done on at once, in bytes of a wide copy.
RUN_BYTES = {"cpu": 256 << 10}
DEFAULT_RUN_BYTES = 64 << 20


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
        self.slots = max(1, 4 // wire.itemsize)  # elements that hold a number in fp32
        self.exponents = int(wire == torch.float16 and len(peers) > 1)

    def chunk(self, owned: dict[int, list[Unit]]) -> Chunk:
        """The chunk in which each owner, by its number, orthogonalizes these units."""
        peers = range(len(self.peers))
        if self.everywhere:
            owned = {self.me: [unit for units in owned.values() for unit in units]}
        runs: list[list[Bundle]] = []
        of_run = 0  # elements in the last one
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
                    if not runs or of_run + bundle.numel > self.run_numel:
                        runs.append([])
                        of_run = 0
                    runs[-1].append(bundle)
                    of_run += bundle.numel
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
            size = max(1, self.matrices_per_batch(group[0]) // self._count(group[0]))
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
        return self._count(unit) * max(unit.rows, entry.matrices.cols) * self.slots

    def _count(self, unit: Unit) -> int:
        return self.entries[unit.entry].matrices.count(unit.box, unit.rows)
