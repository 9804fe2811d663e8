"""What loading a checkpoint does beyond torch.optim: other names, missing keys, where it goes."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Callable

import torch
from torch import Tensor

from .distributed import utils as dtensors
from .distributed.plan import Entry
from .options import STRUCTURE, OptimizerWide, is_number
from .state import KEYS, OWN_DTYPE, layouts_of, place

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
    if key == "step" and is_number(value):
        return torch.tensor(float(value), dtype=torch.float32, device="cpu")
    is_count = key == "step" and isinstance(value, Tensor) and value.numel() == 1
    if is_count and (value.ndim or value.dtype not in (torch.float32, torch.float64)):
        return value.reshape(()).to(torch.float32)  # as integers, torch's AdamW does not take them
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
                    own[key] = dtensors.divide_by_rows(value, layout)


def without_tensors(states: Mapping[Any, Any], saved_groups: Sequence[Group]) -> dict[Any, Any]:
    """State without what `place_tensors` brings: torch would cast it, and put it on the device.

    What belongs to no parameter stays as it is.
    """
    of_params = {saved_id for saved in saved_groups for saved_id in saved["params"]}
    return {
        saved_id: {key: value for key, value in own.items() if key not in KEYS}
        if saved_id in of_params
        else own
        for saved_id, own in states.items()
    }


def place_tensors(
    groups: Sequence[Group],
    state: MutableMapping[Any, dict[str, Any]],
    saved_groups: Sequence[Group],
    states: Mapping[Any, dict[str, Any]],
    home_of: Callable[[Tensor, bool], torch.device],
) -> None:
    """Puts the tensors of loaded state beside their parameters, where torch put the rest.

    Momentum keeps the dtype it was saved in, AdamW's moments get that of their parameter.

    Args:
        groups: of the optimizer.
        state: of the optimizer, by parameter; changed.
        saved_groups: of the checkpoint.
        states: by the ids in ``params`` of the saved groups, with all tensors.
        home_of: the device on which a parameter's state lives.
    """
    for group, saved in zip(groups, saved_groups):
        for param, saved_id in zip(group["params"], saved["params"]):
            if saved_id not in states:
                continue
            loaded = state[param]
            state[param] = {}  # again, in the order in which it was saved
            for key, value in states[saved_id].items():
                if key not in KEYS:
                    state[param][key] = loaded[key]
                elif isinstance(value, Tensor):
                    keeps = key in OWN_DTYPE or not param.is_floating_point()
                    dtype = value.dtype if keeps else param.dtype
                    state[param][key] = place(value, dtype, home_of(param, group["use_muon"]))
