"""Creates the state of an optimizer, on the device or in host memory, and drops what is unused."""

from __future__ import annotations

import operator
from collections.abc import Iterable, MutableMapping, Sequence
from itertools import chain
from typing import Any, Optional

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .. import adamw
from ..cpu_offload import CPUOffload
from ..distributed import dtensors
from ..distributed.plan import Entry
from ..parameters.options import Group, Settings
from .specs import ADAMW_KEYS, KEYS, MUON_KEYS, converted, keys_of, specs_of, zeros

MutableOptimizerState = MutableMapping[Any, dict[str, Any]]  # by parameter
META = torch.device("meta")


class StateStore:
    """Creates missing state, and knows whether steps still have to check it.

    State dicts hold tensors of zeros that no step has used, since ``state_dict()`` creates state.
    Loaded again after steps, they have to reset the state, as torch.optim's do. So no step writes
    into such tensors: the first one makes new ones in their place.
    """

    def __init__(self, offload: CPUOffload):
        self._offload = offload
        # What the last step has left: the state of each parameter, and all values in these.
        self._checked: Optional[tuple[list[dict[str, Any]], list[Any]]] = None
        # Tensors of state that steps have used, since a load or copy, which begin with a new store.
        self._used: MutableMapping[Tensor, None] = WeakTensorKeyDictionary()
        # Zeros that state dicts hold, with their version counters.
        self._zeros: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()

    @property
    def is_checked(self) -> bool:
        """Whether the last step has created and checked all state that there is now."""
        return self._checked is not None

    def recheck(self) -> None:
        """Makes the next step create missing state and check all of it."""
        self._checked = None

    def recheck_replaced(self, state: MutableOptimizerState) -> None:
        """Makes this step check state if a tensor of it was replaced since the last step."""
        if self._checked is None:
            return
        (states, values), current = self._checked, list(state.values())
        is_same = len(current) == len(states) and all(map(operator.is_, current, states))
        found = _values_of(states)
        is_same = is_same and len(found) == len(values)
        if not (is_same and all(map(operator.is_, found, values))):
            self._checked = None

    def mark_checked(self, state: MutableOptimizerState, params: Iterable[Tensor]) -> None:
        """Spares later steps the checks of state, as long as its tensors are the same objects."""
        states = list(state.values())
        self._checked = states, _values_of(states)
        for param in params:
            for value in state.get(param, {}).values():
                if isinstance(value, Tensor):
                    self._used[value] = None

    def unused_zeros(self, state: MutableOptimizerState) -> dict[Tensor, dict[str, Tensor]]:
        """State of zeros that no step has used; reads all that no step has used."""
        return {
            param: {
                key: value
                for key, value in own.items()
                if key in (*KEYS, "step")
                and isinstance(value, Tensor)
                and value not in self._used
                and _is_zero(value)
            }
            for param, own in state.items()
            if isinstance(param, Tensor)
        }

    def note_zeros(self, state: MutableOptimizerState) -> None:
        """Notes the state of zeros that no step has used, and that a state dict is about to hold:
        a step must not read it to know."""
        for unused in self.unused_zeros(state).values():
            for value in unused.values():
                self._zeros[value] = dtensors.raw_local(value)._version

    def drop_zeros(self, state: MutableOptimizerState) -> None:
        """Drops zeros that state dicts hold, unless somebody has written them since, for
        `create_missing` to make them anew."""
        for param, own in state.items() if self._zeros else ():
            for key, value in list(own.items()) if isinstance(param, Tensor) else ():
                version = self._zeros.get(value) if isinstance(value, Tensor) else None
                if version is not None and version == dtensors.raw_local(value)._version:
                    del own[key]
        self._zeros = WeakTensorKeyDictionary()

    @torch.inference_mode(False)  # state made under it could not be changed outside of it
    @torch.no_grad()
    def create_missing(
        self,
        state: MutableOptimizerState,
        groups: Sequence[Group],
        entries: Sequence[Sequence[Optional[Entry]]],
        settings: Settings,
    ) -> None:
        """Creates whatever state is missing, on all ranks alike, and converts what has another
        dtype than it should, as options and the parameter's dtype may be changed at any time.

        All trainable parameters have state, and frozen ones that were trained before. State of the
        other algorithm is dropped if ``use_muon`` of the group was changed: no step
        goes on from it, and `load_state_dict` refuses it.
        """
        on_host: list[tuple[dict[str, Tensor], str, Tensor, torch.device]] = []
        for group, group_entries in zip(groups, entries):
            for param, entry in zip(group.params, group_entries):
                keys, own = keys_of(group, param.dtype), state.get(param, {})
                if "weight_residual" not in keys:
                    # Steps without residuals go on from rounded weights: old residuals do not fit.
                    own.pop("weight_residual", None)
                # The key that every trained parameter has, of this algorithm and of the other.
                main, other = "momentum_buffer", "exp_avg"
                if not group.use_muon:
                    main, other = other, main
                if own.get(other) is not None:
                    for key in ADAMW_KEYS if group.use_muon else MUON_KEYS:
                        own.pop(key, None)
                if not param.requires_grad and own.get(main) is None:
                    continue
                own = state[param]
                if not group.use_muon:
                    adamw.init_step(param, own, group)
                destination = self._offload.destination(param, group.use_muon)
                for key, spec in specs_of(param, entry, group, settings).items():
                    value = own.get(key)
                    if value is not None and spec.dtype not in (None, value.dtype):
                        self._offload.synchronize()
                        own[key] = converted(value, spec.dtype, dtensors.local(value).device)
                    elif value is None and key in keys:
                        if destination is None:
                            own[key] = zeros(spec, param)
                        else:
                            on_host.append((own, key, zeros(spec, param, META), destination))
        self._offload.move_to_host(on_host)
        self._offload.offload_missing(state, ((p, g.use_muon) for g in groups for p in g.params))

    def drop_departed(self, state: MutableOptimizerState, params: Iterable[Tensor]) -> None:
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
            if is_ours and all(map(_is_zero, state[param].values())):
                del state[param]


def _values_of(states: Iterable[Any]) -> list[Any]:
    dicts = [state for state in states if isinstance(state, dict)]  # others are the user's
    return list(chain.from_iterable(map(dict.values, dicts)))


def _is_zero(value: Tensor) -> bool:
    """Whether this rank's part of a tensor is all zeros; its first row mostly tells."""
    if value.is_meta:
        return True
    local = dtensors.local(value)
    return not (local.ndim and local[:1].any()) and not local.any()
