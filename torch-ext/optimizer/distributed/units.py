"""What there is to plan: parameters as entries, matrices as units, and what these travel by."""

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
        index: its place in that group.
        matrices: how the whole tensor is read as matrices.
        sharding: how its weights lie on a mesh; None where this rank has nobody to share with.
        dtype: of the parameter.
        device: of its local tensor.
        wire: format in which momentum and update travel.
        recipe: how its matrices are orthogonalized, which sets their cost.
        second_moment: whether owners send the mean squares of the update along.
        momentum: how its momentum lies, where that is unlike its weights: replicated ones may have
            theirs divided.
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
        """What element-wise arithmetic is done in."""
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

    def momentum_part(self, box: Region) -> Optional[int]:
        """Whose momentum a box of some experts begins in, where replicas divide experts."""
        if self.momentum is None or not self.matrices.row_dim:
            return None
        return box[0][0] // -(-self.matrices.shape[0] // len(self.momentum.ranks))

    def serves(self, rank: int, owner: int) -> bool:
        """Whether a rank sends its momentum to an owner: not where a replica of it does."""
        sharding = self.momentum or self.sharding
        return sharding is None or sharding.replica(rank) == sharding.replica(owner)

    def peers(self, rank: int) -> tuple[int, ...]:
        """The ranks that share the work on the matrices of which ``rank`` holds parts."""
        return self.holders(rank, replicas=self.spread)

    def holders(self, rank: int, replicas: bool = True) -> tuple[int, ...]:
        """The ranks that hold parts of the matrices of which ``rank`` does; ascending.

        Args:
            rank: global rank.
            replicas: also those that hold replicas of such parts.
        """
        if self.sharding is None:
            return (rank,)
        dims = range(self.matrices.row_dim, len(self.matrices.shape))
        return self.sharding.peers(rank, dims, replicas)

    def copies(self, rank: int) -> int:
        """How many of the `peers` hold each weight."""
        return len(self.peers(rank)) // max(1, len(self.holders(rank, replicas=False)))

    @property
    def goes_back_in_place(self) -> bool:
        """Whether the same elements travel in both directions, and nothing new on the way back."""
        return self.momentum is None and not self.spread and not self.second_moment

    def scale(self, rows: int) -> float:
        """Factor on the update of a matrix of so many rows."""
        return update_scale(rows, self.matrices.cols, self.adjust_lr)

    def cost(self, rows: int) -> int:
        """FLOPs for one matrix of so many rows."""
        return self.recipe.flops(rows, self.matrices.cols)


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


@dataclass(frozen=True)
class Channel:
    """What units travel by: the ranks that exchange them, in one format.

    Args:
        peers: global ranks, ascending; one rank alone exchanges nothing.
        me: number of this rank among them.
        everywhere: every peer orthogonalizes every matrix, and nothing is given back.
        wire: dtype of the buffers.
        opmath: of element-wise arithmetic.
        device: of the local tensors.
    """

    peers: tuple[int, ...]
    me: int
    everywhere: bool
    wire: torch.dtype
    opmath: torch.dtype
    device: torch.device

    @property
    def rank(self) -> int:
        """Global rank of this one."""
        return self.peers[self.me]

    @property
    def scaled(self) -> bool:
        """Whether what is gathered is scaled, part by part, to the range of its format."""
        return self.wire == torch.float16 and len(self.peers) > 1


def unit_rows(
    blocks: Sequence[Blocks], held: Sequence[Region]
) -> Iterator[tuple[Interval, int, tuple[int, ...]]]:
    """Rows of units, rows of each of their matrices, and the numbers of the peers that hold some.

    Args:
        blocks: how the rows of a stored matrix fall into matrices.
        held: the rows and columns that each peer has of it.
    """
    for block in blocks:
        of_block: list[tuple[Interval, int, tuple[int, ...]]] = []
        for start in range(block.start, block.stop, block.rows):
            rows = (start, start + block.rows)
            holders = tuple(
                peer
                for peer, region in enumerate(held)
                if regions.numel((regions.overlap(region[0], rows), *region[1:]))
            )
            if len(holders) == 1 and of_block and of_block[-1][2] == holders:
                rows = (of_block.pop()[0][0], rows[1])
            of_block.append((rows, block.rows, holders))
        yield from of_block
