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
from .specs import (
    ADAMW_KEYS,
    KEYS,
    Spec,
    check_tensors,
    converted,
    keys_of,
    moments_dtype,
    specs_of,
)

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


def read_states(state_dict: Mapping[str, Any]) -> dict[Any, Any]:
    """A checkpoint's state under the ids that its groups list, with the keys of torch.optim.

    ``dcp_to_torch_save`` of torch.distributed.checkpoint writes state under the same ids as text.
    State that belongs to no parameter stays as it is.

    Raises:
        ValueError: groups or state in another form than torch.optim's; an id or state twice.
    """
    check_type(state_dict)
    saved_states, groups = state_dict.get("state"), state_dict.get("param_groups")
    if not isinstance(saved_states, Mapping):
        kind = type(saved_states).__name__ if "state" in state_dict else "none"
        raise ValueError(f"the checkpoint's 'state' must be a dict by parameter, found {kind}")
    if not isinstance(groups, (list, tuple)) or not all(isinstance(g, Mapping) for g in groups):
        kind = type(groups).__name__ if "param_groups" in state_dict else "none"
        raise ValueError(f"the checkpoint's 'param_groups' must be a list of dicts, found {kind}")
    by_text: dict[str, Any] = {}
    ids: set[Any] = set()
    for number, group in enumerate(groups):
        where, group_ids = f"param_groups[{number}] of the checkpoint", group.get("params")
        if not isinstance(group_ids, (list, tuple)):
            raise ValueError(f"{where} must list its params, found {group_ids!r}")
        for saved_id in group_ids:
            if not isinstance(saved_id, Hashable):
                raise ValueError(f"{where} has params that name no state, one of them {saved_id!r}")
            if saved_id in ids:
                raise ValueError(f"the checkpoint has parameter {saved_id!r} twice in its groups")
            ids.add(saved_id)
            by_text[str(saved_id)] = saved_id
    states: dict[Any, Any] = {}
    for key, saved in saved_states.items():
        saved_id = key if key in ids else by_text.get(str(key), key)
        if saved_id in states:
            raise ValueError(f"the checkpoint has state of parameter {saved_id!r} twice")
        states[saved_id] = _read_state(saved, saved_id) if saved_id in ids else saved
    return states


def _read_state(saved: Any, saved_id: Any) -> dict[str, Any]:
    """The state of a parameter, with the step count as a tensor."""
    if not isinstance(saved, Mapping):
        raise ValueError(
            f"the checkpoint's state of parameter {saved_id!r} must be a dict, found a "
            f"{type(saved).__name__}"
        )
    state: dict[Any, Any] = {MOTIFS_NAMES.get(key, key): value for key, value in saved.items()}
    for key, value in state.items():
        if isinstance(value, Tensor) and value.is_inference():
            state[key] = value.clone()  # a step could not change the given one
    if "step" in state:
        step = state["step"]
        count = step_count(step)
        if count is None:
            has_many = isinstance(step, Tensor) and step.numel() != 1
            value = tuple(step.shape) if has_many else repr(step)
            raise ValueError(
                f"step of parameter {saved_id!r} in the checkpoint must be one number, found "
                f"{value}"
            )
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
    states: Mapping[Any, dict[str, Any]],
    live: Mapping[Any, Any],
    settings: Settings,
) -> None:
    """Makes the checks of a checkpoint that torch does not make; divides its state as the
    optimizer's is divided.

    Args:
        groups, entries_of_groups, live, settings: of the optimizer, whose state is ``live``.
        saved_groups, states: of the checkpoint; ``states`` is changed.
    """
    of_params = [states.get(saved_id, {}) for saved in saved_groups for saved_id in saved.params]
    kept = {key for state in of_params for key, value in state.items() if value is not None}
    for group, entries, saved in zip(groups, entries_of_groups, saved_groups):
        _check_group(group, saved)
        for index, (param, entry, saved_id) in enumerate(zip(group.params, entries, saved.params)):
            name, saved_state = group.name_of(index), states.get(saved_id, {})
            specs = specs_of(param, entry, saved, settings)
            _divide(saved_state, specs, param, saved)
            _check_algorithm(saved_state, live.get(param, {}), group, saved, name, param.dtype)
            check_tensors(saved_state, specs, "checkpoint", name)
            # All that a parameter needs is there, or nothing: steps would be wrong silently. Second
            # moments and residuals are needed only if another parameter of the checkpoint has them:
            # weights that were in fp32 have had no residuals.
            keys = [*ADAMW_KEYS] if entry is None else ["momentum_buffer"]
            keys += [k for k in keys_of(saved, param.dtype) if k in kept and k not in keys]
            present = [key for key in keys if saved_state.get(key) is not None]
            absent = [key for key in keys if key not in present]
            if present and absent:
                raise ValueError(
                    f"{' and '.join(present)} of {name} in the checkpoint lack "
                    f"{' and '.join(absent)}: give all of them, or none to start from zeros"
                )


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


