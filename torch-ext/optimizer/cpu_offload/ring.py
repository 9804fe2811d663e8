"""Copies tensors from host memory to the device and back, load by load, in the order of events.

A load is what one event uses from host memory: for example, the momentum of a chunk, or a part of
AdamW's state, with weights and gradients if these are in host memory, too. On each device, loads
share a ring of memory. While the step uses one load, the next loads are copied to the device, as
many as fit, and previous ones are copied back to the host::

    IN       l0 l1 l2 ..... l3 l4          waits until the ring has room for a load
    COMPUTE     l0 l1 .... l2 l3 l4        waits for the load it is about to use
    OUT            l0 l1 .... l2 l3 l4     waits until its load has been computed

The host never waits. The ring's memory belongs to the current stream: it is allocated on that
stream, and freed when the stream waits for the last copy.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from .backend import COMPUTE, IN, OUT, Backend

# Alignment of tensors on the device, in bytes, as in the device's allocator.
ALIGNMENT = 256


class Fetch(NamedTuple):
    """A tensor in host memory that a device needs; ``written`` is True if the device writes it."""

    host: Tensor
    device: torch.device
    written: bool = True


class Load:
    """The tensors in host memory that one event uses.

    Args:
        columns: the event's lists, in the order in which it copies them, with the fetch of each
            tensor; None for tensors that are on the device already.

    Attributes:
        device: the device that uses the load; None for an empty load.
        nbytes: bytes on the device, padded to where another load may begin.
        is_written: True if any part is copied back.
        start: where the load's memory begins in the ring, in bytes.
        arrived, freed: events in this step: the load is on the device; its memory is free again.
    """

    start: int
    arrived: Any
    freed: Any

    def __init__(self, columns: Sequence[Sequence[Optional[Fetch]]]):
        self._columns = columns
        fetches = [fetch for column in columns for fetch in column if fetch is not None]
        self.device = fetches[0].device if fetches else None
        self.nbytes = 0
        # Intervals of host memory, in bytes, and where each begins in the load's memory.
        self._copies_in: list[tuple[Tensor, int]] = []
        self._copies_out: list[tuple[Tensor, int]] = []
        for fetch in fetches:
            copies = []
            for interval in intervals(fetch.host):
                copies.append((interval.view(torch.uint8), self.nbytes))
                self.nbytes += interval.nbytes
            self.nbytes += -self.nbytes % ALIGNMENT
            self._copies_in += copies
            if fetch.written:
                self._copies_out += copies
        self.is_written = bool(self._copies_out)

    def overlaps(self, other: Load) -> bool:
        """True if two loads of a ring share memory."""
        return self.start < other.start + other.nbytes and other.start < self.start + self.nbytes

    def copy_in(self, backend: Backend, memory: Tensor) -> None:
        hosts = [host for host, _ in self._copies_in]
        backend.copy(IN, [memory[at : at + len(host)] for host, at in self._copies_in], hosts)
        self.arrived = backend.record(IN)

    def copy_out(self, backend: Backend, memory: Tensor) -> None:
        hosts = [host for host, _ in self._copies_out]
        backend.copy(OUT, hosts, [memory[at : at + len(host)] for host, at in self._copies_out])
        self.freed = backend.record(OUT)

    def views(self, memory: Tensor) -> Iterator[list[Optional[Tensor]]]:
        """Yields the tensors in the load's memory on the device, column by column."""
        start = 0
        for column in self._columns:
            views: list[Optional[Tensor]] = []
            for fetch in column:
                if fetch is None:
                    views.append(None)
                    continue
                host = fetch.host
                flat = memory[start : start + host.nbytes].view(host.dtype)
                views.append(flat.as_strided(host.shape, dense_stride(host)))
                start += host.nbytes + -host.nbytes % ALIGNMENT
            yield views


def intervals(tensor: Tensor) -> Iterator[Tensor]:
    """Yields flat views of the memory intervals that make up a tensor, in memory order."""
    if not tensor.numel():
        return
    dims, inner = memory_order(tensor), 1
    while dims and tensor.stride(dims[-1]) == inner:
        inner *= tensor.shape[dims.pop()]
    for index in itertools.product(*(range(tensor.shape[dim]) for dim in dims)):
        offset = sum(i * tensor.stride(dim) for i, dim in zip(index, dims))
        yield tensor.as_strided((inner,), (1,), tensor.storage_offset() + offset)


