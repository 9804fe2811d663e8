"""What loading a checkpoint does beyond torch.optim: other names, missing keys, dtypes of state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Callable

import torch
from torch import Tensor

from .distributed import utils as dtensors
from .distributed.plan import Entry
from .options import STRUCTURE, OptimizerWide
from .state import OWN_DTYPE, layouts_of

Group = Mapping[str, Any]

_OTHER_NAMES = {"moment1": "exp_avg", "moment2": "exp_avg_sq"}


def normalize_state(states: Mapping[Any, Any]) -> dict[Any, Any]:
    """State under the names of torch.optim, with step counts as tensors, whoever wrote it."""
    return {
        key: {_OTHER_NAMES.get(k, k): _as_tensor(k, v) for k, v in state.items()}
        if isinstance(state, Mapping)
        else state
        for key, state in states.items()
    }


def _as_tensor(key: str, value: Any) -> Any:
    if key == "step" and isinstance(value, (int, float)):
        return torch.tensor(float(value), dtype=torch.float32, device="cpu")
    return value


def merge_groups(
    groups: Sequence[Group], saved: Sequence[Group], defaults_of: Callable[[Group], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Saved groups with every key: what they lack gets its default, or stays where there is none.

    How parameters are read as matrices is not the checkpoint's to say.
    """
    merged = []
    for index, group in enumerate(saved):
        if index >= len(groups):  # torch says what is wrong
            merged.append(dict(group))
            continue
        own = groups[index]
        structure = {key: own[key] for key in STRUCTURE if key in own}
        group = {key: _as_dtype(value) for key, value in group.items()}
        merged.append({**own, **defaults_of(own), **group, **structure})
    return merged


def _as_dtype(value: Any) -> Any:
    """A dtype from its text, which is how `Muon.state_dict` writes it."""
    name = value[len("torch.") :] if isinstance(value, str) and value.startswith("torch.") else ""
    dtype = getattr(torch, name, None)
    return dtype if isinstance(dtype, torch.dtype) else value


def divide_state(
    groups: Sequence[Group],
    entries_of_groups: Sequence[Sequence[Entry]],
    saved_groups: Sequence[Group],
    states: Mapping[Any, dict[str, Any]],
    wide: OptimizerWide,
) -> None:
    """Takes this rank's rows of what replicas are to divide, where a checkpoint has all of it.

    Args:
        groups, entries_of_groups: of the optimizer.
        saved_groups: of the checkpoint.
        states: by the ids in ``params`` of the saved groups; changed.
        wide: says which replicas divide state.
    """
    for group, entries, saved in zip(groups, entries_of_groups, saved_groups):
        for index, (param, saved_id) in enumerate(zip(group["params"], saved["params"])):
            own = states.get(saved_id, {})
            if dtensors.is_dtensor(param) or not own:
                continue
            layouts = layouts_of(param, entries[index] if entries else None, wide)
            for key, (shape, layout) in layouts.items():
                value = own.get(key)
                if layout is None or not isinstance(value, Tensor) or dtensors.is_dtensor(value):
                    continue
                if value.shape == shape:
                    own[key] = dtensors.divide_by_rows(value.to(param.device), layout)


def restore_dtypes(
    groups: Sequence[Group], state: Mapping[Any, dict[str, Any]], loaded: Mapping[str, Any]
) -> None:
    """Gives loaded momentum back the dtype it was saved in."""
    for group, saved in zip(groups, loaded["param_groups"]):
        for param, saved_id in zip(group["params"], saved["params"]):
            for key in OWN_DTYPE:
                value = loaded["state"].get(saved_id, {}).get(key)
                if value is not None:
                    state[param][key] = value.to(device=state[param][key].device)
