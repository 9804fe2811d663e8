"""Loads checkpoints: checks and renames their content, divides and places their tensors."""

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

RawGroup = Mapping[str, Any]  # as torch has it, in an optimizer or a checkpoint

OWN_KEY = "momentum_style"  # the groups of no other optimizer have it

# What Motif's optimizer calls the moments of AdamW.
MOTIFS_NAMES = {"moment1": "exp_avg", "moment2": "exp_avg_sq"}


def check_type(state_dict: Any) -> None:
    """Checks that a checkpoint is a dict; hooks may still change its content."""
    if not isinstance(state_dict, dict):
        raise ValueError(
            f"a state dict is needed, found a {type(state_dict).__name__}; a list of other "
            "optimizers' goes to load_foreign_state_dict"
        )


def read_states(state_dict: Mapping[str, Any]) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """A checkpoint's state under the ids that its groups list, with the keys of torch.optim.

    ``dcp_to_torch_save`` of torch.distributed.checkpoint writes state under the same ids as text.

    Returns:
        By id what this package loads, and what torch does: under keys that are another's, or under
        ids that are no parameter's.

    Raises:
        ValueError: groups or state in another form than torch.optim's; an id or state twice.
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
                raise ValueError(f"{where} has params that name no state, one of them {saved_id!r}")
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
    """The state of a parameter, with the step count as a tensor."""
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
    """A step count, a number or a tensor of one, as a plain number; None where it is neither."""
    if isinstance(step, Tensor):
        is_plain = step.layout == torch.strided and not (step.is_meta or dtensors.is_dtensor(step))
        step = step.item() if is_plain and step.numel() == 1 else None
    return step if is_number(step) and step >= 0 else None


def merge_groups(
    groups: Sequence[RawGroup],
    saved: Sequence[RawGroup],
    defaults_of: Callable[[RawGroup], dict[str, Any]],
) -> list[dict[str, Any]]:
    """Saved groups with every key.

    A key that a saved group lacks gets its default or, if it has none, the value of the optimizer's
    group. The keys of `STRUCTURE`, which say how parameters are read as matrices, keep the values
    of the optimizer's group.

    Raises:
        ValueError: there are more of these groups than of the others, or fewer.
    """
    if len(groups) != len(saved):
        raise ValueError(
            f"there are {len(groups)} param_groups where the checkpoint has {len(saved)}: "
            "a different number of parameter groups; make them as they were when it was saved"
        )
    merged = []
    for group, saved_group in zip(groups, saved):
        structure = {key: group[key] for key in STRUCTURE if key in group}
        # Names are not taken: `Muon` keeps its own, and if a group had ``param_names``, torch would
        # ask for them in every group that is added.
        named = ("names", "param_names")
        taken = {k: _as_dtype(v) for k, v in saved_group.items() if k not in named}
        merged.append({**group, **defaults_of(group), **taken, **structure})
    return merged


def _as_dtype(value: Any) -> Any:
    """The dtype for a text, as which `Muon.state_dict` writes dtypes; any other value as it is."""
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
    """Makes the checks of a checkpoint that torch does not make; divides its state as the
    optimizer's is divided.

    Args:
        groups, entries_of_groups, settings: of the optimizer.
        saved_groups, states, others: of the checkpoint.

    Returns:
        The state of those parameters that have any.
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
            f"{saved.use_muon}: give the groups in the order they were saved in"
        )
    if len(saved.params) != len(group.params):
        raise ValueError(
            f"{group.where} has {len(group.params)} parameters where the checkpoint's has "
            f"{len(saved.params)}, a group of another size; is it of the same "
            "model, with the same groups?"
        )


