"""Finds missing waits without luck: which accesses to memory nothing orders.

All is done at once, in the calling thread, so results are those of a program that waits enough.
Beside that a `Recorder` keeps a vector clock for each queue and for the host (as in Lamport 1978
and FastTrack, Flanagan and Freund 2009): an event carries its queue's clock, a wait joins it to the
waiting queue's. Two accesses to the same bytes, at least one of them a write, race unless the clock
of the later one's queue has come to the earlier one.

The host's giving work to queues orders nothing between queues. But what the host knows to be done
(by `synchronize`) is done before all that it gives to any queue afterwards.
"""

from __future__ import annotations

import importlib
import sys
import weakref
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

import fake_device
from kernel import optimizer

HOST = "host"

Clock = dict[str, int]

# Files whose functions are no call sites.
BACKEND = importlib.import_module(f"{optimizer.__name__}.cpu_offload.backend")
INSIDE = {__file__, fake_device.__file__, BACKEND.__file__}

# What only looks at a tensor's shape. Views are left out by their schema.
WITHOUT_DATA = (
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
    *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
    *("_unsafe_view", "resize_", "set_", "record_stream", "is_pinned"),
)

# Collectives of single tensors, by all names that releases of torch have for them. The output, then
# the input; one tensor is both.
COLLECTIVES = ("all_to_all_single", "all_reduce", "all_gather_into_tensor", "all_gather_single")
COLLECTIVES += ("reduce_scatter_tensor", "reduce_scatter_single")


class Mark(NamedTuple):
    """An event: behind the first `time` accesses and marks of `queue`, and all in its `clock`."""

    queue: str
    time: int
    clock: Clock


class Access(NamedTuple):
    """The last of its kind of a queue to some bytes."""

    time: int
    label: str


@dataclass
class Cell:
    """Bytes that have always been accessed together."""

    end: int
    reads: dict[str, Access] = field(default_factory=dict)  # by queue
    writes: dict[str, Access] = field(default_factory=dict)


