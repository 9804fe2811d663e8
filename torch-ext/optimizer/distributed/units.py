"""Defines what a plan is made of: parameters as entries, matrices as units, and channels."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Optional, Union

import torch

from .. import regions
from ..core import update_scale
from ..matrices import Block, Matrices
from ..newton_schulz import Recipe
from ..regions import Region, Sharding


@dataclass(frozen=True)
class Entry:
    """One Muon parameter as a plan sees it.

    Args:
        name: its FQN, or its position in the groups if it has no name.
        group: number of its parameter group.
        index: its index in that group.
        matrices: how the whole tensor is read as matrices.
        sharding: how its weights lie on a mesh; None if no other rank shares them.
        dtype: dtype of the parameter.
        device: device of its local tensor.
        wire: dtype in which momentum and updates travel.
        recipe: how its matrices are orthogonalized, which sets their cost.
        second_moment: True if owners also send mean squares of the update.
        momentum_sharding: how its momentum lies on the mesh, if not like its weights.
        spread: True if each matrix has one owner among all replicas, not one in each replica.
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
    momentum_sharding: Optional[Sharding] = None
    spread: bool = False
    adjust_lr: Union[str, float] = "none"

    @property
    def opmath(self) -> torch.dtype:
        """The dtype of element-wise arithmetic."""
        return torch.promote_types(self.dtype, torch.float32)

    def region(self, rank: int) -> Region:
        """The region of the stored tensor whose weights a rank holds."""
        shape = self.matrices.shape
        return regions.whole(shape) if self.sharding is None else self.sharding.region(shape, rank)

    def momentum_region(self, rank: int) -> Region:
        """The region of the stored tensor whose momentum a rank holds."""
        if self.momentum_sharding is None:
            return self.region(rank)
        return self.momentum_sharding.region(self.matrices.shape, rank)

    def momentum_holder(self, box: Region) -> Optional[int]:
        """The index in ``momentum_sharding.ranks`` of the rank that has a box's first expert.

        None if the entry has no experts, or if its momentum lies like its weights.
        """
        if self.momentum_sharding is None or not self.matrices.row_dim:
            return None
        return box[0][0] // -(-self.matrices.shape[0] // len(self.momentum_sharding.ranks))

    def sends_momentum(self, rank: int, owner: int) -> bool:
        """True if a rank sends its momentum to an owner: only ranks of the owner's replica do."""
        sharding = self.momentum_sharding or self.sharding
        return sharding is None or sharding.replica(rank) == sharding.replica(owner)

    def peers(self, rank: int) -> tuple[int, ...]:
        """The ranks that share the work on the matrices that ``rank`` holds parts of."""
        return self.holders(rank, replicas=self.spread)

    def holders(self, rank: int, replicas: bool = True) -> tuple[int, ...]:
        """The ranks, ascending, that hold parts of the same matrices as ``rank``.

        Args:
            rank: global rank.
            replicas: True to include the ranks that hold replicas of these parts.
        """
        if self.sharding is None:
            return (rank,)
        dims = range(self.matrices.row_dim, len(self.matrices.shape))
        return self.sharding.peers(rank, dims, replicas)

    def replica_count(self, rank: int) -> int:
        """The number of `peers` that hold each weight."""
        return len(self.peers(rank)) // max(1, len(self.holders(rank, replicas=False)))

    @property
    def scatters_in_place(self) -> bool:
        """True if each rank gets back the update of exactly the elements that it sent."""
        return self.momentum_sharding is None and not self.spread

    def scale(self, block: Block) -> float:
        """The factor that scales the update of a matrix."""
        return update_scale(block.rows, block.cols, self.adjust_lr)

    def cost(self, block: Block) -> int:
        """FLOPs to orthogonalize one matrix."""
        return self.recipe.flops(block.rows, block.cols)


@dataclass(frozen=True)
class Unit:
    """Matrices of one parameter that have one owner.

    Args:
        entry: number of its entry.
        block: the block that contains the matrices.
        box: the unit's region of the block: some matrices with all of their rows and columns.
    """

    entry: int
    block: Block
    box: Region

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the box."""
        return regions.shape_of(self.box)

    @property
    def count(self) -> int:
        """Number of matrices."""
        return regions.numel(self.box[: self.block.row_axis])

    def parts(self, region: Region) -> list[Region]:
        """The parts of the unit in a region of the stored tensor, as boxes of its block."""
        shared = (regions.intersect(self.box, box) for box in self.block.boxes(region))
        return [box for box in shared if regions.numel(box)]


@dataclass(frozen=True)
class Channel:
    """The ranks that exchange units, and the format in which units travel.

    In a channel, a ``rank`` is a global rank, and a ``peer`` is an index in ``peers``.

    Args:
        peers: global ranks, ascending; one rank alone exchanges nothing.
        this_peer: index of this rank in ``peers``.
        wire: dtype of the buffers.
        opmath: dtype of element-wise arithmetic.
        device: device of the local tensors.
    """

    peers: tuple[int, ...]
    this_peer: int
    wire: torch.dtype
    opmath: torch.dtype
    device: torch.device

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self.peers[self.this_peer]

    def shares_all(self, entries: Iterable[Entry]) -> bool:
        """True if every peer gets all updates of these entries."""
        return all(entry.replica_count(self.rank) == len(self.peers) for entry in entries)


def boxes_and_holders(
    m: Matrices, held: Sequence[Region]
) -> Iterator[tuple[Block, Region, tuple[int, ...]]]:
    """Yields the units that each expert is divided into.

    Each unit comes as its block, its box without the expert axes, and the peers that hold parts.

    Args:
        m: how the whole tensor is read as matrices.
        held: the region of the tensor on each peer; all peers hold parts of the same experts.
    """
    for block in m.blocks:
        by_peer = [[box[m.row_dim :] for box in block.boxes(region)] for region in held]
        whole = regions.whole(block.shape[block.row_axis :])
        units: list[tuple[Region, tuple[int, ...]]] = []
        for index in itertools.product(*map(range, block.shape[m.row_dim : block.row_axis])):
            box = (*((at, at + 1) for at in index), *whole)
            holders = tuple(
                peer
                for peer, boxes in enumerate(by_peer)
                if any(regions.numel(regions.intersect(box, part)) for part in boxes)
            )
            if len(holders) == 1 and index and index[-1] and units[-1][1] == holders:
                # Neighbors that the same peer holds whole are one unit.
                *outer, (first, _) = units.pop()[0][: len(index)]
                box = (*outer, (first, index[-1] + 1), *whole)
            units.append((box, holders))
        yield from ((block, box, holders) for box, holders in units)
