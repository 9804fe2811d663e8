"""Holds the local tensors that one element-wise update covers: all of them, or a window's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import compress
from typing import Optional, TypeVar

from torch import Tensor

from ..weight_rounding import RandomBits, RoundedBy
from .prefetcher import Fetched
from .windows import narrow

AnyRows = TypeVar("AnyRows", bound="Rows")


@dataclass
class Rows:
    """Lists of one length, a row for each local tensor that is updated.

    Fields that may be offloaded are the first ones. A field is None where no row has it.
    """

    def in_window(self: AnyRows, fetched: Optional[Fetched]) -> AnyRows:
        """What a window has of the rows: its own tensors, and pieces of those on the device.

        Args:
            fetched: pieces of the rows, each with its tensors; None takes all rows as they are.
        """
        if fetched is None:
            return self
        present = [(name, column) for name, column in vars(self).items() if column is not None]
        # Random bits are in the place of residuals, but in no memory.
        present.sort(key=lambda named: isinstance(named[1][0], RandomBits))
        columns = {
            name: [
                tensors[n] if n < len(tensors) else narrow(column[piece.row], piece.slices)
                for piece, tensors in fetched
            ]
            for n, (name, column) in enumerate(present)
        }
        return replace(self, **columns)

    def only(self: AnyRows, present: list[bool]) -> AnyRows:
        """The rows that are present."""
        columns = {
            name: list(compress(column, present))
            for name, column in vars(self).items()
            if column is not None
        }
        return replace(self, **columns)


@dataclass
class MomentumRows(Rows):
    """Momentum B, gradients G, and what is to be orthogonalized."""

    momenta: list[Tensor]
    grads: list[Tensor]
    outputs: list[Tensor]


@dataclass
class WeightRows(Rows):
    """Weights W, what they are rounded by, updates U, factors on them, and what W is scaled with
    after the update."""

    rounded_by: Optional[list[RoundedBy]]
    weights: list[Tensor]
    updates: list[Tensor]
    factors: Optional[list[Tensor]] = None
    clip: Optional[list[Optional[Tensor]]] = None


@dataclass
class AdamWRows(Rows):
    """AdamW's moments, what weights are rounded by (None of those that are rounded to the nearest),
    weights, gradients, steps, and what weights are scaled with after the update."""

    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    rounded_by: list[Optional[RoundedBy]]
    params: list[Tensor]
    grads: list[Tensor]
    steps: list[Tensor]
    clip: list[Optional[Tensor]]

    def in_window(self, fetched: Optional[Fetched]) -> AdamWRows:
        """As in `Rows`. The step of a row in several pieces is counted with the last piece; the
        other pieces count in copies."""
        rows = super().in_window(fetched)
        if fetched is not None:
            steps = ((piece, self.steps[piece.row]) for piece, _ in fetched)
            rows.steps = [step if piece.is_last else step.clone() for piece, step in steps]
        return rows
