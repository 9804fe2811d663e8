"""What one step does, as data: which matrices go together, in which order."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Optional

import torch

from ..core import Matrices
from . import layout

# Matrices of one chunk are orthogonalized as one batch. A few of them fill an accelerator; on CPUs
# a chunk that stays in the cache is faster than a large one.
CHUNK_BYTES = {"cpu": 2 << 20}
DEFAULT_CHUNK_BYTES = 256 << 20


@dataclass(frozen=True)
class Entry:
    """One Muon parameter as a plan sees it.

    Args:
        name: for messages: its FQN, or its place in the groups where it has no name.
        matrices: how the whole tensor is read as matrices.
        region: the part of it that this rank holds.
        sharding: None where this rank holds everything; else what tells one sharding from another.
        dtype: of the parameter.
        device: of its local tensor.
    """

    name: str
    matrices: Matrices
    region: layout.Region
    sharding: Optional[Hashable]
    dtype: torch.dtype
    device: torch.device

    @property
    def sharded(self) -> bool:
        """Whether other ranks hold parts that this one lacks."""
        return self.sharding is not None

    @property
    def batch_key(self) -> tuple:
        """Entries with equal keys can be orthogonalized in one batch."""
        m = self.matrices
        gathered_alike = (m.shape, self.sharding) if self.sharded else None
        return (m.rows, m.cols, m.blocks, self.dtype, self.device, gathered_alike)


@dataclass(frozen=True)
class Piece:
    """Stored matrices of one entry: indices [first, last) of dim 0, everything where it is rows."""

    entry: int
    first: int
    last: int


@dataclass(frozen=True)
class Chunk:
    """Pieces that are read, orthogonalized and written back together; one shape, one dtype."""

    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class GroupPlan:
    """The plan of one parameter group; AdamW's has no entries and no chunks.

    Args:
        facts: what it was made from, to tell when it no longer holds.
        lines: its parameters, one line each, for ranks to compare.
        entries: its Muon parameters, in the group's order.
        chunks: what is orthogonalized together, in order.
    """

    facts: tuple
    lines: list[str]
    entries: list[Entry]
    chunks: list[Chunk]


def plan_chunks(entries: Sequence[Entry], chunk_size: int = -1) -> list[Chunk]:
    """Groups the matrices of one parameter group into chunks of equal shape.

    Entries keep their order, so ranks with the same parameters get the same chunks. Stacked experts
    are cut along dim 0, unless they are sharded and have to be gathered whole.

    Args:
        entries: the group's Muon parameters.
        chunk_size: stored matrices per chunk; −1 chooses by bytes.
    """
    by_key: dict[tuple, list[Piece]] = {}
    for index, entry in enumerate(entries):
        if layout.numel(layout.whole(entry.matrices.shape)):
            by_key.setdefault(entry.batch_key, []).append(Piece(index, 0, entry.matrices.shape[0]))
    chunks = []
    for pieces in by_key.values():
        limit = chunk_size if chunk_size > 0 else _matrices_per_chunk(entries[pieces[0].entry])
        chunks += _fill(entries, pieces, limit)
    return chunks


def _matrices_per_chunk(entry: Entry) -> int:
    matrix_bytes = entry.matrices.rows * entry.matrices.cols * max(4, entry.dtype.itemsize)
    return max(1, CHUNK_BYTES.get(entry.device.type, DEFAULT_CHUNK_BYTES) // matrix_bytes)


def _fill(entries: Sequence[Entry], pieces: list[Piece], limit: int) -> list[Chunk]:
    chunks: list[Chunk] = []
    current: list[Piece] = []
    room = limit

    def close() -> None:
        nonlocal current, room
        if current:
            chunks.append(Chunk(tuple(current)))
        current, room = [], limit

    for piece in pieces:
        entry = entries[piece.entry]
        experts = entry.matrices.experts
        # Stored matrices under one index of dim 0: cutting anywhere else would need a copy.
        per_index = experts // piece.last if entry.matrices.row_dim else experts
        if entry.sharded or not entry.matrices.row_dim:
            if experts > room:
                close()
            current.append(piece)
            room -= experts
            continue
        first = piece.first
        while first < piece.last:
            if per_index > room and current:
                close()
            last = min(piece.last, first + max(1, room // per_index))
            current.append(Piece(piece.entry, first, last))
            room -= (last - first) * per_index
            first = last
    close()
    return chunks
