"""Lays out the matrices of a chunk, which travel together, in the buffers of each rank."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Optional

from torch import Tensor

from .. import regions
from ..matrices import LocalPart
from ..regions import Region
from .limits import Limits
from .units import Channel, Entry, Unit

# Maximum total size of an all-gather's slots, as a multiple of the elements they hold.
MOST_PADDED = 1.25

# The parts of a batch begin at multiples of this many bytes, so that kernels and NCCL load 16 bytes
# at once. CPU kernels choose a code path by address, and results differ in the last bits between
# paths. So local matrices start at a cache line, as gathered ones do.
ALIGNMENT_BYTES = 64
MOMENT_BYTES = 4  # a mean square in the side buffer is fp32


@dataclass(frozen=True)
class Share:
    """This rank's pieces of the units of one batch, which any rank may own.

    Args:
        units: the units of the batch.
        boxes: the pieces of each unit, in coordinates of the unit's box; equal for all units.
        local_parts: where the pieces lie in the local tensor, unit by unit.
        start: where the pieces begin in the chunk's buffer, in elements; unused if not staged.
        moments_start: where the mean squares of the units begin in the chunk's side buffer.
        is_staged: True if the pieces have a place in the chunk's buffer; False for momentum that
            another replica sends.
    """

    units: tuple[Unit, ...]
    boxes: tuple[Region, ...]
    local_parts: tuple[LocalPart, ...]
    start: int
    moments_start: int
    is_staged: bool

    @property
    def numel(self) -> int:
        """Elements of the pieces of one unit."""
        return sum(map(regions.numel, self.boxes))


class PeerPart(NamedTuple):
    """One peer's parts of the units of a batch in one direction, as the owner stores them.

    Args:
        peer: the peer that has the parts.
        boxes: the parts of each unit, in coordinates of the unit's box.
        start: where the parts begin in the buffer that the owner gathers into or scatters from. The
            owner's own part lies in the buffer of its shares instead.
    """

    peer: int
    boxes: tuple[Region, ...]
    start: int

    @property
    def numel(self) -> int:
        """Elements of the parts of one unit."""
        return sum(map(regions.numel, self.boxes))


class PeerRun(NamedTuple):
    """Parts of several peers that one strided view covers: equal in shape and equally spaced.

    The k-th peer's part lies k·step elements after the first peer's in the buffer, and k·shift
    indices after it in the unit.

    If a mesh cuts one dimension evenly, three runs cover all peers: this rank alone, the peers
    before it, and the peers after it.

    Args:
        first: the part of the first peer.
        peers: number of peers.
        step: elements from one peer's part to the next peer's in the owner's buffer.
        shift: indices from one peer's boxes to the next peer's in the unit, by dimension.
    """

    first: PeerPart
    peers: int = 1
    step: int = 0
    shift: tuple[int, ...] = ()

    def with_next(self, part: PeerPart) -> Optional[PeerRun]:
        """Returns the run with the next peer's part, or None if its shape or distance differs."""
        boxes = list(zip(self.first.boxes, part.boxes))
        shifts = {tuple(there[0] - here[0] for here, there in zip(*pair)) for pair in boxes}
        shapes = (tuple(map(regions.shape_of, each.boxes)) for each in (self.first, part))
        if len(shifts) > 1 or len(set(shapes)) > 1:
            return None
        distances = (part.start - self.first.start, *itertools.chain(*shifts))
        step, *shift = (distance // self.peers for distance in distances)
        longer = PeerRun(self.first, self.peers + 1, step, tuple(shift))
        is_same = self.peers == 1 or (step, longer.shift) == (self.step, self.shift)
        is_exact = all(distance % self.peers == 0 <= distance for distance in distances)
        return longer if is_same and is_exact else None

    def in_buffer(self, buffer: Tensor, count: int) -> list[Tensor]:
        """Views of each box of ``count`` units in the buffer, (count, peers, *shape of the box)."""
        views, start = [], buffer.storage_offset() + self.first.start
        for box in self.first.boxes:
            shape = regions.shape_of(box)
            of_box = (math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
            strides = (self.first.numel, self.step, *of_box)
            views.append(buffer.as_strided((count, self.peers, *shape), strides, start))
            start += regions.numel(box)
        return views

    def in_units(self, units: Tensor) -> list[Tensor]:
        """Views of the same boxes in ``units``, (count, *shape of a unit), in the same shapes."""
        views, (stride, *strides) = [], units.stride()
        step = sum(indices * of_dim for indices, of_dim in zip(self.shift, strides))
        for box in self.first.boxes:
            corner = sum(start * of_dim for (start, _), of_dim in zip(box, strides))
            shape = (len(units), self.peers, *regions.shape_of(box))
            start = units.storage_offset() + corner
            views.append(units.as_strided(shape, (stride, step, *strides), start))
        return views


@dataclass(frozen=True)
class Batch:
    """Units that are orthogonalized together: they have one group, one shape, and one layout.

    Args:
        units: the units.
        gathered: the momentum that each peer sends, this rank's part first.
        scattered: the updates that each peer receives, this rank's part first; only this rank's
            part if all peers receive the same.
        moments_start: where the mean squares of the updates begin in the chunk's side buffer.
    """

    units: tuple[Unit, ...]
    gathered: tuple[PeerPart, ...]
    scattered: tuple[PeerPart, ...]
    moments_start: int

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """(units, *shape of a unit)."""
        return (len(self.units), *self.units[0].shape)

    @property
    def matrix_count(self) -> int:
        """Number of matrices in all units."""
        return len(self.units) * self.units[0].count

    @functools.cached_property
    def gathered_runs(self) -> list[PeerRun]:
        return _runs(self.gathered)

    @functools.cached_property
    def scattered_runs(self) -> list[PeerRun]:
        return _runs(self.scattered)


def _runs(parts: Sequence[PeerPart]) -> list[PeerRun]:
    """Joins parts into as few runs as possible. The owner's own part, in another buffer, comes
    first."""
    runs = [PeerRun(parts[0])]
    for part in parts[1:]:
        longer = runs[-1].with_next(part) if len(runs) > 1 else None
        runs[-1:] = [runs[-1], PeerRun(part)] if longer is None else [longer]
    return runs


@dataclass(frozen=True)
class Traffic:
    """Elements that travel in one direction.

    Args:
        sent, received: elements to and from each peer; 0 for this rank itself.
        kept: elements of this rank's pieces that stay; a buffer without slots begins with them.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    kept: int


@dataclass(frozen=True)
class Chunk:
    """Matrices that are gathered, orthogonalized, and scattered together, as one rank sees them.

    This rank's pieces lie in two buffers: the input of orthogonalization that it sends, and the
    updates that it receives. Without slots, a buffer starts with this rank's pieces of the units it
    owns, followed by the pieces that it sends to or receives from each peer, in order. Two ranks
    exchange pieces batch by batch and unit by unit. Padding makes the next batch begin at a
    multiple of `ALIGNMENT_BYTES`.

    Args:
        momentum, weights: this rank's shares of all batches, in the order of these buffers.
        batches: the batches that this rank owns.
        gather, scatter: the traffic.
        in_place: True if updates overwrite the input of orthogonalization in its buffers.
        slots: if all peers receive all updates, how many elements each peer sends to all others.
            The buffer of updates then has a slot of this size for each peer, in order. One
            all-gather moves slots of equal size; otherwise each slot has a broadcast. Empty if
            peers receive different updates.
        moments_slot: number of mean squares that each peer sends to all others, padded to the same
            number; the side buffer has a slot of this size for each peer. 0 without a second
            moment.
    """

    momentum: tuple[Share, ...]
    weights: tuple[Share, ...]
    batches: tuple[Batch, ...]
    gather: Traffic
    scatter: Traffic
    in_place: bool
    slots: tuple[int, ...]
    moments_slot: int


class ChunkBuilder:
    """Lays out the chunks of one lane in the buffers of this rank."""

    def __init__(self, entries: Sequence[Entry], channel: Channel, limits: Limits):
        self.entries = entries
        self.channel = channel
        self.limits = limits
        self.gather = _Direction(entries, channel, is_scatter=False)
        self.scatter = _Direction(entries, channel, is_scatter=True)

    def chunk(self, owned: Mapping[int, Sequence[Unit]]) -> Chunk:
        """Makes the chunk of the units in ``owned``, given by their owner, a peer."""
        this_peer = self.channel.this_peer
        numbers = {unit.entry for units in owned.values() for unit in units}
        entries = [self.entries[number] for number in numbers]
        owners = sorted(owned, key=lambda peer: (peer != this_peer, peer))
        batches = {owner: self._batches(owned[owner]) for owner in owners}
        slots, (moments, moments_slot) = self._slots(batches, entries), self._moments(batches)
        momentum, gathered, gather = self.gather.layout(batches)
        weights, scattered, scatter = self.scatter.layout(batches, slots)
        return Chunk(
            tuple(momentum),
            tuple(replace(share, moments_start=moments[share.units[0]]) for share in weights),
            tuple(
                Batch(units, come, go, moments[units[0]])
                for units, come, go in zip(batches.get(this_peer, ()), gathered, scattered)
            ),
            gather,
            scatter,
            all(entry.scatters_in_place for entry in entries),
            slots,
            moments_slot,
        )

    def _moments(
        self, batches: Mapping[int, Sequence[tuple[Unit, ...]]]
    ) -> tuple[dict[Unit, int], int]:
        """Lays out the mean squares of all updates in the side buffer. Returns where each batch
        begins, by its first unit, and the size of a slot."""
        starts, ends = {}, dict.fromkeys(batches, 0)
        for owner, owner_batches in batches.items():
            for units in owner_batches:
                entry, block = self.entries[units[0].entry], units[0].block
                starts[units[0]] = ends[owner]
                if entry.second_moment:
                    ends[owner] += len(units) * units[0].count * entry.matrices.moments(block)
        aligned = ALIGNMENT_BYTES // MOMENT_BYTES
        slot = -(-max(ends.values()) // aligned) * aligned
        for owner, owner_batches in batches.items():
            for units in owner_batches:
                starts[units[0]] += owner * slot
        return starts, slot

    def _slots(
        self, batches: Mapping[int, Sequence[tuple[Unit, ...]]], entries: Sequence[Entry]
    ) -> tuple[int, ...]:
        """The elements that each peer sends to all others, see `Chunk`; empty for an all-to-all.

        Slots are padded to one size if their total stays within `MOST_PADDED`, and if each of P
        ranks then sends at most 2 + 2/P bytes per element of the chunk in bf16 (including the
        momentum gather).
        """
        peers = range(len(self.channel.peers))
        count = len(peers)
        if count == 1 or not self.channel.shares_all(entries):
            return ()
        numel = self.scatter.numel
        sizes = [
            sum(numel(units, (regions.whole(units[0].shape),)) for units in batches.get(peer, ()))
            for peer in peers
        ]
        slot, total = max(sizes), sum(sizes)
        within_bound = (count - 1) * slot <= total * (1 + 1 / count - (count - 1) / count**2)
        is_even = within_bound and count * slot <= MOST_PADDED * total
        return (slot,) * count if is_even else tuple(sizes)

    def _batches(self, units: Sequence[Unit]) -> list[tuple[Unit, ...]]:
        """Divides units into batches of limited size that can be orthogonalized together."""
        alike: dict[tuple, list[Unit]] = {}
        for unit in units:
            entry = self.entries[unit.entry]
            m, block = entry.matrices, unit.block
            key: tuple = (entry.group, entry.dtype, entry.recipe)
            key += (unit.shape, block.row_axis, block.col_axis)
            if len(self.channel.peers) > 1:  # a peer's parts of all units must have the same boxes
                key += (entry.sharding, m.shape[m.row_dim :], unit.box[m.row_dim :])
                key += (block.axes[m.row_dim :], block.starts)
                key += (entry.momentum_sharding, entry.momentum_holder(unit.box))
            alike.setdefault(key, []).append(unit)
        batches = []
        for members in alike.values():
            unit, entry = members[0], self.entries[members[0].entry]
            size = max(1, self.limits.matrices_per_batch(entry, unit.block) // unit.count)
            batches += [tuple(members[at : at + size]) for at in range(0, len(members), size)]
        return batches


class _Direction:
    """Lays out one direction of a lane's chunks: gathers of momentum, or scatters of updates."""

    def __init__(self, entries: Sequence[Entry], channel: Channel, is_scatter: bool):
        self.entries = entries
        self.channel = channel
        self.is_scatter = is_scatter
        self.alignment = ALIGNMENT_BYTES // self.channel.wire.itemsize  # in elements

    def layout(
        self, batches: Mapping[int, Sequence[tuple[Unit, ...]]], slots: tuple[int, ...] = ()
    ) -> tuple[list[Share], list[tuple[PeerPart, ...]], Traffic]:
        """Lays out one direction of a chunk.

        Args:
            batches: the batches of each owner, this rank first.
            slots: sizes of the owners' slots in this rank's buffer; if empty, owners' elements
                follow each other without slots.

        Returns:
            This rank's shares, the peers' parts of each batch that it owns, and the traffic.
        """
        this_peer, peers = self.channel.this_peer, len(self.channel.peers)
        shares, own_parts, by_owner = self._shares(batches, slots)
        if slots:
            parts: list[tuple[PeerPart, ...]] = [(part,) for part in own_parts]
            by_owner, by_peer, kept = list(slots), [slots[this_peer]] * peers, slots[this_peer]
        else:
            parts, by_peer = self._parts(batches.get(this_peer, ()), own_parts)
            kept = by_owner[this_peer]
        by_owner[this_peer] = by_peer[this_peer] = 0
        sent, received = (by_peer, by_owner) if self.is_scatter else (by_owner, by_peer)
        shares.sort(key=lambda share: (not share.is_staged, share.start))
        return shares, parts, Traffic(tuple(sent), tuple(received), kept)

    def _shares(
        self, batches: Mapping[int, Sequence[tuple[Unit, ...]]], slots: tuple[int, ...]
    ) -> tuple[list[Share], list[PeerPart], list[int]]:
        """This rank's shares, owner by owner; its parts of each batch that it owns; and the
        elements of each owner in the buffer."""
        this_peer = self.channel.this_peer
        shares: list[Share] = []
        own_parts: list[PeerPart] = []
        by_owner = [0] * len(self.channel.peers)
        end = unstaged_end = 0
        for owner, owner_batches in batches.items():
            begin = end = sum(slots[:owner]) if slots else end
            for units in owner_batches:
                boxes = self._boxes(units[0], this_peer)
                is_staged = self._sends(units[0], this_peer, owner)
                if owner == this_peer:
                    own_parts.append(PeerPart(this_peer, boxes, end))
                start = end if is_staged else unstaged_end
                local_parts = itertools.chain.from_iterable(map(self._local_parts, units))
                shares.append(Share(units, boxes, tuple(local_parts), start, 0, is_staged))
                if is_staged:
                    end += self.numel(units, boxes)
                else:
                    unstaged_end += self.numel(units, boxes)
            by_owner[owner] = end - begin
        return shares, own_parts, by_owner

    def _parts(
        self, batches: Sequence[tuple[Unit, ...]], own_parts: Sequence[PeerPart]
    ) -> tuple[list[tuple[PeerPart, ...]], list[int]]:
        """The parts of each batch that this rank owns, its own first, then peer by peer; and the
        elements of each peer in the owner's buffer."""
        this_peer = self.channel.this_peer
        parts, by_peer = [[part] for part in own_parts], [0] * len(self.channel.peers)
        end = 0
        for peer in range(len(by_peer)):
            begin = end
            for units, of_batch in zip(batches, parts):
                if peer != this_peer:
                    is_sent = self._sends(units[0], peer, this_peer)
                    boxes = self._boxes(units[0], peer) if is_sent else ()
                    of_batch.append(PeerPart(peer, boxes, end))
                    end += self.numel(units, boxes)
            by_peer[peer] = end - begin
        return list(map(tuple, parts)), by_peer

    def _sends(self, unit: Unit, peer: int, owner: int) -> bool:
        """True if a peer's part of a unit travels: updates do, momentum only within a replica."""
        peers = self.channel.peers
        return self.is_scatter or self.entries[unit.entry].sends_momentum(peers[peer], peers[owner])

    def _held(self, unit: Unit, peer: int) -> Region:
        """The region of a unit's parameter on a peer: weights for the scatter, else momentum."""
        entry, rank = self.entries[unit.entry], self.channel.peers[peer]
        return entry.region(rank) if self.is_scatter else entry.momentum_region(rank)

    def _boxes(self, unit: Unit, peer: int) -> tuple[Region, ...]:
        """A peer's parts of a unit, in coordinates of the unit's box."""
        return tuple(regions.relative(box, unit.box) for box in self._block_boxes(unit, peer))

    def _block_boxes(self, unit: Unit, peer: int) -> list[Region]:
        """A peer's parts of a unit, in coordinates of the block; the whole unit for a lone peer."""
        is_alone = len(self.channel.peers) == 1
        return [unit.box] if is_alone else unit.parts(self._held(unit, peer))

    def _local_parts(self, unit: Unit) -> Iterator[LocalPart]:
        """Where this rank's parts of a unit lie in the local tensor."""
        this_peer = self.channel.this_peer
        held = self._held(unit, this_peer)
        return (unit.block.local_part(box, held) for box in self._block_boxes(unit, this_peer))

    def numel(self, units: Sequence[Unit], boxes: tuple[Region, ...]) -> int:
        """Elements of the pieces of a batch, including padding."""
        numel = len(units) * sum(map(regions.numel, boxes))
        return -(-numel // self.alignment) * self.alignment
