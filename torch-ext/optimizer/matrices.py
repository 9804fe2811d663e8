"""Reads a stored tensor as matrices: stacked experts, ``split``, and flattened dimensions."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from . import regions
from .regions import Interval, Region
from .split_notation import Part, parts_of


class Axis(NamedTuple):
    """An axis of a block, along one dimension of a tensor.

    Args:
        dim: the tensor's dimension.
        size: the number of indices on the axis.
        stride: the distance of consecutive indices in that dimension.
    """

    dim: int
    size: int
    stride: int = 1


class LocalPart(NamedTuple):
    """The position of a part of a block in a rank's local tensor.

    Args:
        starts: the first index of the part in each dimension of the tensor.
        axes: the axes of the block, with the sizes of the part.
    """

    starts: tuple[int, ...]
    axes: tuple[Axis, ...]

    def of(self, tensor: Tensor) -> Tensor:
        """Returns the part as a view of a local tensor."""
        strides = tensor.stride()
        offset = sum(start * stride for start, stride in zip(self.starts, strides))
        return tensor.as_strided(
            [axis.size for axis in self.axes],
            [strides[axis.dim] * axis.stride for axis in self.axes],
            tensor.storage_offset() + offset,
        )


@dataclass(frozen=True)
class Block:
    """Matrices of one shape in a stored tensor.

    Each element has one coordinate per axis. The first coordinates give its expert and matrix, the
    next ones together its row, and the last ones together its column. A box of coordinates is a
    `Region` of the block.

    Args:
        axes: the axes, in the order of coordinates. Axes of one dimension are nested: one index of
            an outer axis spans all indices of the inner axes.
        row_axis: number of the first axis of rows; the axes before it count matrices.
        col_axis: number of the first axis of columns.
        starts: the first index of the block in each dimension of the stored tensor.
    """

    axes: tuple[Axis, ...]
    row_axis: int
    col_axis: int
    starts: tuple[int, ...]

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    @functools.cached_property
    def rows(self) -> int:
        """Rows of each matrix."""
        return math.prod(self.shape[self.row_axis : self.col_axis])

    @functools.cached_property
    def cols(self) -> int:
        """Columns of each matrix."""
        return math.prod(self.shape[self.col_axis :])

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.axes, self.row_axis, self.starts)))  # once

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    @functools.lru_cache(maxsize=1 << 16)  # noqa: B019
    def boxes(self, region: Region) -> tuple[Region, ...]:
        """Returns the part of the block in a region of the stored tensor, as boxes.

        There is at most one box, unless the region begins or ends within an index of an outer axis.
        """
        intervals = list(regions.relative(region, tuple((start, start) for start in self.starts)))
        if all(axis[::2] == (dim, 1) for dim, axis in enumerate(self.axes)):  # a dense block
            box = tuple(map(regions.overlap, regions.whole(self.shape), intervals))
            return (box,) if regions.numel(box) else ()
        by_dim = []
        for dim, interval in enumerate(intervals):
            nested = [(number, axis) for number, axis in enumerate(self.axes) if axis.dim == dim]
            nested.sort(key=lambda numbered: -numbered[1].stride)
            numbers, axes = zip(*nested)
            by_dim.append([list(zip(numbers, part)) for part in _boxes(axes, interval)])
        chosen = (
            dict(itertools.chain.from_iterable(parts)) for parts in itertools.product(*by_dim)
        )
        return tuple(tuple(part[number] for number in range(len(self.axes))) for part in chosen)

    def local_part(self, box: Region, held: Region) -> LocalPart:
        """Returns the position of a box in a local tensor, which is the region ``held``."""
        starts = [start - first for start, (first, _) in zip(self.starts, held)]
        for axis, (start, _) in zip(self.axes, box):
            starts[axis.dim] += start * axis.stride
        sizes = regions.shape_of(box)
        axes = (axis._replace(size=size) for axis, size in zip(self.axes, sizes))
        return LocalPart(tuple(starts), tuple(axes))


def _boxes(axes: Sequence[Axis], interval: Interval) -> Iterator[tuple[Interval, ...]]:
    """Yields boxes that cover the elements of nested axes in an interval of their dimension."""
    if not axes:
        if interval[0] <= 0 < interval[1]:
            yield ()
        return
    (_, size, stride), inner = axes[0], axes[1:]
    extent = 1 + sum((axis.size - 1) * axis.stride for axis in inner)  # span of one outer index
    start, stop = interval
    # The interval overlaps the outer indices [first, last), and contains all of
    # [whole_first, whole_last).
    first = min(size, max(0, (start - extent) // stride + 1))
    last = max(first, min(size, -(-stop // stride)))
    whole_first = min(last, max(first, -(-start // stride)))
    whole_last = max(whole_first, min(last, (stop - extent) // stride + 1))

    def cut(index: int) -> Iterator[tuple[Interval, ...]]:
        for box in _boxes(inner, (start - index * stride, stop - index * stride)):
            yield ((index, index + 1), *box)

    for index in range(first, whole_first):
        yield from cut(index)
    if whole_last > whole_first:
        yield ((whole_first, whole_last), *((0, axis.size) for axis in inner))
    for index in range(whole_last, last):
        yield from cut(index)


@dataclass(frozen=True)
class Matrices:
    """How a stored tensor is read as matrices.

    Args:
        shape: shape of the stored tensor: (experts…, rows, cols), or (rows, rest…) if flattened.
        row_dim: the dimension of rows. Dimensions before it are experts, those after it columns.
        blocks: the blocks that make up the tensor.
        moments_of_rows: True if second moments are per row, even of wide matrices.
    """

    shape: tuple[int, ...]
    row_dim: int
    blocks: tuple[Block, ...]
    moments_of_rows: bool = False

    def count(self, block: Block) -> int:
        """Number of matrices of a block per expert."""
        return math.prod(block.shape[self.row_dim : block.row_axis])

    def has_moment_of_rows(self, block: Block) -> bool:
        """True if the second moment has a number for each row, False if for each column."""
        return self.moments_of_rows or block.rows >= block.cols

    def moments(self, block: Block) -> int:
        """Number of elements of one matrix's second moment."""
        return block.rows if self.has_moment_of_rows(block) else block.cols

    def all_moments(self, block: Block) -> int:
        """Number of elements of a block's second moments per expert."""
        return self.count(block) * self.moments(block)

    def moments_interval(self, block: Block) -> Interval:
        """Returns the interval of an expert's second moments that belongs to a block."""
        start = sum(map(self.all_moments, self.blocks[: self.blocks.index(block)]))
        return start, start + self.all_moments(block)


