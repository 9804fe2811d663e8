"""A stand-in for an accelerator, to see what CPU offload does where there is none."""

from __future__ import annotations

import queue
import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Optional

import torch
from torch import Tensor

from ..cpu_offload.backend import COMPUTE, IN, OUT, Backend

NAN_BYTE = 0xFF  # in every byte of a floating-point number makes it NaN

Todo = queue.SimpleQueue[Optional[Callable[[], Any]]]  # None is the end


class SimulatedHost(Backend):
    """Copies in host memory: two threads make them, each in the order of its queue.

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
