"""Finds missing waits of CPU offload without luck: which accesses to memory nothing orders.

`Recorder` is a backend that does every copy at once, in the calling thread, so results are those of
a program that waits enough. Beside that it keeps a vector clock for each queue and for the host (as
in Lamport 1978 and FastTrack, Flanagan and Freund 2009): an event carries its queue's clock, a wait
joins it to the waiting queue's. Two accesses to the same bytes, at least one of them a write, race
unless the clock of the later one's queue has come to the earlier one.

The host's giving work to queues orders nothing between queues. But what the host knows to be done
(by `synchronize`) is done before all that it gives to any queue afterwards.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from kernel import optimizer

backend = importlib.import_module(f"{optimizer.__name__}.cpu_offload.backend")
COMPUTE, IN, OUT = backend.COMPUTE, backend.IN, backend.OUT
HOST = "host"

Clock = dict[str, int]

# Files whose functions are no call sites, beside the backend's and this one.
INSIDE: set[str] = set()

# What only looks at a tensor's shape. Views are left out by their schema.
WITHOUT_DATA = (
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
    *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
    *("_unsafe_view", "resize_", "set_", "record_stream", "is_pinned"),
)


@dataclass(frozen=True)
class Mark:
    """An event: behind the first `time` accesses and marks of `queue`, and all in its `clock`."""

    queue: str
    time: int
    clock: Clock


@dataclass
class Access:
    """The last of its kind of a queue to some bytes."""

    time: int
    label: str


@dataclass
class Cell:
    """Bytes that have always been accessed together."""

    end: int
    reads: dict[str, Access] = field(default_factory=dict)  # by queue
    writes: dict[str, Access] = field(default_factory=dict)
    is_freed: bool = False


class Recorder(optimizer.SimulatedHost):
    """A backend in host memory that tells which accesses race.

    Accesses are copies; `allocate` and `free`, which write all of the memory as ``COMPUTE``; what
    tests tell by `touched`; and torch's operations within `watching`. Memory that was freed is
    kept, and using it is told as a race. Other memory of interest has to stay alive as long as the
    recorder: what is allocated later at its address would be taken for it.

    Args:
        dropped: calls of `wait` to ignore, by their places in `waits`; or a function of the place
            and the call site.

    Attributes:
        races: one line for each pair of accesses that nothing orders.
        waits: the call sites of `wait`, as qualified names of functions, with dropped ones.
    """

    def __init__(self, dropped: Collection[int] | Callable[[int, str], bool] = ()):
        super().__init__()
        self.races: list[str] = []
        self.waits: list[str] = []
        self._dropped = dropped
        self._clocks: dict[str, Clock] = {
            queue: defaultdict(int, {queue: 1}) for queue in (COMPUTE, IN, OUT, HOST)
        }
        self._starts: list[int] = []  # of the cells, in order
        self._cells: dict[int, Cell] = {}  # by start
        self._allocated: list[tuple[int, Tensor]] = []  # all ever, and their addresses
        self._seen: set[str] = set()
        self._is_quiet = False

    # -- the backend

    def allocate(self, nbytes: int) -> Tensor:
        with self._quietly():
            memory: Tensor = super().allocate(nbytes)
        self._allocated.append((memory.data_ptr(), memory))
        self.touched(memory, write=True, label=f"allocate in {_call_site()}")
        return memory

    def free(self, memory: Tensor) -> None:
        self.touched(memory, write=True, label=f"free in {_call_site()}")
        for cell in self._cover(*_interval(memory)):
            cell.is_freed = True
        with self._quietly():
            super().free(memory)

    def record(self, on: str) -> Mark:
        clock = self._clock(on)
        mark = Mark(on, clock[on], dict(clock))
        clock[on] += 1
        return mark

    def wait(self, on: str, event: Mark) -> None:
        place, site = len(self.waits), _call_site()
        self.waits.append(site)
        dropped = self._dropped
        if not (dropped(place, site) if callable(dropped) else place in dropped):
            _join(self._clock(on), event.clock)

    def copy(self, on: str, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        label = f"copy in {_call_site()}"
        for target, source in zip(targets, sources):
            self.touched(source, write=False, by=on, label=label)
            self.touched(target, write=True, by=on, label=label)
            with self._quietly():
                target.copy_(source)

    def synchronize(self, event: Mark) -> None:
        _join(self._clocks[HOST], event.clock)

    # -- for tests

    def is_done(self, event: Mark) -> bool:
        """Whether the host knows that all before an event is done."""
        return self._clocks[HOST].get(event.queue, 0) >= event.time

    def touched(self, tensor: Tensor, write: bool, by: str = COMPUTE, label: str = "") -> None:
        """Tells of an access.

        Args:
            tensor: its bytes; of one with gaps, those in the gaps too.
            write: what `by` does to it.
            by: a queue, or `HOST`.
            label: for the races; by default the caller's name.
        """
        label = label or f"access in {_call_site()}"
        self._access(self._cover(*_interval(tensor)), by, write, label, tensor.data_ptr())

    def queue_of(self, tensors: Sequence[Tensor]) -> str:
        """Which queue does an operation on these tensors, within `watching`."""
        return COMPUTE

    def met(self, tensor: Tensor) -> bool:
        """Whether accesses to a tensor within `watching` are of interest: to memory met before."""
        return bool(self._met(*_interval(tensor)))

    @contextmanager
    def watching(self):
        """Takes torch's operations of this thread for ``COMPUTE``'s, on memory met until then.

        On host memory too, though with an accelerator those would be the host's: a test that cares
        tells them by `touched`. Kernels that torch doesn't dispatch are not seen.
        """
        with _Watch(self):
            yield self

    # -- clocks and cells

    def _clock(self, queue: str) -> Clock:
        """A queue's, when the host gives it something: behind all that the host knows."""
        clock = self._clocks.setdefault(queue, defaultdict(int, {queue: 1}))
        _join(clock, self._clocks[HOST])
        return clock

    def _access(self, cells: list[Cell], by: str, write: bool, label: str, address: int) -> None:
        clock = self._clock(by)
        new = Access(clock[by], label)
        what = f"{by} {'writes' if write else 'reads'} ({label})"
        for cell in cells:
            if cell.is_freed:
                self._race(f"{what} what was freed", address)
            for verb, accesses in [("wrote", cell.writes)] + [("read", cell.reads)] * write:
                for queue, old in accesses.items():
                    if queue != by and clock[queue] < old.time:
                        self._race(f"{what} unordered with: {queue} {verb} ({old.label})", address)
            (cell.writes if write else cell.reads)[by] = new

    def _race(self, what: str, address: int) -> None:
        """Once for two labels: a loop has the same race in each of its rounds."""
        if what not in self._seen:
            self._seen.add(what)
            self.races.append(f"{what}, first in a tensor at {self._place(address)}")

    def _place(self, address: int) -> str:
        for number, (start, memory) in enumerate(self._allocated):
            if start <= address < start + memory.numel():
                return f"byte {address - start} of allocation {number} ({memory.numel()} bytes)"
        return f"{address:#x}"

    def _cut(self, address: int) -> None:
        """Parts the cell that goes over an address."""
        place = bisect_left(self._starts, address) - 1
        cell = self._cells[self._starts[place]] if place >= 0 else None
        if cell is not None and address < cell.end and address not in self._cells:
            self._starts.insert(place + 1, address)
            rest = Cell(cell.end, dict(cell.reads), dict(cell.writes), cell.is_freed)
            self._cells[address], cell.end = rest, address

    def _met(self, start: int, end: int) -> list[Cell]:
        """Cells of the part of an interval that is of interest."""
        if start >= end:
            return []
        self._cut(start)
        self._cut(end)
        first, last = bisect_left(self._starts, start), bisect_left(self._starts, end)
        return [self._cells[place] for place in self._starts[first:last]]

    def _cover(self, start: int, end: int) -> list[Cell]:
        """The cells of an interval, all of which is of interest from now on."""
        self._met(start, end)
        first, last = bisect_left(self._starts, start), bisect_left(self._starts, end)
        new = []
        for place in [*self._starts[first:last], end]:
            if start < place:
                new.append(start)
                self._cells[start] = Cell(place)
            start = self._cells[place].end if place < end else end
        self._starts = sorted([*self._starts, *new])
        return [self._cells[place] for place in self._starts[first : last + len(new)]]

    @contextmanager
    def _quietly(self):
        before, self._is_quiet = self._is_quiet, True
        try:
            yield
        finally:
            self._is_quiet = before


