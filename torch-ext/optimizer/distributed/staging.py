"""Decides how large batches and chunks are, and how many are in flight, from the memory allowed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Optional

from ..matrices import Block
from . import regions
from .units import Channel, Entry, Unit

# A span, in bytes of its copy in opmath.
SPAN_BYTES = {"cpu": 256 << 10}
DEFAULT_SPAN_BYTES = 64 << 20

# A batch, in bytes of its copy in opmath: a few matrices fill an accelerator, and where state is
# streamed each batch waits for its own; on CPUs a batch that stays in the cache is faster than a
# large one.
BATCH_BYTES = {"cpu": 2 << 20}
DEFAULT_BATCH_BYTES = 128 << 20

# A batch as a share of the weights that a rank holds, where that is less (but not less than a
# chunk).
BATCH_SHARE = 0.125

# What a rank sends in one chunk, in bytes: the least that makes a collective worth its latency, and
# the most that helps. Between them, there are so many chunks.
CHUNK_BYTES = {"cpu": (512 << 10, 2 << 20)}
DEFAULT_CHUNK_BYTES = (4 << 20, 64 << 20)
CHUNKS = 6

# The bound on staging, as multiples of the bytes of the local weights and of the largest matrix: a
# little less than the bound on the memory of a step, for small tensors that are not counted.
STAGING_OF_LOCAL = 1.45
STAGING_OF_LARGEST = 3.85

# The least that the bound on staging comes to, in bytes: of an accelerator's memory it is nothing.
LEAST_STAGING = {"cpu": 0}
DEFAULT_LEAST_STAGING = 512 << 20

GatheredBytes = tuple[int, int]  # in a chunk, by the busiest owner and by all owners


def matrices_per_batch(
    entry: Entry, block: Block, chunk_size: int, most_bytes: Optional[int] = None
) -> int:
    """How many matrices of a block are orthogonalized in one batch."""
    if chunk_size > 0:
        return chunk_size
    limit = BATCH_BYTES.get(entry.device.type, DEFAULT_BATCH_BYTES)
    limit = limit if most_bytes is None else min(limit, most_bytes)
    return max(1, limit // (block.rows * block.cols * entry.opmath.itemsize))


class Staging:
    """The memory that a lane may stage its chunks in, and what its chunks take of it.

    Args:
        entries: of the plan.
        channel: of the lane.
        units: of the lane.
        chunk_size, warmup_step: of the plan.

    Attributes:
        mean_replicas: how many peers hold a weight, as a mean over all weights.
        batch_bytes: the share of a rank's weights that bounds a batch; None where nothing is
            staged.
        chunk_bytes: what one owner gathers in a chunk, as a rule.
        room: bytes for chunks in flight, beside what a batch is orthogonalized in.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        channel: Channel,
        units: Sequence[Unit],
        chunk_size: int,
        warmup_step: int,
    ):
        self.entries = entries
        self.channel = channel
        self.chunk_size = chunk_size
        self.warmup_step = warmup_step
        self.ranks = len(channel.peers)
        elements: Counter[int] = Counter()  # of each entry
        for unit in units:
            elements[unit.entry] += regions.numel(unit.box)
        total = sum(elements.values())
        replicas = (n * entries[e].replica_count(channel.rank) for e, n in elements.items())
        self.mean_replicas = sum(replicas) / max(1, total)
        device = channel.device.type
        self.batch_bytes: Optional[int] = None
        self.chunk_bytes = BATCH_BYTES.get(device, DEFAULT_BATCH_BYTES)
        if self.ranks > 1:
            held = total * self.mean_replicas / self.ranks  # elements of the weights on a rank
            least, most = CHUNK_BYTES.get(device, DEFAULT_CHUNK_BYTES)
            self.batch_bytes = max(least, int(BATCH_SHARE * held * channel.opmath.itemsize))
            share = int(held * channel.wire.itemsize) // CHUNKS
            # An owner scatters each update once to every replica.
            self.chunk_bytes = int(max(least, min(most, share)) / self.mean_replicas)
        self._in_place = all(entries[number].scatters_in_place for number in elements)
        sizes = [regions.numel(unit.box) * entries[unit.entry].dtype.itemsize for unit in units]
        bound = STAGING_OF_LOCAL * (sum(sizes) * self.mean_replicas / self.ranks)
        bound += STAGING_OF_LARGEST * max(sizes)
        bound = max(bound, LEAST_STAGING.get(device, DEFAULT_LEAST_STAGING))
        self.room = bound - max(map(self._workspace_bytes, units))

    def in_flight(self, gathered: Sequence[GatheredBytes]) -> int:
        """How many chunks may be in flight; the same number on all ranks."""
        in_flight, most = 1, min(self.warmup_step + 1, len(gathered))
        while in_flight < most and self.has_room(gathered, in_flight + 1):
            in_flight += 1
        return in_flight

    def has_room(self, gathered: Sequence[GatheredBytes], in_flight: int) -> bool:
        """Whether so many chunks fit, and the buffers that one of them is scattered from."""
        size, wide = self.channel.wire.itemsize, self.channel.opmath.itemsize
        span = SPAN_BYTES.get(self.channel.device.type, DEFAULT_SPAN_BYTES) if wide > size else 0
        gathers, scatters = [], []  # bytes of each chunk, and of its scatter with a copy in opmath
        for most, total in gathered:
            held = total * self.mean_replicas / self.ranks
            gathers.append(int(most * self.mean_replicas + held))
            copy = min(span, int(held) * wide // size)
            scatters.append(copy if self._in_place else gathers[-1] + copy)
        at_once = (gathers[at : at + in_flight] for at in range(len(gathers)))
        return max(map(sum, at_once)) + max(scatters) <= self.room

    def _workspace_bytes(self, unit: Unit) -> int:
        """For a batch: matrices twice, products of their shorter sides, and copies in opmath."""
        entry, block = self.entries[unit.entry], unit.block
        numel = regions.numel(unit.box)
        arithmetic = entry.recipe.dtype
        squares = 4 if entry.recipe.form(block.rows, block.cols).is_gram else 2
        copies = 1 if arithmetic == entry.wire else 2  # beside what was gathered
        short = min(block.rows, block.cols)
        nbytes = (copies * numel + squares * unit.count * short**2) * arithmetic.itemsize
        nbytes += numel * entry.wire.itemsize
        batch = matrices_per_batch(entry, block, self.chunk_size, self.batch_bytes)
        nbytes *= max(1, batch // unit.count)
        if entry.second_moment:  # squares, matrix by matrix
            nbytes += block.rows * block.cols * entry.opmath.itemsize
        return nbytes
