"""Reads a stored tensor as matrices: experts, blocks of rows (``split``), flattened dimensions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Union


@dataclass(frozen=True)
class Blocks:
    """``count`` matrices of ``rows`` rows each, consecutive rows of a stored matrix."""

    start: int
    rows: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.count


@dataclass(frozen=True)
class Matrices:
    """How a stored tensor is read as matrices.

    Args:
        shape: of the stored tensor: (experts…, rows, cols), or (rows, rest…) where flattened.
        row_dim: the dimension that counts rows; those before it count experts, those behind it are
            the columns.
        blocks: how the rows of each stored matrix fall into matrices.
    """

    shape: tuple[int, ...]
    row_dim: int
    blocks: tuple[Blocks, ...]

    @property
    def experts(self) -> int:
        return math.prod(self.shape[: self.row_dim])

    @property
    def cols(self) -> int:
        return math.prod(self.shape[self.row_dim + 1 :])

    @property
    def long_sides(self) -> int:
        """Elements of the second moment per stored matrix: the longer side of each matrix in it."""
        return sum(block.count * max(block.rows, self.cols) for block in self.blocks)

    def count(self, box: Sequence[tuple[int, int]], rows: int) -> int:
        """Matrices of ``rows`` rows in a box of the stored tensor."""
        return math.prod(stop - start for start, stop in box[: self.row_dim + 1]) // rows

    def second_moment_interval(self, start: int, rows: int, count: int) -> tuple[int, int]:
        """Which of the `long_sides` belong to ``count`` matrices of ``rows`` rows each."""
        offset = 0
        for block in self.blocks:
            long_side = max(block.rows, self.cols)
            if start < block.stop:
                first = offset + (start - block.start) // rows * long_side
                return first, first + count * long_side
            offset += block.count * long_side
        raise IndexError(start)


def read_as_matrices(
    shape: Sequence[int], is_expert: bool, flatten: bool, row_counts: Union[int, Sequence, None]
) -> Matrices:
    """The matrices of a stored tensor.

    Args:
        shape: of the whole tensor.
        is_expert: leading dimensions count experts.
        flatten: read more than two dimensions as (dim 0, all the rest).
        row_counts: rows of each matrix, one number for all of them, or None for no split.

    Raises:
        ValueError: not a matrix; row counts that do not add up. Completes "<parameter> …".
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
    return Matrices(shape, row_dim, _blocks(shape[row_dim], row_counts))


def _blocks(rows: int, row_counts: Union[int, Sequence, None]) -> tuple[Blocks, ...]:
    if row_counts is None:
        row_counts = [rows]
    elif isinstance(row_counts, int):
        if rows % row_counts:
            raise ValueError(f"has {rows} rows, which split={row_counts} does not divide")
        row_counts = [row_counts] * (rows // row_counts)
    elif sum(row_counts) != rows:
        raise ValueError(
            f"has {rows} rows, but split={list(row_counts)} adds up to {sum(row_counts)}"
        )
    blocks: list[Blocks] = []
    for matrix_rows, equal in itertools.groupby(row_counts):
        start = blocks[-1].stop if blocks else 0
        blocks.append(Blocks(start, matrix_rows, len(list(equal))))
    return tuple(blocks)
