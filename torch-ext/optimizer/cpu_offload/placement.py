"""Decides which state lives in host memory, moves it there, and creates the prefetching rings."""

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

# Default device memory for loads: this share of the state, but at least this many bytes.
SLOT_SHARE = 0.05
LEAST_SLOT_BYTES = 512 << 20

# Accelerators with their own memory and streams.
DEVICE_TYPES = ("cuda", "xpu", "mtia", "hpu", "npu", "privateuseone")

# The state that may live in host memory: everything except AdamW's step count.
KEYS = ("momentum_buffer", "second_momentum_buffer", "exp_avg", "exp_avg_sq", "weight_residual")

State = Mapping[Any, Any]  # an optimizer's state
Params = Iterable[tuple[Tensor, bool]]  # each parameter with True if it is Muon's
# A tensor to offload: its parameter's state, its key there, the tensor, and the device using it.
KeyedState = tuple[MutableMapping[str, Tensor], str, Tensor, torch.device]


class OffloadedTensor(NamedTuple):
    """A tensor of the state that lives in host memory."""

    tensor: Tensor  # the tensor in the optimizer's state
    host: Tensor  # its local tensor
    device: torch.device  # the device that uses it


class OffloadDevice(NamedTuple):
    """The backend that copies to and from a device, and host memory for the device's state."""

    backend: Backend
    arena: Arena


class CPUOffload:
    """Keeps an optimizer's state in host memory, and prepares its copies to devices and back."""

    def __init__(self) -> None:
        self.is_on = False
        self._slot_bytes: Optional[int] = None
        self._backend: Optional[Backend] = None  # replaces the devices' own backends
        self._devices: dict[torch.device, OffloadDevice] = {}
        self._offloaded: dict[int, OffloadedTensor] = {}  # by id of the tensor in the state

    def _device(self, device: torch.device) -> OffloadDevice:
        if device not in self._devices:
            backend = self._backend or Backend(device)
            arena = Arena(backend.device, drain=backend.drain)
            self._devices[device] = OffloadDevice(backend, arena)
        return self._devices[device]

    def __getstate__(self) -> dict[str, Any]:
        """Only the user's settings: memory, streams, and a backend belong to one process."""
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
        """Moves all state back to the devices of its parameters."""
        self.is_on = False
        self.synchronize()
        self._backend, self._devices = None, {}
        for param in state:  # including parameters that have left the groups
            for key, tensor in _state_tensors(state, param).items():
                offloaded = self._offloaded.get(id(tensor))
                is_muon = "momentum_buffer" in state[param]
                if offloaded is not None and self.destination(param, is_muon) is None:
                    del self._offloaded[id(tensor)]
                    on_device = offloaded.host.to(offloaded.device, copy=True)
                    state[param][key] = with_local(tensor, on_device)

    # -- state in host memory --------------------------------------------------------------------

    def is_on_host(self, param: Tensor) -> bool:
        """True if a device computes with a Muon parameter and gradient in host memory."""
        if self._backend is not None and param.device.type == "cpu":
            return self._backend.hosts_parameters
        return param.device != compute_device(param)

    def destination(self, param: Tensor, is_muon: bool) -> Optional[torch.device]:
        """The device that uses a parameter's state from host memory; None if it lives elsewhere.

        AdamW updates a parameter in host memory there.
        """
        if self.is_on_host(param):
            return compute_device(param) if is_muon else None
        if not self.is_on or (self._backend is None and param.device.type not in DEVICE_TYPES):
            return None
        return param.device

    @property
    def has_state(self) -> bool:
        """True if any state is in host memory."""
        return bool(self._offloaded)

    def can_offload(self, params: Params) -> bool:
        """True if any of these parameters has state to offload, now or after the first step."""
        return any(self.destination(param, is_muon) is not None for param, is_muon in params)

    def offload_missing(self, state: State, params: Params) -> None:
        """Moves the parameters' state to host memory if it belongs there and isn't there yet."""
        missing = [
            (state[param], key, tensor, destination)
            for param, is_muon in params
            for destination in [self.destination(param, is_muon)]
            if destination is not None
            for key, tensor in _state_tensors(state, param).items()
            if id(tensor) not in self._offloaded
        ]
        self.move_to_host(missing)
        # This keeps state of parameters that were swapped out of the groups and may come back.
        kept = {id(t) for param in state for t in _state_tensors(state, param).values()}
        if len(kept) < len(self._offloaded):
            self.synchronize()
            self._offloaded = {key: t for key, t in self._offloaded.items() if key in kept}

    def move_to_host(self, states: Sequence[KeyedState]) -> None:
        """Moves tensors from any device to host memory; meta tensors become zeros."""
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
        """Frees all memory when the offloaded state is no longer used, even after a failed copy."""
        for device in self._devices.values():
            device.backend.recover()
        self.synchronize()
        self._offloaded = {}

    def synchronize(self) -> None:
        """Makes the host wait for all copies; then host memory is up to date."""
        for device in self._devices.values():
            for queue in (OUT, IN):
                device.backend.synchronize(device.backend.record(queue))

    # -- within a step -------------------------------------------------------------------------

    def fetch(self, tensor: Optional[Tensor], part: Tensor) -> Optional[Fetch]:
        """The fetch that copies a part of a state tensor to its device; None if not needed."""
        offloaded = self._offloaded.get(id(tensor))
        return None if offloaded is None else Fetch(part, offloaded.device)

    def slot_bytes(self, device: torch.device) -> int:
        """Bytes of device memory for the loads of a step."""
        nbytes = sum(t.host.nbytes for t in self._offloaded.values() if t.device == device)
        return self._slot_bytes or max(int(SLOT_SHARE * nbytes), LEAST_SLOT_BYTES)

    def rings(self, loads: Iterable[Load]) -> dict[torch.device, Ring]:
        """The ring of each device for a step; loads are in the order of their use."""
        by_device: dict[torch.device, list[Load]] = defaultdict(list)
        for load in loads:
            if load.device is not None:
                by_device[load.device].append(load)
        return {
            device: Ring(self._device(device).backend, self.slot_bytes(device), of_device)
            for device, of_device in by_device.items()
        }

    def end_step(self, hosted: Iterable[torch.device]) -> None:
        """Makes the host wait until these devices have updated parameters in host memory."""
        for device in hosted:
            backend = self._device(device).backend
            backend.synchronize(backend.record(OUT))


def _state_tensors(state: State, param: Any) -> dict[str, Tensor]:
    """A parameter's state tensors, by key."""
    # Under keys that aren't parameters, users may keep any objects.
    param_state = state.get(param, {}) if isinstance(param, Tensor) else {}
    return {key: param_state[key] for key in KEYS if param_state.get(key) is not None}
