"""Memory of a step: how large batches and chunks are, and how many chunks are in flight."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Optional

import torch

from . import layout
from .chunks import DEFAULT_RUN_BYTES, RUN_BYTES
from .units import Entry, Unit

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
    return max(1, limit // (rows * entry.matrices.cols * entry.wide.itemsize))


class Staged(NamedTuple):
    """Bytes of a chunk: of its buffers there, or back, and of a wide copy of what is sent."""

    buffers: int
    wide: int


@dataclass(frozen=True)
class Staging:
    """What a lane may stage, and does.

    Args:
        entries: of the plan.
        units: of the lane.
        ranks: how many share them.
        copies: of each weight among these, as a mean.
        wire, wide: dtypes of buffers and of element-wise arithmetic.
        device: of the tensors.
        chunk_size, warmup_step: of the plan.
    """

    entries: Sequence[Entry]
    units: Sequence[Unit]
    ranks: int
    copies: float
    wire: torch.dtype
    wide: torch.dtype
    device: torch.device
    chunk_size: int
    warmup_step: int

    @functools.cached_property
    def _held(self) -> float:
        """Elements of the weights that a rank holds."""
        return sum(layout.numel(unit.box) for unit in self.units) * self.copies / self.ranks

    @property
    def batch_bytes(self) -> Optional[int]:
        """The share of what a rank holds that bounds a batch; None where nothing is staged."""
        if self.ranks == 1:
            return None
        least, _ = CHUNK_BYTES.get(self.device.type, DEFAULT_CHUNK_BYTES)
        return max(least, int(BATCH_SHARE * self._held * self.wide.itemsize))

    @property
    def chunk_bytes(self) -> int:
        """What one owner gathers in a chunk, as a rule."""
        if self.ranks == 1:
            return BATCH_BYTES.get(self.device.type, DEFAULT_BATCH_BYTES)
        least, most = CHUNK_BYTES.get(self.device.type, DEFAULT_CHUNK_BYTES)
        share = int(self._held * self.wire.itemsize) // CHUNKS
        # What comes back from an owner are as many copies.
        return int(max(least, min(most, share)) / self.copies)

    def depth(self, gathered: Sequence[Gathered]) -> int:
        """How many chunks fit into the bound on memory; the same number on all ranks."""
        depth = 1
        while depth <= min(self.warmup_step, len(gathered) - 1):
            if not self.fit(gathered, depth + 1):
                break
            depth += 1
        return depth

    def fit(self, gathered: Sequence[Gathered], in_flight: int) -> bool:
        """Whether so many chunks fit into it, with the way back of one that is computed."""
        staged = self._staged(gathered)
        windows = (staged[at : at + in_flight] for at in range(len(staged)))
        of_windows = max(sum(chunk.buffers for chunk in window) for window in windows)
        back = (chunk.wide if self._in_place else sum(chunk) for chunk in staged)
        return of_windows + max(back) <= self._room

    @functools.cached_property
    def _in_place(self) -> bool:
        return all(self.entries[unit.entry].goes_back_in_place for unit in self.units)

    def _staged(self, gathered: Sequence[Gathered]) -> list[Staged]:
        """Of each chunk, on its way back, where there are copies."""
        size, wide = self.wire.itemsize, self.wide.itemsize
        run = RUN_BYTES.get(self.device.type, DEFAULT_RUN_BYTES) if wide > size else 0
        back = [(most * self.copies, total * self.copies / self.ranks) for most, total in gathered]
        return [Staged(int(most + held), min(run, int(held) * wide // size)) for most, held in back]

    @functools.cached_property
    def _room(self) -> float:
        """Bytes for chunks in flight, beside what one is computed in."""
        sizes = [self._bytes(unit) for unit in self.units]
        local = sum(sizes) * self.copies / self.ranks
        room = STAGING_OF_LOCAL * local + STAGING_OF_LARGEST * max(sizes)
        room = max(room, LEAST_STAGING.get(self.device.type, DEFAULT_LEAST_STAGING))
        return room - max(map(self._bytes_of_work, self.units))

    def _bytes_of_work(self, unit: Unit) -> int:
        """For a batch: matrices twice, products of their shorter sides, and wide copies."""
        entry = self.entries[unit.entry]
        numel, cols = layout.numel(unit.box), entry.matrices.cols
        count = entry.matrices.count(unit.box, unit.rows)
        arithmetic = entry.recipe.dtype
        squares = 4 if entry.recipe.form(unit.rows, cols).is_gram else 2
        copies = 1 if arithmetic == entry.wire else 2  # beside what was gathered
        work = copies * numel + squares * count * min(unit.rows, cols) ** 2
        work = work * arithmetic.itemsize + numel * entry.wire.itemsize
        together = matrices_per_batch(entry, unit.rows, self.chunk_size, self.batch_bytes)
        work *= max(1, together // count)
        if entry.second_moment:
            work += unit.rows * cols * entry.wide.itemsize  # squares, matrix by matrix
        return work

    def _bytes(self, unit: Unit) -> int:
        return layout.numel(unit.box) * self.entries[unit.entry].dtype.itemsize
