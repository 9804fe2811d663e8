"""Finds missing waits without luck: which accesses to memory nothing orders.

All is done at once, in the calling thread, so results are those of a program that waits enough.
Beside that a `Recorder` keeps a vector clock for each queue and for the host (as in Lamport 1978
and FastTrack, Flanagan and Freund 2009): an event carries its queue's clock, a wait joins it to the
waiting queue's. Two accesses to the same bytes, at least one of them a write, race unless the clock
of the later one's queue has come to the earlier one.

The host's giving work to queues orders nothing between queues. But what the host knows to be done
(by `synchronize`) is done before all that it gives to any queue afterwards.

A `Recorder` is a backend of CPU offload in host memory. A `DeviceRecorder` watches the streams and
collectives of a fake device.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

import fake_device
from kernel import optimizer

backend = importlib.import_module(f"{optimizer.__name__}.cpu_offload.backend")
COMPUTE, IN, OUT = backend.COMPUTE, backend.IN, backend.OUT
HOST = "host"

Clock = dict[str, int]

# Files whose functions are no call sites.
INSIDE = {
    *(__file__, fake_device.__file__),
    *(backend.__file__, inspect.getfile(optimizer.SimulatedHost)),
}

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
    is told by `touched`; and torch's operations within `watching`. Memory that was freed is kept,
    and using it is told as a race. Other memory of interest has to stay alive as long as the
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
        self._drops = dropped if callable(dropped) else lambda place, site: place in dropped
        self._clocks: dict[str, Clock] = {}
        self._starts: list[int] = []  # of the cells, in order
        self._cells: dict[int, Cell] = {}  # by start
        self._allocated: list[Tensor] = []  # all ever
        self._is_quiet = False

    # -- the backend

    def allocate(self, nbytes: int) -> Tensor:
        with self._quietly():
            memory: Tensor = super().allocate(nbytes)
        self._allocated.append(memory)
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
        if not self._drops(place, site):
            _join(self._clock(on), event.clock)

    def copy(self, on: str, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        label = f"copy in {_call_site()}"
        for target, source in zip(targets, sources):
            self.touched(source, write=False, by=on, label=label)
            self.touched(target, write=True, by=on, label=label)
            with self._quietly():
                target.copy_(source)

    def synchronize(self, event: Mark) -> None:
        _join(self._clock(HOST), event.clock)

    # -- for tests

    def is_done(self, event: Mark) -> bool:
        """Whether the host knows that all before an event is done."""
        return self._clock(HOST)[event.queue] >= event.time

    def touched(self, tensor: Tensor, write: bool, by: str = COMPUTE, label: str = "") -> None:
        """Tells what a queue, or `HOST`, does to a tensor's bytes, those in its gaps included."""
        clock = self._clock(by)
        what = f"{by} {'writes' if write else 'reads'} ({label})"
        for cell in self._cover(*_interval(tensor)):
            if cell.is_freed:
                self._race(f"{what} what was freed")
            for verb, accesses in [("wrote", cell.writes)] + [("read", cell.reads)] * write:
                for queue, old in accesses.items():
                    if queue != by and clock[queue] < old.time:
                        self._race(f"{what} unordered with: {queue} {verb} ({old.label})")
            (cell.writes if write else cell.reads)[by] = Access(clock[by], label)

    def queue_of(self, tensors: Sequence[Tensor]) -> str:
        """Which queue does an operation on these tensors, within `watching`."""
        return COMPUTE

    def is_of_interest(self, tensor: Tensor) -> bool:
        """Of a tensor within `watching`: memory that was met before."""
        start, end = _interval(tensor)
        before = bisect_left(self._starts, end) - 1  # the last cell that begins before the end
        return before >= 0 and start < self._cells[self._starts[before]].end

    @contextmanager
    def watching(self) -> Iterator[Recorder]:
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
        if queue != HOST:
            _join(clock, self._clock(HOST))
        return clock

    def _race(self, what: str) -> None:
        """Once for two labels: a loop has the same race in each of its rounds."""
        if what not in self.races:
            self.races.append(what)

    def _cut(self, address: int) -> None:
        """Parts the cell that goes over an address."""
        place = bisect_left(self._starts, address) - 1
        cell = self._cells[self._starts[place]] if place >= 0 else None
        if cell is not None and address < cell.end and address not in self._cells:
            self._starts.insert(place + 1, address)
            rest = Cell(cell.end, dict(cell.reads), dict(cell.writes), cell.is_freed)
            self._cells[address], cell.end = rest, address

    def _cover(self, start: int, end: int) -> list[Cell]:
        """The cells of an interval, all of which is of interest from now on."""
        if start >= end:
            return []
        self._cut(start)
        self._cut(end)
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
    def _quietly(self) -> Iterator[None]:
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
                    if isinstance(leaf, Tensor) and recorder.is_of_interest(leaf):
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
    while frame.f_code.co_filename in INSIDE and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_qualname


