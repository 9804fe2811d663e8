"""One device on which state is used, and what has come there for longer than a window."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from .arena import Arena
from .backend import COMPUTE, IN, OUT, Backend
from .windows import Fetch, Share, Window


class Use(NamedTuple):
    """How state that lives on the host is used: on which device, and whether it may stay there for
    longer than a window; not if its parameter has to be carried, too."""

    device: torch.device
    may_stay: bool


@dataclass
class OffloadedTensor:
    """A tensor of the state that lives on the host."""

    tensor: Tensor  # the one in the optimizer's state
    host: Tensor  # this rank's part of it
    use: Use
    here: Optional[Tensor] = None  # its copy on the device, while it is there, too


@dataclass
class _Visit:
    """State that was reloaded together."""

    held: Sequence[OffloadedTensor]
    window: Window
    memory: Tensor  # of the window, on the device
    is_newer: bool = False  # than what the host has
    left: Optional[Any] = None  # event: it has been written back


class OffloadDevice:
    """The queues of a device, the host's memory for it, and what was reloaded to it, until it is
    offloaded."""

    def __init__(self, backend: Backend):
        self.backend = backend
        self.arena = Arena(backend.device, drain=backend.drain)
        self._here: list[_Visit] = []
        self._leaving: deque[_Visit] = deque()  # being written back, in order
        self._came: Optional[Any] = None  # behind reloads not waited for

    def reload(self, held: Sequence[OffloadedTensor], streams: Sequence[Any]) -> None:
        """Starts to bring tensors, where they are not here and may stay.

        On the stream of the steps, whichever the caller's is: that one gets the memory back. Beside
        it, work so far of ``streams`` may use the memory that is taken.
        """
        held = [each for each in held if each.here is None and each.use.may_stay]
        if not held:
            return
        device, backend = held[0].use.device, self.backend
        shares = [Share(n, None, (Fetch(each.host, device, True),)) for n, each in enumerate(held)]
        window = Window(shares, device, self.arena)
        with backend.at_home():
            memory = backend.allocate(window.nbytes)
            backend.wait(IN, backend.record(COMPUTE))  # whoever had the memory before
            for stream in streams:
                backend.wait(IN, stream.record_event())
            self.wait_for_leaving()
            self._came = window.come(backend, memory)  # behind all earlier ones
            for each, (here,) in zip(held, window.views(memory)):
                each.here = here
            self._here.append(_Visit(held, window, memory))

    def wait_reload(self) -> None:
        """Makes the current stream wait for everything that is being reloaded."""
        self.sweep()
        if self._came is not None:
            self.backend.wait(COMPUTE, self._came)

    def wait_for_leaving(self) -> None:
        """Lets nothing be brought that is still being written back."""
        if self._leaving:
            self.backend.wait(IN, self.backend.record(OUT))

    def begin_step(self) -> None:
        """Lets a step change what is here, and bring the rest."""
        self.wait_reload()
        self._came = None
        for visit in self._here:
            visit.is_newer = True
        self.wait_for_leaving()

    def offload(self, hidden: bool) -> None:
        """Starts to write back what was reloaded; its memory is let go when that is done: by
        `sweep` if hidden, else the steps' stream waits for it."""
        with self.backend.at_home():
            self.wait_reload()
            self._came = None
            for visit in self._forget():
                if visit.is_newer:
                    self._write_back(visit)
                if visit.left is not None and hidden:
                    self._leaving.append(visit)
                    continue
                if visit.left is not None:
                    self.backend.wait(COMPUTE, visit.left)
                self.backend.free(visit.memory)

    def sweep(self) -> None:
        """Lets the memory go of what has been written back by now; waits for nothing."""
        while self._leaving and self.backend.has_come(self._leaving[0].left):
            self.backend.free(self._leaving.popleft().memory)

    def settle(self) -> None:
        """Makes the host wait until it has the newest of everything."""
        for visit in self._here:
            if visit.is_newer:
                self._write_back(visit)
                visit.is_newer = False
        self.backend.synchronize(self.backend.record(OUT))
        self.sweep()

    def end(self) -> None:
        """The same, and lets go of what was reloaded."""
        self.settle()
        self.backend.synchronize(self.backend.record(IN))  # memory that copies read may go, too
        self._came = None
        for visit in self._forget():
            self.backend.free(visit.memory)

    def _forget(self) -> list[_Visit]:
        """What was reloaded is on the host, as far as the optimizer is concerned."""
        visits, self._here = self._here, []
        for visit in visits:
            for each in visit.held:
                each.here = None
        return visits

    def _write_back(self, visit: _Visit) -> None:
        self.backend.wait(OUT, self.backend.record(COMPUTE))
        visit.left = visit.window.leave(self.backend, visit.memory)
