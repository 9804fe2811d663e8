"""Reads Keller Jordan's checkpoints: each rank saves the momentum of what it updates.

So did nanochat's before its optimizers became one. A rank updates the parameters of a group at
positions rank, rank + world size, … AdamW's state, where there is any, is the same on all ranks.
The order of a group:

- ``Muon``, ``MuonWithAuxAdam``: parameters by size, largest first, equal ones in order.
- ``SingleDeviceMuon``, ``SingleDeviceMuonWithAuxAdam``: as given.
- Earlier, and nanochat's ``Muon``, ``DistMuon``: a group for each number of elements, or for each
  shape, of the parameters as given.
- The first: one group, summed momentum, flattened to two dimensions, ``use_muon`` in the state.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from torch import Tensor

from ...parameters.options import Group
from . import matching
from .hyperparameters import SCHEDULED, convert_options
from .matching import SavedState, Shape, TargetOptimizer, TargetParam
from .per_parameter import read_param, saved_params, saved_use_muon
from .sources import SavedGroup, SourceOptimizer


def merge_convolutions(groups: Sequence[Group]) -> list[list[int]]:
    """`presets.keller_jordan` puts convolutions into a group after that of their matrices."""
    source_groups: list[list[int]] = []
    for number, group in enumerate(groups):
        is_convolutions = (
            group.use_muon
            and group.adjust_lr == "none"
            and len(group.params) > 0
            and all(param.ndim == 4 for param in group.params)
        )
        if is_convolutions and number > 0 and groups[number - 1].use_muon:
            source_groups[-1].append(number)
        else:
            source_groups.append([number])
    return source_groups


def read(source: SourceOptimizer, optimizer: TargetOptimizer) -> list[SavedState]:
    """Reads Keller Jordan's, of any time; AdamW beside it is torch's, or the same on all ranks."""
    if any("adamw_lr_ratio" in group.options for group in source.groups):
        return _read_first_version(source, optimizer)
    if is_grouped_by_size(source):
        return read_matched(source, group_by_size(source, optimizer))
    matched = []
    for group, targets in zip(source.groups, matching.match_groups(source, optimizer)):
        if group.options.get("use_muon", source.use_muon):
            targets = _in_saved_order(source, group, targets)
        matched.append(targets)
    matching.check_names(source, matched)
    return read_matched(source, matched)


def is_grouped_by_size(source: SourceOptimizer) -> bool:
    """Whether the optimizer has made the groups, by the sizes of its parameters."""
    return source.use_muon is True and any(
        key in group.options for group in source.groups for key in ("update_buffer", "ns_steps")
    )


def read_matched(
    source: SourceOptimizer, matched: Sequence[Sequence[TargetParam]]
) -> list[SavedState]:
    """The momentum of each parameter from the rank that updates it, AdamW's state from the first.

    Raises:
        ValueError: that rank does not have the momentum.
    """
    saved_states = []
    for group, index, target in saved_params(source, matched):
        is_muon = bool(group.options.get("use_muon", source.use_muon))
        options = convert_options(group.options, is_muon)
        if is_muon:
            rank = _updating_rank(source, group, index, index)
            saved = read_param(source, group, index, target, True, "ema", options, rank)
        else:
            saved = _read_replicated(source, group, index, target, options)
        saved_states.append(saved)
    return saved_states


def _updating_rank(source: SourceOptimizer, group: SavedGroup, index: int, turn: int) -> int:
    """The rank that has the momentum of a parameter, the ``turn``-th that ranks take in turns."""
    world, saved_id = len(source.ranks), group.ids[index]
    momenta = [rank.param_state(saved_id).get("momentum_buffer") for rank in source.ranks]
    ranks = [rank for rank, momentum in enumerate(momenta) if momentum is not None]
    buffer = group.options.get("update_buffer")
    saved_world = buffer.shape[0] if isinstance(buffer, Tensor) and buffer.ndim == 2 else world
    if saved_world != world or (ranks != [turn % world] and not source.is_fresh):
        raise ValueError(
            f"the momentum of {source.label(group, index)} should be in the state dict of "
            f"rank {turn % world} of {world} alone, but is in those of {ranks or 'none'}: give "
            "the state dicts of all ranks, in their order; each holds what its rank has updated"
        )
    return turn % world


def _read_replicated(
    source: SourceOptimizer,
    group: SavedGroup,
    index: int,
    target: TargetParam,
    options: Mapping[str, Any],
) -> SavedState:
    """AdamW's state of one parameter, which is the same on all ranks.

    Raises:
        ValueError: it is not.
    """
    counts = (rank.param_state(group.ids[index]).get("step") for rank in source.ranks)
    steps = {None if step is None else float(step) for step in counts}
    if len(steps) > 1:
        raise ValueError(
            f"{source.label(group, index)} has been stepped {steps} times on different ranks: "
            "give the state dicts of one checkpoint"
        )
    return read_param(source, group, index, target, False, "ema", options)


def _in_saved_order(
    source: SourceOptimizer, group: SavedGroup, targets: Sequence[TargetParam]
) -> list[TargetParam]:
    """The parameters of a group in the order that its shapes tell: as given, or sorted by size.

    Convolutions that a preset gave a group of their own come where four dimensions were saved.
    """
    if source.is_fresh:
        return list(targets)
    shapes = [_momentum_shape(source, saved_id) for saved_id in group.ids]
    by_size = sorted(targets, key=lambda target: target.shape or (), reverse=True)
    kernels = iter([target for target in targets if len(target.shape or ()) == 4])
    matrices = iter([target for target in targets if len(target.shape or ()) != 4])
    merged = [next(kernels if len(shape or ()) == 4 else matrices, None) for shape in shapes]
    for order in (list(targets), merged, by_size):
        if all(t is not None and s in (None, t.shape) for t, s in zip(order, shapes)):
            return [t for t in order if t is not None]
    index = next(i for i, (t, s) in enumerate(zip(targets, shapes)) if s not in (None, t.shape))
    raise ValueError(
        f"{source.label(group, index)} has a momentum_buffer of shape {shapes[index]}, where "
        f"{targets[index].name} has {targets[index].shape}, and by size, which is how "
        f"MuonWithAuxAdam sorts, {by_size[index].name} has {by_size[index].shape}: "
        "give the parameters in the order in which the other optimizer was given them"
    )


def _momentum_shape(source: SourceOptimizer, saved_id: Any) -> Optional[Shape]:
    """The shape of one parameter's momentum, whichever rank has it."""
    for rank in source.ranks:
        buffer = rank.param_state(saved_id).get("momentum_buffer")
        if isinstance(buffer, Tensor):
            return tuple(buffer.shape)
    return None


