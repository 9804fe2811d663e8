"""Decides how much a rank does at once: bytes per chunk, bytes per batch, chunks in flight."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Optional

import torch

from ..matrices import Block
from .units import Entry

# Bytes on the wire that an owner gathers in a chunk: enough to make a collective worth its latency,
# and few enough for several chunks to be in flight.
CHUNK_BYTES = {"cpu": 1 << 20}
DEFAULT_CHUNK_BYTES = 64 << 20

# If every rank gets all updates of a chunk, the owners together gather at most this many times one
# owner's bytes.
MOST_SHARED = 48

# Maximum batch size, in bytes of its copy in opmath. On CPUs a batch that stays in the cache is
# faster than a large one. On accelerators each batch costs about twenty launches. If state is
# streamed, batches are smaller: each waits for its own state, and few matrices fill an accelerator.
BATCH_BYTES = {"cpu": 2 << 20}
DEFAULT_BATCH_BYTES = 384 << 20
STREAMED_BATCH_BYTES = 64 << 20

# Three chunks hide traffic both ways: one is gathered, one orthogonalized, one scattered.
HIDING_IN_FLIGHT = 3


@dataclass(frozen=True)
class Limits:
    """How much a rank does at once.

    Args:
        chunk_size: matrices that a rank orthogonalizes per chunk; −1 limits chunks by bytes.
        warmup_step: maximum number of chunks in flight, not counting the one being orthogonalized.
        streams_state: True if momentum comes from host memory. Chunks have to wait for it, so only
            `HIDING_IN_FLIGHT` are in flight, as many as hide each other's traffic.
        staging_bytes: bytes that an owner gathers in a chunk; None means `CHUNK_BYTES`.
    """

    chunk_size: int = -1
    warmup_step: int = 5
    streams_state: bool = False
    staging_bytes: Optional[int] = None

    @property
    def in_flight(self) -> int:
        """Maximum number of chunks in flight."""
        return min(self.warmup_step + 1, HIDING_IN_FLIGHT if self.streams_state else sys.maxsize)

    def chunk_bytes(self, device: torch.device) -> int:
        """Bytes that an owner gathers in a chunk."""
        return self.staging_bytes or CHUNK_BYTES.get(device.type, DEFAULT_CHUNK_BYTES)

    def batch_bytes(self, device: torch.device) -> int:
        """Maximum batch size, in bytes of its copy in opmath."""
        limit = BATCH_BYTES.get(device.type, DEFAULT_BATCH_BYTES)
        return min(limit, STREAMED_BATCH_BYTES) if self.streams_state else limit

    def matrices_per_batch(self, entry: Entry, block: Block) -> int:
        """Maximum number of a block's matrices in one batch."""
        if self.chunk_size > 0:
            return self.chunk_size
        numel = block.rows * block.cols
        return max(1, self.batch_bytes(entry.device) // (numel * entry.opmath.itemsize))
