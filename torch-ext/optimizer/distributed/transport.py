"""Sends a chunk's momentum to the owners and the updates back, by all-to-all or all-gather.

A transport is made for one chunk in one step, and holds its buffers. The collective that one call
launches, a later call waits for; waiting makes the current stream wait, not the host, and all later
work is on that stream. So a buffer may be used again as soon as the scratch has it back.
"""

from __future__ import annotations

import math
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from ..scratch import Scratch
from . import regions, wire
from .chunks import Batch, Chunk, Traffic, views_of_boxes
from .collectives import all_gather_slots
from .plan import Lane


class Transport:
    """Carries the momentum of one chunk to its owners, and their updates back.

    Args:
        chunk, lane: what travels.
        process_group: of the lane's peers; None where this rank is alone.
        scratch: what buffers are taken from.

    Attributes:
        momentum: of this rank's bundles.
        updates: of this rank's bundles, once they have been scattered.
    """

    def __init__(self, chunk: Chunk, lane: Lane, process_group: Any, scratch: Scratch):
        self.chunk = chunk
        self.lane = lane
        self._process_group = process_group
        self._scratch = scratch
        self._is_local = len(lane.peers) == 1
        self.momentum = self.updates = self._take(chunk.gather.kept + sum(chunk.gather.sent))
        self._gathered: Optional[Tensor] = None  # momentum of other ranks
        self._scattered: Optional[Tensor] = None  # updates for other ranks, for each its own
        self._work: Any = None

    def gather(self) -> None:
        """Starts to send the momentum to the owners."""
        if self._is_local:
            return
        kept = self.chunk.gather.kept
        if self.lane.owned_by_all and kept:
            self.momentum[kept:].view(-1, kept).copy_(self.momentum[:kept])
        self._gathered = self._take(sum(self.chunk.gather.received))
        self._exchange(self.momentum[kept:], self._gathered, self.chunk.gather)

    def finish_gather(self) -> None:
        """Waits for the momentum of what this rank owns, and takes buffers for its updates."""
        self.wait()
        scatter = self.chunk.scatter
        if not self.chunk.in_place:
            self.updates = self._take(scatter.kept + sum(scatter.received))
        if not (self.chunk.slot or self._is_local or self.lane.owned_by_all):
            in_place = self.chunk.in_place
            self._scattered = self._gathered if in_place else self._take(sum(scatter.sent))

    def assemble(self, batch: Batch) -> Tensor:
        """Whole units, (n, *shape of each), which may be overwritten."""
        shape = (len(batch.units), *batch.units[0].shape)
        if self._gathered is None:
            return self.momentum[batch.gathered[0].start :][: math.prod(shape)].view(shape)
        X = self._scratch.empty("gathered", shape, self.lane.wire, self.lane.device)
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        exponents: list[Tensor] = []
        for part in batch.gathered:
            buffer = self.momentum if part.peer == self.lane.this_peer else self._gathered
            stop = part.start + part.numel * shape[0]
            targets += [X[(slice(None), *regions.slices(box))] for box in part.boxes]
            if part.boxes:
                sources += views_of_boxes(buffer[part.start : stop], part.boxes, shape[0])
                behind = buffer[stop:][: shape[0] * len(part.boxes)]
                exponents += behind.view(shape[0], -1).unbind(1) if self.lane.scaled else []
        torch._foreach_copy_(targets, sources)
        if self.lane.scaled:
            wire.unify_scales(targets, torch.stack(exponents))
        return X

    def stage_updates(self, units: Tensor, squares: Optional[Tensor], batch: Batch) -> None:
        """Copies the updates of a batch into the buffers that they are scattered from.

        Args:
            units: orthogonalized, (n, *shape of each).
            squares: mean squares of each of their matrices, which follow every part.
            batch: of the units.
        """
        targets, sources = [], []
        for part in batch.scattered:
            buffer = self._scattered
            if buffer is None or part.peer == self.lane.this_peer:
                buffer = self.updates
            stop = part.start + part.numel * len(batch.units)
            if part.boxes:
                sources += [units[(slice(None), *regions.slices(box))] for box in part.boxes]
                targets += views_of_boxes(buffer[part.start : stop], part.boxes, len(batch.units))
            if squares is not None:
                wire.write_numbers(squares, buffer, stop)
        if targets:
            torch._foreach_copy_(targets, sources)

    def scatter(self) -> None:
        """Starts to send the updates to the ranks that hold the weights."""
        for buffer in (self.momentum, self._gathered):
            if buffer is not None and buffer is not self.updates and buffer is not self._scattered:
                self._scratch.give(buffer)
        if self.chunk.slot:
            self._work = all_gather_slots(self.updates, self._process_group)
        elif self._scattered is not None:
            received = self.updates[self.chunk.scatter.kept :]
            self._exchange(self._scattered, received, self.chunk.scatter)

    def wait(self) -> None:
        """Waits for the collective that was launched last."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def release(self) -> None:
        """Gives the buffers of updates back to the scratch."""
        self._scratch.give(self.updates)
        if self._scattered is not None:
            self._scratch.give(self._scattered)

    def _take(self, numel: int) -> Tensor:
        return self._scratch.take(numel, self.lane.wire, self.lane.device)

    def _exchange(self, sent: Tensor, received: Tensor, traffic: Traffic) -> None:
        sizes, group = (list(traffic.received), list(traffic.sent)), self._process_group
        self._work = dist.all_to_all_single(received, sent, *sizes, group=group, async_op=True)
