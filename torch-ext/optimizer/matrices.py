"""Reads a stored tensor as matrices: experts, blocks of it (``split``), flattened dimensions."""

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
    """An index that counts along one dimension of a tensor.

    Args:
        dim: the tensor's dimension.
        size: how many values the index takes.
        stride: how far two consecutive values are apart in that dimension.
    """

    dim: int
    size: int
    stride: int = 1


class LocalPart(NamedTuple):
    """Where a part of some matrices lies in a rank's local tensor.

    Args:
        starts: where the part begins, in each dimension of the tensor.
        axes: the axes of the matrices' block, with the sizes of the part.
    """

    starts: tuple[int, ...]
    axes: tuple[Axis, ...]

    def of(self, tensor: Tensor) -> Tensor:
        """The part, as a view of a local tensor."""
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

    Each element has one coordinate on each axis. The first coordinates say which expert and which
    matrix it is in, the next ones together its row, and the last ones together its column. A box
    of coordinates is a `Region` of the block.

    Args:
        axes: in the order of coordinates. Axes of one dimension nest: one index of an outer axis
            spans all indices of the inner axes.
        row_axis: number of the first axis of rows; the axes before it count matrices.
        col_axis: number of the first axis of columns.
        starts: where the block begins, in each dimension of the stored tensor.
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
        """What a region of the stored tensor has of the block, as boxes.

        There is at most one box, unless the region begins or ends within an index of an outer axis.
        """
        intervals = list(regions.relative(region, tuple((start, start) for start in self.starts)))
        if all(axis[::2] == (dim, 1) for dim, axis in enumerate(self.axes)):  # it is dense
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
        """Where a box lies in a local tensor, which is the region ``held`` of the stored tensor."""
        starts = [start - first for start, (first, _) in zip(self.starts, held)]
        for axis, (start, _) in zip(self.axes, box):
            starts[axis.dim] += start * axis.stride
        sizes = regions.shape_of(box)
        axes = (axis._replace(size=size) for axis, size in zip(self.axes, sizes))
        return LocalPart(tuple(starts), tuple(axes))


def _boxes(axes: Sequence[Axis], interval: Interval) -> Iterator[tuple[Interval, ...]]:
    """Yields boxes with all elements of nested axes that lie in an interval of their dimension."""
    if not axes:
        if interval[0] <= 0 < interval[1]:
            yield ()
        return
    (_, size, stride), inner = axes[0], axes[1:]
    extent = 1 + sum((axis.size - 1) * axis.stride for axis in inner)  # of one outer index
    start, stop = interval
    # The interval touches the outer indices [first, last), and has [whole_first, whole_last) whole.
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
        shape: of the stored tensor: (experts…, rows, cols), or (rows, rest…) if flattened.
        row_dim: the dimension that counts rows; dimensions before it count experts, and those after
            it are the columns.
        blocks: the blocks that the tensor falls into.
        moments_of_rows: whether a second moment has a number for each row even of wide matrices.
    """

    shape: tuple[int, ...]
    row_dim: int
    blocks: tuple[Block, ...]
    moments_of_rows: bool = False

    def count(self, block: Block) -> int:
        """Matrices of a block in each expert."""
        return math.prod(block.shape[self.row_dim : block.row_axis])

    def has_moment_of_rows(self, block: Block) -> bool:
        """Whether the second moment has a number for each row of a matrix, not for each column."""
        return self.moments_of_rows or block.rows >= block.cols

    def moments(self, block: Block) -> int:
        """Elements of the second moment of one matrix."""
        return block.rows if self.has_moment_of_rows(block) else block.cols

    def all_moments(self, block: Block) -> int:
        """Elements of the second moment of a block in each expert."""
        return self.count(block) * self.moments(block)

    def moments_interval(self, block: Block) -> Interval:
        """The interval of an expert's second moment that belongs to a block."""
        start = sum(map(self.all_moments, self.blocks[: self.blocks.index(block)]))
        return start, start + self.all_moments(block)


def read_as_matrices(shape: Sequence[int], is_expert: bool, flatten: bool, split: Any) -> Matrices:
    """Reads a stored tensor as matrices.

    Args:
        shape: of the whole tensor.
        is_expert: whether leading dimensions count experts.
        flatten: whether to read more than two dimensions as (dim 0, all the rest).
        split: the number of rows of each matrix, as a list or one number for all, or the notation
            of axes, or None.

    Raises:
        ValueError: the tensor is no matrix, or the split does not fit. The text continues
            "<parameter> …".
    """
    shape = tuple(shape)
    if len(shape) < 2:
        raise ValueError(
            f"has shape {shape}: Muon orthogonalizes matrices, put it into a group with "
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
    """The block of the matrices that, in each expert, have these parts of the rows and of each
    dimension of the columns; ``experts`` are the sizes of the leading dimensions."""
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
    """Counts the same indices by fewer axes: drops axes of one index, joins those evenly spaced."""
    merged: list[Axis] = []
    for axis in axes:
        if axis.size != 1:
            if merged and merged[-1].stride == axis.size * axis.stride:
                axis = axis._replace(size=merged.pop().size * axis.size)
            merged.append(axis)
    return merged
