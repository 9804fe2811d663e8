"""Loads checkpoints: checks and renames entries, then divides and places tensors."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, MutableMapping, Sequence
from typing import Any, Callable, Optional

import torch
from torch import Tensor

from ..cpu_offload import CPUOffload
from ..distributed import dtensors
from ..distributed.plan import Entry
from ..parameters.options import STRUCTURE, Group, Settings, is_number
from .specs import ALL_KEYS, KEYS, Spec, check_tensors, converted, specs_of

RawGroup = Mapping[str, Any]  # as in torch, in an optimizer or a checkpoint

OWN_KEY = "momentum_style"  # no other optimizer's groups have it

# Names of AdamW's moments in Motif's optimizer.
MOTIFS_NAMES = {"moment1": "exp_avg", "moment2": "exp_avg_sq"}


def check_type(state_dict: Any) -> None:
    """Checks that a checkpoint is a dict; hooks may still change its content."""
    if not isinstance(state_dict, dict):
        raise ValueError(
            f"state_dict must be a dict, found a {type(state_dict).__name__}; pass a list of other "
            "optimizers' state dicts to load_foreign_state_dict"
        )


def read_states(state_dict: Mapping[str, Any]) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Reads a checkpoint's state under the ids that its groups list, with the keys of torch.optim.

    torch.distributed.checkpoint's ``dcp_to_torch_save`` writes these ids as text.

    Returns:
        By id, the state that this package loads, and the state that torch loads: under unknown
        keys, or under ids that no group lists.

    Raises:
        ValueError: groups or state don't have torch.optim's form, or an id appears twice.
    """
    saved_states, groups = state_dict.get("state"), state_dict.get("param_groups")
    if not isinstance(saved_states, Mapping):
        kind = type(saved_states).__name__ if "state" in state_dict else "none"
        raise ValueError(f"the checkpoint's 'state' must be a dict by parameter, found {kind}")
    if not isinstance(groups, (list, tuple)) or not all(isinstance(g, Mapping) for g in groups):
        kind = type(groups).__name__ if "param_groups" in state_dict else "none"
        raise ValueError(f"the checkpoint's 'param_groups' must be a list of dicts, found {kind}")
    ids: dict[Any, Any] = {}  # each also by its text
    for number, group in enumerate(groups):
        where, group_ids = f"param_groups[{number}] of the checkpoint", group.get("params")
        if not isinstance(group_ids, (list, tuple)):
            raise ValueError(f"{where} must list its params, found {group_ids!r}")
        for saved_id in group_ids:
            if not isinstance(saved_id, Hashable):
                raise ValueError(f"{where} has params that can't be ids, such as {saved_id!r}")
            if saved_id in ids:
                raise ValueError(f"the checkpoint has parameter {saved_id!r} twice in its groups")
            ids[saved_id] = ids[str(saved_id)] = saved_id
    states: dict[Any, Any] = {}
    others: dict[Any, Any] = {}
    for key, saved in saved_states.items():
        saved_id = ids.get(key, key)
        if saved_id in others:
            raise ValueError(f"the checkpoint has state of parameter {saved_id!r} twice")
        others[saved_id] = saved
        if key in ids:
            state = _read_state(saved, saved_id)
            states[saved_id] = {k: state.pop(k) for k in [*state] if k in ALL_KEYS}
            others[saved_id] = state
    return states, others


def _read_state(saved: Any, saved_id: Any) -> dict[str, Any]:
    """Reads the state of a parameter; makes the step count a tensor."""
    if not isinstance(saved, Mapping):
        kind = type(saved).__name__
        where = f"the checkpoint's state of parameter {saved_id!r}"
        raise ValueError(f"{where} must be a dict, found a {kind}")
    state: dict[Any, Any] = {MOTIFS_NAMES.get(key, key): value for key, value in saved.items()}
    if "step" in state:
        step = state["step"]
        count = step_count(step)
        if count is None:
            where = f"step of parameter {saved_id!r} in the checkpoint"
            value = tuple(step.shape) if isinstance(step, Tensor) and step.ndim else repr(step)
            raise ValueError(f"{where} must be one number, found {value}")
        if not isinstance(step, Tensor) or step.ndim or step.dtype != torch.float32:
            state["step"] = torch.tensor(float(count), dtype=torch.float32, device="cpu")
    return state


def step_count(step: Any) -> Any:
    """The step count as a plain number, from a number or a one-element tensor; None for others."""
    if isinstance(step, Tensor):
        is_plain = step.layout == torch.strided and not (step.is_meta or dtensors.is_dtensor(step))
        step = step.item() if is_plain and step.numel() == 1 else None
    return step if is_number(step) and step >= 0 else None


