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
from . import layout, wire
from .collectives import all_gather_slots
from .plan import Batch, Chunk, Lane, Traffic


def transport_of(chunk: Chunk, lane: Lane, group: Any, scratch: Scratch) -> Alone:
    """What a chunk of a lane travels by.

    Args:
        group: of the lane's peers; None where this rank is alone.
    """
    if len(lane.peers) == 1:
        return Alone(chunk, lane, group, scratch)
    if lane.everywhere:
        return ToEveryone(chunk, lane, group, scratch)
    return (AllGather if chunk.slot else AllToAll)(chunk, lane, group, scratch)


class Alone:
    """Momentum and updates of a chunk that stays on its rank.

    Attributes:
        momentum: what this rank has to be orthogonalized, in the order of the wire.
        updates: this rank's parts of the updates, once they have come back.
    """

    def __init__(self, chunk: Chunk, lane: Lane, group: Any, scratch: Scratch):
        self.chunk, self.lane, self.group, self._scratch = chunk, lane, group, scratch
        self.momentum = self._take(chunk.kept + sum(chunk.gather.sent))
        self.updates = self.momentum
        self._work: Any = None

    def gather(self) -> None:
        """Sends the momentum to the owners."""

    def land(self) -> None:
        """Waits for what this rank owns, and makes room for its updates."""
        if not self.chunk.in_place:
            self.updates = self._take(self.chunk.kept_back)

    def assemble(self, batch: Batch) -> Tensor:
        """Whole units, (n, *shape of each), which may be overwritten."""
        shape = (len(batch.units), *layout.shape_of(batch.units[0].box))
        return self.momentum[batch.parts[0].gathered :][: math.prod(shape)].view(shape)

    def give_back(self, units: Tensor, squares: Optional[Tensor], batch: Batch) -> None:
        """Puts every peer's part of the updates where it is sent from.

        Args:
            units: orthogonalized, (n, *shape of each).
            squares: mean squares of each matrix of them, which go along with every part.
            batch: of the units.
        """
        here, there = [], []
        for part in batch.parts:
            buffer = self._returned_to(part.peer)
            if buffer is None:
                continue
            numel = layout.numel(part.weights) * len(batch.units)
            stop = part.returned + numel
            if numel:
                there.append(units[(slice(None), *layout.slices(part.weights))])
                here.append(buffer[part.returned : stop].view(there[-1].shape))
            if squares is not None:
                wire.write_numbers(squares, buffer, stop)
        if here:
            torch._foreach_copy_(here, there)

    def scatter(self) -> None:
        """Sends the updates back."""
        if not self.chunk.in_place:
            self._give(self.momentum)

    def come_back(self) -> None:
        """Waits for the updates."""
        self._wait()

    def end(self) -> None:
        """Lets go of the updates."""
        self._give(self.updates)

    def _returned_to(self, peer: int) -> Optional[Tensor]:
        """The buffer in which a peer's part goes back; None where it does not go to it alone."""
        return self.updates if peer == self.lane.me else None

    def _take(self, numel: int) -> Tensor:
        return self._scratch.take(numel, self.lane.wire, self.lane.device)

    def _give(self, *buffers: Tensor) -> None:
        self._scratch.give(*buffers)

    def _exchange(self, sent: Tensor, received: Tensor, traffic: Traffic) -> None:
        self._work = dist.all_to_all_single(
            received,
            sent,
            list(traffic.received),
            list(traffic.sent),
            group=self.group,
            async_op=True,
        )

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None


class AllToAll(Alone):
    """A chunk whose parts go to their owners by an all-to-all, and come back by another one."""

    def gather(self) -> None:
        self._gathered = self._take(sum(self.chunk.gather.received))
        self._exchange(self.momentum[self.chunk.kept :], self._gathered, self.chunk.gather)

    def land(self) -> None:
        self._wait()
        self._returned: Optional[Tensor] = self._gathered
        if not self.chunk.in_place:
            self.updates = self._take(self.chunk.kept_back + sum(self.chunk.scatter.received))
            self._returned = self._room_for_returned()

    def _room_for_returned(self) -> Optional[Tensor]:
        return self._take(sum(self.chunk.scatter.sent))

    def assemble(self, batch: Batch) -> Tensor:
        shape = (len(batch.units), *layout.shape_of(batch.units[0].box))
        X = self._scratch.empty("gathered", shape, self.lane.wire, self.lane.device)
        here, there, exponents = [], [], []
        for part in batch.parts:
            numel = layout.numel(part.momentum) * shape[0]
            if numel:
                source = self.momentum if part.peer == self.lane.me else self._gathered
                here.append(X[(slice(None), *layout.slices(part.momentum))])
                there.append(source[part.gathered : part.gathered + numel].view(here[-1].shape))
                exponents.append(source[part.gathered + numel :][: shape[0]])
        torch._foreach_copy_(here, there)
        if self.lane.scaled:
            wire.align(here, torch.stack(exponents))
        return X

    def scatter(self) -> None:
        if not self.chunk.in_place:
            self._give(self.momentum, self._gathered)
        self._send_back()

    def _send_back(self) -> None:
        assert self._returned is not None
        received = self.updates[self.chunk.kept_back :]
        self._exchange(self._returned, received, self.chunk.scatter)

    def end(self) -> None:
        self._give(self.updates)
        if self._returned is not None:
            self._give(self._returned)

    def _returned_to(self, peer: int) -> Optional[Tensor]:
        return self.updates if peer == self.lane.me else self._returned


class AllGather(AllToAll):
    """A chunk of which every peer gets all updates: each fills a slot, and gets those of others."""

    def land(self) -> None:
        super().land()
        slot = self.chunk.slot  # nothing undefined is sent where it is padded
        self.updates[self.lane.me * slot :][:slot].zero_()

    def _room_for_returned(self) -> Optional[Tensor]:
        return None

    def _send_back(self) -> None:
        self._work = all_gather_slots(self.updates, self.group)


class ToEveryone(AllToAll):
    """A chunk that every peer orthogonalizes all of, as a reference: nothing comes back."""

    def gather(self) -> None:
        kept = self.chunk.kept
        if kept:
            self.momentum[kept:].view(-1, kept).copy_(self.momentum[:kept])
        super().gather()

    def _room_for_returned(self) -> Optional[Tensor]:
        return None

    def _send_back(self) -> None:
        pass

    def _returned_to(self, peer: int) -> Optional[Tensor]:
        return self.updates if peer == self.lane.me else None
