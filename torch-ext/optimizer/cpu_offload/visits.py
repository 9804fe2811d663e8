"""State that has come to its device for longer than a window: reloaded, until it is offloaded."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from .backend import COMPUTE, IN, OUT, Backends
from .windows import Joined, Loan, Share, Window


class Use(NamedTuple):
    """How state that lives on the host is used: on which device, and whether it may stay there for
    longer than a window; not if its parameter has to be carried, too."""

    device: torch.device
    may_stay: bool


@dataclass
class Held:
    """A tensor of the state that lives on the host.

    Args:
        tensor: the one in the optimizer's state.
        host: this rank's part of it.
        use: how it is used.
        here: its copy on the device, while it is there, too.
    """

    tensor: Tensor
    host: Tensor
    use: Use
    here: Optional[Tensor] = None


class _Visit:
    """State that was reloaded together.

    Attributes:
        is_newer: than what the host has.
        left: when it has been written back; None before.
    """

    def __init__(self, held: Sequence[Held], window: Window, memory: Tensor):
        self.held = held
        self.window = window
        self.memory = memory
        self.is_newer = False
        self.left: Optional[Any] = None
        for each, (here,) in zip(held, window.views(memory)):
            each.here = here

    def on_device(self) -> list[Tensor]:
        """Where the window's copies lie in its memory."""
        return [copy.within(self.memory) for copy in self.window.copies]


class Visits:
    """What has been reloaded, and what is being written back.

    Args:
        backends: of the devices.
        joined: see `windows.Window`.

    Attributes:
        changes: how often what is on the devices has become something else.
    """

    def __init__(self, backends: Backends, joined: Joined):
        self._backends = backends
        self._joined = joined
        self._here: list[_Visit] = []
        # Being written back, by device, in order.
        self._leaving: dict[torch.device, deque[_Visit]] = defaultdict(deque)
        self._came: dict[torch.device, Any] = {}  # events behind reloads not waited for
        self.changes = 0

    def reload(self, held: Iterable[Held], streams: Sequence[Any] = ()) -> None:
        """Starts to bring tensors to their devices, where they are not and may stay.

        Args:
            held: which.
            streams: whose work so far may use the memory that is taken, beside the current one's.
        """
        self.sweep()
        by_device: dict[torch.device, list[Held]] = defaultdict(list)
        for each in held:
            if each.here is None and each.use.may_stay:
                by_device[each.use.device].append(each)
        for device, of_device in by_device.items():
            backend = self._backends[device]
            shares = [
                Share(number, None, (Loan(each.host, device, True),))
                for number, each in enumerate(of_device)
            ]
            window = Window(shares, device, self._joined)
            memory = backend.allocate(window.nbytes)
            backend.wait(IN, backend.record(COMPUTE))  # whoever had the memory before
            for stream in streams:
                backend.wait(IN, stream.record_event())
            self.wait_for_leaving(device)
            visit = _Visit(of_device, window, memory)
            backend.copy(IN, visit.on_device(), [copy.host for copy in window.copies])
            self._came[device] = backend.record(IN)  # behind all earlier ones
            self._here.append(visit)
            self.changes += 1

    def wait_reload(self) -> None:
        """Makes the current stream wait for everything that is being reloaded."""
        for device, event in self._came.items():
            self._backends[device].wait(COMPUTE, event)

    def wait_for_leaving(self, device: torch.device) -> None:
        """Lets nothing be brought that is still being written back."""
        if self._leaving[device]:
            backend = self._backends[device]
            backend.wait(IN, backend.record(OUT))

    def begin_step(self) -> None:
        """Lets a step change what is on the devices."""
        self.wait_reload()
        self._came.clear()
        for visit in self._here:
            visit.is_newer = True

    def offload(self, hidden: bool) -> None:
        """Starts to write back what was reloaded; its memory is let go when that is done.

        Args:
            hidden: `sweep` lets it go, else the current stream waits for it.
        """
        self.sweep()
        self.wait_reload()
        self._came.clear()
        leaving = self._forget()
        for visit in leaving:
            if visit.is_newer:
                self._write_back(visit)
        for visit in leaving:
            if visit.left is not None and hidden:
                self._leaving[visit.window.device].append(visit)
                continue
            if visit.left is not None:
                self._backends[visit.window.device].wait(COMPUTE, visit.left)
            self._free(visit)

    def sweep(self) -> None:
        """Lets the memory go of what has been written back by now; waits for nothing."""
        for device, leaving in self._leaving.items():
            while leaving and self._backends[device].has_come(leaving[0].left):
                self._free(leaving.popleft())

    def settle(self) -> None:
        """Makes the host wait until it has the newest of everything."""
        for visit in self._here:
            if visit.is_newer:
                self._write_back(visit)
                visit.is_newer = False
        for backend in self._backends.values():
            backend.synchronize(backend.record(OUT))
        self.sweep()

    def end(self) -> None:
        """Lets go of what was reloaded, of which the host has the newest."""
        for backend in self._backends.values():  # memory that copies read may go, too
            backend.synchronize(backend.record(IN))
        self._came.clear()
        for visit in self._forget():
            self._free(visit)

    def _forget(self) -> list[_Visit]:
        """What was reloaded is on the host, as far as the optimizer is concerned."""
        visits, self._here = self._here, []
        for visit in visits:
            self.changes += 1
            for each in visit.held:
                each.here = None
        return visits

    def _write_back(self, visit: _Visit) -> None:
        backend = self._backends[visit.window.device]
        backend.wait(OUT, backend.record(COMPUTE))
        backend.copy(OUT, [copy.host for copy in visit.window.copies], visit.on_device())
        visit.left = backend.record(OUT)

    def _free(self, visit: _Visit) -> None:
        self._backends[visit.window.device].free(visit.memory)
        del visit.memory
