"""Loads checkpoints: checks and renames their content, divides and places their tensors."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, MutableMapping, Sequence
from typing import Any, Callable, Optional

import torch
from torch import Tensor

from ..cpu_offload import CPUOffload
from ..distributed import regions
from ..distributed import utils as dtensors
from ..distributed.plan import Entry
from ..parameters.options import STRUCTURE, Group, Settings, is_number
from .specs import (
    ADAMW_KEYS,
    KEPT_DTYPE,
    KEYS,
    ExpectedState,
    check_tensors,
    converted,
    expected_state,
    keys_of,
    moments_dtype,
)

RawGroup = Mapping[str, Any]  # as torch has it, in an optimizer or a checkpoint

OWN_KEY = "momentum_style"  # the groups of no other optimizer have it

# What Motif's optimizer calls the moments of AdamW.
MOTIFS_NAMES = {"moment1": "exp_avg", "moment2": "exp_avg_sq"}


def check_structure(state_dict: Any, is_whole: bool = True) -> None:
    """Checks that a checkpoint has the form in which torch.optim writes one.

    Hooks may still change its content as long as it is not whole; then only its type counts.
    """
    if not isinstance(state_dict, dict):
        raise ValueError(
            f"a state dict is needed, found a {type(state_dict).__name__}; a list of other "
            "optimizers' goes to load_foreign_state_dict"
        )
    if not is_whole:
        return
    states, groups = state_dict.get("state"), state_dict.get("param_groups")
    if not isinstance(states, Mapping):
        kind = type(states).__name__ if "state" in state_dict else "none"
        raise ValueError(f"the checkpoint's 'state' must be a dict by parameter, found {kind}")
    if not isinstance(groups, (list, tuple)) or not all(isinstance(g, Mapping) for g in groups):
        kind = type(groups).__name__ if "param_groups" in state_dict else "none"
        raise ValueError(f"the checkpoint's 'param_groups' must be a list of dicts, found {kind}")
    seen: set[Any] = set()
    for number, group in enumerate(groups):
        where, ids = f"param_groups[{number}] of the checkpoint", group.get("params")
        if not isinstance(ids, (list, tuple)):
            raise ValueError(f"{where} must list its params, found {ids!r}")
        for saved_id in ids:
            if not isinstance(saved_id, Hashable):
                raise ValueError(f"{where} has params that name no state, one of them {saved_id!r}")
            if saved_id in seen:
                raise ValueError(f"the checkpoint has parameter {saved_id!r} twice in its groups")
            seen.add(saved_id)


def states_by_id(state_dict: Mapping[str, Any]) -> dict[Any, Any]:
    """A checkpoint's state under the ids that its groups list.

    ``dcp_to_torch_save`` of torch.distributed.checkpoint writes state under the same ids as text.

    Raises:
        ValueError: state of one parameter twice, or in another form than torch.optim's.
    """
    ids = {saved_id for group in state_dict["param_groups"] for saved_id in group["params"]}
    by_text = {str(saved_id): saved_id for saved_id in ids}
    states: dict[Any, Any] = {}
    for key, saved in state_dict["state"].items():
        saved_id = key if key in ids else by_text.get(str(key), key)
        if saved_id in states:
            raise ValueError(f"the checkpoint has state of parameter {saved_id!r} twice")
        states[saved_id] = saved
        if saved_id in ids:
            _check_saved_state(saved, saved_id)
    return states


def check_all_listed(states: Mapping[Any, Any], saved_groups: Sequence[RawGroup]) -> None:
    """Checks that groups list all parameters that have state, which would be lost otherwise."""
    ids = {saved_id for saved in saved_groups for saved_id in saved["params"]}
    for saved_id, saved in states.items():
        has_tensors = isinstance(saved, Mapping) and not saved.keys().isdisjoint(KEYS)
        if has_tensors and saved_id not in ids:
            raise ValueError(
                f"the checkpoint has state of parameter {saved_id!r}, which none of its groups "
                "lists in its params"
            )


def _check_saved_state(saved: Any, saved_id: Any) -> None:
    if not isinstance(saved, Mapping):
        raise ValueError(
            f"the checkpoint's state of parameter {saved_id!r} must be a dict, found a "
            f"{type(saved).__name__}"
        )
    step = saved.get("step", 0)
    if step_count(step) is None:
        has_many = isinstance(step, Tensor) and step.numel() != 1
        value = tuple(step.shape) if has_many else repr(step)
        raise ValueError(
            f"step of parameter {saved_id!r} in the checkpoint must be one number, found {value}"
        )


def step_count(step: Any) -> Any:
    """A step count, a number or a tensor of one, as a plain number; None where it is neither."""
    if isinstance(step, Tensor):
        is_plain = step.layout == torch.strided and not (step.is_meta or dtensors.is_dtensor(step))
        step = step.item() if is_plain and step.numel() == 1 else None
    return step if is_number(step) and step >= 0 else None


def normalize_state(states: Mapping[Any, Any]) -> dict[Any, Any]:
    """State under the names of torch.optim, with step counts as tensors, whoever wrote it."""
    normalized = {}
    for saved_id, saved in states.items():
        if isinstance(saved, Mapping):
            saved = {MOTIFS_NAMES.get(key, key): value for key, value in saved.items()}
            step: Any = saved.get("step")
            if is_number(step):
                saved["step"] = torch.tensor(float(step), dtype=torch.float32, device="cpu")
            elif isinstance(step, Tensor) and (step.ndim or step.dtype != torch.float32):
                saved["step"] = step.reshape(()).to(torch.float32)  # torch's AdamW takes no other
            for key, value in saved.items():
                if isinstance(value, Tensor) and value.is_inference():
                    saved[key] = value.clone()  # a step could not change the given one
        normalized[saved_id] = saved
    return normalized


def check_count(groups: Sequence[RawGroup], saved: Sequence[RawGroup]) -> None:
    """Checks that there are as many groups as saved ones."""
    if len(groups) != len(saved):
        raise ValueError(
            f"there are {len(groups)} param_groups where the checkpoint has {len(saved)}: "
            "a different number of parameter groups; make them as they were when it was saved"
        )


def merge_groups(
    groups: Sequence[RawGroup],
    saved: Sequence[RawGroup],
    defaults_of: Callable[[RawGroup], dict[str, Any]],
) -> list[dict[str, Any]]:
    """Saved groups with every key.

    A key that a saved group lacks gets its default or, if it has none, the value of the optimizer's
    group. The keys of `STRUCTURE`, which say how parameters are read as matrices, keep the values
    of the optimizer's group.
    """
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
            expected = expected_state(param, entry, settings)
            _divide(saved_state, expected, param, saved)
            _check_algorithm(saved_state, live.get(param, {}), group, saved, name, param.dtype)
            check_tensors(saved_state, expected, "checkpoint", name, param)
            keys = ADAMW_KEYS if "exp_avg" in expected else ("momentum_buffer",)
            others = [k for k in keys_of(saved, param.dtype) if k in kept and k not in keys]
            _check_complete(saved_state, name, [*keys, *others])
            # Kernels trust that this rank's part of a DTensor has the size that it should have.
            for key, (shape, placed) in expected.items():
                if placed is None or saved_state.get(key) is None:
                    continue
                local = dtensors.local(saved_state[key])
                needed = dtensors.local_shape(shape, placed)
                if not regions.is_same_shape(local.shape, needed):
                    raise ValueError(
                        f"of {key} of {name} in the checkpoint this rank holds "
                        f"{tuple(local.shape)}, where it should be {tuple(needed)}"
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
    saved_state: dict[str, Any], expected: ExpectedState, param: Tensor, saved: Group
) -> None:
    """Takes this rank's part of each whole tensor for which the optimizer has a DTensor.

    These are state that replicas divide, and second moments: torch.distributed.checkpoint leaves
    second moments whole when it loads them into an optimizer without any. When it loads a flattened
    state dict without second moments into an optimizer that has them, it puts empty dicts in their
    place, which are taken out here. Steps read the two bytes of a residual as one number, so
    residuals become contiguous.
    """
    for key, (shape, placed) in expected.items():
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


def _check_complete(saved_state: Mapping[str, Any], name: str, keys: Sequence[str]) -> None:
    """Checks that all entries of a parameter are there, or none: steps would be wrong silently.

    Live state is not checked: where memory ran out between two entries, the next step makes the
    other ones.

    Args:
        keys: what the parameter needs. Second moments and residuals are among them only if another
            parameter of the checkpoint has them: weights that were in fp32 have had no residuals.
    """
    present = [key for key in keys if saved_state.get(key) is not None]
    absent = [key for key in keys if key not in present]
    if present and absent:
        raise ValueError(
            f"{' and '.join(present)} of {name} in the checkpoint lack {' and '.join(absent)}: "
            "give all of them, or none to start from zeros"
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

    State that belongs to no parameter stays as it is.
    """
    params = {saved_id for saved in saved_groups for saved_id in saved["params"]}
    return {
        saved_id: {key: value for key, value in saved_state.items() if key not in KEYS}
        if saved_id in params
        else saved_state
        for saved_id, saved_state in states.items()
    }


