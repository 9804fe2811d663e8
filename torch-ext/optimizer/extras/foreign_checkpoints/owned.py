"""Keller Jordan's Muons, and nanochat's before its optimizers became one: momentum with owners.

Each rank holds the momentum of the parameters that it updates: of a group those at positions
rank, rank + world size, … AdamW's state, where there is any, is the same on all ranks. Orders:

- ``Muon``, ``MuonWithAuxAdam``: parameters of a group by size, largest first, equal ones in order.
- ``SingleDeviceMuon``, ``SingleDeviceMuonWithAuxAdam``: as given.
- Earlier, and nanochat's ``Muon``, ``DistMuon``: a group for each number of elements, or for each
  shape, of the parameters as given.
- The first: one group, summed momentum, flattened to two dimensions, ``use_muon`` in the state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Optional

from torch import Tensor

from ...parameters.options import Group
from .hyperparameters import SCHEDULED, adamw_options, muon_options
from .matching import Found, Options, Ours, Shape, Target, arrange, check_names, cut, place_of
from .per_parameter import one, positions, use_muon_of
from .reading import Checkpoint, SavedGroup, Section


def bundles(groups: Sequence[Group]) -> list[list[int]]:
    """`presets.keller_jordan` puts convolutions into a group behind that of their matrices."""
    found: list[list[int]] = []
    for number, group in enumerate(groups):
        is_convolutions = (
            group.use_muon
            and group.adjust_lr == "none"
            and len(group.params) > 0
            and all(param.ndim == 4 for param in group.params)
        )
        if is_convolutions and number > 0 and groups[number - 1].use_muon:
            found[-1].append(number)
        else:
            found.append([number])
    return found


def read(section: Section, ours: Ours) -> list[Found]:
    """Keller Jordan's, of any time; a section of AdamW is torch's, or the same on all ranks."""
    if any("adamw_lr_ratio" in group.options for group in section.groups):
        return _read_first(section, ours)
    if is_grouped_by_size(section):
        return owned(section, regroup(section, ours))
    arranged = []
    for saved, targets in zip(section.groups, arrange(section, ours)):
        if saved.options.get("use_muon", section.use_muon):
            targets = _as_saved(section, saved, targets)
        arranged.append(targets)
    check_names(section, arranged)
    return owned(section, arranged)


def is_grouped_by_size(section: Section) -> bool:
    """Whether the optimizer has made the groups, by the sizes of its parameters."""
    return section.use_muon is True and any(
        key in group.options for group in section.groups for key in ("update_buffer", "ns_steps")
    )


def owned(section: Section, arranged: Sequence[Sequence[Target]]) -> list[Found]:
    """The momentum of each parameter from its owner.

    Raises:
        ValueError: an owner does not have it.
    """
    found = []
    for saved, index, target in positions(section, arranged):
        if not saved.options.get("use_muon", section.use_muon):
            found.append(_replicated(section, saved, index, target, adamw_options(saved.options)))
            continue
        rank = _owner(section, saved, index, index)
        options = muon_options(saved.options)
        found.append(one(section, saved, index, target, True, "ema", options, rank))
    return found


def _owner(section: Section, saved: SavedGroup, index: int, number: int) -> int:
    """Which rank has the momentum of a parameter, the ``number``-th that ranks take turns at."""
    world = len(section.ranks)
    have = [r for r, rank in enumerate(section.ranks) if _has_momentum(rank, saved.ids[index])]
    buffer = saved.options.get("update_buffer")
    saved_world = buffer.shape[0] if isinstance(buffer, Tensor) and buffer.ndim == 2 else world
    if saved_world != world or (have != [number % world] and not section.is_fresh):
        raise ValueError(
            f"the momentum of {place_of(saved, index, section)} should be in the state dict of "
            f"rank {number % world} of {world} alone, but is in those of {have or 'none'}: give "
            "the state dicts of all ranks, in their order; each holds what its rank has updated"
        )
    return number % world


def _has_momentum(rank: Checkpoint, saved_id: Any) -> bool:
    return rank.state.get(saved_id, {}).get("momentum_buffer") is not None


def _replicated(
    section: Section, saved: SavedGroup, index: int, target: Target, options: Options
) -> Found:
    """AdamW's state of one parameter, which all ranks have alike.

    Raises:
        ValueError: they do not.
    """
    steps = {
        None if step is None else float(step)
        for step in (rank.state.get(saved.ids[index], {}).get("step") for rank in section.ranks)
    }
    if len(steps) > 1:
        raise ValueError(
            f"{place_of(saved, index, section)} has been stepped {steps} times on different ranks: "
            "give the state dicts of one checkpoint"
        )
    return one(section, saved, index, target, False, "ema", options)


def _as_saved(section: Section, saved: SavedGroup, targets: Sequence[Target]) -> list[Target]:
    """The parameters of a group in the order that its shapes tell: as given, or sorted by size.

    What a preset gave a group of its own comes between the others where its dimensions do.
    """
    if section.is_fresh:
        return list(targets)
    shapes = [_shape(section, saved_id) for saved_id in saved.ids]
    sorted_by_size = sorted(targets, key=lambda target: target.shape or (), reverse=True)
    kernels = iter([target for target in targets if _is_4d(target.shape)])
    matrices = iter([target for target in targets if not _is_4d(target.shape)])
    merged = [next(kernels if _is_4d(shape) else matrices, None) for shape in shapes]
    for order in (list(targets), merged, sorted_by_size):
        if all(t is not None and s in (None, t.shape) for t, s in zip(order, shapes)):
            return [t for t in order if t is not None]
    index = next(i for i, (t, s) in enumerate(zip(targets, shapes)) if s not in (None, t.shape))
    raise ValueError(
        f"{place_of(saved, index, section)} has a momentum_buffer of shape {shapes[index]}, where "
        f"{targets[index].name} has {targets[index].shape}, and by size, which is how "
        f"MuonWithAuxAdam sorts, {sorted_by_size[index].name} has {sorted_by_size[index].shape}: "
        "give the parameters in the order in which the other optimizer was given them"
    )


def _is_4d(shape: Optional[Shape]) -> bool:
    return shape is not None and len(shape) == 4


def _shape(section: Section, saved_id: Any) -> Optional[Shape]:
    """Of the momentum of one parameter, whichever rank has it."""
    for rank in section.ranks:
        buffer = rank.state.get(saved_id, {}).get("momentum_buffer")
        if isinstance(buffer, Tensor):
            return tuple(buffer.shape)
    return None


def regroup(section: Section, ours: Ours) -> list[list[Target]]:
    """The parameters by number of elements, or by shape, in the order in which they were given.

    Raises:
        ValueError: there are others.
    """
    flat = ours.flat(section.use_muon)
    if section.is_fresh:
        return cut(flat, [len(group.ids) for group in section.groups], section)
    arranged: list[list[Target]] = []
    for number, saved in enumerate(section.groups):
        shape, numel = _size_of(section, saved)
        by_numel = [target for target in flat if target.numel == numel]
        by_shape = [target for target in flat if target.shape == shape]
        chosen = by_numel if len(by_numel) == len(saved.ids) else by_shape
        if len(chosen) != len(saved.ids):
            raise ValueError(
                f"group {number} of {section.where} has {len(saved.ids)} parameters of "
                f"{numel} elements, where this optimizer has {len(by_numel)}: give the same ones, "
                "or params=, the parameters in the order in which the other optimizer was given "
                "them"
            )
        arranged.append(chosen)
    if sum(map(len, arranged)) != len(flat):
        known = {target for group in arranged for target in group}
        name = next(target.name for target in flat if target not in known)
        raise ValueError(f"{section.where} has no parameter of the size of {name}")
    check_names(section, arranged)
    return arranged


def _size_of(section: Section, saved: SavedGroup) -> tuple[Optional[Shape], int]:
    """Shape and number of elements of the parameters of a group that one size has made.

    A momentum of one dimension more is a stack of all.
    """
    update, zero = saved.options.get("update_buffer"), saved.options.get("zero_buffer")
    if isinstance(zero, Tensor):
        return tuple(zero.shape), zero.numel()
    shapes = [shape for shape in (_shape(section, i) for i in saved.ids) if shape is not None]
    shape = shapes[0] if shapes else None
    if shape is not None and is_stack(section, saved):
        shape = shape[1:]
    if isinstance(update, Tensor) and update.ndim == 2:
        return shape, update.shape[1]
    return shape, math.prod(shape) if shape is not None else -1


def is_stack(section: Section, saved: SavedGroup) -> bool:
    """Whether the first parameter of a group has the momentum of all: it has the second moment."""
    return any(
        "second_momentum_buffer" in rank.state.get(saved.ids[0], {}) for rank in section.ranks
    )


def _read_first(section: Section, ours: Ours) -> list[Found]:
    """One group of everything; Muon's parameters take turns among themselves."""
    ours = Ours(ours.groups, [range(len(ours.groups))], ours.given)
    found, turn = [], 0
    for number, saved in enumerate(section.groups):
        for key in ("lr", "adamw_lr_ratio", "adamw_wd"):
            if key not in saved.options:
                raise ValueError(f"group {number} of {section.where} has no {key}")
    for saved, index, target in positions(section, arrange(section, ours)):
        own = saved.options
        if not use_muon_of(section, saved, index):
            ratio = own["adamw_lr_ratio"]
            rates = {k: own[k] * ratio for k in ("lr", *SCHEDULED[:3]) if k in own}
            adamw = {**own, **rates, "weight_decay": own["adamw_wd"]}
            options = adamw_options(adamw, prefix="adamw_")
            found.append(_replicated(section, saved, index, target, options))
            continue
        rank = _owner(section, saved, index, turn)
        turn += 1
        buffer = section.ranks[rank].state[saved.ids[index]].get("momentum_buffer")
        if isinstance(buffer, Tensor) and target.shape is not None and buffer.ndim == 2:
            rows = target.shape[:1]
            if buffer.shape[:1] == rows and buffer.numel() == target.numel:
                buffer = buffer.reshape(target.shape)
        state = {} if buffer is None else {"momentum_buffer": buffer}
        where = f"{place_of(saved, index, section)} of {section.ranks[rank].where}"
        found.append(Found(target, where, True, "classical", state, muon_options(own)))
    return found
