"""Decides which state lives in host memory, and moves it there; makes the rings that prefetch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from ..distributed.dtensors import compute_device, local, with_local
from .arena import Arena
from .backend import IN, OUT, Backend
from .ring import Fetch, Load, Ring, dense_stride

# Device memory for loads, by default: a share of the state, or so many bytes if they are more.
SLOT_SHARE = 0.05
LEAST_SLOT_BYTES = 512 << 20

# Accelerators with memory of their own, and streams.
DEVICE_TYPES = ("cuda", "xpu", "mtia", "hpu", "npu", "privateuseone")

# The state that may live in host memory: all but AdamW's count of steps.
KEYS = ("momentum_buffer", "second_momentum_buffer", "exp_avg", "exp_avg_sq", "weight_residual")

State = Mapping[Any, Any]  # of an optimizer
Params = Iterable[tuple[Tensor, bool]]  # and whether they are Muon's
# A tensor to be offloaded: the state of its parameter, its key there, the tensor, and the device on
# which it is used.
KeyedState = tuple[MutableMapping[str, Tensor], str, Tensor, torch.device]


class OffloadedTensor(NamedTuple):
    """A tensor of the state that lives in host memory."""

    tensor: Tensor  # the one in the optimizer's state
    host: Tensor  # its local tensor
    device: torch.device  # on which it is used


class OffloadDevice(NamedTuple):
    """What copies to and from a device, and the host memory of the state that is used there."""

    backend: Backend
    arena: Arena


class CPUOffload:
    """The state of an optimizer that lives in host memory, and its way to the devices and back."""

    def __init__(self) -> None:
        self.is_on = False
        self._slot_bytes: Optional[int] = None
        self._backend: Optional[Backend] = None  # instead of the devices' own
        self._devices: dict[torch.device, OffloadDevice] = {}
        self._offloaded: dict[int, OffloadedTensor] = {}  # by id of the tensor in the state

    def _device(self, device: torch.device) -> OffloadDevice:
        if device not in self._devices:
            backend = self._backend or Backend(device)
            arena = Arena(backend.device, drain=backend.drain)
            self._devices[device] = OffloadDevice(backend, arena)
        return self._devices[device]

    def __getstate__(self) -> dict[str, Any]:
        """What the user has set: memory, streams and a backend belong to one process."""
        return {key: vars(self)[key] for key in ("is_on", "_slot_bytes")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        CPUOffload.__init__(self)
        vars(self).update(state)

    def turn_on(
        self,
        state: State,
        params: Params,
        slot_bytes: Optional[int],
        backend: Optional[Backend],
    ) -> None:
        """Moves an optimizer's state to host memory; see `Muon.turn_on_cpu_offload`."""
        is_int = isinstance(slot_bytes, int) and not isinstance(slot_bytes, bool)
        if slot_bytes is not None and not (is_int and slot_bytes >= 1):
            raise ValueError(f"slot_bytes must be None or an int ≥ 1, found {slot_bytes!r}")
        if backend is not None and not isinstance(backend, Backend):
            raise ValueError(f"backend must be None or a SimulatedHost, found {backend!r}")
        self.is_on, self._slot_bytes = True, slot_bytes
        if backend is not None and backend is not self._backend:
            self.synchronize()
            self._backend, self._devices = backend, {}
        self.offload_missing(state, params)

    def turn_off(self, state: State) -> None:
        """Moves all state back to where its parameters are."""
        self.is_on = False
        self.synchronize()
        self._backend, self._devices = None, {}
        for param in state:  # also those that have left the groups
            for key, tensor in _state_tensors(state, param).items():
                offloaded = self._offloaded.get(id(tensor))
                is_muon = "momentum_buffer" in state[param]
                if offloaded is not None and self.destination(param, is_muon) is None:
                    del self._offloaded[id(tensor)]
                    on_device = offloaded.host.to(offloaded.device, copy=True)
                    state[param][key] = with_local(tensor, on_device)

    # -- what lives in host memory ---------------------------------------------------------------

    def is_on_host(self, param: Tensor) -> bool:
        """Whether a parameter of Muon's and its gradient are in host memory, to be computed with on
        a device."""
        if self._backend is not None and param.device.type == "cpu":
            return self._backend.hosts_parameters
        return param.device != compute_device(param)

    def destination(self, param: Tensor, is_muon: bool) -> Optional[torch.device]:
        """The device that uses a parameter's state from host memory; None if it lives elsewhere.

        AdamW of a parameter in host memory is done there.
        """
        if self.is_on_host(param):
            return compute_device(param) if is_muon else None
        if not self.is_on or (self._backend is None and param.device.type not in DEVICE_TYPES):
            return None
        return param.device

    @property
    def has_state(self) -> bool:
        """Whether there is any state in host memory."""
        return bool(self._offloaded)

    def can_offload(self, params: Params) -> bool:
        """Whether any of these has state to offload, now or after the first step."""
        return any(self.destination(param, is_muon) is not None for param, is_muon in params)

    def offload_missing(self, state: State, params: Params) -> None:
        """Moves all state of parameters to host memory that belongs there and is elsewhere."""
        missing = [
            (state[param], key, tensor, destination)
            for param, is_muon in params
            for destination in [self.destination(param, is_muon)]
            if destination is not None
            for key, tensor in _state_tensors(state, param).items()
            if id(tensor) not in self._offloaded
        ]
        self.move_to_host(missing)
        # Also of parameters that have been swapped out of the groups, and may come back.
        kept = {id(t) for param in state for t in _state_tensors(state, param).values()}
        if len(kept) < len(self._offloaded):
            self.synchronize()
            self._offloaded = {key: t for key, t in self._offloaded.items() if key in kept}

    def move_to_host(self, states: Sequence[KeyedState]) -> None:
        """Moves tensors to host memory, wherever they are; those on meta become zeros."""
        by_device: dict[torch.device, list[KeyedState]] = defaultdict(list)
        for keyed in states:
            by_device[keyed[-1]].append(keyed)
        for device, keyed_states in by_device.items():
            sizes = [local(tensor).nbytes for _, _, tensor, _ in keyed_states]
            memories = self._device(device).arena.allocate(sizes)
            for (param_state, key, tensor, _), memory in zip(keyed_states, memories):
                source = local(tensor)
                host = memory.view(source.dtype).as_strided(source.shape, dense_stride(source))
                if not source.is_meta:
                    host.copy_(source)
                tensor = param_state[key] = with_local(tensor, host)
                self._offloaded[id(tensor)] = OffloadedTensor(tensor, host, device)

    def clear(self) -> None:
        """Frees all memory: nobody uses the offloaded state any more, even where a copy failed."""
        for device in self._devices.values():
            device.backend.recover()
        self.synchronize()
        self._offloaded = {}

    def synchronize(self) -> None:
        """Makes the host wait for all copies: host memory has the newest of everything then."""
        for device in self._devices.values():
            for queue in (OUT, IN):
                device.backend.synchronize(device.backend.record(queue))

    # -- within a step -------------------------------------------------------------------------

    def fetch(self, tensor: Optional[Tensor], part: Tensor) -> Optional[Fetch]:
        """What brings a part of a tensor of the state to its device; None where it needs no
        copy."""
        offloaded = self._offloaded.get(id(tensor))
        return None if offloaded is None else Fetch(part, offloaded.device)

    def slot_bytes(self, device: torch.device) -> int:
        """Device memory for the loads of a step."""
        nbytes = sum(t.host.nbytes for t in self._offloaded.values() if t.device == device)
        return self._slot_bytes or max(int(SLOT_SHARE * nbytes), LEAST_SLOT_BYTES)

    def rings(self, loads: Iterable[Load]) -> dict[torch.device, Ring]:
        """The rings of a step on each device, for loads in the order of their use."""
        by_device: dict[torch.device, list[Load]] = defaultdict(list)
        for load in loads:
            if load.device is not None:
                by_device[load.device].append(load)
        return {
            device: Ring(self._device(device).backend, self.slot_bytes(device), of_device)
            for device, of_device in by_device.items()
        }

    def end_step(self, hosted: Iterable[torch.device]) -> None:
        """Makes the host wait for parameters in host memory that these devices have updated."""
        for device in hosted:
            backend = self._device(device).backend
            backend.synchronize(backend.record(OUT))


def _state_tensors(state: State, param: Any) -> dict[str, Tensor]:
    """A parameter's tensors of state, by key."""
    # Under keys that are no parameters, torch's users may keep what they like.
    param_state = state.get(param, {}) if isinstance(param, Tensor) else {}
    return {key: param_state[key] for key in KEYS if param_state.get(key) is not None}