def _divide(saved_state: dict[str, Any], specs: Mapping[str, Spec], param: Tensor) -> None:
    """Takes this rank's part of each whole tensor for which the optimizer has a DTensor.

    These are state that replicas divide, and second moments: torch.distributed.checkpoint leaves
    second moments whole when it loads them into an optimizer without any. Steps read the two bytes
    of a residual as one number, so residuals become contiguous.
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
    """Checks that a parameter has all that it needs, of the algorithm that goes on, or nothing.

    Otherwise state that nobody reads would be carried along, and state that is read would silently
    begin at zero: torch.distributed.checkpoint reads only tensors that the optimizer already has.

    Args:
        needed: keys by the options in the checkpoint.
        own: keys by the options of the optimizer.
        kept: keys that any parameter has in the checkpoint.
        saved: the parameter's group in the checkpoint.
        name, dtype: of the parameter.
    """
    present = [key for key in ALL_KEYS if saved_state.get(key) is not None]
    if not present:
        return
    foreign_key = "exp_avg" if saved.use_muon else "momentum_buffer"
    if foreign_key in present:
        ours, theirs = ("Muon's", "AdamW's") if saved.use_muon else ("AdamW's", "Muon's")
        raise ValueError(
            f"{name} is {ours} here (use_muon={saved.use_muon}) but has {foreign_key} in the "
            f"checkpoint, as {theirs} parameters do; give it to the group it was in, or take its "
            "state out. If another optimizer wrote the checkpoint, use load_foreign_state_dict"
        )
    if "weight_residual" in present and "weight_residual" not in needed:
        remedy = "load weights that exact_weights() gave, and take the residual out"
        if dtype == torch.bfloat16:  # a load in place kept a residual that the file does not have
            remedy = "load into an optimizer without the option, and set it in param_groups then"
        raise ValueError(
            f"{name} is {dtype}, and its group in the checkpoint has weight_rounding="
            f"{saved.weight_rounding!r}, but there is a weight_residual of it beside: {remedy}"
        )
    options = {"second_momentum_buffer": "beta2", "weight_residual": "weight_rounding"}
    absent = [key for key in needed if key not in present]
    for key in absent:
        if key in options and key not in own:
            option = f"{options[key]}={getattr(saved, options[key])!r}"
            raise ValueError(
                f"the checkpoint has {option}, but {key} of {name} has not been read, since this "
                f"optimizer has none: construct it with {option}"
            )
    # These are needed only if another parameter of the checkpoint has them: weights that were in
    # fp32 have had no residuals.
    absent = [key for key in absent if key in kept or key not in options]
    if not saved.use_muon and "step" not in present:
        absent.append("step")
    if absent:
        raise ValueError(
            f"{' and '.join(present)} of {name} in the checkpoint lack "
            f"{' and '.join(absent)}: give all of them, or none to start from zeros"
        )


def check_apart(states: Mapping[Any, Any], live: Mapping[Any, Any]) -> None:
    """Checks that a checkpoint shares no memory with live state, which a step has changed."""
    if _storages_of(states) & _storages_of(live):
        raise ValueError(
            "the checkpoint's tensors are those of this optimizer, which a step that broke off has "
            "changed: load the file again"
        )


def _storages_of(states: Mapping[Any, Any]) -> set[tuple[torch.device, int]]:
    # Tensors without elements, such as empty shards, have no memory to share.
    local = [dtensors.local(tensor) for tensor in tensors_of(states)]
    held = [tensor for tensor in local if tensor.layout == torch.strided and tensor.numel()]
    return {(tensor.device, tensor.untyped_storage().data_ptr()) for tensor in held}


def tensors_of(states: Mapping[Any, Any]) -> list[Tensor]:
    """The tensors of state of all parameters."""
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

    Tensors of the caller are copied, since the caller may load them again, or into another
    optimizer.

    Args:
        state: of the optimizer, into which torch has loaded what is not this package's.
        saved_states: of the checkpoint, by parameter; is emptied, so that no more than one tensor
            is held twice.
        offload: knows where state lives.
        kept: ids of the optimizer's own tensors, which are used again, so that a load in place, as
            by torch.distributed.checkpoint, takes no more memory.
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
