"""Decides how large batches and chunks are, and how many are in flight, from the memory allowed."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

import torch

from ..matrices import Block
from . import regions
from .machine import DEFAULT_MACHINE
from .units import Channel, Entry, Unit

# So many chunks in flight hide traffic both ways: one is gathered, one orthogonalized, one
# scattered.
HIDING_IN_FLIGHT = 3

# How large a span may be, in bytes of its copy in opmath.
SPAN_BYTES = {"cpu": 256 << 10}
DEFAULT_SPAN_BYTES = 64 << 20

# How large a batch may be, in bytes of its copy in opmath. On CPUs a batch that stays in the cache
# is faster than a large one. On accelerators the bound is a share of their memory, since each batch
# costs some twenty launches; if state is streamed it is less, since each batch waits for its own
# state, and a few matrices fill an accelerator.
BATCH_BYTES = {"cpu": 2 << 20}
BATCH_OF_MEMORY = 1 / 160
STREAMED_BATCH_BYTES = 128 << 20

# How large a batch may be, as a share of the weights that a rank holds; a batch may have the bytes
# of the smallest chunk in any case. The lesser of this bound and the one above counts.
BATCH_SHARE = 0.125

# What a rank sends in one chunk, in bytes: the least that makes a collective worth its latency, and
# the most that helps. Between these bounds a chunk is one of `CHUNKS` equal shares of a lane.
CHUNK_BYTES = {"cpu": (512 << 10, 2 << 20)}
DEFAULT_CHUNK_BYTES = (4 << 20, 64 << 20)
CHUNKS = 4

# The bound on staging: on accelerators a share of their memory; on CPUs multiples of the bytes of
# the local weights and of the largest matrix. These are a little below the bound on the memory of a
# step, which leaves room for small tensors that are not counted.
STAGING_OF_MEMORY = 0.1
STAGING_OF_LOCAL_AND_LARGEST = {"cpu": (1.45, 3.85)}

# How many chunks of each lane but the first are gathered from the beginning of a step, at most; and
# the most that they take of the room of their lane, on top of what the lane before has in flight.
GATHERS_AHEAD = 4
AHEAD_OF_ROOM = 0.25

GatheredBytes = tuple[int, int]  # in a chunk: by the owner that gathers most, and by all owners


@dataclass(frozen=True)
class Limits:
    """How much a rank does at once.

    Args:
        chunk_size: matrices that a rank orthogonalizes per chunk; −1 chooses by bytes.
        warmup_step: the most chunks in flight beside the one being orthogonalized.
        streams: whether momentum comes from host memory. Chunks have to wait for it, so only as
            many are in flight as hide each other's traffic, `HIDING_IN_FLIGHT`.
        memory: bytes of an accelerator's memory, the least among the ranks that share a plan.
        staging_bytes: the bound on staging; None takes that of the device.
    """

    chunk_size: int = -1
    warmup_step: int = 5
    streams: bool = False
    memory: float = DEFAULT_MACHINE.memory
    staging_bytes: Optional[int] = None

    @property
    def in_flight(self) -> int:
        """The most chunks that may be in flight."""
        return min(self.warmup_step + 1, HIDING_IN_FLIGHT if self.streams else sys.maxsize)

    def batch_bytes(self, device: torch.device) -> int:
        """How large a batch may be, in bytes of its copy in opmath."""
        memory_share = int(self.memory * BATCH_OF_MEMORY)
        limit = BATCH_BYTES.get(device.type, memory_share)
        return min(limit, STREAMED_BATCH_BYTES) if self.streams else limit

    def matrices_per_batch(
        self, entry: Entry, block: Block, most_bytes: Optional[int] = None
    ) -> int:
        """How many matrices of a block are orthogonalized in one batch."""
        if self.chunk_size > 0:
            return self.chunk_size
        limit = self.batch_bytes(entry.device)
        limit = limit if most_bytes is None else min(limit, most_bytes)
        return max(1, limit // (block.rows * block.cols * entry.opmath.itemsize))


class Staging:
    """The memory that a lane may stage its chunks in, and what its chunks take of it.

    Args:
        entries: of the plan.
        channel: of the lane.
        units: of the lane.
        limits: of the plan.

    Attributes:
        mean_replicas: how many peers hold a weight, as a mean over all weights.
        shares: whether all peers get all updates.
        batch_bytes: the share of a rank's weights that bounds a batch; None for a rank that is
            alone, which stages nothing.
        chunk_bytes: what one owner gathers in a chunk, unless loads differ much.
        least_bytes: rounds are not divided into rounds of fewer owners if all owners together
            gather at most so much in each; 0 if the user bounds staging.
        room: bytes for chunks in flight, beside the workspace in which a batch is orthogonalized.
    """

    def __init__(
        self, entries: Sequence[Entry], channel: Channel, units: Sequence[Unit], limits: Limits
    ):
        self.entries = entries
        self.channel = channel
        self.limits = limits
        self.ranks = len(channel.peers)
        elements: Counter[int] = Counter()  # of each entry
        for unit in units:
            elements[unit.entry] += regions.numel(unit.box)
        total = sum(elements.values())
        replicas = (n * entries[e].replica_count(channel.rank) for e, n in elements.items())
        self.mean_replicas = sum(replicas) / max(1, total)
        self.shares = self.mean_replicas == self.ranks > 1
        device = channel.device.type
        self.batch_bytes: Optional[int] = None
        self.chunk_bytes = limits.batch_bytes(channel.device)
        self.least_bytes = 0
        if self.ranks > 1:
            held = total * self.mean_replicas / self.ranks  # elements of the weights on a rank
            least, most = CHUNK_BYTES.get(device, DEFAULT_CHUNK_BYTES)
            self.least_bytes = 0 if limits.staging_bytes else least
            self.batch_bytes = max(least, int(BATCH_SHARE * held * channel.opmath.itemsize))
            share = int(held * channel.wire.itemsize) // CHUNKS
            # An owner scatters each update once to every replica.
            self.chunk_bytes = int(max(least, min(most, share)) / self.mean_replicas)
        self._in_place = all(entries[number].scatters_in_place for number in elements)
        bound = limits.staging_bytes or STAGING_OF_MEMORY * limits.memory
        if limits.staging_bytes is None and device in STAGING_OF_LOCAL_AND_LARGEST:
            local_factor, largest_factor = STAGING_OF_LOCAL_AND_LARGEST[device]
            sizes = [regions.numel(unit.box) * entries[unit.entry].dtype.itemsize for unit in units]
            local = sum(sizes) * self.mean_replicas / self.ranks
            bound = local_factor * local + largest_factor * max(sizes)
        self.room = bound - max(map(self._workspace_bytes, units))

    def in_flight(self, gathered: Sequence[GatheredBytes]) -> int:
        """How many chunks may be in flight; the same number on all ranks."""
        in_flight, most = 1, min(self.limits.in_flight, len(gathered))
        while in_flight < most and self.has_room(gathered, in_flight + 1):
            in_flight += 1
        return in_flight

    def has_room(self, gathered: Sequence[GatheredBytes], in_flight: int) -> bool:
        """Whether so many chunks fit, and the buffers that two of them are scattered from and into.

        Of these two, one is being orthogonalized, and the scatter of the other is under way.
        """
        size, wide = self.channel.wire.itemsize, self.channel.opmath.itemsize
        span = SPAN_BYTES.get(self.channel.device.type, DEFAULT_SPAN_BYTES) if wide > size else 0
        gathers, scatters, copies = self._gathers(gathered), [], []
        for most, total in gathered:
            held = total * self.mean_replicas / self.ranks
            scatters.append(held + (0 if self.shares else most * self.mean_replicas))
            copies.append(min(span, held * wide / size))  # of what was scattered, in opmath
        at_once = max(sum(gathers[at : at + in_flight]) for at in range(len(gathers)))
        at_once += 0 if self._in_place else max(scatters) * min(2, in_flight)
        return at_once + max(copies) <= self.room

    def gathers_ahead(self, gathered: Sequence[GatheredBytes]) -> int:
        """How many chunks may be gathered at the beginning of a step, if another lane is first."""
        sums = itertools.accumulate(self._gathers(gathered[:GATHERS_AHEAD]))
        return sum(nbytes <= AHEAD_OF_ROOM * self.room for nbytes in sums)

    def _gathers(self, gathered: Sequence[GatheredBytes]) -> list[float]:
        """Bytes of the buffers that each chunk is gathered from and into, on its busiest owner."""
        return [most + total / self.ranks for most, total in gathered]

    def _workspace_bytes(self, unit: Unit) -> int:
        """Bytes of workspace for a batch of such units: their matrices, copies, s × s products."""
        entry, block = self.entries[unit.entry], unit.block
        numel = regions.numel(unit.box)
        arithmetic = entry.recipe.dtype
        squares = 4 if entry.recipe.form(block.rows, block.cols).is_gram else 2
        copies = 1 if arithmetic == entry.wire else 2  # beside what was gathered
        short = min(block.rows, block.cols)
        nbytes = (copies * numel + squares * unit.count * short**2) * arithmetic.itemsize
        nbytes += numel * entry.wire.itemsize
        batch = self.limits.matrices_per_batch(entry, block, self.batch_bytes)
        nbytes *= max(1, batch // unit.count)
        if entry.second_moment:  # squares, matrix by matrix
            nbytes += block.rows * block.cols * entry.opmath.itemsize
        return nbytes
