"""Carries a chunk's input to the owners, and the updates to the ranks that hold the weights.

An exchange serves one chunk in one step, and holds its buffers, all in the wire's dtype. One call
starts a collective, and a later call waits for it. On accelerators the current stream waits, not
the host. Because all later work runs on that stream, a buffer can be reused as soon as it is
returned to the scratch. The contents of the buffers, and the buffers that a chunk needs::

                     inputs       gathered      scattered     updates
    holds            this rank's  the owner's   the owner's   this rank's
    without traffic  the batch    –             –             in inputs
    in place         yes          yes           in gathered   in inputs
    by slots         yes          yes           –             yes
    else             yes          yes           yes           yes

In place, each rank gets back the update of the elements it sent (FSDP2, tensor parallelism). By
slots, all ranks get all updates (DDP, ZeRO-2), through an all-gather or broadcasts of slots.

Mean squares of updates travel in a side buffer, in fp32, so that they are equal on every layout.
"""

from __future__ import annotations

import math
from typing import Any, Optional

import torch
from torch import Tensor

from ..scratch import Scratch
from .chunks import Batch, Chunk, PeerPart, Traffic
from .collectives import all_gather_slots, all_to_all, share_slots
from .plan import Lane
from .wire import copy_parts


class Exchange:
    """Carries the input of orthogonalization to the owners of one chunk, and their updates back.

    Args:
        chunk, lane: the chunk to exchange, and its lane.
        process_group: process group of the lane's peers; None if this rank is alone.
        scratch: provides the buffers.

    Attributes:
        inputs: the input of orthogonalization of this rank's pieces.
        updates: the updates of this rank's pieces, after `finish_scatter`.
        moments: mean squares of the updates of all peers; None without a second moment.
    """

    def __init__(self, chunk: Chunk, lane: Lane, process_group: Any, scratch: Scratch):
        self.chunk = chunk
        self.lane = lane
        self._process_group = process_group
        self._scratch = scratch
        self._is_local = len(lane.peers) == 1
        self.inputs = self.updates = self._take(chunk.gather.kept + sum(chunk.gather.sent))
        self.moments: Optional[Tensor] = None
        self._gathered: Optional[Tensor] = None  # input from other ranks
        self._scattered: Optional[Tensor] = None  # updates to send, if ranks receive different ones
        self._works: list[Any] = []

    def start_gather(self) -> None:
        """Starts to send the input to the owners."""
        if self._is_local:
            return
        kept = self.chunk.gather.kept
        self._gathered = self._take(sum(self.chunk.gather.received))
        self._start(self.inputs[kept:], self._gathered, self.chunk.gather)

    def finish_gather(self) -> None:
        """Waits for the input of the units that this rank owns; allocates buffers for updates."""
        self._wait()
        chunk, scatter = self.chunk, self.chunk.scatter
        if not chunk.in_place:
            self.updates = self._take(scatter.kept + sum(scatter.received))
        if not (chunk.slots or self._is_local):
            self._scattered = self._gathered if chunk.in_place else self._take(sum(scatter.sent))
        if chunk.moments_slot:
            numbers = len(self.lane.peers) * chunk.moments_slot
            self.moments = self._scratch.take(numbers, torch.float32, self.lane.device)

    def assemble(self, batch: Batch) -> Tensor:
        """Assembles the units of a batch, (n, *shape of each); callers may overwrite them."""
        if self._is_local:
            return self._own(self.inputs, batch.gathered[0], batch)
        assert self._gathered is not None
        X = self._scratch.empty("gathered", batch.shape, self.lane.wire, self.lane.device)
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for run in batch.gathered_runs:
            is_own = run.first.peer == self.lane.this_peer
            buffer = self.inputs if is_own else self._gathered
            targets += run.in_units(X)
            sources += run.in_buffer(buffer, len(X))
        copy_parts(sources, targets)
        return X

    def stage(self, U: Tensor, batch: Batch) -> None:
        """Copies the updates of a batch, (n, *shape of a unit), into the buffer to be sent."""
        if self._is_local:
            self._own(self.updates, batch.scattered[0], batch)[: len(U)].copy_(U)
            return
        targets, sources = [], []
        for run in batch.scattered_runs:
            buffer = self._scattered
            if buffer is None or run.first.peer == self.lane.this_peer:
                buffer = self.updates
            sources += run.in_units(U)
            targets += run.in_buffer(buffer, len(U))
        if targets:
            copy_parts(sources, targets)

    def _own(self, buffer: Tensor, part: PeerPart, batch: Batch) -> Tensor:
        """A view of a batch's units in a local lane's buffer, where they are whole."""
        return buffer[part.start :][: math.prod(batch.shape)].view(batch.shape)

    def stage_moments(self, squares: Tensor, batch: Batch) -> None:
        """Copies the mean squares of a batch's updates, of any shape, into the side buffer."""
        assert self.moments is not None
        self.moments[batch.moments_start :][: squares.numel()].copy_(squares.flatten())

    def start_scatter(self) -> None:
        """Starts to send the updates to the ranks that hold the weights."""
        for buffer in (self.inputs, self._gathered):
            if buffer is not None and buffer is not self.updates and buffer is not self._scattered:
                self._scratch.give(buffer)
        if self.chunk.slots:
            self._works = share_slots(self.updates, self.chunk.slots, self._process_group)
        elif self._scattered is not None:
            received = self.updates[self.chunk.scatter.kept :]
            self._start(self._scattered, received, self.chunk.scatter)
        if self.moments is not None and not self._is_local:
            self._works.append(all_gather_slots(self.moments, self._process_group))

    def finish_scatter(self) -> None:
        """Waits for the updates of this rank's pieces."""
        self._wait()

    def release(self) -> None:
        """Returns the buffers of updates to the scratch."""
        for buffer in (self.updates, self._scattered, self.moments):
            if buffer is not None:
                self._scratch.give(buffer)

    def _take(self, numel: int) -> Tensor:
        return self._scratch.take(numel, self.lane.wire, self.lane.device)

    def _start(self, sent: Tensor, received: Tensor, traffic: Traffic) -> None:
        sizes = traffic.received, traffic.sent
        self._works = [all_to_all(received, sent, *sizes, self._process_group)]

    def _wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []
