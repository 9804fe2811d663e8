"""Converts the state of another optimizer's checkpoint to the form that `Muon` loads."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Callable, Optional

import torch
from torch import Tensor

from ...distributed import dtensors
from ...distributed.plan import Entry
from ...parameters.options import GROUP_OPTIONS, Group, Settings
from ...parameters.validation import warn
from ...state.specs import Spec, specs_of
from . import keller_jordan, nanochat, per_parameter
from .hyperparameters import ADAMW_OPTIONS, MUON_OPTIONS, MUON_OPTIONS_FROM_ADAMW, RENAMED
from .matching import SavedState, TargetParam, match_groups, targets_in_order, targets_of
from .sources import SourceOptimizer, read_sources

_READERS: dict[str, Callable[..., list[SavedState]]] = {
    "torch_muon": per_parameter.read_torch,
    "torch_adamw": per_parameter.read_torch,
    "motif": per_parameter.read_motif,
    "llamafactory": per_parameter.read_moonlight,
    "nanochat": nanochat.read,
    "keller_jordan": keller_jordan.read,
}


def to_state_dict(
    states: Any,
    kind: str,
    params: Optional[Iterable[Any]],
    hyperparameters: bool,
    *,
    param_groups: Sequence[Mapping[str, Any]],
    groups: Sequence[Group],
    names: Sequence[Sequence[str]],
    entries: Sequence[Sequence[Optional[Entry]]],
    settings: Settings,
) -> dict[str, Any]:
    """Returns a state dict for `Muon.load_state_dict`, which shares no memory with ``states``.

    Args:
        states, kind, params, hyperparameters: see `Muon.load_foreign_state_dict`.
        param_groups: the optimizer's groups.
        groups: views of these groups.
        names: names of each group's parameters in messages.
        entries: plan entries of each group's parameters; None for AdamW's.
        settings: the optimizer's settings, which say if replicas divide state.

    Raises:
        ValueError: something doesn't fit.
    """
    sources, omitted = read_sources(states, kind)
    of_groups = targets_of(groups, names)
    targets = list(itertools.chain.from_iterable(of_groups))
    ordered = None if params is None else targets_in_order(params, targets)
    as_in_source, match = of_groups, match_groups
    if kind == "llamafactory":  # which has one group
        as_in_source = [targets]
    elif kind == "keller_jordan":
        as_in_source = keller_jordan.merge_convolutions(groups, of_groups)
        match = keller_jordan.match
    saved_states: list[SavedState] = []
    for source in sources:
        saved_states += _READERS[kind](source, match(source, as_in_source, ordered))
    _warn_of_amsgrad(sources)
    by_target = _by_target(saved_states, kind)
    _check_complete(by_target, targets, sources, omitted)

    saved_style = "classical" if kind in ("motif", "llamafactory") else "ema"
    state: dict[int, dict[str, Any]] = {}
    new_groups: list[dict[str, Any]] = []
    new_ids = itertools.count()
    for param_group, group, of_group, of_entries in zip(param_groups, groups, of_groups, entries):
        ids = list(itertools.islice(new_ids, len(of_group)))
        saved_of_group = [by_target[target] for target in of_group if target in by_target]
        options = _group_options(saved_of_group, group) if hyperparameters else {}
        new_view = dataclasses.replace(
            group, **{key: value for key, value in options.items() if key in GROUP_OPTIONS}
        )
        kept = {key: value for key, value in param_group.items() if key not in ("params", "names")}
        own_keys = {option: key for key, option in RENAMED.items() if key in param_group}
        renamed = {own_keys.get(option, option): value for option, value in options.items()}
        new_groups.append({**kept, **renamed, "params": ids})
        for new_id, target, param, entry in zip(ids, of_group, group.params, of_entries):
            if target in by_target:
                specs = specs_of(param, entry, new_view, settings)
                state[new_id] = _convert(by_target[target], saved_style, new_view, specs)
    return {"state": {i: own for i, own in state.items() if own}, "param_groups": new_groups}


def _by_target(saved_states: Sequence[SavedState], kind: str) -> dict[TargetParam, SavedState]:
    """Saved states by parameter. Checks that Muon's and AdamW's parameters stay theirs."""
    by_target: dict[TargetParam, SavedState] = {}
    for saved in saved_states:
        target = saved.target
        if target.use_muon is None:
            if saved.state:
                raise ValueError(
                    f"{target.name}, {saved.where}, has state, but is in no group of this "
                    "optimizer: add it to one, or remove it from the state dict"
                )
            continue
        if target in by_target:
            raise ValueError(f"{target.name} is in the checkpoint twice")
        if saved.is_muon != target.use_muon and not (kind == "torch_adamw" and target.use_muon):
            was, remedy = ("Muon", True) if saved.is_muon else ("AdamW", False)
            raise ValueError(
                f"{target.name} was {was}'s, {saved.where}: put it into a group with "
                f"use_muon={remedy}, or pass the parameters in the other optimizer's order"
            )
        by_target[target] = saved
    return by_target


def _check_complete(
    by_target: Mapping[TargetParam, SavedState],
    targets: Sequence[TargetParam],
    sources: Sequence[SourceOptimizer],
    omitted: Sequence[bool],
) -> None:
    """Checks that each trainable parameter has saved state, except those whose ``use_muon`` is in
    ``omitted``: their state starts at zero."""
    missing = [
        target
        for target in targets
        if target.param is not None
        and target.param.requires_grad
        and target.use_muon not in omitted
        and target not in by_target
    ]
    if not missing:
        return
    name, use_muon = missing[0].name, missing[0].use_muon
    if any(source.use_muon in (None, use_muon) for source in sources):
        raise ValueError(
            f"{name} and {len(missing) - 1} others are not in the checkpoint: all trainable "
            "parameters of this optimizer must be"
        )
    muon, adamw = ("None", "…") if use_muon else ("…", "None")
    raise ValueError(
        f"states has nothing for {name}, which is {'Muon' if use_muon else 'AdamW'}'s here: pass "
        "{'muon': …, 'adamw': …}, the state dicts of both optimizers, or "
        f"{{'muon': {muon}, 'adamw': {adamw}}} to start these parameters from zeros"
    )


def _warn_of_amsgrad(sources: Sequence[SourceOptimizer]) -> None:
    for source in sources:
        if any(group.options.get("amsgrad") is True for group in source.groups):
            warn(
                f"{source.where} was saved with amsgrad=True, which Muon does not have: "
                "max_exp_avg_sq is not loaded"
            )
            return


def _group_options(saved_states: Iterable[SavedState], group: Group) -> dict[str, Any]:
    """The hyperparameters with which the source trained the parameters of a group.

    Raises:
        ValueError: the source trained them with different hyperparameters.
    """
    options: dict[str, Any] = {}
    origin: dict[str, SavedState] = {}  # of each option
    for saved in saved_states:
        keys: Sequence[str] = MUON_OPTIONS if group.use_muon else ADAMW_OPTIONS
        if group.use_muon and not saved.is_muon:  # AdamW's rates fit its scale only
            keys = MUON_OPTIONS_FROM_ADAMW if group.adjust_lr in ("match_rms_adamw", 0.2) else ()
        for key in keys:
            if key not in saved.options or (key == "beta2" and group.beta2 is None):
                continue
            value = saved.options[key]
            if key == "beta2" and value is None:
                value = 0.0  # its meaning in nanochat
            if key in options and not _is_same(options[key], value):
                raise ValueError(
                    f"{key} is {options[key]} for {origin[key].target.name} in the checkpoint, but "
                    f"{value} for {saved.target.name}, which are in one group here: put them "
                    "into separate groups, or keep the hyperparameters of the groups with "
                    "hyperparameters=False"
                )
            options[key] = value
            origin.setdefault(key, saved)
    return options


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) or isinstance(other, Tensor):
        return float(value) == float(other)
    return bool(value == other)


def _convert(
    saved: SavedState, saved_style: str, group: Group, specs: Mapping[str, Spec]
) -> dict[str, Any]:
    """This rank's part of the state of one parameter.

    Args:
        saved: the parameter's saved state.
        saved_style: the source's ``momentum_style``.
        group: the parameter's group, with its new hyperparameters.
        specs: shape and layout of each tensor.
    """
    if not saved.target.use_muon:
        return _adamw_state(saved, specs)
    state = {}
    momentum = saved.state.get("momentum_buffer" if saved.is_muon else "exp_avg")
    if momentum is not None:
        state["momentum_buffer"] = _part(momentum, "momentum_buffer", saved, specs)
        factor = _momentum_factor(saved, saved_style, group)
        if factor != 1.0:
            dtensors.local(state["momentum_buffer"]).mul_(factor)
    key = "second_momentum_buffer"
    second_moment = saved.state.get(key)
    if second_moment is not None and group.beta2 is not None:
        second_moment = _flat_second_moment(second_moment, saved, specs[key].shape)
        state[key] = _part(second_moment, key, saved, specs)
    return state


def _momentum_factor(saved: SavedState, saved_style: str, group: Group) -> float:
    """Factor of the momentum: with constant μ, averaged momentum is 1 − μ times summed momentum."""
    if saved_style == group.momentum_style:
        return 1.0
    if group.momentum_style == "ema":
        return 1.0 - saved.options.get("momentum", group.momentum)
    return 1.0 / (1.0 - group.momentum)


def _flat_second_moment(value: Tensor, saved: SavedState, shape: torch.Size) -> Tensor:
    """Converts nanochat's (…, rows, 1) or (…, 1, cols) to (…, longer side), in fp32."""
    assert saved.target.shape is not None
    *experts, rows, cols = saved.target.shape
    saved_shape = (*experts, rows, 1) if rows >= cols else (*experts, 1, cols)
    if tuple(value.shape) == saved_shape and value.numel() == shape.numel():
        value = value.reshape(shape)
    return value.float()


