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

    @property
    def names(self) -> list[Optional[list[str]]]:
        """For each group the names of its parameters, in order, or None."""
        raise NotImplementedError

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
                the state on the device or 512 MiB, whichever is more.
            model: for ``"backward"``, the module before whose forwards memory is let go as far as
                it has been written back; without it, that happens when the next backward begins.
            backend: moves state instead of the device's own streams, for all parameters wherever
                they are: a `cpu_offload.backend.Host` shows what happens where there is no
                accelerator.

        Raises:
            ValueError: an unknown mode; ``slot_bytes`` below 1.
        """
        if mode not in MODES:
            raise ValueError(f"mode must be one of {MODES}, found {mode!r}")
        is_int = isinstance(slot_bytes, int) and not isinstance(slot_bytes, bool)
        if slot_bytes is not None and not (is_int and slot_bytes >= 1):
            raise ValueError(f"slot_bytes must be None or an int ≥ 1, found {slot_bytes!r}")
        if self._offload.is_on and backend not in (None, self._offload.stand_in):
            self.turn_off_cpu_offload()
        self._offload.turn_on(mode, slot_bytes, backend)
        self._hold_state()
        self._tell_planner()
        self._hook(model)

    @torch.no_grad()
    def turn_off_cpu_offload(self) -> None:
        """Brings all state back to where its parameters are, for good."""
        self._unhook()
        self._offload.turn_off()
        for group in self.param_groups:
            for param in group["params"]:
                if self._offload.use_of(param, group["use_muon"]) is None:
                    self._offload.release(self.state.get(param, {}))
        self._tell_planner()

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

    def offload(self) -> None:
        """Starts to write reloaded state back.

        Its device memory is let go when that is done, as seen by the next call of any of these
        methods, of ``step()``, or by a forward of ``model`` in the mode ``"backward"``.
        """
        self._offload.offload()

    def _reload(self, params: Iterable[Tensor], streams: Sequence[Any] = ()) -> None:
        self._offload.reload((own[key] for own, key in self._tensors_of(params)), streams)

    def _reload_at_home(self, param: Tensor) -> None:
        self._offload.reload_at_home(own[key] for own, key in self._tensors_of((param,)))

    def _tensors_of(self, params: Iterable[Tensor]) -> Iterator[tuple[dict[str, Tensor], str]]:
        for param in params:
            own = self.state.get(param, {})
            yield from ((own, key) for key in KEYS if own.get(key) is not None)

    def _hold_state(self) -> None:
        """Takes all state that there is into host memory, where it is not yet and belongs."""
        strangers, found = [], []
        for group in self.param_groups:
            for param in group["params"]:
                use = self._offload.use_of(param, group["use_muon"])
                if use is None:
                    continue
                for own, key in self._tensors_of((param,)):
                    if not self._offload.holds(own[key]):
                        strangers.append((own, key, use))
                    found.append((own, key))
        self._offload.adopt(strangers)
        self._offload.keep_only(own[key] for own, key in found)

    def _tell_planner(self) -> None:
        """Fewer chunks are begun ahead where each has to wait for its state."""
        streams = self._offload.is_on and self._offload.mode == "stream"
        is_used = streams and any(
            self._offload.use_of(param, group["use_muon"]) is not None
            for group in self.param_groups
            for param in group["params"]
        )
        self._wide = dataclasses.replace(self._wide, cpu_offload="stream" if is_used else None)

    def _hook(self, model: Optional[nn.Module]) -> None:
        self._unhook()
        if self._offload.is_on and self._offload.mode == "backward":
            self._hooks = Hooks(self, model)

    def _unhook(self) -> None:
        if self._hooks is not None:
            self._hooks.remove()
        self._hooks = None
