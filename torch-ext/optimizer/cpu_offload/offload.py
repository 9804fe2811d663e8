"""Where the state of an optimizer lives: on the host, and for a while on the device."""

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
from .device import OffloadDevice, OffloadedTensor, Use
from .hooks import Hooks
from .prefetcher import Prefetcher, PrefetchRing
from .windows import Fetch, dense_stride

# How state comes to a step: carried through it, all at once before it, or under the backward.
MODES = ("stream", "bulk", "backward")

# Device memory for what is streamed, unless told: a share of the state, or so much if it is more.
SLOT_SHARE = 0.05
LEAST_SLOT_BYTES = 512 << 20

# Accelerators with memory of their own, and streams.
DEVICE_TYPES = ("cuda", "xpu", "mtia", "hpu", "npu", "privateuseone")

OwnState = MutableMapping[str, Tensor]  # of one parameter
State = Mapping[Any, Any]  # of an optimizer
Params = Iterable[tuple[Tensor, bool]]  # and whether they are Muon's


class CPUOffload:
    """The host's copy of an optimizer's state, and how it gets to where it is used."""

    def __init__(self) -> None:
        self.is_on = False
        self.mode = "stream"
        self.slot_bytes: Optional[int] = None
        self.manual = False
        self.hooks: Optional[Hooks] = None
        self.tags: dict[Tensor, Hashable] = {}
        self._stand_in: Optional[Backend] = None  # for the devices' own backends
        self._devices: dict[torch.device, OffloadDevice] = {}
        self._held: dict[int, OffloadedTensor] = {}  # by id of the tensor in the state
        self._carrier: Optional[Prefetcher] = None  # of the last step
        self._plan: object = None  # of it
        self._used: tuple = ()
        self._lock = threading.Lock()  # autograd, whose hooks reload, has a thread for each device

    def _device(self, device: torch.device) -> OffloadDevice:
        if device not in self._devices:
            self._devices[device] = OffloadDevice(self._stand_in or Backend(device))
        return self._devices[device]

    def __getstate__(self) -> dict[str, Any]:
        """The settings: memory, streams and a stand-in belong to one process."""
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
        stand_in: Optional[Backend],
    ) -> None:
        """Takes an optimizer's state into host memory; see `Muon.turn_on_cpu_offload`."""
        if mode not in MODES:
            raise ValueError(f"mode must be one of {MODES}, found {mode!r}")
        is_int = isinstance(slot_bytes, int) and not isinstance(slot_bytes, bool)
        if slot_bytes is not None and not (is_int and slot_bytes >= 1):
            raise ValueError(f"slot_bytes must be None or an int ≥ 1, found {slot_bytes!r}")
        if model is not None and not isinstance(model, nn.Module):
            raise ValueError(f"model must be None or a module, found {model!r}")
        if stand_in is not None and not isinstance(stand_in, Backend):
            raise ValueError(
                f"backend must be None or a cpu_offload.backend.Host, found {stand_in!r}"
            )
        hooks = Hooks(optimizer, model) if mode == "backward" else None
        if self.hooks is not None:
            self.hooks.remove()
        self.hooks = hooks
        self.is_on, self.mode, self.slot_bytes = True, mode, slot_bytes
        self._carrier = None
        if stand_in is not None and stand_in is not self._stand_in:
            self.evict()
            self._stand_in, self._devices = stand_in, {}
        params = ((p, g["use_muon"]) for g in optimizer.param_groups for p in g["params"])
        self.hold(optimizer.state, params)

    def turn_off(self, state: State) -> None:
        """Brings all state back to where its parameters are."""
        if self.hooks is not None:
            self.hooks.remove()
        self.hooks, self.is_on = None, False
        self.evict()
        self._stand_in, self._devices, self._carrier = None, {}, None
        for param, own in state.items():  # also of those that have left the groups
            if not isinstance(param, Tensor):  # the user's own
                continue
            if self.use_of(param, "momentum_buffer" in own) is not None:
                continue
            for key, tensor in own.items():
                held = self._held.pop(id(tensor), None)
                if held is not None:
                    own[key] = with_local(tensor, held.host.to(held.use.device, copy=True))

    def tag(self, tags: Mapping[Any, Hashable], params: Mapping[Any, Tensor]) -> None:
        """See `Muon.set_param_tags`; ``params`` are the optimizer's, by id and by name."""
        found: dict[Tensor, Hashable] = {}
        for key, tag in tags.items():
            param = params.get(key if isinstance(key, str) else id(key))
            if param is None:
                is_name = isinstance(key, str)
                what = repr(key) if is_name else f"a tensor of shape {tuple(key.shape)}"
                raise ValueError(f"{what} is no parameter of this optimizer, so it can't be tagged")
            if tag is not None:
                found[param] = tag
        self.tags = found

    def tagged(self, tag: Hashable) -> list[Tensor]:
        """The parameters with a tag; a ValueError where there are none."""
        if not self.tags:
            raise ValueError(
                f"no parameter has a tag, so none has {tag!r}: call set_param_tags first"
            )
        tagged = [param for param, other in self.tags.items() if other == tag]
        if not tagged:
            known = sorted({repr(other) for other in self.tags.values()})
            raise ValueError(f"no parameter has the tag {tag!r}; there are {', '.join(known)}")
        return tagged

    # -- what is held ------------------------------------------------------------------------

    def hosts(self, param: Tensor) -> bool:
        """Whether a parameter of Muon's and its gradient are in host memory, but not their use."""
        if self._stand_in is not None and param.device.type == "cpu":
            return self._stand_in.hosts_parameters
        return param.device != compute_device(param)

    def use_of(self, param: Tensor, is_muon: bool) -> Optional[Use]:
        """How state of a parameter is used if it lives on the host; None where it does not.

        AdamW of a parameter in host memory is done there.
        """
        if self.hosts(param):
            return Use(compute_device(param), may_stay=False) if is_muon else None
        if not self.is_on:
            return None
        is_used = self._stand_in is not None or param.device.type in DEVICE_TYPES
        return Use(param.device, may_stay=True) if is_used else None

    def home_of(self, param: Tensor, is_muon: bool) -> torch.device:
        """The device on which a parameter's state lives."""
        is_held = self.use_of(param, is_muon) is not None
        return torch.device("cpu") if is_held else local(param).device

    @property
    def is_used(self) -> bool:
        """Whether there is any state on the host."""
        return bool(self._held)

    def holds(self, tensor: Tensor) -> bool:
        return id(tensor) in self._held

    def uses_host(self, params: Params) -> bool:
        """Whether there is state of these to offload, now or after the first step."""
        return any(self.use_of(param, is_muon) is not None for param, is_muon in params)

    def hold(self, state: State, params: Params) -> None:
        """Takes all state of parameters into host memory, where it is not yet and belongs."""
        strangers = [
            (state[param], key, state[param][key], use)
            for param, is_muon in params
            for use in [self.use_of(param, is_muon)]
            if use is not None
            for key in _tensors_of(state, param)
            if not self.holds(state[param][key])
        ]
        if strangers:  # what replaces a tensor makes its copy on the device old
            self.evict()
            self.take(strangers)
        # Also of parameters that have been swapped out of the groups, and may come back.
        kept = {id(state[param][key]) for param in state for key in _tensors_of(state, param)}
        if len(kept) < len(self._held):
            self.settle()
            self._held = {key: held for key, held in self._held.items() if key in kept}
            self._carrier = None
        if self.hooks is not None:
            self.hooks.hook_params()

    def take(self, states: Sequence[tuple[OwnState, str, Tensor, Use]]) -> None:
        """Takes tensors into host memory, wherever they are; those on meta become zeros.

        Of each: the state of its parameter, its key there, itself, and how it is used.
        """
        by_device: dict[torch.device, list[tuple[OwnState, str, Tensor, Use]]] = defaultdict(list)
        for state in states:
            by_device[state[-1].device].append(state)
        for device, of_device in by_device.items():
            sizes = [local(tensor).nbytes for _, _, tensor, _ in of_device]
            memories = self._device(device).arena.allocate(sizes)
            for (own, key, tensor, use), memory in zip(of_device, memories):
                part = local(tensor)
                host = memory.view(part.dtype).as_strided(part.shape, dense_stride(part))
                if not part.is_meta:
                    host.copy_(part)
                own[key] = with_local(tensor, host)
                self._held[id(own[key])] = OffloadedTensor(own[key], host, use)
            self._carrier = None

    def forget(self) -> None:
        """Lets go of all memory: what the host has is nobody's any more."""
        for device in self._devices.values():
            device.backend.recover()
        self.evict()
        self._held, self._carrier = {}, None

    # -- within a step -------------------------------------------------------------------------

    def current(self, tensor: Tensor) -> Tensor:
        """This rank's part of a tensor of the state, on its device if it is there."""
        held = self._held.get(id(tensor))
        if held is None:
            return local(tensor)
        return held.host if held.here is None else held.here

    def fetches(self, tensor: Tensor, part: Optional[Tensor] = None) -> list[Fetch]:
        """What has to be carried to use a tensor of the state, or a part of what is `here` of it:
        that, or nothing."""
        held = self._held.get(id(tensor))
        if held is None or held.here is not None:
            return []
        return [Fetch(held.host if part is None else part, held.use.device, True)]

    def begin_step(self, plan: object, use: object, once: bool) -> Prefetcher:
        """What carries the host's state through a step, but for what is on its device already.

        Args:
            plan, use: the very same, and equal, for steps that use the same state in one order.
            once: what is carried is not all state, so it may be another next time.
        """
        for each in self._devices.values():
            each.backend.come_home()
        if self.mode != "stream" and not self.manual:
            self._reload(self._held.values())
        for each in self._devices.values():
            each.begin_step()
        used = (use, [key for key, held in self._held.items() if held.here is not None])
        is_same = plan is self._plan and used == self._used
        if self._carrier is None or not self._carrier.is_prepared or not is_same:
            self._carrier, self._plan, self._used = self._new_carrier(), plan, used
        prefetcher = self._carrier
        if once:
            self._carrier = None
        return prefetcher

    def _new_carrier(self) -> Prefetcher:
        sizes: dict[torch.device, int] = defaultdict(int)
        for held in self._held.values():
            if held.here is None:
                sizes[held.use.device] += held.host.nbytes
        rings = {}
        for device, nbytes in sizes.items():
            slot_bytes = self.slot_bytes or max(int(SLOT_SHARE * nbytes), LEAST_SLOT_BYTES)
            rings[device] = PrefetchRing(self._device(device), slot_bytes)
        return Prefetcher(rings)

    def end_step(self, hosted: Iterable[torch.device]) -> None:
        """Sends back what was reloaded, unless that is the caller's to do.

        Args:
            hosted: devices on which parameters were computed that are in host memory: whoever reads
                them next may do so without any stream.
        """
        for device in hosted:
            backend = self._device(device).backend
            backend.synchronize(backend.record(OUT))
        if not self.manual:
            self.offload(hidden=self.mode != "bulk")

    # -- on demand, on all devices: see the methods of `OffloadDevice` ---------------------------

    @torch.inference_mode(False)
    @torch.no_grad()
    def reload(self, state: State, params: Iterable[Tensor], streams: Sequence[Any] = ()) -> None:
        """Starts to bring the state of parameters to their devices."""
        with self._lock:
            tensors = [state[param][key] for param in params for key in _tensors_of(state, param)]
            held = (self._held.get(id(tensor)) for tensor in tensors)
            self._reload((each for each in held if each is not None), streams)

    def _reload(self, held: Iterable[OffloadedTensor], streams: Sequence[Any] = ()) -> None:
        self.sweep()
        by_device: dict[torch.device, list[OffloadedTensor]] = defaultdict(list)
        for each in held:
            by_device[each.use.device].append(each)
        for device, of_device in by_device.items():
            self._device(device).reload(of_device, streams)

    def wait_reload(self) -> None:
        for device in self._devices.values():
            device.wait_reload()

    def offload(self, hidden: bool = True) -> None:
        for device in self._devices.values():
            device.offload(hidden)

    def sweep(self) -> None:
        for device in self._devices.values():
            device.sweep()

    def settle(self) -> None:
        for device in self._devices.values():
            device.settle()

    def evict(self) -> None:
        for device in self._devices.values():
            device.end()


def _tensors_of(state: State, param: Any) -> list[str]:
    """The keys of a parameter's tensors of state."""
    # Under keys that are no parameters, torch's users may keep what they like.
    own = state.get(param, {}) if isinstance(param, Tensor) else {}
    return [key for key in KEYS if own.get(key) is not None]
