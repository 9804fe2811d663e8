"""Lists of local tensors that element-wise arithmetic takes at once, whole or window by window."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import compress
from typing import Optional, TypeVar

from torch import Tensor

from . import Fetched, narrow

AnyRows = TypeVar("AnyRows", bound="Rows")


@dataclass
class Rows:
    """Lists of one length, a row for each local tensor that is updated.

    Fields that may come from host memory are the first ones. A field is None where no row has it.
    """

    def part(self: AnyRows, fetched: Optional[Fetched]) -> AnyRows:
        """What a window has of the rows: its tensors, and pieces of those on the device.

        Args:
            fetched: shares of the rows, each with its tensors; None where nothing was carried.
        """
        if fetched is None:
            return self
        columns = {}
        for number, (key, column) in enumerate(vars(self).items()):
            if column is not None:
                columns[key] = [
                    tensors[number]
                    if number < len(tensors)
                    else narrow(column[share.row], share.piece)
                    for share, tensors in fetched
                ]
        return replace(self, **columns)

    def only(self: AnyRows, present: list[bool]) -> AnyRows:
        """The rows that are present."""
        columns = {
            key: list(compress(column, present))
            for key, column in vars(self).items()
            if column is not None
        }
        return replace(self, **columns)


@dataclass
class MomentumRows(Rows):
    """Momentum B, gradients G, what is to be orthogonalized, and where to update at all."""

    momenta: list[Tensor]
    grads: list[Tensor]
    outputs: list[Tensor]
    keep: Optional[list[Tensor]] = None
    largest: Optional[list[Tensor]] = None  # magnitudes of the outputs, to be written


@dataclass
class WeightRows(Rows):
    """Weights W, updates U, factors on them, where to update, and what W is scaled with then."""

    weights: list[Tensor]
    updates: list[Tensor]
    factors: Optional[list[Tensor]] = None
    keep: Optional[list[Tensor]] = None
    clip: Optional[list[Optional[Tensor]]] = None


@dataclass
class AdamWRows(Rows):
    """AdamW's moments, weights, gradients and steps."""

    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    params: list[Tensor]
    grads: list[Tensor]
    steps: list[Tensor]

    def part(self, fetched: Optional[Fetched]) -> AdamWRows:
        """A row that is cut is counted once: its last piece counts, the others count a copy."""
        part = super().part(fetched)
        if fetched is not None:
            rows = ((share, self.steps[share.row]) for share, _ in fetched)
            part.steps = [step if share.is_last else step.clone() for share, step in rows]
        return part