def read_as_matrices(shape: Sequence[int], is_expert: bool, flatten: bool, split: Any) -> Matrices:
    """Reads a stored tensor as matrices.

    Args:
        shape: shape of the whole tensor.
        is_expert: True if leading dimensions are experts.
        flatten: True to read more than two dimensions as (dim 0, all the rest).
        split: a list of row counts, a number of rows, the notation of `split_notation`, or None.

    Raises:
        ValueError: if the tensor isn't a matrix or the split doesn't fit. The message continues
            "<parameter> …".
    """
    shape = tuple(shape)
    if len(shape) < 2:
        raise ValueError(
            f"has shape {shape}, but Muon orthogonalizes matrices: put it into a group with "
            "use_muon=False"
        )
    if len(shape) > 2 and not (is_expert or flatten):
        raise ValueError(
            f"has shape {shape}: name its component in expert_keys if the leading dimensions are "
            "experts, set flatten=True to read it as (dim 0, all the rest), or put it into a group "
            "with use_muon=False"
        )
    row_dim = len(shape) - 2 if is_expert else 0
    rows, cols = parts_of(split, shape[row_dim], shape[row_dim + 1 :])
    blocks = (
        _block(shape[:row_dim], (row_part, *col_parts)) for row_part in rows for col_parts in cols
    )
    return Matrices(shape, row_dim, tuple(blocks))


def _block(experts: Sequence[int], parts: Sequence[Part]) -> Block:
    """Returns the block for a part of the rows and of each column dimension, in all experts."""
    counting = [Axis(dim, size) for dim, size in enumerate(experts)]
    joined: list[list[Axis]] = []
    for dim, part in enumerate(parts, len(experts)):
        axes = [(loop.counts_matrices, Axis(dim, *loop[:2])) for loop in part.loops]
        counting += _merged([axis for counts, axis in axes if counts])
        joined.append(_merged([axis for counts, axis in axes if not counts]) or [Axis(dim, 1)])
    rows, *cols = joined
    starts = (*(0 for _ in experts), *(part.start for part in parts))
    col_axis = len(counting) + len(rows)
    return Block((*counting, *rows, *itertools.chain(*cols)), len(counting), col_axis, starts)


def _merged(axes: Sequence[Axis]) -> list[Axis]:
    """Drops axes of one index, and joins nested axes whose indices are evenly spaced."""
    merged: list[Axis] = []
    for axis in axes:
        if axis.size != 1:
            if merged and merged[-1].stride == axis.size * axis.stride:
                axis = axis._replace(size=merged.pop().size * axis.size)
            merged.append(axis)
    return merged
