"""Cuts tensors of any strides into tiles, and puts many tensors into one launch of a kernel."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Optional

import torch
import triton
from torch import Tensor

# Elements per program: two vectors of 16 bytes in bf16 for each thread of four warps.
_TILE = 2048
_SQUARE_TILE = (32, 64)  # where rows are contiguous in one tensor and columns in another

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Tiles:
    """How the tensors of a launch are cut: stacks (tensors, …) of equal shapes.

    Args:
        tensors: how many each stack has.
        shape: of each tensor, (slices, rows, cols).
        strides: of each stack, for (tensors, slices, rows, cols).
        rows, cols: of a tile.
    """

    tensors: int
    shape: Shape
    strides: tuple[Shape, ...]
    rows: int
    cols: int

    @property
    def count(self) -> int:
        """Tiles of each tensor."""
        slices, rows, cols = self.shape
        return slices * -(-rows // self.rows) * -(-cols // self.cols)

    @property
    def programs(self) -> int:
        """Tiles of all tensors: one program has one of them."""
        return self.tensors * self.count


def stacked(*arguments: Optional[Sequence[Tensor]]) -> Iterator[list[Any]]:
    """Yields the stacks (tensors, …) of each launch, one for each argument of a kernel.

    Each argument is a list of tensors, or None, as in all stacks then. Tensors at consecutive
    indices are stacked where those of each list lie evenly spaced in one storage, as experts and
    buffers do: that is one launch for all of them. Empty tensors are left out.
    """
    stack: list[tuple[Optional[Tensor], ...]] = []
    spacing: Optional[list[int]] = None  # of the tensors of a stack
    columns = (repeat(None) if column is None else column for column in arguments)
    for tensors in zip(*columns):
        if not tensors[0].numel():
            continue
        distances = _distances(stack[-1], tensors) if stack else None
        if stack and (distances is None or spacing not in (None, distances)):
            yield _views(stack, spacing)
            stack, distances = [], None
        stack.append(tensors)
        spacing = distances
    if stack:
        yield _views(stack, spacing)


def tiled(*stacks: Optional[Tensor]) -> tuple[Tiles, list[Optional[Tensor]]]:
    """The tiles of stacks (tensors, …), and the stacks, each broadcast to the first one's shape.

    Stacks are contiguous copies where not even four strides tell where the elements of all of them
    lie.
    """
    shape = stacks[0].shape  # type: ignore[union-attr]
    broadcast = [None if stack is None else _expanded(stack, shape) for stack in stacks]
    tiles = _tiles_of(shape, tuple(None if t is None else t.stride() for t in broadcast))
    if tiles is None:
        return tiled(*(None if stack is None else stack.contiguous() for stack in broadcast))
    return tiles, broadcast


def write_back(*pairs: tuple[Tensor, Optional[Tensor]]) -> None:
    """Copies what was written to copies, see `tiled`."""
    for tensor, written in pairs:
        if written is not None and written.data_ptr() != tensor.data_ptr():
            tensor.copy_(written)


def _expanded(stack: Tensor, shape: torch.Size) -> Tensor:
    """A stack of tensors that broadcast to those of a stack of that shape."""
    missing = (1,) * (len(shape) - stack.ndim)
    return stack.view(len(stack), *missing, *stack.shape[1:]).expand(shape)


@functools.lru_cache(maxsize=4096)
def _tiles_of(shape: Shape, strides: tuple[Optional[Shape], ...]) -> Optional[Tiles]:
    """The tiles of stacks of that shape with those strides, None of a stack that is None.

    Returns None where tensors have more than three dimensions even when neighbours are merged.
    """
    steps_of_stacks = [(0,) * len(shape) if steps is None else steps for steps in strides]
    sizes: list[int] = []
    steps: list[Shape] = []  # for each size, the stride of each stack
    for size, step in zip(shape[1:], list(zip(*steps_of_stacks))[1:]):
        if size == 1:
            continue
        if sizes and all(outer == size * inner for outer, inner in zip(steps[-1], step)):
            sizes[-1], steps[-1] = sizes[-1] * size, step
        else:
            sizes.append(size)
            steps.append(step)
    if len(sizes) > 3:
        return None
    sizes = [1] * (3 - len(sizes)) + sizes
    steps = [(0,) * len(strides)] * (3 - len(steps)) + steps
    if any(row == 1 and col > 1 for row, col in zip(steps[1], steps[2])):
        rows, cols = _SQUARE_TILE
    else:
        cols = min(_TILE, triton.next_power_of_2(sizes[2]))
        rows = min(_TILE // cols, triton.next_power_of_2(sizes[1]))
    between_tensors = tuple(steps[0] for steps in steps_of_stacks)
    return Tiles(shape[0], tuple(sizes), tuple(zip(between_tensors, *steps)), rows, cols)


def _distances(
    tensors: Sequence[Optional[Tensor]], following: Sequence[Optional[Tensor]]
) -> Optional[list[int]]:
    """How many elements lie from each tensor to the one that follows it; None where a pair cannot
    be of one stack."""
    distances: list[int] = []
    for tensor, other in zip(tensors, following):
        if tensor is None or other is None:  # so is the whole list
            distances.append(0)
            continue
        is_alike = (
            tensor.shape == other.shape
            and tensor.stride() == other.stride()
            and tensor.dtype == other.dtype
            and tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        )
        distances.append(int(other.storage_offset()) - int(tensor.storage_offset()))
        if not is_alike or distances[-1] < 0:
            return None
    return distances


def _views(
    stack: Sequence[Sequence[Optional[Tensor]]], spacing: Optional[list[int]]
) -> list[Optional[Tensor]]:
    """For each argument the tensors of a stack as one, (tensors, …)."""
    steps = [0] * len(stack[0]) if spacing is None else spacing
    return [
        None if t is None else t.as_strided((len(stack), *t.shape), (step, *t.stride()))
        for t, step in zip(stack[0], steps)
    ]