class _Watch(TorchDispatchMode):
    def __init__(self, recorder: Recorder):
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass_type(t) for t in types):
            return NotImplemented  # seen again as operations on the tensors within
        kwargs = kwargs or {}
        recorder = self._recorder
        name = func._schema.name.split("::")[-1]
        if not recorder._is_quiet and not func.is_view and name not in WITHOUT_DATA:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            queue = recorder.queue_of(tensors)
            for position, argument in enumerate(func._schema.arguments):
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                info = argument.alias_info
                write = info is not None and info.is_write
                for leaf in tree_leaves(value):
                    if isinstance(leaf, Tensor) and recorder.met(leaf):
                        recorder.touched(leaf, write, queue, name)
        return func(*args, **kwargs)


def _interval(tensor: Tensor) -> tuple[int, int]:
    """From the first byte of a tensor to behind the last one."""
    if tensor.numel() == 0 or tensor.layout != torch.strided:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def _join(clock: Clock, other: Clock) -> None:
    for queue, time in other.items():
        clock[queue] = max(clock.get(queue, 0), time)


def _call_site() -> str:
    """The function outside of the backend that called it."""
    frame = sys._getframe(1)
    inside = {__file__, backend.__file__, inspect.getfile(optimizer.SimulatedHost), *INSIDE}
    while frame.f_code.co_filename in inside and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_qualname
