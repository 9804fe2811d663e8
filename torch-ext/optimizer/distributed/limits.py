"""Decides how much a rank does at once: bytes of a chunk, of a batch, and chunks in flight."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Optional

import torch

from ..matrices import Block
from .units import Entry

# What an owner gathers in a chunk, in bytes on the wire: enough to make a collective worth its
# latency, and little enough that several chunks are under way.
CHUNK_BYTES = {"cpu": 1 << 20}
DEFAULT_CHUNK_BYTES = 64 << 20

# Where every rank gets all updates of a chunk, its owners together gather at most so many times
# the bytes of one of them.
MOST_SHARED = 48

# How large a batch may be, in bytes of its copy in opmath. On CPUs a batch that stays in the cache
# is faster than a large one. On accelerators each batch costs some twenty launches; but if state is
# streamed, each waits for its own state, and a few matrices fill an accelerator.
BATCH_BYTES = {"cpu": 2 << 20}
DEFAULT_BATCH_BYTES = 384 << 20
STREAMED_BATCH_BYTES = 64 << 20

# So many chunks in flight hide traffic both ways: one is gathered, one orthogonalized, one
# scattered.
HIDING_IN_FLIGHT = 3


@dataclass(frozen=True)
class Limits:
    """How much a rank does at once.

    Args:
        chunk_size: matrices that a rank orthogonalizes per chunk; −1 chooses by bytes.
        warmup_step: the most chunks in flight beside the one being orthogonalized.
        streams_state: whether momentum comes from host memory. Chunks have to wait for it, so only
            as many are in flight as hide each other's traffic, `HIDING_IN_FLIGHT`.
        staging_bytes: what an owner gathers in a chunk; None takes `CHUNK_BYTES`.
    """

    chunk_size: int = -1
    warmup_step: int = 5
    streams_state: bool = False
    staging_bytes: Optional[int] = None

    @property
    def in_flight(self) -> int:
        """The most chunks that may be in flight."""
        return min(self.warmup_step + 1, HIDING_IN_FLIGHT if self.streams_state else sys.maxsize)

    def chunk_bytes(self, device: torch.device) -> int:
        """What an owner gathers in a chunk."""
        return self.staging_bytes or CHUNK_BYTES.get(device.type, DEFAULT_CHUNK_BYTES)

    def batch_bytes(self, device: torch.device) -> int:
        """How large a batch may be, in bytes of its copy in opmath."""
        limit = BATCH_BYTES.get(device.type, DEFAULT_BATCH_BYTES)
        return min(limit, STREAMED_BATCH_BYTES) if self.streams_state else limit

    def matrices_per_batch(self, entry: Entry, block: Block) -> int:
        """How many matrices of a block are orthogonalized in one batch."""
        if self.chunk_size > 0:
            return self.chunk_size
        numel = block.rows * block.cols
        return max(1, self.batch_bytes(entry.device) // (numel * entry.opmath.itemsize))