def merge_groups(
    groups: Sequence[RawGroup],
    saved: Sequence[RawGroup],
    defaults_of: Callable[[RawGroup], dict[str, Any]],
) -> list[dict[str, Any]]:
    """Completes saved groups to have every key.

    A key that a saved group lacks gets its default or, without one, the value in the optimizer's
    group. The keys of `STRUCTURE`, which say how parameters are read as matrices, keep the values
    in the optimizer's group.

    Raises:
        ValueError: the numbers of groups differ.
    """
    if len(groups) != len(saved):
        raise ValueError(
            f"there are {len(groups)} param_groups where the checkpoint has {len(saved)}: "
            "a different number of parameter groups; make them as they were when it was saved"
        )
    merged = []
    for group, saved_group in zip(groups, saved):
        structure = {key: group[key] for key in STRUCTURE if key in group}
        # Saved names are ignored: `Muon` keeps its own, and if a group had ``param_names``, torch
        # would require them in every added group.
        named = ("names", "param_names")
        taken = {k: _as_dtype(v) for k, v in saved_group.items() if k not in named}
        merged.append({**group, **defaults_of(group), **taken, **structure})
    return merged


def _as_dtype(value: Any) -> Any:
    """Converts a dtype's name, as `Muon.state_dict` writes it; returns other values unchanged."""
    if isinstance(value, str) and value.startswith("torch."):
        dtype = getattr(torch, value[len("torch.") :], None)
        return dtype if isinstance(dtype, torch.dtype) else value
    return value


def check_and_divide(
    groups: Sequence[Group],
    entries_of_groups: Sequence[Sequence[Optional[Entry]]],
    saved_groups: Sequence[Group],
    states: MutableMapping[Any, dict[str, Any]],
    others: Mapping[Any, Any],
    settings: Settings,
) -> dict[Tensor, dict[str, Any]]:
    """Checks what torch doesn't check in a checkpoint; divides its state like the optimizer's.

    Args:
        groups, entries_of_groups, settings: the optimizer's.
        saved_groups, states, others: the checkpoint's.

    Returns:
        The state of each parameter that has any.
    """
    kept = {k for state in states.values() for k, value in state.items() if value is not None}
    by_param: dict[Tensor, dict[str, Any]] = {}
    for group, entries, saved in zip(groups, entries_of_groups, saved_groups):
        _check_group(group, saved)
        for index, (param, entry, saved_id) in enumerate(zip(group.params, entries, saved.params)):
            if saved_id in states:
                saved_state = by_param[param] = states[saved_id]
                name, specs = group.name_of(index), specs_of(param, entry, saved, settings)
                _divide(saved_state, specs, param)
                own_keys = specs_of(param, entry, group, settings).keys()
                _check_keys(saved_state, specs.keys(), own_keys, kept, saved, name, param.dtype)
                check_tensors(saved_state, specs, "checkpoint", name)
    for saved_id, other in others.items():
        if isinstance(other, Mapping) and not other.keys().isdisjoint({*KEYS, *MOTIFS_NAMES}):
            raise ValueError(
                f"the checkpoint has state of parameter {saved_id!r}, which none of its groups "
                "lists in its params"
            )
    return by_param


def _check_group(group: Group, saved: Group) -> None:
    saved.validate()
    if saved.use_muon != group.use_muon:
        raise ValueError(
            f"{group.where} has use_muon={group.use_muon} but the checkpoint's has "
            f"{saved.use_muon}: create the groups in the order in which they were saved"
        )
    if len(saved.params) != len(group.params):
        raise ValueError(
            f"{group.where} has {len(group.params)} parameters where the checkpoint's has "
            f"{len(saved.params)}, a group of another size; is it of the same "
            "model, with the same groups?"
        )


def _divide(saved_state: dict[str, Any], specs: Mapping[str, Spec], param: Tensor) -> None:
    """Replaces whole tensors with this rank's part if the optimizer has a DTensor there.

    These are state that replicas divide, and second moments: torch.distributed.checkpoint leaves
    second moments whole when it loads them into an optimizer without any. Residuals become
    contiguous, since steps read their two bytes as one number.
    """
    for key, (shape, placed, _) in specs.items():
        value = saved_state.get(key)
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            continue
        if key == "weight_residual" and not dtensors.raw_local(value).is_contiguous():
            local = dtensors.local(value).contiguous()
            value = saved_state[key] = dtensors.with_local(value, local)
        is_whole = key == "second_momentum_buffer" or not dtensors.is_dtensor(param)
        if placed and is_whole and value.shape == shape and not dtensors.is_dtensor(value):
            saved_state[key] = dtensors.shard_tensor(value, placed)


