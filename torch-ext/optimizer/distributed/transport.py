"""How a chunk travels: not at all, by all-to-alls, back by an all-gather, or to everyone.

A transport is made for one chunk in one step, and holds its buffers. What it starts, it waits for
in its next call; waiting makes the current stream wait, not the host, and all later work is on that
stream. So a buffer may be used again as soon as it has been given back to the scratch.
"""

from __future__ import annotations

import math
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from ..scratch import Scratch
from . import regions, wire
from .chunks import Batch, Chunk, Traffic
from .collectives import all_gather_slots
from .plan import Lane


class Transport:
    """Momentum and updates of a chunk on their way.

    Args:
        chunk, lane: what travels.
        group: of the lane's peers; None where this rank is alone.
        scratch: what buffers are taken from.

    Attributes:
        momentum: this rank's parts, in the order of the wire.
        updates: this rank's parts of the updates, once they have come back.
    """

    def __init__(self, chunk: Chunk, lane: Lane, group: Any, scratch: Scratch):
        self.chunk = chunk
        self.lane = lane
        self._group = group
        self._scratch = scratch
        self._is_alone = len(lane.peers) == 1
        self.momentum = self.updates = self._take(chunk.kept + sum(chunk.gather.sent))
        self._gathered: Optional[Tensor] = None  # others' momentum
        self._returned: Optional[Tensor] = None  # others' updates, where each gets its own
        self._work: Any = None

    def gather(self) -> None:
        """Sends the momentum to the owners."""
        if self._is_alone:
            return
        kept = self.chunk.kept
        if self.lane.everywhere and kept:
            self.momentum[kept:].view(-1, kept).copy_(self.momentum[:kept])
        self._gathered = self._take(sum(self.chunk.gather.received))
        self._exchange(self.momentum[kept:], self._gathered, self.chunk.gather)

    def land(self) -> None:
        """Waits for what this rank owns, and makes room for its updates."""
        self.wait()
        slot, scatter = self.chunk.slot, self.chunk.scatter
        if not self.chunk.in_place:
            self.updates = self._take(self.chunk.kept_back + sum(scatter.received))
        if slot:  # nothing undefined is sent where it is padded
            self.updates[self.lane.me * slot :][:slot].zero_()
        elif not (self._is_alone or self.lane.everywhere):
            in_place = self.chunk.in_place
            self._returned = self._gathered if in_place else self._take(sum(scatter.sent))

    def assemble(self, batch: Batch) -> Tensor:
        """Whole units, (n, *shape of each), which may be overwritten."""
        shape = (len(batch.units), *regions.shape_of(batch.units[0].box))
        if self._gathered is None:
            return self.momentum[batch.gathered[0].start :][: math.prod(shape)].view(shape)
        X = self._scratch.empty("gathered", shape, self.lane.wire, self.lane.device)
        here, there, exponents = [], [], []
        for part in batch.gathered:
            numel = regions.numel(part.box) * shape[0]
            if numel:
                source = self.momentum if part.peer == self.lane.me else self._gathered
                here.append(X[(slice(None), *regions.slices(part.box))])
                there.append(source[part.start : part.start + numel].view(here[-1].shape))
                exponents.append(source[part.start + numel :][: shape[0]])
        torch._foreach_copy_(here, there)
        if self.lane.scaled:
            wire.align(here, torch.stack(exponents))
        return X

    def give_back(self, units: Tensor, squares: Optional[Tensor], batch: Batch) -> None:
        """Puts every peer's part of the updates where it is sent from.

        Args:
            units: orthogonalized, (n, *shape of each).
            squares: mean squares of each matrix of them, which go along with every part.
            batch: of the units.
        """
        here, there = [], []
        for part in batch.returned:
            buffer = self._returned
            if buffer is None or part.peer == self.lane.me:
                buffer = self.updates
            stop = part.start + regions.numel(part.box) * len(batch.units)
            if stop > part.start:
                there.append(units[(slice(None), *regions.slices(part.box))])
                here.append(buffer[part.start : stop].view(there[-1].shape))
            if squares is not None:
                wire.write_numbers(squares, buffer, stop)
        if here:
            torch._foreach_copy_(here, there)

    def scatter(self) -> None:
        """Sends the updates back."""
        for buffer in (self.momentum, self._gathered):
            if buffer is not None and buffer is not self.updates and buffer is not self._returned:
                self._scratch.give(buffer)
        if self.chunk.slot:
            self._work = all_gather_slots(self.updates, self._group)
        elif self._returned is not None:
            received = self.updates[self.chunk.kept_back :]
            self._exchange(self._returned, received, self.chunk.scatter)

    def wait(self) -> None:
        """Waits for what is on its way."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def end(self) -> None:
        """Lets go of the updates."""
        self._scratch.give(self.updates)
        if self._returned is not None:
            self._scratch.give(self._returned)

    def _take(self, numel: int) -> Tensor:
        return self._scratch.take(numel, self.lane.wire, self.lane.device)

    def _exchange(self, sent: Tensor, received: Tensor, traffic: Traffic) -> None:
        self._work = dist.all_to_all_single(
            received,
            sent,
            list(traffic.received),
            list(traffic.sent),
            group=self._group,
            async_op=True,
        )
