"""Defines what a plan is made from: parameters as entries, matrices as units, their channels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Optional

import torch

from ..core import update_scale
from ..matrices import Blocks, Matrices
from ..newton_schulz import Recipe
from . import regions
from .regions import Interval, Region, Sharding


@dataclass(frozen=True)
class Entry:
    """One Muon parameter as a plan sees it.

    Args:
        name: its FQN, or its place in the groups where it has no name.
        group: number of its parameter group.
        index: its index in that group.
        matrices: how the whole tensor is read as matrices.
        sharding: how its weights lie on a mesh; None where this rank has nobody to share with.
        dtype: of the parameter.
        device: of its local tensor.
        wire: dtype in which momentum and updates travel.
        recipe: how its matrices are orthogonalized, which sets their cost.
        second_moment: whether owners send mean squares of the update behind it.
        momentum: how its momentum lies, where that differs from its weights: replicas of weights
            may divide the momentum.
        spread: each matrix has one owner among all replicas, not one in each of them.
        adjust_lr: how updates are scaled, see `core.update_scale`.
    """

    name: str
    group: int
    index: int
    matrices: Matrices
    sharding: Optional[Sharding]
    dtype: torch.dtype
    device: torch.device
    wire: torch.dtype
    recipe: Recipe
    second_moment: bool = False
    momentum: Optional[Sharding] = None
    spread: bool = False
    adjust_lr: str = "none"

    @property
    def opmath(self) -> torch.dtype:
        """The dtype of element-wise arithmetic."""
        return torch.promote_types(self.dtype, torch.float32)

    def region(self, rank: int) -> Region:
        """The part of the stored tensor whose weights a rank holds."""
        shape = self.matrices.shape
        return regions.whole(shape) if self.sharding is None else self.sharding.region(shape, rank)

    def momentum_region(self, rank: int) -> Region:
        """The part of the stored tensor whose momentum a rank holds."""
        if self.momentum is None:
            return self.region(rank)
        return self.momentum.region(self.matrices.shape, rank)

    def momentum_holder(self, box: Region) -> Optional[int]:
        """The index in ``momentum.ranks`` of who holds a box's first expert, of stacks of these."""
        if self.momentum is None or not self.matrices.row_dim:
            return None
        return box[0][0] // -(-self.matrices.shape[0] // len(self.momentum.ranks))

    def sends_momentum(self, rank: int, owner: int) -> bool:
        """Whether a rank sends its momentum to an owner: only ranks of the owner's replica do."""
        sharding = self.momentum or self.sharding
        return sharding is None or sharding.replica(rank) == sharding.replica(owner)

    def peers(self, rank: int) -> tuple[int, ...]:
        """The ranks that share the work on the matrices of which ``rank`` holds parts."""
        return self.holders(rank, replicas=self.spread)

    def holders(self, rank: int, replicas: bool = True) -> tuple[int, ...]:
        """The ranks that hold parts of the matrices of which ``rank`` does; ascending.

        Args:
            rank: global rank.
            replicas: also the ranks that hold replicas of such parts.
        """
        if self.sharding is None:
            return (rank,)
        dims = range(self.matrices.row_dim, len(self.matrices.shape))
        return self.sharding.peers(rank, dims, replicas)

    def replica_count(self, rank: int) -> int:
        """How many of the `peers` hold each weight."""
        return len(self.peers(rank)) // max(1, len(self.holders(rank, replicas=False)))

    @property
    def scatters_in_place(self) -> bool:
        """Whether exactly the gathered elements are scattered, to the ranks that they came from."""
        return self.momentum is None and not self.spread and not self.second_moment

    def scale(self, rows: int) -> float:
        """Factor on the update of a matrix of ``rows`` rows."""
        return update_scale(rows, self.matrices.cols, self.adjust_lr)

    def cost(self, rows: int) -> int:
        """FLOPs to orthogonalize one matrix of ``rows`` rows."""
        return self.recipe.flops(rows, self.matrices.cols)


@dataclass(frozen=True)
class Unit:
    """Matrices of one parameter that have one owner: a box of the stored tensor.

    Args:
        entry: number of its entry.
        box: experts, rows and all columns; the rows are those of one or more matrices.
        rows: of each matrix.
    """

    entry: int
    box: Region
    rows: int


@dataclass(frozen=True)
class Channel:
    """What units travel by: the ranks that exchange them, in one format.

    In a channel a ``rank`` is a global rank, and a ``peer`` an index in ``peers``.

    Args:
        peers: global ranks, ascending; one rank alone exchanges nothing.
        this_peer: index of this rank in ``peers``.
        owned_by_all: every peer orthogonalizes every matrix, and nothing is scattered.
        wire: dtype of the buffers.
        opmath: dtype of element-wise arithmetic.
        device: of the local tensors.
    """

    peers: tuple[int, ...]
    this_peer: int
    owned_by_all: bool
    wire: torch.dtype
    opmath: torch.dtype
    device: torch.device

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self.peers[self.this_peer]

    @property
    def scaled(self) -> bool:
        """Whether each part that is gathered is scaled to the range of the wire's dtype."""
        return self.wire == torch.float16 and len(self.peers) > 1


# Rows of a unit, rows of each of its matrices, and the peers that hold some of them.
UnitRows = tuple[Interval, int, tuple[int, ...]]


def unit_rows(blocks: Sequence[Blocks], held: Sequence[Region]) -> Iterator[UnitRows]:
    """The units that the rows of a stored matrix fall into.

    Args:
        blocks: how these rows fall into matrices.
        held: the rows and columns that each peer holds of the stored matrix.
    """
    for block in blocks:
        units: list[UnitRows] = []
        for start in range(block.start, block.stop, block.rows):
            rows = (start, start + block.rows)
            holders = tuple(
                peer
                for peer, (held_rows, *columns) in enumerate(held)
                if regions.numel((regions.overlap(held_rows, rows), *columns))
            )
            if len(holders) == 1 and units and units[-1][2] == holders:
                rows = (units.pop()[0][0], rows[1])  # whole on the same peer: one unit
            units.append((rows, block.rows, holders))
        yield from units
