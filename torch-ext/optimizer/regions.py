"""Computes which part of a tensor each rank of a mesh holds, without a process group."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Optional

Interval = tuple[int, int]  # [start, stop)
Region = tuple[Interval, ...]  # one interval per dimension of the stored tensor


@dataclass(frozen=True)
class ShardedDim:
    """The placement of a mesh dimension that cuts a tensor dimension into shards.

    Args:
        dim: the tensor's dimension.
        strided: True if later mesh dimensions cut the same tensor dimension before this one, as in
            FSDP over tensor parallelism (torch's ``_StridedShard``).
    """

    dim: int
    strided: bool = False


@dataclass(frozen=True)
class Sharding:
    """How tensors are placed on a mesh of ranks.

    Args:
        mesh_shape: number of ranks in each mesh dimension.
        ranks: global ranks in row-major order of the mesh.
        placements: one for each mesh dimension; None for a dimension that replicates.
    """

    mesh_shape: tuple[int, ...]
    ranks: tuple[int, ...]
    placements: tuple[Optional[ShardedDim], ...]

    def __post_init__(self) -> None:
        fields = (self.mesh_shape, self.ranks, self.placements)
        object.__setattr__(self, "_hash", hash(fields))  # once: ranks can be thousands

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Returns the indices of a rank in the mesh.

        Raises:
            ValueError: if the rank isn't in the mesh.
        """
        index, coordinate = self.ranks.index(rank), []
        for size in reversed(self.mesh_shape):
            index, remainder = divmod(index, size)
            coordinate.append(remainder)
        return tuple(reversed(coordinate))

    @functools.lru_cache(maxsize=1 << 16)  # noqa: B019
    def region(self, shape: tuple[int, ...], rank: int) -> Region:
        """Returns the region of a tensor that ``rank`` holds; empty if it isn't in the mesh."""
        if rank not in self.ranks:
            return tuple((0, 0) for _ in shape)
        region, coordinate = list(whole(shape)), self.coordinate(rank)
        for index in self.cutting_order():
            placement = self.placements[index]
            if placement is not None:
                (start, stop), parts = region[placement.dim], self.mesh_shape[index]
                first, last = shard_interval(stop - start, parts, coordinate[index])
                region[placement.dim] = (start + first, start + last)
        return tuple(region)

    @functools.lru_cache(maxsize=1 << 12)  # noqa: B019
    def peers(self, rank: int, dims: Iterable[int], replicas: bool = False) -> tuple[int, ...]:
        """Returns the ranks, ascending, whose regions differ from ``rank``'s only in ``dims``.

        Args:
            rank: global rank; outside of the mesh it has no peers.
            dims: dimensions of the tensor, hashable.
            replicas: True to include ranks that hold replicas of these regions.
        """
        if rank not in self.ranks:
            return ()
        indices = [0]
        for size, at, placement in zip(self.mesh_shape, self.coordinate(rank), self.placements):
            is_free = replicas if placement is None else placement.dim in dims
            indices = [i * size + j for i in indices for j in (range(size) if is_free else (at,))]
        return tuple(sorted(self.ranks[i] for i in indices))

    @functools.lru_cache(maxsize=1 << 16)  # noqa: B019
    def replica(self, rank: int) -> tuple[int, ...]:
        """Identifies the replica of ``rank``: its indices in the replicating mesh dimensions."""
        indices = zip(self.coordinate(rank), self.placements)
        return tuple(index for index, placement in indices if placement is None)

    def cutting_order(self) -> list[int]:
        """Returns the mesh dimensions in the order in which they cut the tensor."""
        order: list[int] = []
        for index in reversed(range(len(self.mesh_shape))):
            placement = self.placements[index]
            if placement is not None and placement.strided:
                order.append(index)
            else:
                order.insert(0, index)
        return order


def shard_interval(size: int, parts: int, index: int) -> Interval:
    """Returns part ``index`` of ``range(size)``, cut as in `torch.chunk`: the last are shorter."""
    length = -(-size // parts)
    start = min(size, length * index)
    return (start, min(size, start + length))


def whole(shape: Sequence[int]) -> Region:
    """Returns the region that covers all of a tensor."""
    return tuple((0, size) for size in shape)


def numel(region: Region) -> int:
    product = 1
    for start, stop in region:
        product *= stop - start
    return product


def shape_of(region: Region) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in region)


def is_same_shape(held: Sequence[int], expected: Sequence[int]) -> bool:
    """Returns True if two shapes are equal, or if neither has elements.

    For a shard without columns, FSDP2 around tensor parallelism has shape (0, 0), not (rows, 0).
    """
    return tuple(held) == tuple(expected) or 0 == math.prod(held) == math.prod(expected)


def overlap(a: Interval, b: Interval) -> Interval:
    """Returns the intersection of two intervals; if it is empty, an empty interval in ``a``."""
    start = min(max(a[0], b[0]), a[1])
    return (start, max(start, min(a[1], b[1])))


def intersect(a: Region, b: Region) -> Region:
    return tuple(map(overlap, a, b))


def relative(region: Region, origin: Region) -> Region:
    """Returns ``region`` in coordinates relative to the start of ``origin``."""
    return tuple((start - o, stop - o) for (start, stop), (o, _) in zip(region, origin))


def slices(region: Region) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in region)