def group_by_size(source: SourceOptimizer, optimizer: TargetOptimizer) -> list[list[TargetParam]]:
    """The parameters by number of elements, or by shape, in the order in which they were given.

    Raises:
        ValueError: the checkpoint's groups have other sizes.
    """
    ordered = optimizer.ordered(source.use_muon)
    if source.is_fresh:
        return matching.cut(ordered, [len(group.ids) for group in source.groups], source)
    matched: list[list[TargetParam]] = []
    for number, group in enumerate(source.groups):
        shape, numel = _size_of(source, group)
        by_numel = [target for target in ordered if target.numel == numel]
        by_shape = [target for target in ordered if target.shape == shape]
        targets = by_numel if len(by_numel) == len(group.ids) else by_shape
        if len(targets) != len(group.ids):
            raise ValueError(
                f"group {number} of {source.where} has {len(group.ids)} parameters of "
                f"{numel} elements, where this optimizer has {len(by_numel)}: give the same ones, "
                "or params=, the parameters in the order in which the other optimizer was given "
                "them"
            )
        matched.append(targets)
    if sum(map(len, matched)) != len(ordered):
        in_groups = {target for group in matched for target in group}
        name = next(target.name for target in ordered if target not in in_groups)
        raise ValueError(f"{source.where} has no parameter of the size of {name}")
    matching.check_names(source, matched)
    return matched


def _size_of(source: SourceOptimizer, group: SavedGroup) -> tuple[Optional[Shape], int]:
    """Shape and number of elements of the parameters of a group, which have one size.

    If the group is a stack (`is_stack`), its momentum has one dimension more.
    """
    update, zero = group.options.get("update_buffer"), group.options.get("zero_buffer")
    if isinstance(zero, Tensor):
        return tuple(zero.shape), zero.numel()
    shapes = (_momentum_shape(source, saved_id) for saved_id in group.ids)
    shape = next((shape for shape in shapes if shape is not None), None)
    if shape is not None and is_stack(source, group):
        shape = shape[1:]
    if isinstance(update, Tensor) and update.ndim == 2:
        return shape, update.shape[1]
    return shape, math.prod(shape) if shape is not None else -1


def is_stack(source: SourceOptimizer, group: SavedGroup) -> bool:
    """Whether the first parameter of a group has the state of all: then it has second moments."""
    return any("second_momentum_buffer" in rank.param_state(group.ids[0]) for rank in source.ranks)


def _read_first_version(source: SourceOptimizer, optimizer: TargetOptimizer) -> list[SavedState]:
    """Reads one group of everything, in which ranks take turns at Muon's parameters alone."""
    optimizer = dataclasses.replace(optimizer, source_groups=[range(len(optimizer.groups))])
    for number, group in enumerate(source.groups):
        for key in ("lr", "adamw_lr_ratio", "adamw_wd"):
            if key not in group.options:
                raise ValueError(f"group {number} of {source.where} has no {key}")
    saved_states, turn = [], 0
    for group, index, target in saved_params(source, matching.match_groups(source, optimizer)):
        options = group.options
        if not saved_use_muon(source, group, index):
            ratio = options["adamw_lr_ratio"]
            rates = {k: options[k] * ratio for k in ("lr", *SCHEDULED[:3]) if k in options}
            options = {**options, **rates, "weight_decay": options["adamw_wd"]}
            options = convert_options(options, is_muon=False, prefix="adamw_")
            saved_states.append(_read_replicated(source, group, index, target, options))
            continue
        rank = _updating_rank(source, group, index, turn)
        turn += 1
        options = convert_options(options, is_muon=True)
        saved = read_param(source, group, index, target, True, "classical", options, rank)
        buffer = saved.state.get("momentum_buffer")
        if (
            isinstance(buffer, Tensor)
            and target.shape is not None
            and buffer.ndim == 2
            and buffer.shape[:1] == target.shape[:1]
            and buffer.numel() == target.numel
        ):
            buffer = buffer.reshape(target.shape)
            saved = dataclasses.replace(saved, state={"momentum_buffer": buffer})
        saved_states.append(saved)
    return saved_states
