"""Cuts tensors of any strides into tiles, and puts many tensors into one launch of a kernel.

A kernel gets the addresses of its tensors as numbers, a tuple for each column of tensors; of random
bits it gets the first counters. They travel with the launch, as all arguments do: nothing is copied
to the device before it, and graphs may be captured of it. torch's functions of lists of tensors do
it in the same way.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Optional, Union

import torch
import triton
from torch import Tensor

from ..weight_rounding import RandomBits

# Elements per program: two vectors of 16 bytes in bf16 for each thread of four warps.
_TILE = 2048
_SQUARE_TILE = (32, 64)  # where rows are contiguous in one tensor and columns in another

# Each program looks through the items of its launch for its own: with more items, that would take
# longer than its tile.
MOST_ITEMS = 32

_ALIGNMENT = 16  # bytes of addresses, and elements of rows, that vectors take

Shape = tuple[int, ...]
Column = Optional[Sequence[Any]]  # of tensors or of random bits


class _Tiling(NamedTuple):
    """How the tensors of an item are cut.

    Args:
        shape: (slices, rows).
        length: elements of a row.
        strides: of each tensor, for (slices, rows, elements).
        dtypes: of the tensors.
        rows, cols: of a tile.
        tiles: how many there are.
        alike: what is equal in items that one launch can have. The length may differ where all
            elements are one row.
    """

    shape: Shape
    length: int
    strides: tuple[Shape, ...]
    dtypes: tuple[torch.dtype, ...]
    rows: int
    cols: int
    tiles: int
    alike: tuple


_Item = tuple[_Tiling, Sequence[int]]  # how it is cut, and the addresses of its tensors


class Launch(NamedTuple):
    """One launch, with a program for each tile of its items, which are one tensor of each column.

    Args:
        columns: for each the addresses of the items' tensors, or the first counters of their
            random bits; None for a column that is None.
        dtypes: of the columns; None likewise.
        firsts: of each item, the number of its first program.
        lengths: of each item, the elements of a row.
        shape: of each item, (slices, rows).
        strides: of the columns, for (slices, rows, elements).
        rows, cols: of a tile.
        programs: tiles of all items.
        is_aligned: whether wide tensors and rows can be accessed in vectors.

    Columns, firsts and lengths are padded to a power of two, or each number of items would be
    another compilation; the padding begins after the last program.
    """

    columns: tuple[Optional[tuple[int, ...]], ...]
    dtypes: tuple[Any, ...]
    firsts: tuple[int, ...]
    lengths: tuple[int, ...]
    shape: Shape
    strides: tuple[Shape, ...]
    rows: int
    cols: int
    programs: int
    is_aligned: bool


def launches(
    wide: Sequence[Column],
    broadcast: Sequence[Column] = (),
    *,
    whole_dims: int = 0,
) -> Iterator[Launch]:
    """Yields as few launches as have all items; empty ones are left out.

    Args:
        wide: columns, lists of tensors; the tensors of an item have one shape. Any column but the
            first may be None.
        broadcast: columns that broadcast to these, random bits among them, or None.
        whole_dims: so many leading dimensions are slices, rows and elements as they are; others
            are merged where they can be.
    """
    columns = (*wide, *broadcast)
    given = [column for column in columns if column is not None]
    wide_count = len(wide) - wide.count(None)
    alike: dict[tuple, list[_Item]] = {}
    items = list(zip(*given))
    for operands in items:
        tensors = [o.places if isinstance(o, RandomBits) else o for o in operands]
        if not tensors[0].numel():
            continue
        layout = tuple([(t.shape, t.stride(), t.dtype) for t in tensors])
        tiling = _tiling_of(layout, whole_dims)
        if tiling is None:  # its slices, which have fewer dimensions, become items at the end
            shape = tensors[0].shape
            items += zip(*[_slices(operand, shape, whole_dims) for operand in operands])
            continue
        addresses = [
            o.first_counter if isinstance(o, RandomBits) else o.data_ptr() for o in operands
        ]
        low_bits = tiling.length
        for address in addresses[:wide_count]:
            low_bits |= address
        alike.setdefault((tiling.alike, low_bits % _ALIGNMENT == 0), []).append((tiling, addresses))
    for (_, is_aligned), members in alike.items():
        for start in range(0, len(members), MOST_ITEMS):
            part = members[start : start + MOST_ITEMS]
            yield _launch(part, columns, is_aligned)


def _slices(operand: Union[Tensor, RandomBits], shape: Shape, dim: int) -> Sequence[Any]:
    """An operand that is broadcast to that shape, slice by slice along a dimension."""
    if isinstance(operand, RandomBits):
        return [operand._replace(places=places) for places in operand.places.unbind(dim)]
    return operand.expand(shape).unbind(dim)


@functools.lru_cache(maxsize=4096)
def _tiling_of(layout: tuple, whole_dims: int) -> Optional[_Tiling]:
    """The tiling of an item, whose tensors are broadcast to the first one's shape.

    Args:
        layout: of each tensor the shape, the strides and the dtype.
    """
    shape = layout[0][0]
    strides = tuple([_expanded(shape, *tensor[:2]) for tensor in layout])
    return _tiling(shape, strides, tuple([tensor[2] for tensor in layout]), whole_dims)


def _expanded(shape: Shape, sizes: Shape, strides: Shape) -> Shape:
    """Strides of a tensor that is expanded to that shape."""
    added = len(shape) - len(sizes)
    own = zip(sizes, strides, shape[added:])
    return (*[0] * added, *(0 if size == 1 < whole else step for size, step, whole in own))


def _launch(items: Sequence[_Item], columns: Sequence[Column], is_aligned: bool) -> Launch:
    tiling, _ = items[0]
    *firsts, programs = accumulate([item[0].tiles for item in items], initial=0)
    lengths = [item[0].length for item in items]
    padding = (1 << (len(items) - 1).bit_length()) - len(items)
    addresses = zip(*[item[1] for item in items], *[items[-1][1]] * padding)
    strides, dtypes = iter(tiling.strides), iter(tiling.dtypes)
    return Launch(
        tuple([None if column is None else next(addresses) for column in columns]),
        tuple([None if column is None else next(dtypes) for column in columns]),
        (*firsts, *[programs] * padding),
        (*lengths, *lengths[-1:] * padding),
        tiling.shape,
        tuple([(0, 0, 0) if c is None else next(strides) for c in columns]),
        tiling.rows,
        tiling.cols,
        programs,
        is_aligned,
    )


def _tiling(
    shape: Shape, strides: tuple[Shape, ...], dtypes: tuple[torch.dtype, ...], whole_dims: int
) -> Optional[_Tiling]:
    """How tensors of that shape are cut; None where there are more than three dimensions even when
    neighbours are merged."""
    sizes: list[int] = []
    steps: list[Shape] = []  # for each size, the stride of each tensor
    for dim, (size, step) in enumerate(zip(shape, zip(*strides))):
        if size == 1 and dim >= whole_dims:
            continue
        follows = sizes and all(outer == size * inner for outer, inner in zip(steps[-1], step))
        if follows and len(sizes) > whole_dims:
            sizes[-1], steps[-1] = sizes[-1] * size, step
        else:
            sizes.append(size)
            steps.append(step)
    if len(sizes) > 3:
        return None
    if whole_dims:  # the first one is slices
        missing = 3 - len(sizes)
        sizes[1:1], steps[1:1] = [1] * missing, [(0,) * len(strides)] * missing
    else:
        sizes = [1] * (3 - len(sizes)) + sizes
        steps = [(0,) * len(strides)] * (3 - len(steps)) + steps
    is_one_row = not whole_dims and sizes[:2] == [1, 1]
    if is_one_row:
        rows, cols = 1, _TILE
    elif any(row == 1 and col > 1 for row, col in zip(steps[1], steps[2])):
        rows, cols = _SQUARE_TILE
    else:
        cols = min(_TILE, triton.next_power_of_2(sizes[2]))
        rows = min(_TILE // cols, triton.next_power_of_2(sizes[1]))
    tiles = sizes[0] * -(-sizes[1] // rows) * -(-sizes[2] // cols)
    per_tensor = tuple(zip(*steps))
    alike = (rows, cols, per_tensor, dtypes, None if is_one_row else tuple(sizes))
    return _Tiling(tuple(sizes[:2]), sizes[2], per_tensor, dtypes, rows, cols, tiles, alike)
