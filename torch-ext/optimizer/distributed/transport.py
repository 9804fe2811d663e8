"""Sends the owners their input of a chunk, and sends the updates back to the ranks of the lane.

A transport is made for one chunk in one step, and holds its buffers. One call launches a
collective, and a later call waits for it. On accelerators the current stream waits, not the host,
and all later work is on that stream. So a buffer may be used again once the scratch has it back.
"""

from __future__ import annotations

import math
from typing import Any, Optional

import torch.distributed as dist
from torch import Tensor

from ..scratch import Scratch
from . import wire
from .chunks import Batch, Chunk, Traffic
from .collectives import share_slots
from .plan import Lane


class Transport:
    """Carries the input of orthogonalization to the owners of one chunk, and their updates back.

    Args:
        chunk, lane: what travels.
        process_group: that of the lane's peers; None if this rank is alone.
        scratch: what buffers are taken from.

    Attributes:
        inputs: the buffer with the input of orthogonalization of this rank's bundles.
        updates: the buffer with the updates of this rank's bundles, once they have been scattered.
    """

    def __init__(self, chunk: Chunk, lane: Lane, process_group: Any, scratch: Scratch):
        self.chunk = chunk
        self.lane = lane
        self._process_group = process_group
        self._scratch = scratch
        self._is_local = len(lane.peers) == 1
        self.inputs = self.updates = self._take(chunk.gather.kept + sum(chunk.gather.sent))
        self._gathered: Optional[Tensor] = None  # input from other ranks
        self._scattered: Optional[Tensor] = None  # updates for other ranks, if these differ
        self._works: list[Any] = []

    def gather(self) -> None:
        """Starts to send the owners their input."""
        if self._is_local:
            return
        kept = self.chunk.gather.kept
        self._gathered = self._take(sum(self.chunk.gather.received))
        self._exchange(self.inputs[kept:], self._gathered, self.chunk.gather)

    def finish_gather(self) -> None:
        """Waits for the input of what this rank owns, and takes buffers for updates."""
        self.wait()
        scatter = self.chunk.scatter
        if not self.chunk.in_place:
            self.updates = self._take(scatter.kept + sum(scatter.received))
        if not (self.chunk.slots or self._is_local):
            in_place = self.chunk.in_place
            self._scattered = self._gathered if in_place else self._take(sum(scatter.sent))

    def assemble(self, batch: Batch) -> Tensor:
        """Puts the units of a batch together, (n, *shape of each); they may be overwritten."""
        shape = (len(batch.units), *batch.units[0].shape)
        if self._gathered is None:
            return self.inputs[batch.gathered[0].start :][: math.prod(shape)].view(shape)
        X = self._scratch.empty("gathered", shape, self.lane.wire, self.lane.device)
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for run in batch.gathered_runs:
            is_own = run.first.peer == self.lane.this_peer
            buffer = self.inputs if is_own else self._gathered
            targets += run.in_units(X)
            sources += run.in_buffer(buffer, len(X))
        wire.copy_parts(sources, targets)
        return X

    def stage_updates(self, units: Tensor, squares: Optional[Tensor], batch: Batch) -> None:
        """Copies the updates of a batch into the buffers that they are scattered from.

        Args:
            units: orthogonalized, (n, *shape of each).
            squares: mean squares of each of their matrices, which are sent after every part.
            batch: of the units.
        """
        targets, sources = [], []
        for run in batch.scattered_runs:
            buffer = self._scattered
            if buffer is None or run.first.peer == self.lane.this_peer:
                buffer = self.updates
            sources += run.in_units(units)
            targets += run.in_buffer(buffer, len(units))
            if squares is not None:
                numel = squares.numel() * wire.elements_of_numbers(buffer.dtype)
                wire.write_numbers(squares, run.after(buffer, len(units), numel))
        if targets:
            wire.copy_parts(sources, targets)

    def scatter(self) -> None:
        """Starts to send the updates to the ranks that hold the weights."""
        for buffer in (self.inputs, self._gathered):
            if buffer is not None and buffer is not self.updates and buffer is not self._scattered:
                self._scratch.give(buffer)
        if self.chunk.slots:
            self._works = share_slots(self.updates, self.chunk.slots, self._process_group)
        elif self._scattered is not None:
            received = self.updates[self.chunk.scatter.kept :]
            self._exchange(self._scattered, received, self.chunk.scatter)

    def wait(self) -> None:
        """Waits for the collectives that were launched last."""
        for work in self._works:
            work.wait()
        self._works = []

    def release(self) -> None:
        """Gives the buffers of updates back to the scratch."""
        self._scratch.give(self.updates)
        if self._scattered is not None:
            self._scratch.give(self._scattered)

    def _take(self, numel: int) -> Tensor:
        return self._scratch.take(numel, self.lane.wire, self.lane.device)

    def _exchange(self, sent: Tensor, received: Tensor, traffic: Traffic) -> None:
        sizes, group = (list(traffic.received), list(traffic.sent)), self._process_group
        work = dist.all_to_all_single(received, sent, *sizes, group=group, async_op=True)
        self._works = [work]
