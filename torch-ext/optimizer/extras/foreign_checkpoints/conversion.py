"""What was found in a checkpoint as a state dict of `Muon`: conventions, layouts, groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Callable, Optional

import torch
from torch import Tensor

from ...distributed import utils as dtensors
from ...distributed.plan import Entry
from ...parameters.options import GROUP_OPTIONS, Group, Settings
from ...parameters.validation import warn
from ...state.specs import expected_state
from . import nanochat, owned
from .hyperparameters import ADAMW, FROM_ADAMW, MUON
from .matching import Found, Options, Ours, Target, ours_of
from .per_parameter import (
    ADAMW_KEYS,
    all_in_one,
    each_alone,
    read_moonlight,
    read_motif,
    read_torch,
)
from .reading import Section, read_sections

_Source = tuple[
    Callable[[Section, Ours], "list[Found]"], Callable[[Sequence[Group]], "list[list[int]]"]
]

_SOURCES: dict[str, _Source] = {
    "torch_muon": (read_torch, each_alone),
    "torch_adamw": (read_torch, each_alone),
    "motif": (read_motif, each_alone),
    "llamafactory": (read_moonlight, all_in_one),
    "nanochat": (nanochat.read, each_alone),
    "keller_jordan": (owned.read, owned.bundles),
}


def to_state_dict(
    states: Any,
    kind: str,
    params: Optional[Iterable[Any]],
    hyperparameters: bool,
    *,
    own_groups: Sequence[Options],
    groups: Sequence[Group],
    names: Sequence[Sequence[str]],
    entries: Sequence[Sequence[Optional[Entry]]],
    settings: Settings,
) -> dict[str, Any]:
    """What `Muon.load_state_dict` takes; reads, and shares no memory with, ``states``.

    Args:
        states, kind, params, hyperparameters: see `Muon.load_foreign_state_dict`.
        own_groups: ``param_groups`` of the optimizer.
        groups: the same as the package reads them.
        names: what messages call the parameters of each group.
        entries: of each group, its parameters as a plan sees them; None for AdamW's.
        settings: says which replicas divide state.

    Raises:
        ValueError: whatever does not fit.
    """
    sections, anew = read_sections(states, kind)
    read, bundles = _SOURCES[kind]
    ours = ours_of(groups, names, params, bundles)
    every = [found for section in sections for found in read(section, ours)]
    _warn_of_amsgrad(sections)
    by_place = _check(every, ours, kind)
    _check_complete(by_place, ours, groups, sections, anew)

    state: dict[int, dict[str, Any]] = {}
    saved_groups: list[dict[str, Any]] = []
    first = 0
    for number, (own, group) in enumerate(zip(own_groups, groups)):
        of_group = {i: by_place[number, i] for n, i in by_place if n == number}
        options = _options_of_group(of_group.values(), group) if hyperparameters else {}
        brought = {key: value for key, value in options.items() if key in GROUP_OPTIONS}
        merged = dataclasses.replace(group, **brought)
        saved = {key: value for key, value in own.items() if key not in ("params", "names")}
        ids = list(range(first, first + len(group.params)))
        first += len(ids)
        saved_groups.append({**saved, **_under_own_keys(options, own), "params": ids})
        for index, found in of_group.items():
            param = group.params[index]
            layouts = expected_state(param, entries[number][index], settings)
            converted = _convert(found, merged, layouts)
            if converted:
                state[ids[index]] = converted
    return {"state": state, "param_groups": saved_groups}


def _check(every: Sequence[Found], ours: Ours, kind: str) -> dict[tuple[int, int], Found]:
    """By place; each parameter once, as what it was."""
    by_place: dict[tuple[int, int], Found] = {}
    for found in every:
        target = found.target
        if target.place is None:
            if found.state:
                raise ValueError(
                    f"{target.name}, {found.where}, has state, but is in no group of this "
                    "optimizer: add it, or take it out of the state dict"
                )
            continue
        if target.place in by_place:
            raise ValueError(f"{target.name} is twice in the checkpoint")
        if found.is_muon != target.use_muon and not (kind == "torch_adamw" and target.use_muon):
            was, remedy = ("Muon", True) if found.is_muon else ("AdamW", False)
            raise ValueError(
                f"{target.name} was {was}'s, {found.where}: put it into a group with "
                f"use_muon={remedy}, or give the parameters in the order of the other optimizer"
            )
        by_place[target.place] = found
    return by_place


def _check_complete(
    by_place: Mapping[tuple[int, int], Found],
    ours: Ours,
    groups: Sequence[Group],
    sections: Sequence[Section],
    anew: Sequence[bool],
) -> None:
    """Every trainable parameter has been found, unless it is to start anew."""
    missing: list[Target] = []
    for group, targets in zip(groups, ours.groups):
        for param, target in zip(group.params, targets):
            if param.requires_grad and target.use_muon not in anew:
                missing += [target] if target.place not in by_place else []
    if not missing:
        return
    name, use_muon = missing[0].name, missing[0].use_muon
    if any(section.use_muon in (None, use_muon) for section in sections):
        raise ValueError(
            f"{name} is not in the checkpoint, nor are {len(missing) - 1} others: all trainable "
            "parameters of this optimizer have to be"
        )
    muon, adamw = ("None", "…") if use_muon else ("…", "None")
    raise ValueError(
        f"states has nothing for {name}, which is {'Muon' if use_muon else 'AdamW'}'s here: give "
        "{'muon': …, 'adamw': …}, the state dicts of both optimizers, or "
        f"{{'muon': {muon}, 'adamw': {adamw}}} to have its like start anew"
    )


def _warn_of_amsgrad(sections: Sequence[Section]) -> None:
    for section in sections:
        if any(saved.options.get("amsgrad") is True for saved in section.groups):
            warn(
                f"{section.where} was saved with amsgrad=True, which there is not here: "
                "max_exp_avg_sq is not taken over"
            )
            return


def _options_of_group(every: Iterable[Found], group: Group) -> dict[str, Any]:
    """Hyperparameters that the parameters of a group had.

    Raises:
        ValueError: they had different ones.
    """
    brought: dict[str, Any] = {}
    origin: dict[str, Found] = {}
    for found in every:
        keys: Sequence[str] = MUON if group.use_muon else ADAMW
        if group.use_muon and not found.is_muon:  # rates of AdamW fit with its scale alone
            keys = FROM_ADAMW if group.adjust_lr == "match_rms_adamw" else ()
        for key in keys:
            if key not in found.options or (key == "beta2" and group.beta2 is None):
                continue
            value = found.options[key]
            if key == "beta2" and value is None:
                value = 0.0  # as nanochat means it
            if key in brought and not _is_same(brought[key], value):
                raise ValueError(
                    f"{key} is {brought[key]} for {origin[key].target.name} in the checkpoint, but "
                    f"{value} for {found.target.name}, which are in one group here: give them to "
                    "groups of their own, or hyperparameters=False, which keeps those of the "
                    "groups as they are"
                )
            brought[key] = value
            origin.setdefault(key, found)
    return brought


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return float(one) == float(other)
    return bool(one == other)


def _under_own_keys(options: Options, own: Options) -> dict[str, Any]:
    """As the group calls them: nanochat's have ``betas`` and ``eps``."""
    renamed = {"adamw_betas": "betas", "adamw_eps": "eps"} if "betas" in own else {}
    return {renamed.get(key, key): value for key, value in options.items()}


