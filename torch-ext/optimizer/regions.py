"""Says which part of a tensor each rank of a mesh holds: plain arithmetic, no process group."""

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
    """The placement on a mesh dimension that cuts a tensor dimension into shards.

    Args:
        dim: the tensor's dimension.
        strided: whether later mesh dimensions cut the same tensor dimension before this one does,
            as in FSDP over tensor parallelism (torch's ``_StridedShard``).
    """

    dim: int
    strided: bool = False


@dataclass(frozen=True)
class Sharding:
    """How tensors lie on a mesh of ranks.

    Args:
        mesh_shape: ranks in each dimension of the mesh.
        ranks: global ranks in row-major order of the mesh.
        placements: one for each mesh dimension; None for a mesh dimension that replicates.
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
        """Indices of a rank in the mesh.

        Raises:
            ValueError: the rank is not in the mesh.
        """
        index, coordinate = self.ranks.index(rank), []
        for size in reversed(self.mesh_shape):
            index, remainder = divmod(index, size)
            coordinate.append(remainder)
        return tuple(reversed(coordinate))

    @functools.lru_cache(maxsize=1 << 16)  # noqa: B019
    def region(self, shape: tuple[int, ...], rank: int) -> Region:
        """What ``rank`` holds of a tensor of ``shape``; nothing if it is not in the mesh."""
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
        """The ranks, ascending, whose parts differ from that of ``rank`` only in ``dims``.

        Args:
            rank: global rank; if it is not in the mesh, it has no peers.
            dims: dimensions of the tensor, hashable.
            replicas: whether to include the ranks that hold replicas of these parts.
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
        """Which replica ``rank`` holds a part of: its indices in mesh dimensions that replicate."""
        indices = zip(self.coordinate(rank), self.placements)
        return tuple(index for index, placement in indices if placement is None)

    def cutting_order(self) -> list[int]:
        """Mesh dimensions in the order in which they cut the tensor."""
        order: list[int] = []
        for index in reversed(range(len(self.mesh_shape))):
            placement = self.placements[index]
            if placement is not None and placement.strided:
                order.append(index)
            else:
                order.insert(0, index)
        return order


def shard_interval(size: int, parts: int, index: int) -> Interval:
    """Part ``index`` of ``range(size)`` as `torch.chunk` cuts it: the last parts may be shorter."""
    length = -(-size // parts)
    start = min(size, length * index)
    return (start, min(size, start + length))


def whole(shape: Sequence[int]) -> Region:
    """The region that holds all of a tensor."""
    return tuple((0, size) for size in shape)


def numel(region: Region) -> int:
    product = 1
    for start, stop in region:
        product *= stop - start
    return product


def shape_of(region: Region) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in region)


def is_same_shape(held: Sequence[int], expected: Sequence[int]) -> bool:
    """Whether two shapes are equal, or neither has elements.

    Of a shard without columns, FSDP2 around tensor parallelism holds (0, 0) for (rows, 0).
    """
    return tuple(held) == tuple(expected) or 0 == math.prod(held) == math.prod(expected)


def overlap(a: Interval, b: Interval) -> Interval:
    """What two intervals share; if they share nothing, an empty interval within ``a``."""
    start = min(max(a[0], b[0]), a[1])
    return (start, max(start, min(a[1], b[1])))


def intersect(a: Region, b: Region) -> Region:
    return tuple(map(overlap, a, b))


def relative(region: Region, origin: Region) -> Region:
    """``region`` in coordinates that begin where ``origin`` does."""
    return tuple((start - o, stop - o) for (start, stop), (o, _) in zip(region, origin))


def slices(region: Region) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in region)
