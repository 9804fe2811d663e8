"""What an optimizer offers of CPU offload: the methods that move its state."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Optional, Union

import torch
from torch import Tensor, nn

from ..options import OptimizerWide
from ..state import KEYS
from .backend import Backend
from .hooks import Hooks
from .offload import MODES, CPUOffload


class Offloadable(torch.optim.Optimizer):
    """An optimizer whose state can live in host memory."""

    _wide: OptimizerWide
    _offload: CPUOffload
    _tags: dict[Tensor, Hashable]
    _hooks: Optional[Hooks]
    _work: Any

    @property
    def names(self) -> list[Optional[list[str]]]:
        """For each group the names of its parameters, in order, or None."""
        raise NotImplementedError

    @torch.inference_mode(False)  # memory that it makes could not be changed outside of it
    @torch.no_grad()
    def turn_on_cpu_offload(
        self,
        mode: str = "stream",
        *,
        slot_bytes: Optional[int] = None,
        model: Optional[nn.Module] = None,
        backend: Optional[Backend] = None,
    ) -> None:
        """Keeps optimizer state in page-locked host memory between steps, from now on.

        Results are the same to the bit. To be called on all ranks alike, at any time; again, to
        change how. Where parameters are on the CPU, nothing happens.

        Args:
            mode: how state comes to a step. ``"stream"`` carries it through the device piece by
                piece, under the step's arithmetic; ``"bulk"`` brings all of it before the step and
                all of it back behind it; ``"backward"`` brings that of a parameter when its
                gradient is there, and writes back under the next forward.
            slot_bytes: device memory that ``"stream"`` takes, within the step only; None is 5 % of
                the device's state or 512 MiB, whichever is more.
            model: for ``"backward"``, the model: before the forward of each of its modules that has
                parameters, memory is let go that has been written back (but not in compiled
                forwards); without it, that happens when the next backward begins.
            backend: makes the copies, in place of the devices' streams; parameters on a CPU are
                offloaded, too: a `cpu_offload.backend.Host` shows what happens where there is no
                accelerator.

        Raises:
            ValueError: an unknown mode; ``slot_bytes`` below 1; a model without parameters of this
                optimizer; no backend. Nothing was changed.
        """
        if mode not in MODES:
            raise ValueError(f"mode must be one of {MODES}, found {mode!r}")
        is_int = isinstance(slot_bytes, int) and not isinstance(slot_bytes, bool)
        if slot_bytes is not None and not (is_int and slot_bytes >= 1):
            raise ValueError(f"slot_bytes must be None or an int ≥ 1, found {slot_bytes!r}")
        if model is not None and not isinstance(model, nn.Module):
            raise ValueError(f"model must be None or a module, found {model!r}")
        if backend is not None and not isinstance(backend, Backend):
            raise ValueError(
                f"backend must be None or a cpu_offload.backend.Host, found {backend!r}"
            )
        hooks = Hooks(self, model) if mode == "backward" else None
        self._unhook()
        self._hooks, self._work = hooks, None  # what a step keeps would keep memory of the state
        self._offload.turn_on(mode, slot_bytes, backend)
        self._hold_state()
        self._tell_planner()

    @torch.inference_mode(False)  # memory that it makes could not be changed outside of it
    @torch.no_grad()
    def turn_off_cpu_offload(self) -> None:
        """Brings all state back to where its parameters are, for good."""
        self._unhook()
        self._work = None
        self._offload.turn_off()
        for param, own in self.state.items():  # also of those that have left the groups
            is_state = isinstance(param, Tensor)  # else the user's own
            if is_state and self._offload.use_of(param, "momentum_buffer" in own) is None:
                self._offload.release(own)
        self._tell_planner()

    @property
    def cpu_offload(self) -> Optional[str]:
        """The mode of CPU offload; None while it is off."""
        return self._offload.mode if self._offload.is_on else None

    def synchronize_offload(self) -> None:
        """Makes the host wait until all state is in host memory, and nothing of it on devices.

        To be called before reading or changing what ``optim.state`` holds by hand: until then it
        may be on its way, or newer on the device. `state_dict` makes the host wait by itself, but
        leaves on the device what was reloaded.
        """
        self._offload.end_visits()

    @property
    def manual_offload(self) -> bool:
        """Whether what is reloaded stays until `offload` is called.

        While this is set, neither ``step()`` nor the hooks of ``"backward"`` bring or write back
        anything on their own, but for what ``step()`` needs and finds on the host only: that is
        streamed.
        """
        return self._offload.manual

    @manual_offload.setter
    def manual_offload(self, manual: bool) -> None:
        self._offload.manual = bool(manual)

    def set_param_tags(self, tags: Mapping[Union[Tensor, str], Hashable]) -> None:
        """Sorts parameters into groups for `reload_group`, instead of any earlier ones.

        Args:
            tags: of parameters, or of their names; None as a tag is none.

        Raises:
            ValueError: something that is no parameter of this optimizer.
        """
        params = {id(p): p for group in self.param_groups for p in group["params"]}
        named = {
            name: p
            for group, names in zip(self.param_groups, self.names)
            for name, p in zip(names or (), group["params"])
        }
        found: dict[Tensor, Hashable] = {}
        for key, tag in tags.items():
            param = named.get(key) if isinstance(key, str) else params.get(id(key))
            if param is None:
                what = (
                    repr(key) if isinstance(key, str) else f"a tensor of shape {tuple(key.shape)}"
                )
                raise ValueError(f"{what} is no parameter of this optimizer, so it can't be tagged")
            if tag is not None:
                found[param] = tag
        self._tags = found

    def reload_group(self, tag: Hashable, sync_streams: Sequence[Any] = ()) -> None:
        """Starts to bring the state of the parameters with a tag to the device.

        Args:
            tag: from `set_param_tags`.
            sync_streams: streams whose work so far the copies wait for, beside the current one's:
                those from which memory may come that has just been freed.

        Raises:
            ValueError: no parameter has that tag.
        """
        tagged = [param for param, other in self._tags.items() if other == tag]
        if not self._tags:
            raise ValueError(
                f"no parameter has a tag, so none has {tag!r}: call set_param_tags first"
            )
        if not tagged:
            known = sorted({repr(other) for other in self._tags.values()})
            raise ValueError(f"no parameter has the tag {tag!r}; there are {', '.join(known)}")
        self._reload(tagged, sync_streams)

    def reload_untagged(self, sync_streams: Sequence[Any] = ()) -> None:
        """The same for all parameters without a tag."""
        params = (param for group in self.param_groups for param in group["params"])
        self._reload((param for param in params if param not in self._tags), sync_streams)

    def wait_reload(self) -> None:
        """Makes the current stream wait for all that is being reloaded; ``step()`` does it, too."""
        self._offload.sweep()
        self._offload.wait_reload()

    @torch.inference_mode(False)
    @torch.no_grad()
    def offload(self) -> None:
        """Starts to write reloaded state back.

        Its device memory is let go when that is done, as seen by the next call of any of these
        methods, of ``step()``, or by a forward of ``model`` in the mode ``"backward"``.
        """
        self._offload.offload()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _reload(self, params: Iterable[Tensor], streams: Sequence[Any] = ()) -> None:
        self._offload.reload((own[key] for own, key in self._tensors_of(params)), streams)

    def _tensors_of(self, params: Iterable[Tensor]) -> Iterator[tuple[dict[str, Tensor], str]]:
        for param in params:
            # Under keys that are no parameters, torch's users may keep what they like.
            own = self.state.get(param, {}) if isinstance(param, Tensor) else {}
            yield from ((own, key) for key in KEYS if own.get(key) is not None)

    def _hold_state(self) -> None:
        """Takes all state that there is into host memory, where it is not yet and belongs."""
        strangers = []
        for group in self.param_groups:
            for param in group["params"]:
                use = self._offload.use_of(param, group["use_muon"])
                if use is not None:
                    for own, key in self._tensors_of((param,)):
                        if not self._offload.holds(own[key]):
                            strangers.append((own, key, use))
        if strangers:  # what replaces a tensor makes its copy on the device old
            self._offload.end_visits()
            self._offload.adopt(strangers)
        # Also of parameters that have been swapped out of the groups, and may come back.
        self._offload.keep_only(own[key] for own, key in self._tensors_of(self.state))
        if self._hooks is not None:
            self._hooks.hook_params()

    def _uses_host(self) -> bool:
        """Whether there is state to offload, now or after the first step."""
        return any(
            self._offload.use_of(param, group["use_muon"]) is not None
            for group in self.param_groups
            for param in group["params"]
        )

    def _where_state_is(self) -> str:
        """For people to read."""
        if self.cpu_offload is None:
            return "with its parameters"
        if not self._uses_host():
            return "with its parameters: CPU offload is on, but they are on the CPU"
        return f"in host memory, mode {self.cpu_offload!r}"

    def _tell_planner(self) -> None:
        """Fewer chunks are begun ahead where each has to wait for its state."""
        is_used = self.cpu_offload == "stream" and self._uses_host()
        if is_used is not self._wide.streams:
            self._wide = dataclasses.replace(self._wide, streams=is_used)

    def _unhook(self) -> None:
        if self._hooks is not None:
            self._hooks.remove()
        self._hooks = None
