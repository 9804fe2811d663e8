"""How kernels take tensors of any layout: few dimensions, cut into tiles, many tensors at once."""

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
    """How tensors (parts, …) are cut.

    Args:
        parts: how many.
        shape: of each part, (slices, rows, cols).
        strides: of each tensor, for (parts, slices, rows, cols).
        rows, cols: of a tile.
    """

    parts: int
    shape: Shape
    strides: tuple[Shape, ...]
    rows: int
    cols: int

    @property
    def count(self) -> int:
        """Tiles of each part."""
        slices, rows, cols = self.shape
        return slices * -(-rows // self.rows) * -(-cols // self.cols)

    @property
    def programs(self) -> int:
        """Tiles of all parts: one program has one of them."""
        return self.parts * self.count


def joined(*columns: Optional[Sequence[Tensor]]) -> Iterator[list[Any]]:
    """Rows of tensors, none of them empty, each with a dimension of parts in front.

    Consecutive rows become one, with as many parts, where the tensors of each column lie evenly
    spaced in one storage, as experts and buffers do: that is one launch for all of them. A column
    may be None, as it is in all rows then.
    """
    run: list[tuple[Optional[Tensor], ...]] = []
    spacing: Optional[list[int]] = None  # of the tensors of a run
    for row in zip(*(repeat(None) if column is None else column for column in columns)):
        if not row[0].numel():
            continue
        found = _spacing(run[-1], row) if run else None
        if run and (found is None or spacing not in (None, found)):
            yield _stacked(run, spacing)
            run, found = [], None
        run.append(row)
        spacing = found
    if run:
        yield _stacked(run, spacing)


def tiled(*tensors: Optional[Tensor]) -> tuple[Tiles, list[Optional[Tensor]]]:
    """The tiles of tensors (parts, …) and what they are tiles of, each of the first one's shape.

    That is the tensors themselves, but contiguous copies where not even four strides tell where
    the elements of all of them lie.
    """
    shape = tensors[0].shape  # type: ignore[union-attr]
    of_shape = [None if tensor is None else _expanded(tensor, shape) for tensor in tensors]
    tiles = _tiles_of(shape, tuple(None if t is None else t.stride() for t in of_shape))
    if tiles is None:
        return tiled(*(None if tensor is None else tensor.contiguous() for tensor in of_shape))
    return tiles, of_shape


def write_back(*pairs: tuple[Tensor, Optional[Tensor]]) -> None:
    """Copies what was written to copies, see `tiled`."""
    for tensor, written in pairs:
        if written is not None and written.data_ptr() != tensor.data_ptr():
            tensor.copy_(written)


def _expanded(tensor: Tensor, shape: torch.Size) -> Tensor:
    """(parts, …) of what broadcasts to each part."""
    missing = (1,) * (len(shape) - tensor.ndim)
    return tensor.view(len(tensor), *missing, *tensor.shape[1:]).expand(shape)


@functools.lru_cache(maxsize=4096)
def _tiles_of(shape: Shape, strides: tuple[Optional[Shape], ...]) -> Optional[Tiles]:
    """None where parts have more than three dimensions even when neighbours are merged."""
    of_each = [(0,) * len(shape) if of is None else of for of in strides]
    sizes: list[int] = []
    steps: list[Shape] = []  # of each size, one for each tensor
    for size, step in zip(shape[1:], list(zip(*of_each))[1:]):
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
    crossing = any(row == 1 and col > 1 for row, col in zip(steps[1], steps[2]))
    if crossing:
        rows, cols = _SQUARE_TILE
    else:
        cols = min(_TILE, triton.next_power_of_2(sizes[2]))
        rows = min(_TILE // cols, triton.next_power_of_2(sizes[1]))
    parts = tuple(of[0] for of in of_each)
    return Tiles(shape[0], tuple(sizes), tuple(zip(parts, *steps)), rows, cols)


def _spacing(
    row: Sequence[Optional[Tensor]], following: Sequence[Optional[Tensor]]
) -> Optional[list[int]]:
    """How many elements lie from the tensors of one row to those of the next; None: unlike ones."""
    found: list[int] = []
    for one, other in zip(row, following):
        if one is None or other is None:  # so is the whole column
            found.append(0)
            continue
        alike = (
            one.shape == other.shape
            and one.stride() == other.stride()
            and one.dtype == other.dtype
            and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        )
        distance = int(other.storage_offset()) - int(one.storage_offset())
        found.append(distance)
        if not alike or distance < 0:
            return None
    return found


def _stacked(
    run: Sequence[Sequence[Optional[Tensor]]], spacing: Optional[list[int]]
) -> list[Optional[Tensor]]:
    steps = [0] * len(run[0]) if spacing is None else spacing
    return [
        None if t is None else t.as_strided((len(run), *t.shape), (step, *t.stride()))
        for t, step in zip(run[0], steps)
    ]
