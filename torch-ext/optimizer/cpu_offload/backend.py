"""Streams, events and copies between host and device: an accelerator's, and a stand-in's for tests.

A *queue* is a stream: ``COMPUTE`` is the current one, on which the step's arithmetic runs; ``IN``
carries copies to the device and ``OUT`` copies to the host. What one queue does is in order; an
event recorded on one and waited for on another orders the two. Nothing here makes the host wait but
`Backend.synchronize`.
"""

from __future__ import annotations

import queue
import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Optional

import torch
from torch import Tensor

COMPUTE, IN, OUT = "compute", "in", "out"
NAN_BYTE = 0xFF  # in every byte of a floating-point number makes it NaN

Todo = queue.SimpleQueue[Optional[Callable[[], Any]]]  # None is the end


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


class Host(Backend):
    """The same in host memory: two threads copy, each in the order of its queue.

    For tests and to look at what streaming does, where there is no accelerator: with a random delay
    before each copy, a missing wait shows as a wrong result. The ``COMPUTE`` queue is the calling
    thread. Memory is full of NaNs when allocated and again when freed, so that reading what nobody
    wrote, or too late, shows too.

    A copy that fails is told by every `wait` and `synchronize` from then on, as RuntimeError, until
    `recover`; what follows in its queue is done all the same, and nobody waits for ever.

    Args:
        delay: largest delay before a copy, in seconds.
        seed: of the delays.
        hosts_parameters: whether parameters and gradients, too, are what has to be carried.
    """

    def __init__(self, delay: float = 0.0, seed: int = 0, hosts_parameters: bool = False):
        super().__init__(torch.device("cpu"))
        self.hosts_parameters = hosts_parameters
        self._delay = delay
        self._random = {on: random.Random(f"{on}{seed}") for on in (IN, OUT)}
        self._errors: list[BaseException] = []
        self._queues: dict[str, Todo] = {on: queue.SimpleQueue() for on in (IN, OUT)}
        for on, todo in self._queues.items():
            # The thread knows its queue and the errors, not the backend, which it would keep alive.
            arguments = (todo, self._errors)
            name = f"offload-{on}"
            threading.Thread(target=_work, args=arguments, name=name, daemon=True).start()
            weakref.finalize(self, todo.put, None).atexit = False
        self.allocated_bytes = 0  # on the "device", now
        self.peak_bytes = 0  # at most so far

    def come_home(self) -> None:
        """There is one stream."""

    def allocate(self, nbytes: int) -> Tensor:
        self.allocated_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        return super().allocate(nbytes).fill_(NAN_BYTE)

    def free(self, memory: Tensor) -> None:
        self.allocated_bytes -= memory.numel()
        memory.fill_(NAN_BYTE)

    def record(self, on: str) -> threading.Event:
        event = threading.Event()
        if on == COMPUTE:
            event.set()  # the calling thread has done everything before it
        else:
            self._queues[on].put(event.set)
        return event

    def wait(self, on: str, event: threading.Event) -> None:
        if on == COMPUTE:
            self.synchronize(event)
        else:
            self._check()
            self._queues[on].put(event.wait)

    def copy(self, on: str, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        todo = self._queues[on]
        for target, source in zip(targets, sources):
            if self._delay:
                todo.put(partial(time.sleep, self._random[on].uniform(0.0, self._delay)))
            todo.put(partial(target.copy_, source))

    def has_come(self, event: threading.Event) -> bool:
        return event.is_set()

    def synchronize(self, event: threading.Event) -> None:
        event.wait()
        self._check()

    def _check(self) -> None:
        if self._errors:
            raise RuntimeError("a copy failed") from self._errors[0]

    def recover(self) -> None:
        for todo in self._queues.values():
            done = threading.Event()
            todo.put(done.set)
            done.wait()
        self._errors.clear()


def _work(todo: Todo, errors: list[BaseException]) -> None:
    """Does one thing after the other, until it is told None."""
    for do in iter(todo.get, None):
        try:
            do()
        except BaseException as error:  # later waits tell
            errors.append(error)
        del do  # and its tensors, not only when there is more to do