# -- streams and collectives of a fake device ------------------------------------------------------

# Collectives of single tensors, by all names that releases of torch have for them. The output, then
# the input; one tensor is both.
COLLECTIVES = ("all_to_all_single", "all_reduce")
COLLECTIVES += ("all_gather_into_tensor", "all_gather_single")
COLLECTIVES += ("reduce_scatter_tensor", "reduce_scatter_single")


class DeviceRecorder(Recorder):
    """Takes operations on the device for the current stream's, all others for the host's.

    The collectives of each process group have a clock, too, as NCCL has streams of its own for
    them: a collective is behind what the current stream was given before, and the current stream is
    behind a collective only after ``wait()``. Memory that was seen stays alive, so that no address
    is used twice.

    Attributes:
        collectives: how many were launched.
    """

    device: fake_device.Device  # set by `ordered_device`; a backend's is a torch.device

    def __init__(self, dropped: Callable[[int, str], bool] | Collection[int] = ()):
        super().__init__(dropped)
        self.collectives = 0
        self._kept: dict[int, torch.UntypedStorage] = {}

    def queue_of(self, tensors: Sequence[Tensor]) -> str:
        is_here = any(self.device.memory.has(t.untyped_storage()) for t in tensors)
        return self.current if is_here else HOST

    def is_of_interest(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        self._kept[storage.data_ptr()] = storage
        return True

    @property
    def current(self) -> str:
        return self.device.streams[-1].name

    def collective(self, name: str, launch: Callable[..., Any]) -> Callable[..., Any]:
        """A collective that tells of its accesses, and whose work of being waited for."""

        def told(*args: Any, group: Any = None, async_op: bool = False, **kwargs: Any) -> Any:
            tensors = [arg for arg in args if isinstance(arg, Tensor)]
            queue = f"collectives of {dist.get_process_group_ranks(group or dist.group.WORLD)}"
            self.collectives += 1
            # The backend does this itself, so it is none of the waits that may be dropped.
            _join(self._clock(queue), self.record(self.current).clock)
            for tensor, write in ((tensors[-1], False), (tensors[0], True)):
                self.is_of_interest(tensor)
                self.touched(tensor, write, queue, name)
            mark = self.record(queue)
            with self._quietly():
                work = launch(*args, group=group, async_op=True, **kwargs)
            told_work = _Work(self, work, mark)
            return told_work if async_op else told_work.wait()

        return told


@dataclass
class _Work:
    """What a collective returns: waiting for it makes the current stream wait."""

    recorder: DeviceRecorder
    work: Any
    mark: Mark

    def wait(self, *_: Any) -> None:
        with self.recorder._quietly():  # backends may copy what has come only now
            self.work.wait()
        self.recorder.wait(self.recorder.current, self.mark)


@contextmanager
def ordered_device(dropped: Any = ()) -> Iterator[DeviceRecorder]:
    """Puts the device there, and a recorder that watches it.

    Args:
        dropped: waits to ignore; see `Recorder`.
    """
    recorder = DeviceRecorder(dropped)
    with fake_device.fake_device(recorder=recorder) as recorder.device, ExitStack() as stack:
        for name in COLLECTIVES:
            launch = getattr(dist, name, None)
            if launch is not None:
                stack.enter_context(patch.object(dist, name, recorder.collective(name, launch)))
        stack.enter_context(recorder.watching())
        yield recorder
