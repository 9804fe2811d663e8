"""Creates the state of an optimizer, on the device or in host memory, and drops what is unused."""

from __future__ import annotations

import operator
from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any, Optional

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .. import adamw
from ..cpu_offload import CPUOffload
from ..distributed import utils as dtensors
from ..distributed.plan import Entry
from ..parameters.options import Group, Settings
from .specs import (
    ADAMW_KEYS,
    KEYS,
    MUON_KEYS,
    converted,
    keys_of,
    moments_dtype,
    momentum_dtype,
    zeros,
)

MutableOptimizerState = MutableMapping[Any, dict[str, Any]]  # by parameter
META = torch.device("meta")


class StateStore:
    """Creates missing state, and knows whether steps still have to check it."""

    def __init__(self, offload: CPUOffload):
        self._offload = offload
        # Each parameter, its state, and the values that the last step has left in this state.
        self._checked: Optional[list[tuple[Tensor, dict[str, Any], list[Any]]]] = None
        # By parameter, the keys of state that was created since the last step.
        self._created: MutableMapping[Tensor, list[str]] = WeakTensorKeyDictionary()
        self._has_stepped = False  # since a load or copy, which begin with a new store

    @property
    def is_checked(self) -> bool:
        """Whether the last step has created and checked all state that there is now."""
        return self._checked is not None

    def recheck(self) -> None:
        """Makes the next step create missing state and check all of it."""
        self._checked = None

    def mark_checked(self, state: MutableOptimizerState, params: Iterable[Tensor]) -> None:
        """Spares later steps the checks of state, as long as its tensors are the same objects."""
        self._checked = [
            (param, state[param], list(state[param].values())) for param in params if param in state
        ]
        self._created = WeakTensorKeyDictionary()
        self._has_stepped = True

    def count_zeros_as_created(self, state: MutableOptimizerState) -> None:
        """Before the first step: takes loaded or copied state for created where all of it is zeros.

        A state dict that is taken of it then resets the optimizer, as one of created state does.
        Reads tensors up to the first that is not zeros.
        """
        if self._has_stepped:
            return
        found = {
            param: [key for key in own if key not in self._created.get(param, ())]
            for param, own in state.items()
            if isinstance(param, Tensor) and own.keys() <= {*KEYS, "step"}
        }
        if not any(
            dtensors.local(state[p][key]).any() for p, keys in found.items() for key in keys
        ):
            for param, keys in found.items():
                self._created.setdefault(param, []).extend(keys)

    def recheck_replaced(self, state: MutableOptimizerState) -> None:
        """Makes this step check state if a tensor of it was replaced since the last step."""
        for param, param_state, values in self._checked or ():
            is_same = state.get(param) is param_state and len(param_state) == len(values)
            if not (is_same and all(map(operator.is_, param_state.values(), values))):
                self._checked = None
                return

    def without_created(self, state: MutableOptimizerState) -> dict[Any, dict[str, Any]]:
        """State without what was created since the last step, unless it was written in place, as
        torch.distributed.checkpoint does."""
        kept = {}
        for param, param_state in state.items():
            if isinstance(param_state, dict):
                created = self._created.get(param, ()) if isinstance(param, Tensor) else ()
                kept[param] = {
                    key: value
                    for key, value in param_state.items()
                    if key not in created or dtensors.local(value).any()
                }
        return kept

    @torch.inference_mode(False)
    @torch.no_grad()
    def copy_created(self, state: MutableOptimizerState, groups: Sequence[Group]) -> None:
        """Copies state that was created since the last step, before this step changes it.

        State dicts may hold it; loaded again, they have to reset the state, as torch.optim's do.
        """
        on_host: list[tuple[dict[str, Tensor], str, Tensor, torch.device]] = []
        for group in groups if self._created else ():
            for param in group.params:
                param_state = state.get(param, {})
                destination = self._offload.destination(param, group.use_muon)
                for key in self._created.get(param, ()):
                    value = param_state.get(key)
                    if value is None:
                        continue
                    if destination is not None and key in KEYS:
                        on_host.append((param_state, key, value, destination))
                    else:
                        copied = dtensors.local(value).clone()
                        param_state[key] = dtensors.with_local(value, copied)
        self._offload.move_to_host(on_host)

    @torch.inference_mode(False)  # state made under it could not be changed outside of it
    @torch.no_grad()
    def create_missing(
        self,
        state: MutableOptimizerState,
        groups: Sequence[Group],
        entries: Sequence[Sequence[Optional[Entry]]],
        settings: Settings,
    ) -> None:
        """Creates whatever state is missing, on all ranks alike.

        All trainable parameters have state, and frozen ones that were trained before. State of the
        other algorithm is dropped if ``use_muon`` of the group was changed: no step
        goes on from it, and `load_state_dict` refuses it.
        """
        on_host: list[tuple[dict[str, Tensor], str, Tensor, torch.device]] = []
        for group, group_entries in zip(groups, entries):
            for param, entry in zip(group.params, group_entries):
                keys = keys_of(group, param.dtype)
                if param in state and "weight_residual" not in keys:
                    # Steps without residuals go on from rounded weights: old residuals do not fit.
                    state[param].pop("weight_residual", None)
                # The entry that every trained parameter has, of this algorithm and of the other.
                main, other = "momentum_buffer", "exp_avg"
                if not group.use_muon:
                    main, other = other, main
                if state.get(param, {}).get(other) is not None:
                    for key in ADAMW_KEYS if group.use_muon else MUON_KEYS:
                        state[param].pop(key, None)
                if not param.requires_grad and state.get(param, {}).get(main) is None:
                    continue
                param_state = state[param]
                # Options and the parameter's dtype may be changed at any time.
                if group.use_muon:
                    dtype = momentum_dtype(group, param.dtype)
                    self._convert(param_state, "momentum_buffer", dtype)
                else:
                    if "step" not in param_state:
                        self._created.setdefault(param, []).append("step")
                    adamw.init_step(param, param_state, group)
                    for key in ("exp_avg", "exp_avg_sq"):
                        self._convert(param_state, key, moments_dtype(group, param.dtype))
                absent = [key for key in keys if param_state.get(key) is None]
                if not absent:
                    continue
                destination = self._offload.destination(param, group.use_muon)
                self._created.setdefault(param, []).extend(absent)
                for key in absent:
                    device = None if destination is None else META
                    value = zeros(key, param, entry, group, settings, device)
                    if destination is None:
                        param_state[key] = value
                    else:
                        on_host.append((param_state, key, value, destination))
        self._offload.move_to_host(on_host)
        self._offload.offload_missing(state, ((p, g.use_muon) for g in groups for p in g.params))

    def _convert(
        self, param_state: dict[str, Tensor], key: str, dtype: Optional[torch.dtype]
    ) -> None:
        """Converts a tensor of state after the dtype that it should have was changed."""
        value = param_state.get(key)
        if dtype is not None and value is not None and value.dtype != dtype:
            self._offload.synchronize()
            param_state[key] = converted(value, dtype, dtensors.local(value).device)

    def drop_unused(self, state: MutableOptimizerState, params: Iterable[Tensor]) -> None:
        """Drops the state of parameters that have left the groups, if it is all zeros.

        A trainer that replaces parameters by their shards may have called `state_dict` before,
        which creates state. That state would keep the whole model alive.
        """
        current = {id(param) for param in params}
        departed = [key for key in state if isinstance(key, Tensor) and id(key) not in current]
        if departed:
            self._offload.synchronize()
        for param in departed:
            is_ours = state[param].keys() <= {*KEYS, "step"}
            tensors = state[param].values()
            if is_ours and all(t.is_meta or not dtensors.local(t).any() for t in tensors):
                del state[param]
