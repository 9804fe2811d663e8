"""Issues copies between host and device on streams, and the events that order these copies.

A *queue* is a stream: ``COMPUTE`` is the current stream, which runs the step's arithmetic; ``IN``
carries copies to the device, ``OUT`` copies to the host. Work on one queue runs in order; an event
recorded on one queue and waited for on another orders the two. The host waits only in
`Backend.synchronize` and `Backend.drain`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

COMPUTE, IN, OUT = "compute", "in", "out"


class Backend:
    """Copies, events, and memory of an accelerator; streams for copies are created on first use."""

    hosts_parameters = False  # True if CPU parameters count as an accelerator's, in host memory

    def __init__(self, device: torch.device):
        self.device = device
        self._streams: dict[str, torch.Stream] = {}

    def allocate(self, nbytes: int) -> Tensor:
        """Allocates uninitialized bytes on the device, for later work on the ``COMPUTE`` queue."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def free(self, memory: Tensor) -> None:
        """Called before memory from `allocate` is freed, when all queues are done with it or the
        ``COMPUTE`` queue waits for them."""

    def _stream(self, name: str) -> torch.Stream:
        if name == COMPUTE:
            return torch.accelerator.current_stream(self.device)
        if name not in self._streams:
            self._streams[name] = torch.Stream(self.device)
        return self._streams[name]

    def record(self, on: str) -> Any:
        """Records an event after all work issued to a queue so far."""
        return self._stream(on).record_event()  # without timing, which would take time

    def wait(self, on: str, event: Any) -> None:
        """Makes a queue wait for an event."""
        self._stream(on).wait_event(event)

    def copy(self, on: str, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Copies flat tensors, one by one, on the ``IN`` or ``OUT`` queue."""
        # The context makes the stream and its device current, and restores the previous ones. Until
        # torch 2.13 a stream can't be entered twice, so nothing in here may call this again.
        with self._stream(on):
            for target, source in zip(targets, sources):
                target.copy_(source, non_blocking=True)

    def synchronize(self, event: Any) -> None:
        """Makes the host wait for an event."""
        event.synchronize()

    def drain(self) -> None:
        """Makes the host wait for all copies, which may not keep their memory alive."""
        for stream in self._streams.values():
            stream.synchronize()

    def recover(self) -> None:
        """Forgets failed copies, whose tensors are no longer used."""
