"""Reloads offloaded state to its device, to stay beyond one window, and writes it back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from .arena import Arena
from .backend import COMPUTE, IN, OUT, Backend
from .windows import Fetch, RowPiece, Window


class Destination(NamedTuple):
    """The device on which offloaded state is used, and whether the state may be reloaded to it;
    not if its parameter is in host memory, too."""

    device: torch.device
    may_reload: bool


@dataclass
class OffloadedTensor:
    """A tensor of the state that lives in host memory."""

    tensor: Tensor  # the one in the optimizer's state
    host: Tensor  # its local tensor
    destination: Destination
    device_copy: Optional[Tensor] = None  # of the local tensor, while it is reloaded


@dataclass
class _Reload:
    """Tensors that were reloaded together, in one window."""

    tensors: Sequence[OffloadedTensor]
    window: Window
    memory: Tensor  # of the window, on the device
    is_dirty: bool = False  # newer than host memory
    written_back: Optional[Any] = None  # event after the copies to the host


class OffloadDevice:
    """A device with its queues, the host memory of its state, and what is reloaded to it."""

    def __init__(self, backend: Backend):
        self.backend = backend
        self.arena = Arena(backend.device, drain=backend.drain)
        self._reloads: list[_Reload] = []
        self._writing_back: deque[_Reload] = deque()  # in the order of their copies
        self._arrived: Optional[Any] = None  # event after reloads that no step has waited for

    def reload(self, tensors: Sequence[OffloadedTensor], streams: Sequence[Any]) -> None:
        """Starts to copy to the device what is not reloaded yet and may be.

        Memory is allocated on the stream of the steps, whichever the caller's is, since only that
        stream will reuse it. The copies wait for work so far of that stream and of ``streams``,
        which may still use the memory.
        """
        tensors = [t for t in tensors if t.device_copy is None and t.destination.may_reload]
        if not tensors:
            return
        device, backend = tensors[0].destination.device, self.backend
        rows = [RowPiece(n, None, (Fetch(t.host, device, True),)) for n, t in enumerate(tensors)]
        window = Window(rows, device, self.arena)
        with backend.step_stream():
            memory = backend.allocate(window.nbytes)
            backend.wait(IN, backend.record(COMPUTE))
            for stream in streams:
                backend.wait(IN, stream.record_event())
            self._wait_write_back()
            self._arrived = window.copy_in(backend, memory)  # after all earlier ones
            for tensor, (view,) in zip(tensors, window.views(memory)):
                tensor.device_copy = view
            self._reloads.append(_Reload(tensors, window, memory))

    def wait_reload(self) -> None:
        """Makes the current stream wait for everything that is being reloaded."""
        self.free_written_back()
        if self._arrived is not None:
            self.backend.wait(COMPUTE, self._arrived)

    def begin_step(self) -> None:
        """Lets a step change what is reloaded, and prefetch the rest."""
        self.wait_reload()
        self._arrived = None
        for reloaded in self._reloads:
            reloaded.is_dirty = True
        self._wait_write_back()

    def offload(self, overlap: bool) -> None:
        """Starts to write back what was reloaded, and frees its memory when that is done: in
        `free_written_back` with ``overlap``, else at once, and the steps' stream waits."""
        with self.backend.step_stream():
            self.wait_reload()
            self._arrived = None
            for reloaded in self._drop_reloads():
                if reloaded.is_dirty:
                    self._write_back(reloaded)
                if reloaded.written_back is not None and overlap:
                    self._writing_back.append(reloaded)
                    continue
                if reloaded.written_back is not None:
                    self.backend.wait(COMPUTE, reloaded.written_back)
                self.backend.free(reloaded.memory)

    def free_written_back(self) -> None:
        """Frees memory whose copies to the host are done by now; waits for nothing."""
        while self._writing_back and self.backend.is_done(self._writing_back[0].written_back):
            self.backend.free(self._writing_back.popleft().memory)

    def flush(self) -> None:
        """Makes the host wait until it has the newest of everything."""
        for reloaded in self._reloads:
            if reloaded.is_dirty:
                self._write_back(reloaded)
                reloaded.is_dirty = False
        self.backend.synchronize(self.backend.record(OUT))
        self.free_written_back()

    def evict(self) -> None:
        """Flushes, waits for all copies to the device, and frees what was reloaded."""
        self.flush()
        self.backend.synchronize(self.backend.record(IN))  # host memory they read may go next
        self._arrived = None
        for reloaded in self._drop_reloads():
            self.backend.free(reloaded.memory)

    def _drop_reloads(self) -> list[_Reload]:
        """Leaves no device copies to the optimizer; returns what they were part of."""
        reloads, self._reloads = self._reloads, []
        for tensor in (tensor for reloaded in reloads for tensor in reloaded.tensors):
            tensor.device_copy = None
        return reloads

    def _wait_write_back(self) -> None:
        """Makes copies to the device wait until host memory has what is being written back."""
        if self._writing_back:
            self.backend.wait(IN, self.backend.record(OUT))

    def _write_back(self, reloaded: _Reload) -> None:
        self.backend.wait(OUT, self.backend.record(COMPUTE))
        reloaded.written_back = reloaded.window.copy_out(self.backend, reloaded.memory)