def _divide(
    saved_state: dict[str, Any], specs: Mapping[str, Spec], param: Tensor, saved: Group
) -> None:
    """Takes this rank's part of each whole tensor for which the optimizer has a DTensor.

    These are state that replicas divide, and second moments: torch.distributed.checkpoint leaves
    second moments whole when it loads them into an optimizer without any. When it loads a flattened
    state dict without second moments into an optimizer that has them, it puts empty dicts in their
    place, which are taken out here. Steps read the two bytes of a residual as one number, so
    residuals become contiguous.
    """
    for key, (shape, placed, _) in specs.items():
        value = saved_state.get(key)
        if isinstance(value, dict) and not value and saved.beta2 is None:
            del saved_state[key]
        if key == "weight_residual" and isinstance(value, Tensor) and value.layout == torch.strided:
            local = dtensors.local(value)
            if not local.is_contiguous():
                value = saved_state[key] = dtensors.with_local(value, local.contiguous())
        if placed is None or not isinstance(value, Tensor) or dtensors.is_dtensor(value):
            continue
        is_whole = key == "second_momentum_buffer" or not dtensors.is_dtensor(param)
        if is_whole and value.shape == shape:
            saved_state[key] = dtensors.shard_tensor(value, placed)


def _check_algorithm(
    saved_state: Mapping[str, Any],
    live: Mapping[str, Any],
    group: Group,
    saved: Group,
    name: str,
    dtype: torch.dtype,
) -> None:
    """Checks that the saved state is complete, and of the algorithm that goes on from it.

    Otherwise state that nobody reads would be carried along, and state that is read would silently
    begin at zero. Second moments can be missing because torch.distributed.checkpoint reads only
    tensors that the optimizer already has.
    """
    foreign_key = "exp_avg" if group.use_muon else "momentum_buffer"
    if saved_state.get(foreign_key) is not None:
        ours, theirs = ("Muon's", "AdamW's") if group.use_muon else ("AdamW's", "Muon's")
        raise ValueError(
            f"{name} is {ours} here (use_muon={group.use_muon}) but has {foreign_key} in the "
            f"checkpoint, as {theirs} parameters do; give it to the group it was in, or take its "
            "state out. If another optimizer wrote the checkpoint, use load_foreign_state_dict"
        )
    if saved.beta2 is not None and all(
        state.get("momentum_buffer") is not None and state.get("second_momentum_buffer") is None
        for state in (saved_state, live)
    ):
        raise ValueError(
            f"the checkpoint has beta2={saved.beta2}, but its second moment of {name} has not been "
            f"read, since this optimizer has none: construct it with beta2={saved.beta2}"
        )
    has_residual = saved_state.get("weight_residual") is not None
    is_kept = saved.weight_rounding == "exact" and saved.updates_in_fp32(dtype)
    if has_residual and not is_kept:
        remedy = "load weights that exact_weights() gave, and take the residual out"
        if dtype == torch.bfloat16:  # a load in place kept a residual that the file does not have
            remedy = "load into an optimizer without the option, and set it in param_groups then"
        raise ValueError(
            f"{name} is {dtype}, and its group in the checkpoint has weight_rounding="
            f"{saved.weight_rounding!r}, but there is a weight_residual of it beside: {remedy}"
        )
    if is_kept and saved_state and not has_residual and group.weight_rounding != "exact":
        raise ValueError(
            f"the checkpoint has weight_rounding='exact', but its residual of {name} has not been "
            "read, since this optimizer has none: construct it with weight_rounding='exact'"
        )


