"""What loading a checkpoint does beyond torch.optim: what fits, other names, where it goes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, MutableMapping, Sequence
from typing import Any, Callable

import torch
from torch import Tensor

from . import options, validation
from .core import is_dense
from .distributed import utils as dtensors
from .distributed.plan import Entry
from .options import STRUCTURE, Group, OptimizerWide, is_number
from .state import KEYS, OWN_DTYPE, layouts_of, place

RawGroup = Mapping[str, Any]  # as torch has it, in an optimizer or a checkpoint

_OTHER_NAMES = {"moment1": "exp_avg", "moment2": "exp_avg_sq"}


def check_structure(state_dict: Any, is_whole: bool = True) -> None:
    """A checkpoint is what torch.optim writes, as far as one can tell without an optimizer.

    Args:
        state_dict: the checkpoint.
        is_whole: False before the hooks that may yet change what is in it.
    """
    if not isinstance(state_dict, dict):
        raise ValueError(f"a state dict is needed, found a {type(state_dict).__name__}")
    if not is_whole:
        return
    states, groups = state_dict.get("state"), state_dict.get("param_groups")
    if not isinstance(states, Mapping):
        found = type(states).__name__ if "state" in state_dict else "none"
        raise ValueError(f"the checkpoint's 'state' must be a dict by parameter, found {found}")
    if not isinstance(groups, (list, tuple)) or not all(isinstance(g, Mapping) for g in groups):
        found = type(groups).__name__ if "param_groups" in state_dict else "none"
        raise ValueError(f"the checkpoint's 'param_groups' must be a list of dicts, found {found}")
    seen: set[Any] = set()
    for number, group in enumerate(groups):
        ids = group.get("params")
        if not isinstance(ids, (list, tuple)):
            raise ValueError(
                f"param_groups[{number}] of the checkpoint must list its params, found {ids!r}"
            )
        for saved_id in ids:
            if not isinstance(saved_id, Hashable):
                raise ValueError(
                    f"param_groups[{number}] of the checkpoint has params that name no state, one "
                    f"of them {saved_id!r}"
                )
            if saved_id in seen:
                raise ValueError(f"the checkpoint has parameter {saved_id!r} twice in its groups")
            seen.add(saved_id)
            own = states.get(saved_id, {})
            if not isinstance(own, Mapping):
                raise ValueError(
                    f"the checkpoint's state of parameter {saved_id!r} must be a dict, found a "
                    f"{type(own).__name__}"
                )
            if "step" in own:
                _check_step(own["step"], saved_id)


def _check_step(step: Any, saved_id: Any) -> None:
    if step_count(step) is None:
        found = repr(step)
        if isinstance(step, Tensor) and not _is_one_number(step):
            found = str(tuple(step.shape))
        raise ValueError(
            f"step of parameter {saved_id!r} in the checkpoint must be one number, found {found}"
        )


def step_count(step: Any) -> Any:
    """A step count as a plain number, of a number or a tensor of one; None where it is none."""
    if isinstance(step, Tensor):
        step = step.item() if _is_one_number(step) else None
    return step if options.is_number(step) and step >= 0 else None


def _is_one_number(tensor: Tensor) -> bool:
    is_plain = tensor.layout == torch.strided and not (
        tensor.is_meta or dtensors.is_dtensor(tensor)
    )
    return is_plain and tensor.numel() == 1


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
    if key == "step" and isinstance(value, Tensor):  # torch's AdamW takes no other dtype
        value = value.reshape(()).to(torch.float32)
    if isinstance(value, Tensor) and value.is_inference():
        return value.clone()  # a step could not change it
    return value


def merge_groups(
    groups: Sequence[RawGroup],
    saved: Sequence[RawGroup],
    defaults_of: Callable[[RawGroup], dict[str, Any]],
) -> list[dict[str, Any]]:
    """Saved groups with every key: what they lack gets its default, or stays where there is none.

    How parameters are read as matrices is not the checkpoint's to say.

    Raises:
        ValueError: there are more groups than saved ones, or fewer.
    """
    if len(groups) != len(saved):
        raise ValueError(
            f"there are {len(groups)} param_groups where the checkpoint has {len(saved)}: "
            "a different number of parameter groups; make them as they were when it was saved"
        )
    merged = []
    for own, group in zip(groups, saved):
        structure = {key: own[key] for key in STRUCTURE if key in own}
        # Names are not taken: `Muon` keeps its own, and torch would ask for those in its form in
        # every group that is added.
        taken = group.keys() - {"names", "param_names"}
        group = {key: _as_dtype(value) for key, value in group.items() if key in taken}
        merged.append({**own, **defaults_of(own), **group, **structure})
    return merged


def _as_dtype(value: Any) -> Any:
    """A dtype from its text, which is how `Muon.state_dict` writes it."""
    name = value[len("torch.") :] if isinstance(value, str) and value.startswith("torch.") else ""
    dtype = getattr(torch, name, None)
    return dtype if isinstance(dtype, torch.dtype) else value


def fit_state(
    groups: Sequence[Group],
    entries_of_groups: Sequence[Sequence[Entry]],
    saved_groups: Sequence[Group],
    states: Mapping[Any, dict[str, Any]],
    wide: OptimizerWide,
) -> None:
    """Brings the state of a checkpoint into the form in which the optimizer has it.

    A rank takes its part where a checkpoint has all: of what replicas divide, and of second
    moments, which torch.distributed.checkpoint does not distribute to an optimizer without. Nor
    does it leave them out for one with: what a flattened state dict lacks becomes an empty dict.

    Args:
        groups, entries_of_groups: of the optimizer.
        saved_groups: of the checkpoint.
        states: by the ids in ``params`` of the saved groups; changed.
        wide: says which replicas divide state.
    """
    for group, entries, saved in zip(groups, entries_of_groups, saved_groups):
        for index, (param, saved_id) in enumerate(zip(group.params, saved.params)):
            own = states.get(saved_id, {})
            layouts = layouts_of(param, entries[index] if entries else None, wide)
            for key, (shape, layout) in layouts.items():
                value = own.get(key)
                if isinstance(value, dict) and not value and saved.beta2 is None:
                    del own[key]
                if layout is None or not isinstance(value, Tensor) or dtensors.is_dtensor(value):
                    continue
                is_whole = key == "second_momentum_buffer" or not dtensors.is_dtensor(param)
                if is_whole and value.shape == shape:
                    own[key] = dtensors.divide(value, layout)


def check_checkpoint(
    groups: Sequence[Group],
    entries_of_groups: Sequence[Sequence[Entry]],
    saved_groups: Sequence[Group],
    saved_state: Mapping[Any, Any],
    state: Mapping[Any, Any],
    wide: OptimizerWide,
) -> None:
    """Whether a checkpoint fits the optimizer, as far as torch does not look itself.

    Args:
        groups, entries_of_groups: of the optimizer.
        saved_groups: views of the checkpoint's.
        saved_state: by the ids in ``params`` of the saved groups.
        state: of the optimizer, by parameter.
        wide: says which replicas divide state.
    """
    for number, (group, entries, saved) in enumerate(zip(groups, entries_of_groups, saved_groups)):
        where = f"param_groups[{number}]"
        options.validate(saved, f"{where} of the checkpoint")
        if saved.use_muon != group.use_muon:
            raise ValueError(
                f"{where} has use_muon={group.use_muon} but the checkpoint's has "
                f"{saved.use_muon}: give the groups in the order they were saved in"
            )
        if len(saved.params) != len(group.params):
            raise ValueError(
                f"{where} has {len(group.params)} parameters where the checkpoint's has "
                f"{len(saved.params)}, a group of another size; is it of the same "
                "model, with the same groups?"
            )
        for index, (param, saved_id) in enumerate(zip(group.params, saved.params)):
            expected = layouts_of(param, entries[index] if entries else None, wide)
            name = validation.name_of(group, index, where)
            own = saved_state.get(saved_id, {})
            _check_algorithm(own, group.use_muon, name)
            if saved.beta2 is not None:
                _check_second_moment(own, state.get(param, {}), saved.beta2, name)
            validation.check_tensors(own, expected, "checkpoint", name, param)
            _check_parts(own, expected, name)


def _check_parts(saved: Mapping[str, Any], expected: Mapping[str, tuple], name: str) -> None:
    """What is around a part of another size says nothing of it, and kernels would trust that."""
    for key, (shape, layout) in expected.items():
        if layout is None or saved.get(key) is None:
            continue
        found, needed = dtensors.local(saved[key]).shape, dtensors.part_shape(shape, layout)
        if found != needed:
            raise ValueError(
                f"of {key} of {name} in the checkpoint this rank holds {tuple(found)}, where it "
                f"should be {tuple(needed)}"
            )


def _check_algorithm(saved: Mapping[str, Any], use_muon: bool, name: str) -> None:
    """State of the other algorithm would be carried along, and this one's begin at zero unseen."""
    other = "exp_avg" if use_muon else "momentum_buffer"
    if saved.get(other) is not None:
        mine, its = ("Muon's", "AdamW's") if use_muon else ("AdamW's", "Muon's")
        raise ValueError(
            f"{name} is {mine} here (use_muon={use_muon}) but has {other} in the checkpoint, as "
            f"{its} parameters do; give it to the group it was in, or take its state out. If "
            "another optimizer wrote the checkpoint, use load_foreign_state_dict"
        )


def _check_second_moment(
    saved: Mapping[str, Any], live: Mapping[str, Any], beta2: float, name: str
) -> None:
    """torch.distributed.checkpoint takes of files, and of flattened state dicts, only what is live:
    the second moments of an optimizer without would begin at zero unseen."""
    lack_it = (
        own.get("momentum_buffer") is not None and own.get("second_momentum_buffer") is None
        for own in (saved, live)
    )
    if all(lack_it):
        raise ValueError(
            f"the checkpoint has beta2={beta2}, but its second moment of {name} has not been read, "
            f"since this optimizer has none: construct it with beta2={beta2}"
        )


def check_apart(states: Mapping[Any, Any], live: Mapping[Any, Any]) -> None:
    """None of a checkpoint's tensors is the live state, which steps have changed since.

    Raises:
        ValueError: one is.
    """
    used = {_storage(t) for own in live.values() for t in _tensors(own)}
    if any(_storage(t) in used for own in states.values() for t in _tensors(own)):
        raise ValueError(
            "the checkpoint's tensors are those of this optimizer, which a step that broke off has "
            "changed: load the file again"
        )


def _tensors(own: Any) -> list[Tensor]:
    values = own.values() if isinstance(own, Mapping) else ()
    return [dtensors.local(t) for t in values if isinstance(t, Tensor) and t.numel()]


def _storage(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def without_tensors(states: Mapping[Any, Any], saved_groups: Sequence[RawGroup]) -> dict[Any, Any]:
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
    groups: Sequence[RawGroup],
    state: MutableMapping[Any, dict[str, Any]],
    saved_groups: Sequence[RawGroup],
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
    taken: set[int] = set()  # where tensors begin that are used as they are
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
                    dtype = value.dtype if key in OWN_DTYPE else param.dtype
                    home = home_of(param, group["use_muon"])
                    state[param][key] = place(_with_own_memory(value, taken), dtype, home)


def _with_own_memory(value: Tensor, taken: set[int]) -> Tensor:
    """A copy where its elements, or another tensor, may share memory with it."""
    held = dtensors.local(value)
    if held.numel() and (held.data_ptr() in taken or not is_dense(held)):
        return value.clone()
    taken.add(held.data_ptr())
    return value