def place_tensors(
    groups: Sequence[Group],
    state: MutableMapping[Any, dict[str, Any]],
    saved_groups: Sequence[RawGroup],
    states: MutableMapping[Any, dict[str, Any]],
    offload: CPUOffload,
    kept: Collection[tuple[torch.device, int]],
) -> None:
    """Puts the tensors of loaded state on the devices where they live; torch has put the rest.

    The tensors of `KEPT_DTYPE`, such as momentum, keep the dtype that they were saved in; AdamW's
    moments get the dtype that their parameter calls for. Tensors of the caller are copied, since
    the caller may load them again, or into another optimizer.

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
            loaded = state[param]
            state[param] = {}  # made anew, in the order in which it was saved
            for key, value in states.pop(saved_id).items():
                if key not in KEYS:
                    value = loaded[key]
                    is_step = key == "step" and isinstance(value, Tensor)
                    state[param][key] = apart(value) if is_step else value
                elif isinstance(value, Tensor):
                    is_kept = key in KEPT_DTYPE
                    dtype = value.dtype if is_kept else moments_dtype(group, param.dtype)
                    # State that is offloaded is copied to its host memory in any case.
                    is_copied = offload.destination(param, group.use_muon) is not None
                    home = torch.device("cpu") if is_copied else dtensors.local(param).device
                    placed = converted(value, dtype, home)
                    is_new = placed is not value or is_copied
                    state[param][key] = placed if is_new else apart(placed)
