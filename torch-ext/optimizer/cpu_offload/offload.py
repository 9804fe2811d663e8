"""Decides which state lives in host memory, and moves it there; a step asks it for a prefetcher."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Optional

import torch
from torch import Tensor, nn

from ..distributed.utils import compute_device, local, with_local
from ..state.specs import KEYS
from .backend import OUT, Backend
from .device import Destination, OffloadDevice, OffloadedTensor
from .hooks import Hooks
from .prefetcher import Prefetcher, PrefetchRing
from .windows import Fetch, dense_stride

# How state gets to the device: window by window within a step, all at once before its first event,
# or under the backward.
MODES = ("stream", "bulk", "backward")

# Device memory for windows, by default: a share of the state, or so many bytes if they are more.
SLOT_SHARE = 0.05
LEAST_SLOT_BYTES = 512 << 20

# Accelerators with memory of their own, and streams.
DEVICE_TYPES = ("cuda", "xpu", "mtia", "hpu", "npu", "privateuseone")

State = Mapping[Any, Any]  # of an optimizer
Params = Iterable[tuple[Tensor, bool]]  # and whether they are Muon's
# A tensor to be offloaded: the state of its parameter, its key there, the tensor, where it is used.
KeyedState = tuple[MutableMapping[str, Tensor], str, Tensor, Destination]


class CPUOffload:
    """The state of an optimizer that lives in host memory, and its way to the devices and back."""

    def __init__(self) -> None:
        self.is_on = False
        self.mode = "stream"
        self.slot_bytes: Optional[int] = None
        self.manual = False
        self.hooks: Optional[Hooks] = None
        self.tags: dict[Tensor, Hashable] = {}
        self._backend: Optional[Backend] = None  # instead of the devices' own
        self._devices: dict[torch.device, OffloadDevice] = {}
        self._offloaded: dict[int, OffloadedTensor] = {}  # by id of the tensor in the state
        self._prefetcher: Optional[Prefetcher] = None  # of the last step
        self._plan: object = None  # of the last step
        self._prefetched_for: tuple = ()
        self._lock = threading.Lock()  # autograd, whose hooks reload, has a thread for each device

    def _device(self, device: torch.device) -> OffloadDevice:
        if device not in self._devices:
            self._devices[device] = OffloadDevice(self._backend or Backend(device))
        return self._devices[device]

    def __getstate__(self) -> dict[str, Any]:
        """What the user has set: memory, streams and a backend belong to one process."""
        return {key: vars(self)[key] for key in ("is_on", "mode", "slot_bytes", "manual", "tags")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        CPUOffload.__init__(self)
        vars(self).update(state)

    def turn_on(
        self,
        optimizer: torch.optim.Optimizer,
        mode: str,
        slot_bytes: Optional[int],
        model: Optional[nn.Module],
        backend: Optional[Backend],
    ) -> None:
        """Moves an optimizer's state to host memory; see `Muon.turn_on_cpu_offload`."""
        if mode not in MODES:
            raise ValueError(f"mode must be one of {MODES}, found {mode!r}")
        is_int = isinstance(slot_bytes, int) and not isinstance(slot_bytes, bool)
        if slot_bytes is not None and not (is_int and slot_bytes >= 1):
            raise ValueError(f"slot_bytes must be None or an int ≥ 1, found {slot_bytes!r}")
        if model is not None and not isinstance(model, nn.Module):
            raise ValueError(f"model must be None or a module, found {model!r}")
        if backend is not None and not isinstance(backend, Backend):
            raise ValueError(f"backend must be None or a SimulatedHost, found {backend!r}")
        hooks = Hooks(optimizer, model) if mode == "backward" else None
        if self.hooks is not None:
            self.hooks.remove()
        self.hooks = hooks
        self.is_on, self.mode, self.slot_bytes = True, mode, slot_bytes
        self._prefetcher = None
        if backend is not None and backend is not self._backend:
            self.evict()
            self._backend, self._devices = backend, {}
        params = ((p, g["use_muon"]) for g in optimizer.param_groups for p in g["params"])
        self.offload_missing(optimizer.state, params)

    def turn_off(self, state: State) -> None:
        """Moves all state back to where its parameters are."""
        if self.hooks is not None:
            self.hooks.remove()
        self.hooks, self.is_on = None, False
        self.evict()
        self._backend, self._devices, self._prefetcher = None, {}, None
        for param in state:  # also those that have left the groups
            for key, tensor in _state_tensors(state, param).items():
                offloaded = self._offloaded.get(id(tensor))
                is_muon = "momentum_buffer" in state[param]
                if offloaded is not None and self.destination(param, is_muon) is None:
                    del self._offloaded[id(tensor)]
                    device = offloaded.destination.device
                    state[param][key] = with_local(tensor, offloaded.host.to(device, copy=True))

    def tag(self, tags: Mapping[Any, Hashable], params: Mapping[Any, Tensor]) -> None:
        """See `Muon.set_param_tags`; ``params`` are the optimizer's, by id and by name."""
        tagged: dict[Tensor, Hashable] = {}
        for key, tag in tags.items():
            is_name = isinstance(key, str)
            param = params.get(key if is_name else id(key))
            if param is None:
                what = repr(key) if is_name else f"a tensor of shape {tuple(key.shape)}"
                raise ValueError(f"{what} is no parameter of this optimizer, so it can't be tagged")
            if tag is not None:
                tagged[param] = tag
        self.tags = tagged

    def tagged(self, tag: Hashable) -> list[Tensor]:
        """The parameters with a tag; a ValueError where there are none."""
        if not self.tags:
            raise ValueError(
                f"no parameter has a tag, so none has {tag!r}: call set_param_tags first"
            )
        tagged = [param for param, other in self.tags.items() if other == tag]
        if not tagged:
            tags = sorted({repr(other) for other in self.tags.values()})
            raise ValueError(f"no parameter has the tag {tag!r}; there are {', '.join(tags)}")
        return tagged

    # -- what lives in host memory ---------------------------------------------------------------

    def is_on_host(self, param: Tensor) -> bool:
        """Whether a parameter of Muon's and its gradient are in host memory, to be computed with on
        a device."""
        if self._backend is not None and param.device.type == "cpu":
            return self._backend.hosts_parameters
        return param.device != compute_device(param)

    def destination(self, param: Tensor, is_muon: bool) -> Optional[Destination]:
        """Where state of a parameter is used if it lives in host memory; None if it does not.

        AdamW of a parameter in host memory is done there.
        """
        if self.is_on_host(param):
            return Destination(compute_device(param), may_reload=False) if is_muon else None
        if not self.is_on or (self._backend is None and param.device.type not in DEVICE_TYPES):
            return None
        return Destination(param.device, may_reload=True)

    def state_device(self, param: Tensor, is_muon: bool) -> torch.device:
        """The device on which a parameter's state lives."""
        is_offloaded = self.destination(param, is_muon) is not None
        return torch.device("cpu") if is_offloaded else local(param).device

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
        if missing:  # the device copy of a tensor that was replaced is out of date
            self.evict()
            self.move_to_host(missing)
        # Also of parameters that have been swapped out of the groups, and may come back.
        kept = {id(t) for param in state for t in _state_tensors(state, param).values()}
        if len(kept) < len(self._offloaded):
            self.flush()
            self._offloaded = {key: t for key, t in self._offloaded.items() if key in kept}
            self._prefetcher = None
        if self.hooks is not None:
            self.hooks.hook_params()

    def move_to_host(self, states: Sequence[KeyedState]) -> None:
        """Moves tensors to host memory, wherever they are; those on meta become zeros."""
        by_device: dict[torch.device, list[KeyedState]] = defaultdict(list)
        for keyed in states:
            by_device[keyed[-1].device].append(keyed)
        for device, keyed_states in by_device.items():
            sizes = [local(tensor).nbytes for _, _, tensor, _ in keyed_states]
            memories = self._device(device).arena.allocate(sizes)
            for (param_state, key, tensor, destination), memory in zip(keyed_states, memories):
                source = local(tensor)
                host = memory.view(source.dtype).as_strided(source.shape, dense_stride(source))
                if not source.is_meta:
                    host.copy_(source)
                tensor = param_state[key] = with_local(tensor, host)
                self._offloaded[id(tensor)] = OffloadedTensor(tensor, host, destination)
            self._prefetcher = None

    def clear(self) -> None:
        """Frees all memory: nobody uses the offloaded state any more, even where a copy failed."""
        for device in self._devices.values():
            device.backend.recover()
        self.evict()
        self._offloaded, self._prefetcher = {}, None

    # -- within a step -------------------------------------------------------------------------

    def current(self, tensor: Tensor) -> Tensor:
        """The local tensor of a tensor of the state, on its device if it is reloaded."""
        offloaded = self._offloaded.get(id(tensor))
        if offloaded is None:
            return local(tensor)
        return offloaded.host if offloaded.device_copy is None else offloaded.device_copy

    def fetches(self, tensor: Tensor, part: Optional[Tensor] = None) -> list[Fetch]:
        """The fetch by which a step can use a tensor of the state, or a part of its `current`
        tensor; none where it needs no copy."""
        offloaded = self._offloaded.get(id(tensor))
        if offloaded is None or offloaded.device_copy is not None:
            return []
        return [Fetch(offloaded.host if part is None else part, offloaded.destination.device, True)]

    def begin_step(self, plan: object, participants: object, once: bool) -> Prefetcher:
        """What prefetches the offloaded state for a step, but for what is reloaded.

        Args:
            plan, participants: steps with the same object as plan, and equal participants, use the
                same state in one order; such a step uses again what was prepared for the last one.
            once: whether more than state is prefetched. Then the tensors may be others in the next
                step, and nothing is kept for it.
        """
        for offload_device in self._devices.values():
            offload_device.backend.set_step_stream()
        if self.mode != "stream" and not self.manual:
            self._reload([*self._offloaded.values()])
        for offload_device in self._devices.values():
            offload_device.begin_step()
        streamed = {key: t for key, t in self._offloaded.items() if t.device_copy is None}
        reloaded = [key for key in self._offloaded if key not in streamed]
        conditions, prefetcher = (participants, reloaded), self._prefetcher
        is_same = plan is self._plan and conditions == self._prefetched_for
        if prefetcher is None or not prefetcher.is_enqueued or not is_same:
            sizes: dict[torch.device, int] = defaultdict(int)
            for tensor in streamed.values():
                sizes[tensor.destination.device] += tensor.host.nbytes
            rings = {}
            for device, nbytes in sizes.items():
                slot_bytes = self.slot_bytes or max(int(SLOT_SHARE * nbytes), LEAST_SLOT_BYTES)
                rings[device] = PrefetchRing(self._device(device), slot_bytes)
            prefetcher = Prefetcher(rings)
            self._plan, self._prefetched_for = plan, conditions
        self._prefetcher = None if once else prefetcher
        return prefetcher

    def end_step(self, hosted: Iterable[torch.device]) -> None:
        """Writes back what was reloaded, unless `manual` leaves that to the user.

        Args:
            hosted: devices that have updated parameters in host memory: whoever reads these next
                may do so without any stream.
        """
        for device in hosted:
            backend = self._device(device).backend
            backend.synchronize(backend.record(OUT))
        if not self.manual:
            self.offload(overlap=self.mode != "bulk")

    # -- on demand, on all devices: see the methods of `OffloadDevice` ---------------------------

    @torch.inference_mode(False)
    @torch.no_grad()
    def reload(self, state: State, params: Iterable[Tensor], streams: Sequence[Any] = ()) -> None:
        """Starts to reload the state of parameters to their devices."""
        with self._lock:
            ids = [id(t) for param in params for t in _state_tensors(state, param).values()]
            self._reload([self._offloaded[key] for key in ids if key in self._offloaded], streams)

    def _reload(self, tensors: Sequence[OffloadedTensor], streams: Sequence[Any] = ()) -> None:
        self.free_written_back()
        for device in dict.fromkeys(tensor.destination.device for tensor in tensors):
            on_device = [tensor for tensor in tensors if tensor.destination.device == device]
            self._device(device).reload(on_device, streams)

    def wait_reload(self) -> None:
        for device in self._devices.values():
            device.wait_reload()

    def offload(self, overlap: bool = True) -> None:
        for device in self._devices.values():
            device.offload(overlap)

    def free_written_back(self) -> None:
        for device in self._devices.values():
            device.free_written_back()

    def flush(self) -> None:
        for device in self._devices.values():
            device.flush()

    def evict(self) -> None:
        for device in self._devices.values():
            device.evict()


def _state_tensors(state: State, param: Any) -> dict[str, Tensor]:
    """A parameter's tensors of state, by key."""
    # Under keys that are no parameters, torch's users may keep what they like.
    param_state = state.get(param, {}) if isinstance(param, Tensor) else {}
    return {key: param_state[key] for key in KEYS if param_state.get(key) is not None}
