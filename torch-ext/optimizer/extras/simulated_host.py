"""Simulates an accelerator's copies with threads, to run CPU offload without an accelerator."""

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

NAN_BYTE = 0xFF  # a floating-point number of such bytes is NaN

Queue = queue.SimpleQueue[Optional[Callable[[], Any]]]  # of actions; None ends it


class SimulatedHost(Backend):
    """A backend in host memory: two threads make the copies, each in the order of its queue.

    Use it in tests, or to see what streaming does. The ``COMPUTE`` queue is the calling thread. A
    random delay before each copy turns a missing wait into a wrong result. Memory is filled with
    NaN when allocated and again when freed, so reads before the first write or after the free show,
    too.

    After a failed copy, every ``wait`` and ``synchronize`` raises RuntimeError until ``recover`` is
    called. The queue continues with its next action, so nothing waits forever.

    Args:
        delay: longest delay before a copy, in seconds.
        seed: seed of the delays.
        hosts_parameters: True if parameters and gradients must be copied too.
    """

    def __init__(self, delay: float = 0.0, seed: int = 0, hosts_parameters: bool = False):
        super().__init__(torch.device("cpu"))
        self.hosts_parameters = hosts_parameters
        self._delay = delay
        self._random = {on: random.Random(f"{on}{seed}") for on in (IN, OUT)}
        self._errors: list[BaseException] = []
        self._queues: dict[str, Queue] = {on: queue.SimpleQueue() for on in (IN, OUT)}
        for on, actions in self._queues.items():
            # Not bound methods: a thread with a reference to the backend would keep it alive.
            run = partial(_run, actions, self._errors)
            threading.Thread(target=run, name=f"offload-{on}", daemon=True).start()
            weakref.finalize(self, actions.put, None).atexit = False
        self.allocated_bytes = 0  # now, on the simulated device
        self.peak_bytes = 0

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
        actions = self._queues[on]
        for target, source in zip(targets, sources):
            if self._delay:
                actions.put(partial(time.sleep, self._random[on].uniform(0.0, self._delay)))
            actions.put(partial(target.copy_, source))

    def synchronize(self, event: threading.Event) -> None:
        event.wait()
        self._check()

    def _check(self) -> None:
        if self._errors:
            raise RuntimeError("a copy failed") from self._errors[0]

    def recover(self) -> None:
        for actions in self._queues.values():
            done = threading.Event()
            actions.put(done.set)
            done.wait()
        self._errors.clear()


def _run(actions: Queue, errors: list[BaseException]) -> None:
    """Runs the actions in order, until None arrives."""
    for action in iter(actions.get, None):
        try:
            action()
        except BaseException as error:  # raised by later waits
            errors.append(error)
        del action  # frees its tensors now, not only when the next action arrives
