"""Plays a step of all ranks inside one process: every element of every matrix is a number.

Buffers are filled, exchanged and emptied as the plans say. What arrives has to be what was
expected, with nothing written twice and nothing left unwritten. No process group is needed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from kernel import optimizer

regions = optimizer.regions
Entry = optimizer.distributed.plan.Entry

NONE = -1  # nothing has been written here
MOMENT = -3  # in side buffers


def simulate(entries: Sequence[Any], plans: Sequence[Any], chunk_size: int) -> Counter[str]:
    """Plays a step of the plans of ranks 0, 1, …, and checks what they promise.

    Returns how many lanes had traffic, and how many chunks came back by an all-gather.

    - The peers of a lane see the same lane, and come to it without waiting for each other.
    - What a rank expects is what the others send, and none sends anything to itself.
    - The momentum of every element is read once on each rank that holds it, and gathered by as many
      owners as there should be; they are those that the lane names.
    - Every element of a rank's weights gets its own update, once.
    - Buffers are as long as what is in them, and local tensors are indexed where they lie.
    """
    step = _Step(entries, plans)
    left = {plan.rank: list(plan.lanes) for plan in plans}
    while any(left.values()):
        nexts = [lanes[0] for lanes in left.values() if lanes]
        counts = Counter(map(key, nexts))
        ready = next((lane for lane in nexts if counts[key(lane)] == len(lane.peers)), None)
        assert ready is not None, "the ranks wait for each other"
        step.lane([left[peer].pop(0) for peer in ready.peers], chunk_size)
        step.seen["lanes"] += 1
    for plan in plans:
        for lane in plan.local_lanes:
            assert lane.peers == (plan.rank,)
            step.lane([lane], chunk_size)
    step.check()
    return step.seen


def key(lane: Any) -> tuple:
    return (lane.peers, lane.wire, lane.opmath, lane.device)


class _Step:
    def __init__(self, entries: Sequence[Any], plans: Sequence[Any]):
        self.entries = entries
        self.plans = plans
        self.seen = Counter[str]()
        self.gradients: set[tuple[int, int]] = set()  # by rank and entry, those asked for
        self.whole, begin = [], 0
        for e in entries:
            numel = math.prod(e.matrices.shape)
            self.whole.append(torch.arange(begin, begin + numel).view(e.matrices.shape))
            begin += numel
        # How often each element was read, orthogonalized, updated, by rank and entry.
        self.read, self.owned, self.updated = (
            [[torch.zeros_like(whole) for whole in self.whole] for _ in plans] for _ in range(3)
        )

    def check(self) -> None:
        """The counts of the whole step."""
        for number, e in enumerate(self.entries):
            for plan in self.plans:
                rank = plan.rank
                held = ((self.updated, e.region(rank)), (self.read, e.momentum_region(rank)))
                for counts, region in held:
                    expected = torch.zeros_like(self.whole[number])
                    expected[regions.slices(region)] = 1
                    assert torch.equal(counts[rank][number], expected)
                if regions.numel(e.region(rank)):
                    assert (rank, number) in self.gradients  # its gradient is let go then
            owners = sum(owned[number] for owned in self.owned)
            assert (owners == _owners_of_each(e, len(self.plans))).all()

    def lane(self, lanes: Sequence[Any], chunk_size: int) -> None:
        """Plays a lane, as each of its peers has it."""
        first = lanes[0]
        ranks = [lane.peers[lane.this_peer] for lane in lanes]
        assert ranks == list(first.peers) == sorted(first.peers)
        for lane in lanes:
            same = ("digest", "in_flight", "units")
            assert all(getattr(lane, key) == getattr(first, key) for key in same)
            assert len(lane.chunks) == len(lane.units)
        named = [unit for unit, _ in first.owners]
        assert len(set(named)) == len(named)
        for number, owned in enumerate(first.units):
            chunks = [lane.chunks[number] for lane in lanes]
            for lane, chunk in zip(lanes, chunks):
                mine = [unit for batch in chunk.batches for unit in batch.units]
                assert Counter(mine) == Counter(unit for unit, of in owned if of == lane.this_peer)
                matrices = sum(unit.count for unit in mine)
                assert chunk_size < 0 or matrices <= chunk_size
            self.chunk(lanes, chunks)

    def chunk(self, lanes: Sequence[Any], chunks: Sequence[Any]) -> None:
        first = lanes[0]
        momenta = [self.pack(lane, chunk) for lane, chunk in zip(lanes, chunks)]
        sent = [momentum[chunk.gather.kept :] for momentum, chunk in zip(momenta, chunks)]
        gathered = _exchange(sent, chunks, "gather")
        updates, returned, moments = [], [], []
        for lane, chunk, momentum, came in zip(lanes, chunks, momenta, gathered):
            everything = chunk.scatter.kept + sum(chunk.scatter.received)
            updates.append(torch.full((everything if chunk.slots else chunk.scatter.kept,), NONE))
            returned.append(torch.full((0 if chunk.slots else sum(chunk.scatter.sent),), NONE))
            moments.append(torch.full((len(lanes) * chunk.moments_slot,), NONE))
            for batch in chunk.batches:
                units = self.assemble(lane, batch, momentum, came)
                self.stage_updates(lane, chunk, batch, units, updates[-1], returned[-1])
                _write(moments[-1], batch.moments_start, self.moments(batch.units))
        if chunks[0].slots:
            self.seen["all-gathers"] += 1
            updates = [_all_gather(updates, [c.slots for c in chunks])] * len(lanes)
        else:
            assert all(_is_full(u, first) for u in (*updates, *returned))
            back = _exchange(returned, chunks, "scatter")
            updates = [torch.cat([kept, came]) for kept, came in zip(updates, back)]
        side = _all_gather(moments, [(c.moments_slot,) * len(lanes) for c in chunks])
        for lane, chunk, of_rank in zip(lanes, chunks, updates):
            self.unpack(lane, chunk, of_rank, side)

    def pack(self, lane: Any, chunk: Any) -> torch.Tensor:
        """Fills the buffer of momentum that a rank sends."""
        buffer = torch.full((chunk.gather.kept + sum(chunk.gather.sent),), NONE)
        rank = lane.peers[lane.this_peer]
        for share in chunk.momentum:
            assert share.start % _alignment(lane) == 0
            parts = self.parts(share)
            assert len(parts) == len(share.units) * share.numel
            if share.is_staged:
                _write(buffer, share.start, parts)
            self.visit(self.read[rank], rank, share, Entry.momentum_region)
            self.gradients.update((rank, unit.entry) for unit in share.units)
        assert _is_full(buffer, lane)
        return buffer

    def assemble(
        self, lane: Any, batch: Any, momentum: torch.Tensor, came: torch.Tensor
    ) -> torch.Tensor:
        """Makes whole units of what has come, (n, *shape of each)."""
        first, count = batch.units[0], len(batch.units)
        shapes = {(unit.block.rows, unit.block.cols, unit.count) for unit in batch.units}
        assert len(shapes) == 1
        if len(lane.peers) == 1:  # the transport takes them out of the buffer by one view
            assert [part.boxes for part in batch.gathered] == [(regions.whole(first.shape),)]
        units = torch.full((count, *first.shape), NONE)
        for part in batch.gathered:
            assert part.start % _alignment(lane) == 0
            source = momentum if part.peer == lane.this_peer else came
            for number in range(count):  # unit by unit, box by box
                at = part.start + number * part.numel
                for box in part.boxes:
                    there = units[number][regions.slices(box)]
                    assert there.numel() and (there == NONE).all()
                    there.copy_(source[at:][: there.numel()].view(there.shape))
                    at += there.numel()
        in_runs = torch.full_like(units, NONE)
        for run in batch.gathered_runs:
            source = momentum if run.first.peer == lane.this_peer else came
            for there, parts in zip(run.in_units(in_runs), run.in_buffer(source, count)):
                there.copy_(parts)
        assert torch.equal(in_runs, units)
        owned = self.owned[lane.peers[lane.this_peer]]
        for unit, found in zip(batch.units, units):
            assert torch.equal(found, self.unit_of(self.whole, unit))
            self.unit_of(owned, unit).add_(1)
        return units

    def stage_updates(
        self,
        lane: Any,
        chunk: Any,
        batch: Any,
        units: torch.Tensor,
        kept: torch.Tensor,
        sent: torch.Tensor,
    ) -> None:
        """Writes every peer's part of the updates where it is sent from."""
        for part in batch.scattered:
            assert part.start % _alignment(lane) == 0
            assert part.peer == lane.this_peer or not chunk.slots
            buffer = kept if part.peer == lane.this_peer else sent
            numbers = [unit[regions.slices(box)].flatten() for unit in units for box in part.boxes]
            flat = torch.cat(numbers) if numbers else torch.empty(0)
            _write(buffer, part.start, flat)
        for run in batch.scattered_runs:
            buffer = kept if run.first.peer == lane.this_peer else sent
            for parts, there in zip(run.in_units(units), run.in_buffer(buffer, len(units))):
                assert torch.equal(there, parts)

    def unpack(self, lane: Any, chunk: Any, updates: torch.Tensor, side: torch.Tensor) -> None:
        """Updates a rank's weights with what has come back."""
        seen, rank = torch.zeros_like(updates), lane.peers[lane.this_peer]
        seen_moments = torch.zeros_like(side)
        for share in chunk.weights:
            assert share.start % _alignment(lane) == 0
            numel = len(share.units) * share.numel
            parts = updates[share.start :][:numel]
            assert torch.equal(parts, self.parts(share))
            moments = self.moments(share.units)
            assert side[share.moments_start :][: len(moments)].tolist() == moments
            seen[share.start :][:numel] += 1
            seen_moments[share.moments_start :][: len(moments)] += 1
            self.visit(self.updated[rank], rank, share, Entry.region)
        assert (seen <= 1).all() and ((seen == 1) == (updates != NONE)).all()
        assert (seen_moments <= 1).all() and ((seen_moments == 1) == (side != NONE)).all()
        assert len(set(chunk.slots)) == 1 or _is_full(updates, lane)

    def unit_of(self, tensors: Sequence[torch.Tensor], unit: Any) -> torch.Tensor:
        """What whole tensors have of a unit, a view."""
        return block_of(tensors[unit.entry], unit.block)[regions.slices(unit.box)]

    def parts(self, share: Any) -> torch.Tensor:
        """The numbers of a share's parts, unit by unit, box by box."""
        units = (self.unit_of(self.whole, unit) for unit in share.units)
        parts = [unit[regions.slices(box)].flatten() for unit in units for box in share.boxes]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    def visit(self, counts: list[torch.Tensor], rank: int, share: Any, held: Any) -> None:
        """Counts the elements of a share, where they lie in the local tensor."""
        parts = [(unit, box) for unit in share.units for box in share.boxes]
        assert len(parts) == len(share.local_parts)
        for (unit, box), local_part in zip(parts, share.local_parts):
            region = regions.slices(held(self.entries[unit.entry], rank))
            local = local_part.of(self.whole[unit.entry][region].contiguous())
            assert torch.equal(local, self.unit_of(self.whole, unit)[regions.slices(box)])
            self.unit_of(counts, unit)[regions.slices(box)] += 1

    def moments(self, units: Sequence[Any]) -> list[int]:
        """The mean squares of units, for the longer side of every matrix."""
        if not self.entries[units[0].entry].second_moment:
            return []
        long = sum(max(u.block.rows, u.block.cols) * u.count for u in units)
        return [MOMENT] * long