def _adamw_state(saved: SavedState, specs: Mapping[str, Spec]) -> dict[str, Any]:
    if not saved.state:
        return {}
    absent = [key for key in per_parameter.ADAMW_KEYS if key not in saved.state]
    if absent:
        raise ValueError(
            f"{saved.target.name}, {saved.where}, has no {' and no '.join(absent)}: is it AdamW's?"
        )
    step = torch.tensor(float(saved.state["step"]), dtype=torch.float32, device="cpu")
    moments = ("exp_avg", "exp_avg_sq")
    return {"step": step, **{key: _part(saved.state[key], key, saved, specs) for key in moments}}


def _part(value: Tensor, key: str, saved: SavedState, specs: Mapping[str, Spec]) -> Tensor:
    """Copies this rank's part of a whole tensor, without communication.

    Raises:
        ValueError: the tensor has another shape or is sharded differently.
    """
    shape, layout, _ = specs[key]
    name = f"{key} of {saved.target.name}, {saved.where}"
    if value.shape != shape:
        raise ValueError(
            f"{name}, has shape {tuple(value.shape)}, not {tuple(shape)}: pass the parameters in "
            "the order of the other optimizer, whole tensors, and, if ranks divided state, the "
            "state dicts of all ranks"
        )
    if dtensors.is_dtensor(value):
        if not dtensors.is_placed(value, layout):
            raise ValueError(
                f"{name}, is {dtensors.describe(value)}: pass whole tensors, value.full_tensor() "
                "on all ranks"
            )
        return value.detach().clone()
    if layout is None:
        return value.detach().clone()
    return dtensors.shard_tensor(value, layout)