def _check_keys(
    saved_state: Mapping[str, Any],
    needed: Collection[str],
    own: Collection[str],
    kept: Collection[str],
    saved: Group,
    name: str,
    dtype: torch.dtype,
) -> None:
    """Checks that a parameter has all the state that its algorithm needs, or none.

    Otherwise unused state would be carried along, and missing state would silently begin at zero:
    torch.distributed.checkpoint reads only tensors that the optimizer already has.

    Args:
        needed: keys that the options in the checkpoint need.
        own: keys that the optimizer's options need.
        kept: keys that any parameter has in the checkpoint.
        saved: the parameter's group in the checkpoint.
        name, dtype: name and dtype of the parameter.
    """
    present = [key for key in ALL_KEYS if saved_state.get(key) is not None]
    if not present:
        return
    foreign_key = "exp_avg" if saved.use_muon else "momentum_buffer"
    if foreign_key in present:
        ours, theirs = ("Muon's", "AdamW's") if saved.use_muon else ("AdamW's", "Muon's")
        raise ValueError(
            f"{name} is {ours} here (use_muon={saved.use_muon}) but has {foreign_key} in the "
            f"checkpoint, as {theirs} parameters do; give it to the group it was in, or remove its "
            "state. If another optimizer wrote the checkpoint, use load_foreign_state_dict"
        )
    if "weight_residual" in present and "weight_residual" not in needed:
        remedy = "load the result of exact_weights() into the model, and remove the residual"
        if dtype == torch.bfloat16:  # a load in place kept a residual that the file doesn't have
            remedy = "load into an optimizer without the option, then set it in param_groups"
        raise ValueError(
            f"{name} is {dtype}, and its group in the checkpoint has weight_rounding="
            f"{saved.weight_rounding!r}, but it also has a weight_residual: {remedy}"
        )
    options = {"second_momentum_buffer": "beta2", "weight_residual": "weight_rounding"}
    absent = [key for key in needed if key not in present]
    for key in absent:
        if key in options and key not in own:
            option = f"{options[key]}={getattr(saved, options[key])!r}"
            raise ValueError(
                f"the checkpoint has {option}, but {key} of {name} was not read, since this "
                f"optimizer has none: construct it with {option}"
            )
    # Optional keys are needed only if another parameter of the checkpoint has them: weights that
    # were in fp32 had no residuals.
    absent = [key for key in absent if key in kept or key not in options]
    if not saved.use_muon and "step" not in present:
        absent.append("step")
    if absent:
        raise ValueError(
            f"the checkpoint has {' and '.join(present)} of {name} but not "
            f"{' and '.join(absent)}: provide all of them, or none to start from zeros"
        )


def check_apart(states: Mapping[Any, Any], live: Mapping[Any, Any]) -> None:
    """Checks that a checkpoint shares no memory with live state that a step has changed."""
    if _storages_of(states) & _storages_of(live):
        raise ValueError(
            "the checkpoint shares tensors with this optimizer, and a failed step has changed "
            "them: load the file again"
        )


def _storages_of(states: Mapping[Any, Any]) -> set[tuple[torch.device, int]]:
    # Tensors without elements, such as empty shards, have no memory to share.
    local = [dtensors.local(tensor) for tensor in tensors_of(states)]
    held = [tensor for tensor in local if tensor.layout == torch.strided and tensor.numel()]
    return {(tensor.device, tensor.untyped_storage().data_ptr()) for tensor in held}


def tensors_of(states: Mapping[Any, Any]) -> list[Tensor]:
    """The state tensors of all parameters."""
    mappings = [state for state in states.values() if isinstance(state, Mapping)]
    values = (mapping.get(key) for mapping in mappings for key in ALL_KEYS)
    return [value for value in values if isinstance(value, Tensor)]


def place_tensors(
    state: MutableMapping[Any, dict[str, Any]],
    saved_states: MutableMapping[Tensor, dict[str, Any]],
    offload: CPUOffload,
    kept: set[int],
) -> None:
    """Puts loaded state on the devices where it lives, in the dtypes in which it was saved.

    The caller's tensors are copied, since the caller may load them again or into another optimizer.

    Args:
        state: the optimizer's state, with the entries that torch has loaded.
        saved_states: the checkpoint's state, by parameter. Emptied as it is read, so that at most
            one tensor is in memory twice.
        offload: knows where state lives.
        kept: ids of the optimizer's own tensors. These are reused, so that loads in place, as in
            torch.distributed.checkpoint, need no extra memory.
    """
    for param in [*saved_states]:
        saved = saved_states.pop(param)
        # State that is offloaded is copied to its host memory in any case.
        is_offloaded = offload.destination(param, "momentum_buffer" in saved) is not None
        home = torch.device("cpu") if is_offloaded else dtensors.local(param).device
        own: dict[str, Any] = {}
        for key, value in saved.items():
            if isinstance(value, Tensor):
                own[key] = converted(value, None, home)
                is_apart = own[key] is not value or (is_offloaded and key in KEYS)
                if not is_apart and id(value) not in kept:
                    own[key] = value.clone()
                kept.discard(id(value))  # another parameter may have the same tensor
        state[param] = {**own, **state[param]}