class Recorder(TorchDispatchMode):
    """Tells which accesses race, of streams and collectives of a fake device, and of the host.

    Operations on the device are the current stream's, all others the host's. The collectives of
    each process group have a clock, too, as NCCL has streams of its own for them: a collective is
    behind what the current stream was given before, and the current stream is behind a collective
    only after ``wait()``. Kernels that torch doesn't dispatch are not seen.

    Args:
        dropped: the call site of `wait` whose calls are ignored.

    Attributes:
        device: the fake one.
        races: one line for each pair of accesses that nothing orders.
        waits: the call sites of `wait`, as qualified names of functions, with dropped ones.
        collectives: how many were launched.
    """

    device: fake_device.Device

    def __init__(self, dropped: str | None = None):
        super().__init__()
        self.races: list[str] = []
        self.waits: list[str] = []
        self.collectives = 0
        self._dropped = dropped
        self._clocks: dict[str, Clock] = {}
        self._starts: list[int] = []  # of the cells, in order
        self._cells: dict[int, Cell] = {}  # by start
        self._hosts: dict[int, weakref.ref[Any]] = {}  # storages in host memory, by address
        self._is_quiet = False

    # -- what orders

    def record(self, queue: str) -> Mark:
        clock = self._clock(queue)
        mark = Mark(queue, clock[queue], dict(clock))
        clock[queue] += 1
        return mark

    def wait(self, queue: str, event: Mark) -> None:
        self.waits.append(_call_site())
        if self.waits[-1] != self._dropped:
            _join(self._clock(queue), event.clock)

    def synchronize(self, event: Mark) -> None:
        _join(self._clock(HOST), event.clock)

    @property
    def current(self) -> str:
        return self.device.streams[-1].name

    def _clock(self, queue: str) -> Clock:
        """A queue's, when the host gives it something: behind all that the host knows."""
        clock = self._clocks.setdefault(queue, defaultdict(int, {queue: 1}))
        if queue != HOST:
            _join(clock, self._clock(HOST))
        return clock

    # -- what is ordered

    def touched(self, tensor: Tensor, write: bool, by: str, label: str) -> None:
        """Notes what a queue does to a tensor's bytes, those in its gaps included."""
        storage = tensor.untyped_storage()
        if not self.device.memory.has(storage) and storage.data_ptr() not in self._hosts:
            self._hosts[storage.data_ptr()] = weakref.ref(
                storage, partial(self._forget, *_bytes(storage))
            )
        self._note(*_interval(tensor), write, by, label)

    def allocated(self, start: int, end: int) -> None:
        """Notes that the current stream has got memory of the device."""
        self._note(start, end, True, self.current, "allocation")

    def freed(self, start: int, end: int) -> None:
        """Notes that the current stream may use memory of the device for something else."""
        self._note(start, end, True, self.current, "release")
        self._forget(start, end)

    def _note(self, start: int, end: int, write: bool, by: str, label: str) -> None:
        clock = self._clock(by)
        what = f"{by} {'writes' if write else 'reads'} ({label})"
        for cell in self._cover(start, end):
            for verb, accesses in [("wrote", cell.writes)] + [("read", cell.reads)] * write:
                for queue, old in accesses.items():
                    race = f"{what} unordered with: {queue} {verb} ({old.label})"
                    if queue != by and clock[queue] < old.time and race not in self.races:
                        self.races.append(race)
            (cell.writes if write else cell.reads)[by] = Access(clock[by], label)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass_type(t) for t in types):
            return NotImplemented  # seen again as operations on the tensors within
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[-1]
        if not self._is_quiet and not func.is_view and name not in WITHOUT_DATA:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            is_here = any(self.device.memory.has(t.untyped_storage()) for t in tensors)
            for position, argument in enumerate(func._schema.arguments):
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                write = argument.alias_info is not None and argument.alias_info.is_write
                for leaf in tree_leaves(value):
                    if isinstance(leaf, Tensor):
                        self.touched(leaf, write, self.current if is_here else HOST, name)
        return func(*args, **kwargs)

    def collective(self, name: str, launch: Callable[..., Any]) -> Callable[..., Any]:
        """A collective that tells of its accesses, and whose work of being waited for."""

        def told(*args: Any, group: Any = None, async_op: bool = False, **kwargs: Any) -> Any:
            tensors = [arg for arg in args if isinstance(arg, Tensor)]
            queue = f"collectives of {dist.get_process_group_ranks(group or dist.group.WORLD)}"
            self.collectives += 1
            # The backend does this itself, so it is none of the waits that may be dropped.
            _join(self._clock(queue), self.record(self.current).clock)
            self.touched(tensors[-1], False, queue, name)
            self.touched(tensors[0], True, queue, name)
            mark = self.record(queue)
            with self._quietly():
                work = launch(*args, group=group, async_op=True, **kwargs)

            def wait(*_: Any) -> None:
                """Makes the current stream wait."""
                with self._quietly():  # backends may copy what has come only now
                    work.wait()
                self.wait(self.current, mark)

            return SimpleNamespace(wait=wait) if async_op else wait()

        return told

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        before, self._is_quiet = self._is_quiet, True
        try:
            yield
        finally:
            self._is_quiet = before

    # -- cells

    def _forget(self, start: int, end: int, *_: Any) -> None:
        """When memory goes: something else may get its address."""
        self._hosts.pop(start, None)
        for place in self._starts[
            bisect_left(self._starts, start) : bisect_left(self._starts, end)
        ]:
            self._starts.remove(place)
            del self._cells[place]

    def _cut(self, address: int) -> None:
        """Parts the cell that goes over an address."""
        place = bisect_left(self._starts, address) - 1
        cell = self._cells[self._starts[place]] if place >= 0 else None
        if cell is not None and address < cell.end and address not in self._cells:
            self._starts.insert(place + 1, address)
            rest = Cell(cell.end, dict(cell.reads), dict(cell.writes))
            self._cells[address], cell.end = rest, address

    def _cover(self, start: int, end: int) -> list[Cell]:
        """The cells of an interval."""
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


def _bytes(storage: torch.UntypedStorage) -> tuple[int, int]:
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


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


@contextmanager
def ordered_device(dropped: str | None = None) -> Iterator[Recorder]:
    """Puts the device there, and a recorder that watches it."""
    recorder = Recorder(dropped)
    with fake_device.fake_device(recorder=recorder) as recorder.device, ExitStack() as stack:
        for name in COLLECTIVES:
            launch = getattr(dist, name, None)
            if launch is not None:
                stack.enter_context(patch.object(dist, name, recorder.collective(name, launch)))
        stack.enter_context(recorder)
        yield recorder