def check_apart(states: Mapping[Any, Any], live: Mapping[Any, Any]) -> None:
    """Checks that a checkpoint shares no tensors with live state, which a step has changed."""
    if storages_of(states) & storages_of(live):
        raise ValueError(
            "the checkpoint's tensors are those of this optimizer, which a step that broke off has "
            "changed: load the file again"
        )


def storages_of(states: Mapping[Any, Any]) -> set[tuple[torch.device, int]]:
    """The storages of the tensors of state, by device and address."""
    mappings = (state for state in states.values() if isinstance(state, Mapping))
    values = (mapping.get(key) for mapping in mappings for key in (*KEYS, "step"))
    tensors = [dtensors.local(value) for value in values if isinstance(value, Tensor)]
    # Tensors without elements, such as empty shards, have no memory to share.
    return {_storage_of(t) for t in tensors if t.layout == torch.strided and t.numel()}


def _storage_of(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def without_tensors(states: Mapping[Any, Any], saved_groups: Sequence[RawGroup]) -> dict[Any, Any]:
    """State without the tensors that `place_tensors` loads, since torch would cast and move them.

    Raises:
        ValueError: tensors of a parameter that no group lists, which would be lost.
    """
    params = {saved_id for saved in saved_groups for saved_id in saved["params"]}
    others = {}
    for saved_id, saved in states.items():
        if saved_id in params:
            saved = {key: value for key, value in saved.items() if key not in KEYS}
        elif isinstance(saved, Mapping) and not saved.keys().isdisjoint({*KEYS, *MOTIFS_NAMES}):
            raise ValueError(
                f"the checkpoint has state of parameter {saved_id!r}, which none of its groups "
                "lists in its params"
            )
        others[saved_id] = saved
    return others


def place_tensors(
    groups: Sequence[Group],
    state: MutableMapping[Any, dict[str, Any]],
    saved_groups: Sequence[RawGroup],
    states: MutableMapping[Any, dict[str, Any]],
    offload: CPUOffload,
    kept: Collection[tuple[torch.device, int]],
) -> None:
    """Puts the tensors of loaded state on the devices where they live; torch has put the rest.

    AdamW's moments get the dtype that their parameter calls for; other tensors, such as momentum,
    keep the dtype that they were saved in. Tensors of the caller are copied, since the caller may
    load them again, or into another optimizer.

    Args:
        groups, state: of the optimizer; ``state`` is changed.
        saved_groups, states: of the checkpoint, with all tensors; ``states`` is emptied, so that
            no more than one tensor is held twice.
        offload: knows where state lives.
        kept: storages of the optimizer's own state, `storages_of`, whose tensors are used again, so
            that a load in place, as by torch.distributed.checkpoint, takes no more memory.
    """
    taken: set[int] = set()  # addresses of the tensors that are used without a copy

    def apart(value: Tensor) -> Tensor:
        local = dtensors.local(value)
        if local.numel() and (
            _storage_of(local) not in kept
            or local.data_ptr() in taken
            or not dtensors.is_dense(local)  # elements may share memory
        ):
            return value.clone()
        taken.add(local.data_ptr())
        return value

    for group, saved in zip(groups, saved_groups):
        for param, saved_id in zip(group.params, saved["params"]):
            if saved_id not in states:
                continue
            # State that is offloaded is copied to its host memory in any case.
            is_copied = offload.destination(param, group.use_muon) is not None
            home = torch.device("cpu") if is_copied else dtensors.local(param).device
            loaded = state[param]
            own = state[param] = {}  # made anew, in the order in which it was saved
            for key, value in states.pop(saved_id).items():
                if key not in KEYS:
                    value = loaded[key]
                    own[key] = apart(value) if key == "step" else value
                elif isinstance(value, Tensor):
                    dtype = moments_dtype(group, param.dtype) if key in ADAMW_KEYS else None
                    placed = converted(value, dtype, home)
                    own[key] = placed if placed is not value or is_copied else apart(placed)
