"""Creates an optimizer's state, on the device or in host memory, and drops unused state."""

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
from .specs import ALL_KEYS, converted, specs_of, zeros

MutableOptimizerState = MutableMapping[Any, dict[str, Any]]  # by parameter
META = torch.device("meta")


class StateStore:
    """Creates missing state, and knows whether steps still have to check it.

    ``state_dict()`` creates missing state, so a state dict may share zero tensors with the
    optimizer. Loading it later must still reset the state, as in torch.optim, so steps must not
    write to these tensors: the first step replaces them with new ones.
    """

    def __init__(self, offload: CPUOffload):
        self._offload = offload
        self._checked: Optional[list[Any]] = None  # all objects of state at the last check
        # State tensors that steps have used since a load or copy; both begin with a new store.
        self._used: MutableMapping[Tensor, None] = WeakTensorKeyDictionary()
        # Zeros in state dicts, with their version counters.
        self._zeros: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()

    @property
    def is_checked(self) -> bool:
        """True if the last step has created and checked all current state."""
        return self._checked is not None

    def recheck(self) -> None:
        """Makes the next step create missing state and check all of it."""
        self._checked = None

    def recheck_replaced(self, state: MutableOptimizerState) -> None:
        """Makes this step check state if any tensor in it was replaced since the last step."""
        if self._checked is not None:
            current = _objects_of(state)
            is_same = len(current) == len(self._checked)
            if not (is_same and all(map(operator.is_, current, self._checked))):
                self._checked = None

    def mark_checked(self, state: MutableOptimizerState, params: Iterable[Tensor]) -> None:
        """Lets later steps skip the checks of state while its tensors are the same objects."""
        self._checked = _objects_of(state)
        values = chain.from_iterable(state[p].values() for p in params if p in state)
        self._used.update((value, None) for value in values if isinstance(value, Tensor))

    def note_zeros(self, state: MutableOptimizerState) -> None:
        """Records the zeros that no step has used and that a state dict will contain, so that a
        step need not read state to find them."""
        for param, own in state.items():
            for key in ALL_KEYS if isinstance(param, Tensor) else ():
                value = own.get(key)
                if isinstance(value, Tensor) and value not in self._used and _is_zero(value):
                    self._zeros[value] = dtensors.raw_local(value)._version

    def unwritten_zeros(self) -> list[Tensor]:
        """The zeros in state dicts that haven't been written since."""
        zeros = self._zeros.items()
        return [value for value, version in zeros if dtensors.raw_local(value)._version == version]

    def drop_zeros(self, state: MutableOptimizerState) -> None:
        """Drops `unwritten_zeros`; `create_missing` then creates new ones."""
        unwritten = set(map(id, self.unwritten_zeros()))
        for param, own in state.items() if unwritten else ():
            for key in ALL_KEYS if isinstance(param, Tensor) else ():
                if id(own.get(key)) in unwritten:
                    del own[key]
        self._zeros.clear()

    @torch.inference_mode(False)  # state made under it couldn't be changed outside of it
    @torch.no_grad()
    def create_missing(
        self,
        state: MutableOptimizerState,
        groups: Sequence[Group],
        entries: Sequence[Sequence[Optional[Entry]]],
        settings: Settings,
    ) -> None:
        """Creates missing state, drops state that options no longer need, and converts state to
        the dtype it should have. All ranks do the same.

        Options and a parameter's dtype may change at any time. All trainable parameters have state,
        and so do frozen parameters that were trained before.
        """
        on_host: list[tuple[dict[str, Tensor], str, Tensor, torch.device]] = []
        for group, group_entries in zip(groups, entries):
            main = "momentum_buffer" if group.use_muon else "exp_avg"
            for param, entry in zip(group.params, group_entries):
                specs, own = specs_of(param, entry, group, settings), state.get(param, {})
                for key in own.keys() & {*ALL_KEYS} - specs.keys():
                    if key != "step" or group.use_muon:
                        del own[key]
                if not param.requires_grad and own.get(main) is None:
                    continue
                own = state[param]
                if not group.use_muon:
                    adamw.init_step(param, own, group)
                destination = self._offload.destination(param, group.use_muon)
                for key, spec in specs.items():
                    value = own.get(key)
                    if value is not None:
                        if spec.dtype not in (None, value.dtype):
                            self._offload.synchronize()
                            own[key] = converted(value, spec.dtype, dtensors.local(value).device)
                    elif destination is None:
                        own[key] = zeros(spec, param)
                    else:
                        on_host.append((own, key, zeros(spec, param, META), destination))
        self._offload.move_to_host(on_host)
        self._offload.offload_missing(state, ((p, g.use_muon) for g in groups for p in g.params))

    def drop_departed(self, state: MutableOptimizerState, params: Iterable[Tensor]) -> None:
        """Drops the state of parameters that have left the groups, if it is all zeros.

        A trainer may call `state_dict`, which creates state, before it replaces parameters with
        shards. That state would keep the whole model in memory.
        """
        current = {id(param) for param in params}
        departed = [key for key in state if isinstance(key, Tensor) and id(key) not in current]
        if departed:
            self._offload.synchronize()
        for param in departed:
            own = state[param]
            if own.keys() <= {*ALL_KEYS} and all(map(_is_zero, own.values())):
                del state[param]


def _objects_of(state: MutableOptimizerState) -> list[Any]:
    """The state of each parameter, and the values in it."""
    states = list(state.values())
    dicts = [own for own in states if isinstance(own, dict)]  # others are the user's
    return [*states, *chain.from_iterable(map(dict.values, dicts))]


def _is_zero(value: Tensor) -> bool:
    """True if this rank's part of a tensor is all zeros. The first row usually settles it."""
    if value.is_meta:
        return True
    local = dtensors.local(value)
    return not (local.ndim and local[:1].any()) and not local.any()
