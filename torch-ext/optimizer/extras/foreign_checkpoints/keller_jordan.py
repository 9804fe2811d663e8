"""Reads Keller Jordan's checkpoints: each rank saves the momentum of the parameters it updates.

A rank updates the parameters of a group at positions rank, rank + world size, … AdamW's state, if
any, is equal on all ranks. ``Muon`` and ``MuonWithAuxAdam`` sort the parameters of a group by size,
largest first (stable); ``SingleDeviceMuon`` and ``SingleDeviceMuonWithAuxAdam`` keep their order.
An earlier release of ``Muon`` has a group for each number of elements, in the given order, with an
``update_buffer`` (world size, that number).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Optional

from torch import Tensor

from ...parameters.options import Group
from .matching import SavedState, Shape, TargetParam, Targets, check_names, match_groups
from .per_parameter import read_param
from .sources import SavedGroup, SourceOptimizer


def merge_convolutions(groups: Sequence[Group], targets: Targets) -> list[list[TargetParam]]:
    """Parameters by group of the source. `presets.keller_jordan` puts convolutions into a group
    that follows the matrices' group; this merges the two."""
    merged: list[list[TargetParam]] = []
    follows_muon = False
    for group, of_group in zip(groups, targets):
        is_kernels = group.adjust_lr == "none" and {p.ndim for p in group.params} == {4}
        if follows_muon and group.use_muon and is_kernels:
            merged[-1].extend(of_group)
        else:
            merged.append(list(of_group))
        follows_muon = group.use_muon
    return merged


def match(
    source: SourceOptimizer, groups: Targets, params: Optional[Sequence[TargetParam]]
) -> list[list[TargetParam]]:
    """Like `match_groups`, but by number of elements if groups have an ``update_buffer``.

    Raises:
        ValueError: the checkpoint's groups have other sizes.
    """
    buffers = [group.options.get("update_buffer") for group in source.groups]
    if all(buffer is None for buffer in buffers):
        return match_groups(source, groups, params)
    given = list(itertools.chain.from_iterable(groups)) if params is None else params
    rest = [target for target in given if source.use_muon in (None, target.use_muon)]
    matched: list[list[TargetParam]] = []
    for number, (group, buffer) in enumerate(zip(source.groups, buffers)):
        numel = buffer.shape[1] if isinstance(buffer, Tensor) and buffer.ndim == 2 else -1
        matched.append([target for target in rest if math.prod(target.shape or ()) == numel])
        if len(matched[-1]) != len(group.ids):
            raise ValueError(
                f"group {number} of {source.where} has {len(group.ids)} parameters of {numel} "
                f"elements, but this optimizer has {len(matched[-1])}: use the same ones, or pass "
                "params=, the parameters in the order in which the other optimizer received them"
            )
        rest = [target for target in rest if target not in matched[-1]]
    if rest:
        raise ValueError(f"{source.where} has no parameter of the size of {rest[0].name}")
    return matched


def read(source: SourceOptimizer, matched: Targets) -> list[SavedState]:
    """Reads each parameter's momentum from the rank that updates it, and AdamW's state from rank 0.

    Raises:
        ValueError: that rank lacks the momentum, or AdamW's step counts differ between ranks.
    """
    are_muons = [bool(g.options.get("use_muon", source.use_muon)) for g in source.groups]
    ordered = [
        _in_saved_order(source, group, targets) if is_muon else targets
        for group, targets, is_muon in zip(source.groups, matched, are_muons)
    ]
    check_names(source, ordered)
    saved_states = []
    for group, targets, is_muon in zip(source.groups, ordered, are_muons):
        for index, target in enumerate(targets):
            rank = _updating_rank(source, group, index) if is_muon else 0
            if not is_muon:
                _check_replicated(source, group, index)
            saved_states.append(read_param(source, group, index, target, is_muon, rank))
    return saved_states


def _updating_rank(source: SourceOptimizer, group: SavedGroup, index: int) -> int:
    """The rank with the momentum of a parameter: ranks update a group's parameters round-robin."""
    world, states = len(source.states), source.param_states(group, index)
    ranks = [rank for rank in range(world) if states[rank].get("momentum_buffer") is not None]
    buffer = group.options.get("update_buffer")
    is_whole = not isinstance(buffer, Tensor) or len(buffer) == world
    if not is_whole or (ranks != [index % world] and not source.is_fresh):
        raise ValueError(
            f"the momentum of {source.label(group, index)} should be only in the state dict of "
            f"rank {index % world} of {world}, but is in those of {ranks or 'none'}: pass the "
            "state dicts of all ranks, in order; each has the momentum that its rank updated"
        )
    return index % world


def _check_replicated(source: SourceOptimizer, group: SavedGroup, index: int) -> None:
    counts = [state.get("step") for state in source.param_states(group, index)]
    steps = {None if step is None else float(step) for step in counts}
    if len(steps) > 1:
        raise ValueError(
            f"{source.label(group, index)} has step counts {steps} on different ranks: pass the "
            "state dicts of one checkpoint"
        )


def _in_saved_order(
    source: SourceOptimizer, group: SavedGroup, targets: Sequence[TargetParam]
) -> list[TargetParam]:
    """The parameters of a group in the order of the saved shapes: as given, or sorted by size.

    Convolutions from a separate group of the preset go where four-dimensional shapes were saved.
    """
    if source.is_fresh:
        return list(targets)
    shapes = [_momentum_shape(source, group, index) for index in range(len(targets))]
    by_size = sorted(targets, key=lambda target: target.shape or (), reverse=True)
    kernels = iter([target for target in targets if len(target.shape or ()) == 4])
    matrices = iter([target for target in targets if len(target.shape or ()) != 4])
    merged = [next(kernels if len(shape or ()) == 4 else matrices, None) for shape in shapes]
    for order in (list(targets), merged, by_size):
        if all(t is not None and s in (None, t.shape) for t, s in zip(order, shapes)):
            return [t for t in order if t is not None]
    index = next(i for i, (t, s) in enumerate(zip(targets, shapes)) if s not in (None, t.shape))
    raise ValueError(
        f"{source.label(group, index)} has a momentum_buffer of shape {shapes[index]}, but "
        f"{targets[index].name} has {targets[index].shape}; sorted by size, as in "
        f"MuonWithAuxAdam, {by_size[index].name} would have {by_size[index].shape}: "
        "pass the parameters in the order in which the other optimizer received them"
    )


def _momentum_shape(source: SourceOptimizer, group: SavedGroup, index: int) -> Optional[Shape]:
    """The shape of a parameter's momentum on any rank that has it."""
    for state in source.param_states(group, index):
        buffer = state.get("momentum_buffer")
        if isinstance(buffer, Tensor):
            return tuple(buffer.shape)
    return None