def _convert(
    found: Found, group: Group, layouts: Mapping[str, tuple[torch.Size, Optional[tuple]]]
) -> dict[str, Any]:
    """The state of one parameter, of which this rank has its part.

    Args:
        found: of the parameter.
        group: the parameter's, as it is going to be.
        layouts: shape and layout of each tensor.
    """
    if not found.target.use_muon:
        return _adamw_state(found, layouts)
    state = {}
    momentum = found.state.get("momentum_buffer" if found.is_muon else "exp_avg")
    if momentum is not None:
        state["momentum_buffer"] = _part(momentum, "momentum_buffer", found, layouts)
        factor = _momentum_factor(found, group)
        if factor != 1.0:
            dtensors.local(state["momentum_buffer"]).mul_(factor)
    second = found.state.get("second_momentum_buffer")
    if second is not None and group.beta2 is not None:
        key = "second_momentum_buffer"
        second = _flat_second_moment(second, found, layouts[key][0])
        state[key] = _part(second, key, found, layouts)
    return state


def _momentum_factor(found: Found, group: Group) -> float:
    """From one convention to the other: with constant μ, averaged momentum is 1 − μ of summed."""
    style = group.momentum_style
    if found.style == style:
        return 1.0
    if style == "ema":
        return 1.0 - found.options.get("momentum", group.momentum)
    return 1.0 / (1.0 - group.momentum)


def _flat_second_moment(value: Tensor, found: Found, shape: torch.Size) -> Tensor:
    """nanochat's (…, rows, 1) or (…, 1, cols) as (…, longer side), in fp32."""
    assert found.target.shape is not None
    *experts, rows, cols = found.target.shape
    expected = (*experts, rows, 1) if rows >= cols else (*experts, 1, cols)
    if tuple(value.shape) == expected and value.numel() == shape.numel():
        value = value.reshape(shape)
    return value.float()


def _adamw_state(
    found: Found, layouts: Mapping[str, tuple[torch.Size, Optional[tuple]]]
) -> dict[str, Any]:
    if not found.state:
        return {}
    absent = [key for key in ADAMW_KEYS if key not in found.state]
    if absent:
        raise ValueError(
            f"{found.target.name}, {found.where}, has no {' and no '.join(absent)}: is it AdamW's?"
        )
    step = torch.tensor(float(found.state["step"]), dtype=torch.float32, device="cpu")
    moments = {key: _part(found.state[key], key, found, layouts) for key in ADAMW_KEYS[1:]}
    return {"step": step, **moments}


def _part(
    value: Tensor,
    key: str,
    found: Found,
    layouts: Mapping[str, tuple[torch.Size, Optional[tuple]]],
) -> Tensor:
    """This rank's part of a whole tensor, copied, without traffic.

    Raises:
        ValueError: it has another shape, or is divided otherwise.
    """
    shape, layout = layouts[key]
    name = found.target.name
    if value.shape != shape:
        raise ValueError(
            f"{key} of {name}, {found.where}, has shape {tuple(value.shape)}, where {tuple(shape)} "
            "is needed: give the parameters in the order of the other optimizer, whole tensors, "
            "and, where ranks have divided state, the state dicts of all ranks"
        )
    if dtensors.is_dtensor(value):
        if dtensors.mesh_placements_of(value) != layout:
            raise ValueError(
                f"{key} of {name}, {found.where}, is {dtensors.describe(value)}: give whole "
                "tensors, value.full_tensor() on all ranks"
            )
        return value.detach().clone()
    if layout is None:
        return value.detach().clone()
    return dtensors.shard_tensor(value, layout)