def memory_order(tensor: Tensor) -> list[int]:
    """Dimensions with more than one index, outermost in memory first."""
    dims = [dim for dim, size in enumerate(tensor.shape) if size > 1]
    return sorted(dims, key=tensor.stride, reverse=True)


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """Strides without gaps in the same order of dimensions; unchanged if the tensor has no gap."""
    stride, inner = list(tensor.stride()), 1
    for dim in reversed(memory_order(tensor)):
        stride[dim] = inner
        inner *= tensor.shape[dim]
    return tuple(stride)


class Ring:
    """Device memory through which the loads of a step pass on one device.

    Args:
        backend: backend of the device that uses the loads.
        slot_bytes: bytes of device memory; a larger load gets as much as it needs.
        loads: the loads, in the order of their use.
    """

    def __init__(self, backend: Backend, slot_bytes: int, loads: Sequence[Load]):
        self._backend = backend
        self._slot_bytes = slot_bytes
        self._loads = loads
        self._memory: Any = None

    def open(self) -> None:
        """Allocates the ring and starts to copy loads into it."""
        sizes = [load.nbytes for load in self._loads]
        nbytes = min(max(self._slot_bytes, *sizes), sum(sizes))
        self._memory = self._backend.allocate(nbytes)
        self._head = 0
        self._pending = deque(self._loads)  # not in the ring yet
        self._arriving: deque[Load] = deque()  # in the ring, before the end of their use
        self._leaving: list[Load] = []  # used, until another load takes their place
        # The current stream may still use the ring's memory, or write to the sources of copies.
        self._backend.wait(IN, self._backend.record(COMPUTE))
        self._copy_in()

    def acquire(self, load: Load) -> Iterator[list[Optional[Tensor]]]:
        """Returns the load's tensors on the device, column by column, valid until `release`."""
        if not self._arriving or self._arriving[0] is not load:
            raise RuntimeError("loads must be used in the order in which they were announced")
        self._backend.wait(COMPUTE, load.arrived)
        return load.views(self._memory_of(load))

    def release(self, load: Load) -> None:
        """Ends the use of the acquired load."""
        self._arriving.popleft()
        load.freed = self._backend.record(COMPUTE)
        if load.is_written:
            self._backend.wait(OUT, load.freed)
            load.copy_out(self._backend, self._memory_of(load))
        self._leaving.append(load)
        self._copy_in()

    def close(self) -> None:
        """Frees the ring; the current stream waits for the last copy, even after an error."""
        if self._memory is None:
            return
        if self._arriving:  # loads that weren't used because of an error
            self._backend.wait(COMPUTE, self._backend.record(IN))
        self._backend.wait(COMPUTE, self._backend.record(OUT))
        self._backend.free(self._memory)
        self._memory = None

    def _memory_of(self, load: Load) -> Tensor:
        return self._memory[load.start : load.start + load.nbytes]

    def _copy_in(self) -> None:
        """Starts to copy the next loads, as far as they fit."""
        while self._pending:
            load = self._pending[0]
            if not self._make_room(load):
                return
            self._arriving.append(self._pending.popleft())
            self._head = load.start + load.nbytes
            load.copy_in(self._backend, self._memory_of(load))

    def _make_room(self, load: Load) -> bool:
        """Places the next load; returns False while a load that is still needed is there."""
        load.start = self._head if self._head + load.nbytes <= self._memory.numel() else 0
        if any(map(load.overlaps, self._arriving)):
            return False
        overlapping = [other for other in self._leaving if load.overlaps(other)]
        self._leaving = [other for other in self._leaving if other not in overlapping]
        # Uses run in order, and so do copies back: waiting for the last of each suffices.
        written = [other for other in overlapping if other.is_written]
        for other in dict.fromkeys((*written[-1:], *overlapping[-1:])):
            self._backend.wait(IN, other.freed)
        return True
