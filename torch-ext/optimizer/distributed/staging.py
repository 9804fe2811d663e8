"""Memory of a step: how large batches and chunks are, and how many chunks are in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Optional

from . import regions
from .units import Channel, Entry, Unit

# What element-wise arithmetic is done on at once, in bytes of a wide copy.
SPAN_BYTES = {"cpu": 256 << 10}
DEFAULT_SPAN_BYTES = 64 << 20

# Matrices orthogonalized as one batch, in bytes of their wide copy: a few of them fill an
# accelerator, and where state is streamed each batch waits for its own; on CPUs a batch that stays
# in the cache is faster than a large one.
BATCH_BYTES = {"cpu": 2 << 20}
DEFAULT_BATCH_BYTES = 128 << 20

# The same as a share of what a rank holds, where that is less (but not less than a chunk).
BATCH_SHARE = 0.125

# What a rank sends in one chunk, in bytes: the least that makes a collective worth its latency, and
# the most that helps. Between them, there are so many chunks.
CHUNK_BYTES = {"cpu": (512 << 10, 2 << 20)}
DEFAULT_CHUNK_BYTES = (4 << 20, 64 << 20)
CHUNKS = 6

# What chunks in flight are chosen by, in bytes of the local weights and of the largest matrix: a
# little less than the bound on the memory of a step, for small tensors that are not counted.
STAGING_OF_LOCAL = 1.45
STAGING_OF_LARGEST = 3.85

# Bytes to which the bound need not keep: of an accelerator's memory they are nothing.
LEAST_STAGING = {"cpu": 0}
DEFAULT_LEAST_STAGING = 512 << 20

Gathered = tuple[int, int]  # of a chunk: bytes of the busiest owner, and of all owners


def matrices_per_batch(
    entry: Entry, rows: int, chunk_size: int, most_bytes: Optional[int] = None
) -> int:
    """How many matrices of so many rows are orthogonalized together."""
    if chunk_size > 0:
        return chunk_size
    limit = BATCH_BYTES.get(entry.device.type, DEFAULT_BATCH_BYTES)
    limit = limit if most_bytes is None else min(limit, most_bytes)
    return max(1, limit // (rows * entry.matrices.cols * entry.opmath.itemsize))


class Staging:
    """What a lane may stage, and does.

    Args:
        entries: of the plan.
        channel: of the lane.
        units: of the lane.
        chunk_size, warmup_step: of the plan.

    Attributes:
        copies: of each weight among the peers, as a mean.
        batch_bytes: the share of what a rank holds that bounds a batch; None where nothing is
            staged.
        chunk_bytes: what one owner gathers in a chunk, as a rule.
        room: bytes for chunks in flight, beside what one is computed in.
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
        copies = sum(n * entries[number].copies(channel.rank) for number, n in elements.items())
        self.copies = copies / max(1, total)
        device = channel.device.type
        self.batch_bytes: Optional[int] = None
        self.chunk_bytes = BATCH_BYTES.get(device, DEFAULT_BATCH_BYTES)
        if self.ranks > 1:
            held = total * self.copies / self.ranks  # elements of the weights on a rank
            least, most = CHUNK_BYTES.get(device, DEFAULT_CHUNK_BYTES)
            self.batch_bytes = max(least, int(BATCH_SHARE * held * channel.opmath.itemsize))
            share = int(held * channel.wire.itemsize) // CHUNKS
            # What comes back from an owner are as many copies.
            self.chunk_bytes = int(max(least, min(most, share)) / self.copies)
        self._in_place = all(entries[number].goes_back_in_place for number in elements)
        sizes = [regions.numel(unit.box) * entries[unit.entry].dtype.itemsize for unit in units]
        room = STAGING_OF_LOCAL * (sum(sizes) * self.copies / self.ranks)
        room = max(
            room + STAGING_OF_LARGEST * max(sizes), LEAST_STAGING.get(device, DEFAULT_LEAST_STAGING)
        )
        self.room = room - max(map(self._bytes_of_work, units))

    def depth(self, gathered: Sequence[Gathered]) -> int:
        """How many chunks fit into the bound on memory; the same number on all ranks."""
        depth, most = 1, min(self.warmup_step + 1, len(gathered))
        while depth < most and self.fit(gathered, depth + 1):
            depth += 1
        return depth

    def fit(self, gathered: Sequence[Gathered], in_flight: int) -> bool:
        """Whether so many chunks fit into it, with the way back of one that is computed."""
        size, wide = self.channel.wire.itemsize, self.channel.opmath.itemsize
        span = SPAN_BYTES.get(self.channel.device.type, DEFAULT_SPAN_BYTES) if wide > size else 0
        buffers, back = [], []  # of each chunk, and of its way back with a wide copy
        for most, total in gathered:
            held = total * self.copies / self.ranks
            buffers.append(int(most * self.copies + held))
            copy = min(span, int(held) * wide // size)
            back.append(copy if self._in_place else buffers[-1] + copy)
        windows = (buffers[at : at + in_flight] for at in range(len(buffers)))
        return max(map(sum, windows)) + max(back) <= self.room

    def _bytes_of_work(self, unit: Unit) -> int:
        """For a batch: matrices twice, products of their shorter sides, and wide copies."""
        entry = self.entries[unit.entry]
        numel, cols = regions.numel(unit.box), entry.matrices.cols
        count = entry.matrices.count(unit.box, unit.rows)
        arithmetic = entry.recipe.dtype
        squares = 4 if entry.recipe.form(unit.rows, cols).is_gram else 2
        copies = 1 if arithmetic == entry.wire else 2  # beside what was gathered
        work = copies * numel + squares * count * min(unit.rows, cols) ** 2
        work = work * arithmetic.itemsize + numel * entry.wire.itemsize
        together = matrices_per_batch(entry, unit.rows, self.chunk_size, self.batch_bytes)
        work *= max(1, together // count)
        if entry.second_moment:
            work += unit.rows * cols * entry.opmath.itemsize  # squares, matrix by matrix
        return work
