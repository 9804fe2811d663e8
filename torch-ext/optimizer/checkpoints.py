"""What loading a checkpoint does beyond torch.optim: other names, missing keys, dtypes of state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Callable, Optional

import torch

from . import adamw
from .distributed import utils as dtensors
from .options import STRUCTURE, OptimizerWide

Group = Mapping[str, Any]

# Momentum may be wider or narrower than its parameter; torch casts state to the parameter's dtype.
OWN_DTYPE = ("momentum_buffer", "second_momentum_buffer")
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
    saved_groups: Sequence[Group],
    states: Mapping[Any, dict[str, Any]],
    wide: OptimizerWide,
) -> None:
    """Takes this rank's rows of what replicas are to divide, where a checkpoint has all of it."""
    for group, saved in zip(groups, saved_groups):
        for param, saved_id in zip(group["params"], saved["params"]):
            own, layout = states.get(saved_id, {}), state_layout(param, group, wide)
            if layout is None:
                continue
            for key in {"momentum_buffer", "exp_avg", "exp_avg_sq"}.intersection(own):
                value = own[key]
                if not isinstance(value, torch.Tensor) or dtensors.is_dtensor(value):
                    continue
                if value.shape == param.shape:
                    own[key] = dtensors.divide_by_rows(value.to(param.device), layout)


def state_layout(param: torch.Tensor, group: Group, wide: OptimizerWide) -> Optional[tuple]:
    """Mesh and placements of a parameter's state where replicas divide it."""
    if group["use_muon"]:
        return dtensors.state_layout(param, wide.process_group)
    return adamw.state_layout(param, wide.divided)


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
