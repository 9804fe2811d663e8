"""Where the state of an optimizer lives: on the host, and for a while on the device."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from ..distributed.utils import compute_device, local, with_local
from ..state import Spec, make
from .arena import Arena
from .backend import COMPUTE, IN, OUT, Accelerator, Backend
from .carrier import Carrier
from .windows import Loan, Share, Window, dense_stride

# How state comes to a step: carried through it, all at once before it, or under the backward.
MODES = ("stream", "bulk", "backward")

# Device memory for what is streamed, unless told: a share of the state, or so much if it is more.
SLOT_SHARE = 0.05
LEAST_SLOT_BYTES = 512 << 20

# Accelerators with memory of their own, and streams.
DEVICE_TYPES = ("cuda", "xpu", "mtia", "hpu", "npu", "privateuseone")

OwnState = MutableMapping[str, Tensor]  # of one parameter


class Use(NamedTuple):
    """How state that lives on the host is used: on which device, and whether it may stay there for
    longer than a window; not if its parameter has to be carried, too."""

    device: torch.device
    may_stay: bool


@dataclass
class _Held:
    """A tensor of the state that lives on the host.

    Args:
        tensor: the one in the optimizer's state.
        host: this rank's part of it.
        use: how it is used.
        visit: while it is on the device, too.
        here: its copy there.
    """

    tensor: Tensor
    host: Tensor
    use: Use
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
        self.stand_in: Optional[Backend] = None
        self._backends: dict[torch.device, Backend] = {}
        self._arenas: dict[torch.device, Arena] = {}
        self._held: dict[int, _Held] = {}  # by id of the tensor in the state
        self._visits: list[_Visit] = []
        self._came: dict[torch.device, Any] = {}  # events behind reloads not waited for
        self._leaving: list[tuple[_Visit, Any]] = []  # with the event that lets its memory go
        self._plan: object = None
        self._carrier: Optional[tuple[Carrier, int, Sequence[int]]] = None  # of the last step

    def __getstate__(self) -> dict[str, Any]:
        """The settings: memory, streams and a stand-in belong to one process."""
        kept = ("is_on", "mode", "slot_bytes", "manual")
        return {**vars(CPUOffload()), **{key: vars(self)[key] for key in kept}}

    def turn_on(self, mode: str, slot_bytes: Optional[int], stand_in: Optional[Backend]) -> None:
        self.is_on, self.mode, self.slot_bytes = True, mode, slot_bytes
        self._carrier = None
        if stand_in is not None:
            self.stand_in, self._backends = stand_in, {}

    def turn_off(self) -> None:
        self.settle()
        self._end_visits()
        self.is_on, self.stand_in, self._backends = False, None, {}

    # -- what is held ------------------------------------------------------------------------

    def hosts(self, param: Tensor) -> bool:
        """Whether a parameter of Muon's and its gradient are in host memory, but not their use."""
        if self.stand_in is not None and param.device.type == "cpu":
            return self.stand_in.hosts_parameters
        return param.device != compute_device(param)

    def use_of(self, param: Tensor, is_muon: bool) -> Optional[Use]:
        """How state of a parameter is used if it lives on the host; None where it does not.

        AdamW of a parameter in host memory is done there.
        """
        if self.hosts(param):
            return Use(compute_device(param), may_stay=False) if is_muon else None
        if not self.is_on:
            return None
        is_used = self.stand_in is not None or param.device.type in DEVICE_TYPES
        return Use(param.device, may_stay=True) if is_used else None

    def home_of(self, param: Tensor, is_muon: bool) -> torch.device:
        """The device on which a parameter's state lives."""
        is_held = self.use_of(param, is_muon) is not None
        return torch.device("cpu") if is_held else local(param).device

    def holds(self, tensor: Tensor) -> bool:
        return id(tensor) in self._held

    def create(self, missing: Sequence[tuple[OwnState, str, Spec, Use]]) -> None:
        """Makes zeros in host memory: for a parameter's state, which key, what it is like, and how
        it is used."""
        wanted = [(s.held_shape, s.held_stride, s.dtype, use.device) for _, _, s, use in missing]
        for (own, key, spec, use), host in zip(missing, self._allocate(wanted)):
            own[key] = make(spec, host)
            self._hold(own[key], host, use)

    def adopt(self, states: Sequence[tuple[OwnState, str, Use]]) -> None:
        """Takes tensors into host memory, wherever they are: of a parameter's state, which key, and
        how it is used."""
        parts = [local(own[key]) for own, key, _ in states]
        wanted = [
            (part.shape, dense_stride(part), part.dtype, use.device)
            for part, (_, _, use) in zip(parts, states)
        ]
        del parts  # each goes when it has been copied
        for (own, key, use), host in zip(states, self._allocate(wanted)):
            host.copy_(local(own[key]))
            own[key] = with_local(own[key], host)
            self._hold(own[key], host, use)

    def _hold(self, tensor: Tensor, host: Tensor, use: Use) -> None:
        self._held[id(tensor)] = _Held(tensor, host, use)
        self._carrier = None

    def release(self, own: OwnState) -> None:
        """Puts the host's tensors of a parameter's state to where they are used."""
        for key, tensor in own.items():
            held = self._held.pop(id(tensor), None)
            if held is not None:
                self._carrier = None
                like, device = held.host, held.use.device
                there = torch.empty_strided(
                    like.shape, like.stride(), dtype=like.dtype, device=device
                )
                own[key] = with_local(tensor, there.copy_(like))

    def forget(self) -> None:
        """Lets go of all memory: what the host has is nobody's any more."""
        self.settle()
        self._end_visits()
        self._held, self._arenas, self._carrier = {}, {}, None

    def _allocate(
        self, wanted: Sequence[tuple[Sequence[int], Sequence[int], torch.dtype, torch.device]]
    ) -> list[Tensor]:
        """Zeros in host memory, by shape, stride, dtype, and the device for which they are."""
        by_device: dict[torch.device, list[int]] = defaultdict(list)
        for number, (*_, device) in enumerate(wanted):
            by_device[device].append(number)
        allocated: dict[int, Tensor] = {}
        for device, numbers in by_device.items():
            if device not in self._arenas:
                self._arenas[device] = Arena(self._backend(device).device)
            sizes = [math.prod(wanted[n][0]) * wanted[n][2].itemsize for n in numbers]
            for number, memory in zip(numbers, self._arenas[device].allocate(sizes)):
                shape, stride, dtype, _ = wanted[number]
                allocated[number] = memory.view(dtype).as_strided(tuple(shape), tuple(stride))
        return [allocated[number] for number in range(len(wanted))]

    def keep_only(self, tensors: Iterable[Tensor]) -> None:
        """Forgets whatever is not among the tensors of the state any more."""
        ids = {id(tensor) for tensor in tensors}
        if len(ids) < len(self._held):
            self._held = {key: held for key, held in self._held.items() if key in ids}
            self._carrier = None

    @property
    def held_bytes(self) -> int:
        """Of state on the host."""
        return sum(_nbytes(held.host) for held in self._held.values())

    def _backend(self, device: torch.device) -> Backend:
        if device not in self._backends:
            self._backends[device] = self.stand_in or Accelerator(device)
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
        return [Loan(host, held.use.device, True)]

    def begin_step(self, plan: object, others: Sequence[int], once: bool) -> Carrier:
        """What carries the host's state through a step, but for what is on its device already.

        Args:
            plan, others: a step with the same plan, and the same others, uses the same state in the
                same order.
            once: what is carried is not all state, so it may be another next time.
        """
        if self.mode != "stream" and not self.manual:
            self.reload([held.tensor for held in self._held.values()])
        for backend in self._backends.values():
            backend.come_home()
        self.sweep()
        self.wait_reload()
        for visit in self._visits:
            visit.is_newer = True
        carrier, *used = self._carrier or (None, None, None)
        if carrier is None or not carrier.is_prepared or used != [id(plan), others]:
            carrier = self._new_carrier()
            # Whoever keeps a plan's id keeps the plan, or another one could get it.
            self._carrier, self._plan = (carrier, id(plan), others), plan
        for device in carrier.devices:
            self._wait_for_leaving(device)
        if once:
            self._carrier = None
        return carrier

    def _new_carrier(self) -> Carrier:
        slots: dict[torch.device, int] = defaultdict(int)
        for held in self._held.values():
            if held.here is None:
                slots[held.use.device] += _nbytes(held.host)
        for device, nbytes in slots.items():
            default = max(int(SLOT_SHARE * nbytes), LEAST_SLOT_BYTES)
            slots[device] = default if self.slot_bytes is None else self.slot_bytes
        return Carrier({device: self._backend(device) for device in slots}, slots, self._joined)

    def end_step(self, hosted: Iterable[torch.device]) -> None:
        """Sends back what was reloaded, unless that is the caller's to do.

        Args:
            hosted: devices on which parameters were computed that are in host memory: whoever reads
                them next may do so without any stream.
        """
        for device in hosted:
            backend = self._backend(device)
            backend.synchronize(backend.record(OUT))
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

    def reload_at_home(self, tensors: Iterable[Tensor]) -> None:
        """The same as `reload`, from a hook."""
        with ExitStack() as homes:
            for backend in self._backends.values():
                homes.enter_context(backend.at_home())
            self.reload(tensors)

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
            if held is not None and held.visit is None and held.use.may_stay:
                by_device[held.use.device].append(held)
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
            self._carrier = None

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
            self._carrier = None
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

    def _end_visits(self) -> None:
        """Lets go of what was reloaded; the host has the newest."""
        for backend in self._backends.values():  # memory that copies read may go, too
            backend.synchronize(backend.record(IN))
        self._came.clear()
        for visit in self._visits:
            visit.end()
            self._leave(visit)
            self._carrier = None
        self._visits = []

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
