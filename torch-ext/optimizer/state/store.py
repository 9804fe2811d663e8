"""The state of an optimizer: created, checked and let go of, on the device or in host memory."""

from __future__ import annotations

import operator
from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from .. import adamw
from ..cpu_offload import CPUOffload, Destination
from ..distributed import utils as dtensors
from ..distributed.plan import Entry
from ..parameters.options import Group, Settings
from .specs import KEYS, keys_of, place, specs_of, zeros

State = MutableMapping[Any, dict[str, Any]]  # of an optimizer
META = torch.device("meta")


class StateStore:
    """What an optimizer keeps beside its parameters."""

    def __init__(self, offload: CPUOffload):
        self._offload = offload
        # Of each parameter its state, and the tensors in it, as the last step has left them.
        self._settled: Optional[list[tuple[Tensor, dict[str, Any], list[Any]]]] = None

    @property
    def is_settled(self) -> bool:
        """Whether the last step has created and checked all state that there is now."""
        return self._settled is not None

    def forget(self) -> None:
        """Has the next step create and check state."""
        self._settled = None

    def settle(self, state: State, params: Iterable[Tensor]) -> None:
        """Spares steps the checks of all state, as long as it is the same."""
        some = [param for param in params if param in state]
        self._settled = [(param, state[param], list(state[param].values())) for param in some]

    def look(self, state: State) -> None:
        """Forgets what was settled where any of it is not the same tensor any more."""
        for param, own, values in self._settled or ():
            is_same = state.get(param) is own and len(own) == len(values)
            if not (is_same and all(map(operator.is_, own.values(), values))):
                self._settled = None
                return

    @torch.inference_mode(False)  # state made under it could not be changed outside of it
    @torch.no_grad()
    def create(
        self,
        state: State,
        groups: Sequence[Group],
        entries: Sequence[Sequence[Optional[Entry]]],
        settings: Settings,
    ) -> None:
        """Creates whatever state is missing, for all trainable parameters, on all ranks alike."""
        on_host: list[tuple[dict[str, Tensor], str, Tensor, Destination]] = []
        for group, of_group in zip(groups, entries):
            keys = keys_of(group)
            for param, entry in zip(group.params, of_group):
                if not param.requires_grad:
                    continue
                own = state[param]
                if group.use_muon:
                    self._convert(own, "momentum_buffer", group.momentum_dtype)
                else:
                    adamw.init_step(param, own, group)
                    for key in keys:  # as the parameter's, which may be changed at any time, too
                        self._convert(own, key, param.dtype)
                absent = [key for key in keys if own.get(key) is None]
                if not absent:
                    continue
                specs = specs_of(param, entry, group, settings)
                destination = self._offload.destination(param, group.use_muon)
                for key in absent:
                    if destination is None:
                        own[key] = zeros(specs[key])
                    else:
                        on_host.append((own, key, zeros(specs[key], META), destination))
        self._offload.move_to_host(on_host)
        self._offload.offload_missing(state, ((p, g.use_muon) for g in groups for p in g.params))

    def _convert(self, own: dict[str, Tensor], key: str, dtype: Optional[torch.dtype]) -> None:
        """Follows a dtype that was changed."""
        value = own.get(key)
        if dtype is not None and value is not None and value.dtype != dtype:
            self._offload.flush()
            own[key] = place(value, dtype, dtensors.local(value).device)

    def forget_strangers(self, state: State, params: Iterable[Tensor]) -> None:
        """Lets go of state that is all zeros, of parameters that have left the groups.

        Trainers that swap parameters for their shards have had it made by `state_dict`. Kept, it
        would keep the whole model, too; made again it would be the same.
        """
        held = {id(param) for param in params}
        strangers = [key for key in state if isinstance(key, Tensor) and id(key) not in held]
        if strangers:
            self._offload.flush()
        for param in strangers:
            own = state[param]
            if own.keys() <= {*KEYS, "step"} and all(_is_zero(value) for value in own.values()):
                del state[param]


def _is_zero(value: Tensor) -> bool:
    """Whether a tensor has nothing but zeros, or no numbers at all."""
    return value.is_meta or not dtensors.local(value).any()
