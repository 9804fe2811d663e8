"""Where the state of an optimizer lives: on the host, and for a while on the device."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple, Optional

import torch
from torch import Tensor

from ..distributed.utils import local, with_local
from .arena import Arena
from .backend import COMPUTE, IN, OUT, Accelerator, Backend, Host
from .carrier import Carrier
from .windows import Loan, Share, Window, dense_stride

# How state comes to a step: carried through it, all at once before it, or under the backward.
MODES = ("stream", "bulk", "backward")

# Device memory for what is streamed, unless told: a share of the state, or so much if it is more.
SLOT_SHARE = 0.05
LEAST_SLOT_BYTES = 512 << 20

# Accelerators with memory of their own, and streams.
DEVICE_TYPES = ("cuda", "xpu", "mtia", "hpu", "npu", "privateuseone")


class Wanted(NamedTuple):
    """A tensor of the state that is to be made: its place, and what it is like.

    Args:
        state: of its parameter.
        key: in that.
        make: from this rank's part of it to the tensor.
        shape, stride, dtype: of this rank's part.
        device: where it is used.
    """

    state: MutableMapping[str, Tensor]
    key: str
    make: Callable[[Tensor], Tensor]
    shape: Sequence[int]
    stride: Sequence[int]
    dtype: torch.dtype
    device: torch.device


@dataclass
class _Held:
    """A tensor of the state that lives on the host.

    Args:
        tensor: the one in the optimizer's state.
        host: this rank's part of it.
        device: where it is used.
        visit: while it is there, too.
        here: its copy there.
    """

    tensor: Tensor
    host: Tensor
    device: torch.device
    visit: Optional[_Visit] = None
    here: Optional[Tensor] = None


class _Visit:
    """State on its device from a reload to the next offload."""

    def __init__(self, held: Sequence[_Held], window: Window, memory: Tensor):
        self.held = held
        self.window = window
        self.memory = memory
        self.is_newer = False  # than what the host has
        for each, (here,) in zip(held, window.views(memory)):
            each.visit, each.here = self, here

    def on_device(self) -> list[Tensor]:
        """Where the window's copies lie in its memory."""
        copies = self.window.copies
        return [self.memory[copy.place : copy.place + copy.host.numel()] for copy in copies]

    def end(self) -> None:
        """Its tensors are where they live, as far as the optimizer is concerned."""
        for each in self.held:
            each.visit = each.here = None