def block_of(tensor: torch.Tensor, block: Any) -> torch.Tensor:
    """A block's elements of a whole tensor by their coordinates, a view."""
    strides = tensor.stride()
    start = sum(at * stride for at, stride in zip(block.starts, strides))
    steps = [strides[axis.dim] * axis.stride for axis in block.axes]
    return tensor.as_strided(block.shape, steps, tensor.storage_offset() + start)


def _owners_of_each(e: Any, ranks: int) -> int:
    """How many ranks orthogonalize each matrix."""
    if e.sharding is None:
        return ranks
    if e.spread:
        return 1
    places = zip(e.sharding.mesh_shape, e.sharding.placements)
    return math.prod(size for size, placement in places if placement is None)


def _alignment(lane: Any) -> int:
    """Returns the alignment of parts and shares, 64 bytes, in elements."""
    return 64 // lane.wire.itemsize


def _is_full(buffer: torch.Tensor, lane: Any) -> bool:
    """True if everything was written except padding, which is shorter than an alignment."""
    undefined = buffer.view(-1, _alignment(lane)) == NONE
    is_suffix = undefined.sort(dim=1).values == undefined
    return bool(is_suffix.all()) and not bool(undefined.all(dim=1).any())


def _write(buffer: torch.Tensor, start: int, numbers: Any) -> None:
    """Into a part of a buffer where nothing has been written, and which is inside of it."""
    there = buffer[start : start + len(numbers)]
    assert len(there) == len(numbers) and (there == NONE).all()
    there.copy_(torch.as_tensor(numbers, dtype=there.dtype))


def _exchange(buffers: Sequence[torch.Tensor], chunks: Sequence[Any], way: str) -> list[Any]:
    """One all-to-all."""
    traffic = [getattr(chunk, way) for chunk in chunks]
    pieces = [buffer.split(list(t.sent)) for buffer, t in zip(buffers, traffic)]
    received = [[sent[peer] for sent in pieces] for peer in range(len(buffers))]
    for peer, (came, t) in enumerate(zip(received, traffic)):
        assert tuple(map(len, came)) == t.received
        assert t.sent[peer] == 0
    return [torch.cat(came) for came in received]


def _all_gather(buffers: Sequence[torch.Tensor], slots_of: Sequence[Any]) -> torch.Tensor:
    """What they make of buffers in which each rank has filled its slot, and no other."""
    (sizes,) = set(slots_of)
    slots = [buffer.split(list(sizes)) for buffer in buffers]
    for peer, of_rank in enumerate(slots):
        assert len(of_rank) == len(buffers)
        assert all((s == NONE).all() for other, s in enumerate(of_rank) if other != peer)
    return torch.cat([of_rank[peer] for peer, of_rank in enumerate(slots)])
