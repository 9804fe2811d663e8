"""What there is to plan: parameters as entries, and the boxes of them that go to one owner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Optional

import torch

from ..core import Blocks, Matrices
from ..newton_schulz import Triple, flops
from . import layout
from .layout import Interval, Region, Sharding


@dataclass(frozen=True)
class Entry:
    """One Muon parameter as a plan sees it.

    Args:
        name: its FQN, or its place in the groups where it has no name.
        group: number of its parameter group.
        index: its place in that group.
        matrices: how the whole tensor is read as matrices.
        sharding: how it lies on a mesh; None where this rank holds everything.
        dtype: of the parameter.
        device: of its local tensor.
        wire: format in which momentum and update travel.
        triples: polynomials of its orthogonalization, which set its cost.
        second_moment: whether owners send the mean squares of the update along.
    """

    name: str
    group: int
    index: int
    matrices: Matrices
    sharding: Optional[Sharding]
    dtype: torch.dtype
    device: torch.device
    wire: torch.dtype
    triples: tuple[Triple, ...]
    second_moment: bool = False

    @property
    def wide(self) -> torch.dtype:
        """What element-wise arithmetic is done in."""
        return torch.promote_types(self.dtype, torch.float32)

    def region(self, rank: int) -> Region:
        """The part of the stored tensor that a rank holds."""
        shape = self.matrices.shape
        return layout.whole(shape) if self.sharding is None else self.sharding.region(shape, rank)

    def peers(self, rank: int, replicas: bool = False) -> tuple[int, ...]:
        """The ranks that hold parts of the matrices of which ``rank`` does; ascending.

        Args:
            rank: global rank.
            replicas: also those that hold replicas of such parts.
        """
        if self.sharding is None:
            return (rank,)
        dims = range(self.matrices.row_dim, len(self.matrices.shape))
        return self.sharding.peers(rank, dims, replicas)

    def cost(self, rows: int) -> int:
        """FLOPs for one matrix of so many rows."""
        return flops(rows, self.matrices.cols, self.triples)


@dataclass(frozen=True)
class Unit:
    """Matrices of one parameter that have one owner: a box of the stored tensor.

    Args:
        entry: number of its entry.
        box: experts, rows, and all columns; rows are one or several blocks of ``rows``.
        rows: of each matrix.
    """

    entry: int
    box: Region
    rows: int


def runs_of(
    blocks: Sequence[Blocks], held: Sequence[Region]
) -> Iterator[tuple[Interval, int, tuple[int, ...]]]:
    """Rows of units, rows of each of their matrices, and the numbers of the peers that hold some.

    Args:
        blocks: how the rows of a stored matrix fall into matrices.
        held: the rows and columns that each peer has of it.
    """
    for run in blocks:
        of_run: list[tuple[Interval, int, tuple[int, ...]]] = []
        for start in range(run.start, run.stop, run.rows):
            rows = (start, start + run.rows)
            holders = tuple(
                peer
                for peer, region in enumerate(held)
                if layout.numel((layout.overlap(region[0], rows), *region[1:]))
            )
            if len(holders) == 1 and of_run and of_run[-1][2] == holders:
                rows = (of_run.pop()[0][0], rows[1])
            of_run.append((rows, run.rows, holders))
        yield from of_run