class CPUOffload:
    """The host's copy of an optimizer's state, and how it gets to where it is used."""

    def __init__(self) -> None:
        self.is_on = False
        self.mode = "stream"
        self.slot_bytes: Optional[int] = None
        self.manual = False
        self._stand_in: Optional[Host] = None
        self._backends: dict[torch.device, Backend] = {}
        self._arenas: dict[torch.device, Arena] = {}
        self._held: dict[int, _Held] = {}  # by id of the tensor in the state
        self._visits: list[_Visit] = []
        self._came: dict[torch.device, Any] = {}  # events behind reloads not waited for
        self._leaving: list[tuple[_Visit, Any]] = []  # with the event that lets its memory go

    def __getstate__(self) -> dict[str, Any]:
        """The settings: memory, streams and a stand-in belong to one process."""
        kept = ("is_on", "mode", "slot_bytes", "manual")
        return {**vars(CPUOffload()), **{key: vars(self)[key] for key in kept}}

    # -- what is held ------------------------------------------------------------------------

    def device_of(self, param: Tensor) -> Optional[torch.device]:
        """The device on which the host's state of a parameter is used; None where it has none."""
        device = param.device
        if not self.is_on:
            return None
        if self._stand_in is not None and device.type == "cpu":
            return device
        return device if device.type in DEVICE_TYPES else None

    def create(self, wanted: Sequence[Wanted]) -> None:
        """Makes zeros in host memory."""
        by_device: dict[torch.device, list[Wanted]] = defaultdict(list)
        for each in wanted:
            by_device[each.device].append(each)
        for device, of_device in by_device.items():
            sizes = [torch.Size(w.shape).numel() * w.dtype.itemsize for w in of_device]
            for each, memory in zip(of_device, self._arena(device).allocate(sizes)):
                host = memory.view(each.dtype).as_strided(tuple(each.shape), tuple(each.stride))
                tensor = each.make(host)
                each.state[each.key] = tensor
                self._held[id(tensor)] = _Held(tensor, host, device)

    def holds(self, tensor: Tensor) -> bool:
        return id(tensor) in self._held

    def adopt(
        self, states: Iterable[tuple[MutableMapping[str, Tensor], str, torch.device]]
    ) -> None:
        """Takes tensors of the state into host memory, where they are not yet, one after another.

        Args:
            states: of a parameter, which key of it, and the device on which it is used.
        """
        listed = list(states)
        given = [state[key] for state, key, _ in listed]
        wanted = []
        for (state, key, device), tensor in zip(listed, given):
            held = local(tensor)
            make = functools.partial(with_local, tensor)
            stride = dense_stride(held)
            wanted.append(Wanted(state, key, make, held.shape, stride, held.dtype, device))
        self.create(wanted)
        for (state, key, _), tensor in zip(listed, given):
            self._held[id(state[key])].host.copy_(local(tensor))

    def release(self, state: MutableMapping[str, Tensor]) -> None:
        """Puts the host's tensors of a parameter's state back to where they are used."""
        for key, tensor in state.items():
            held = self._held.pop(id(tensor), None)
            if held is not None:
                there = torch.empty_strided(
                    held.host.shape, held.host.stride(), dtype=held.host.dtype, device=held.device
                )
                state[key] = with_local(tensor, there.copy_(held.host))

    def keep_only(self, tensors: Iterable[Tensor]) -> None:
        """Forgets whatever is not among the tensors of the state any more."""
        ids = {id(tensor) for tensor in tensors}
        if len(ids) < len(self._held):
            self._held = {key: held for key, held in self._held.items() if key in ids}

    @property
    def held_bytes(self) -> int:
        """Of state on the host."""
        return sum(_nbytes(held.host) for held in self._held.values())

    def _arena(self, device: torch.device) -> Arena:
        if device not in self._arenas:
            self._arenas[device] = Arena(device)
        return self._arenas[device]

    def _backend(self, device: torch.device) -> Backend:
        if device not in self._backends:
            self._backends[device] = self._stand_in or Accelerator(device)
        return self._backends[device]

    # -- within a step -------------------------------------------------------------------------

    def here(self, tensor: Tensor) -> Tensor:
        """This rank's part of a tensor of the state, on its device if it is there."""
        held = self._held.get(id(tensor))
        if held is None:
            return local(tensor)
        return held.host if held.here is None else held.here

    def loan(self, tensor: Tensor, part: Any = None) -> list[Loan]:
        """What has to be carried to use a tensor of the state: it, or nothing.

        Args:
            tensor: in the state.
            part: slices of this rank's part, or a function that takes some of it.
        """
        held = self._held.get(id(tensor))
        if held is None or held.here is not None:
            return []
        host = held.host
        if part is not None:
            host = part(host) if callable(part) else host[part]
        return [Loan(host, held.device, True)]

    def begin_step(self) -> Carrier:
        """What carries the host's state through a step, but for what is on its device already."""
        if self.mode != "stream" and not self.manual:
            self.reload([held.tensor for held in self._held.values()])
        self.sweep()
        self.wait_reload()
        for visit in self._visits:
            visit.is_newer = True
        slots: dict[torch.device, int] = defaultdict(int)
        for held in self._held.values():
            slots[held.device] += _nbytes(held.host)
        for device, nbytes in slots.items():
            default = max(int(SLOT_SHARE * nbytes), LEAST_SLOT_BYTES)
            slots[device] = default if self.slot_bytes is None else self.slot_bytes
            self._wait_for_leaving(device)
        backends = {device: self._backend(device) for device in slots}
        return Carrier(backends, slots, self._joined)

    def end_step(self, carrier: Carrier) -> None:
        """Sends back what was reloaded, unless that is the caller's to do."""
        carrier.end()
        if not self.manual:
            self.offload(hidden=self.mode != "bulk")

    def _joined(self, address: int, nbytes: int) -> Optional[Tensor]:
        for arena in self._arenas.values():
            try:
                return arena.span(address, nbytes)
            except ValueError:
                continue
        return None

    # -- visits --------------------------------------------------------------------------------

    def reload(self, tensors: Iterable[Tensor], streams: Sequence[Any] = ()) -> None:
        """Starts to bring tensors of the state to their devices, where they are not.

        Args:
            tensors: of the state; those that are not held stay where they are.
            streams: whose work so far may use the memory that is taken, beside the current one's.
        """
        self.sweep()
        by_device: dict[torch.device, list[_Held]] = defaultdict(list)
        for tensor in tensors:
            held = self._held.get(id(tensor))
            if held is not None and held.visit is None:
                by_device[held.device].append(held)
        for device, of_device in by_device.items():
            backend = self._backend(device)
            shares = [
                Share(number, None, (Loan(held.host, device, True),))
                for number, held in enumerate(of_device)
            ]
            window = Window(shares, device, self._joined)
            memory = backend.allocate(window.nbytes)
            backend.wait(IN, backend.record(COMPUTE))  # whoever had the memory before
            for stream in streams:
                backend.wait(IN, stream.record_event())
            self._wait_for_leaving(device)
            visit = _Visit(of_device, window, memory)
            backend.copy(IN, visit.on_device(), [copy.host for copy in window.copies])
            self._came[device] = backend.record(IN)
            self._visits.append(visit)

    def wait_reload(self) -> None:
        """Makes the current stream wait for everything that is being reloaded."""
        for device, event in self._came.items():
            self._backend(device).wait(COMPUTE, event)
        self._came.clear()

    def offload(self, hidden: bool = True) -> None:
        """Starts to write back what was reloaded; its memory is let go when that is done.

        Args:
            hidden: `sweep` lets it go, else the current stream waits for it.
        """
        self.sweep()
        self.wait_reload()
        for visit in self._visits:
            if visit.is_newer:
                event = self._write_back(visit)
                self._leaving.append((visit, event))
                if not hidden:
                    self._backend(visit.window.device).wait(COMPUTE, event)
                    self._leave(visit)
            else:
                self._leave(visit)
            visit.end()
        self._visits = []
        if not hidden:
            self._leaving = []

    def sweep(self) -> None:
        """Lets the memory go of what has been written back by now; waits for nothing."""
        under_way = []
        for visit, event in self._leaving:
            if self._backend(visit.window.device).has_come(event):
                self._leave(visit)
            else:
                under_way.append((visit, event))
        self._leaving = under_way

    def settle(self) -> None:
        """Makes the host wait until it has the newest of everything."""
        for visit in self._visits:
            if visit.is_newer:
                self._write_back(visit)
                visit.is_newer = False
        for backend in self._backends.values():
            backend.synchronize(backend.record(OUT))
        self.sweep()

    def _write_back(self, visit: _Visit) -> Any:
        backend = self._backend(visit.window.device)
        backend.wait(OUT, backend.record(COMPUTE))
        backend.copy(OUT, [copy.host for copy in visit.window.copies], visit.on_device())
        return backend.record(OUT)

    def _leave(self, visit: _Visit) -> None:
        self._backend(visit.window.device).free(visit.memory)
        del visit.memory

    def _wait_for_leaving(self, device: torch.device) -> None:
        """Lets nothing be brought that is still being written back."""
        if any(visit.window.device == device for visit, _ in self._leaving):
            backend = self._backend(device)
            backend.wait(IN, backend.record(OUT))


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize
