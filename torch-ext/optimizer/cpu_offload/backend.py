"""Streams, events and copies between host and device.

A *queue* is a stream: ``COMPUTE`` is the current one, on which the step's arithmetic runs; ``IN``
carries copies to the device and ``OUT`` copies to the host. What one queue does is in order; an
event recorded on one and waited for on another orders the two. Nothing here makes the host wait but
`Backend.synchronize`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Optional

import torch
from torch import Tensor

COMPUTE, IN, OUT = "compute", "in", "out"


def __getattr__(name: str) -> Any:
    """`SimulatedHost` under its former name, which messages and older programs have."""
    if name == "Host":
        from ..extras.simulated_host import SimulatedHost

        return SimulatedHost
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class Backend:
    """What moving state needs of the device where it is used: an accelerator's streams.

    The copies' own two are made when first needed.
    """

    hosts_parameters = False  # whether parameters on a CPU pass for what an accelerator computes

    def __init__(self, device: torch.device):
        self.device = device
        self._streams: dict[str, torch.Stream] = {}
        self._home: Optional[torch.Stream] = None

    def come_home(self) -> None:
        """Makes the current stream the one to which `at_home` returns."""
        self._home = torch.accelerator.current_stream(self.device)

    def at_home(self) -> AbstractContextManager[Any]:
        """A context in which that stream is current: a hook may be called on another one, and what
        is allocated there goes back to no stream but that one."""
        return nullcontext() if self._home is None else self._home

    def allocate(self, nbytes: int) -> Tensor:
        """Uninitialized bytes on the device, for work of the ``COMPUTE`` queue from now on."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def free(self, memory: Tensor) -> None:
        """Tells that what `allocate` gave is about to be let go: all queues are done with it, or
        the ``COMPUTE`` queue waits until they are."""

    def _stream(self, name: str) -> torch.Stream:
        if name == COMPUTE:
            return torch.accelerator.current_stream(self.device)
        if name not in self._streams:
            self._streams[name] = torch.Stream(self.device)
        return self._streams[name]

    def record(self, on: str) -> Any:
        """An event behind everything that has been given to a queue so far."""
        return self._stream(on).record_event()  # without timing, which would cost

    def wait(self, on: str, event: Any) -> None:
        """Lets a queue go on when an event has come."""
        self._stream(on).wait_event(event)

    def copy(self, on: str, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Copies flat tensors, one by one, on the ``IN`` or the ``OUT`` queue."""
        # Makes the stream and its device current, and afterwards those that were. Until torch 2.13
        # a stream can't be entered twice at a time, so nothing in here may call this again.
        with self._stream(on):
            for target, source in zip(targets, sources):
                target.copy_(source, non_blocking=True)

    def has_come(self, event: Any) -> bool:
        """Whether everything before an event is done; doesn't wait."""
        return event.query()

    def synchronize(self, event: Any) -> None:
        """Makes the host wait for an event."""
        event.synchronize()

    def drain(self) -> None:
        """Makes the host wait for all copies, where they don't keep the memory they use."""
        for stream in self._streams.values():
            stream.synchronize()

    def recover(self) -> None:
        """Forgets copies that have failed, whose tensors nobody uses any more."""
