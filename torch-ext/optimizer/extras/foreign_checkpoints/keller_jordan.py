"""Reads Keller Jordan's checkpoints: each rank saves the momentum of what it updates.

A rank updates the parameters of a group at positions rank, rank + world size, … AdamW's state,
where there is any, is the same on all ranks. The order of a group:

- ``Muon``, ``MuonWithAuxAdam``: parameters by size, largest first, equal ones in order.
- ``SingleDeviceMuon``, ``SingleDeviceMuonWithAuxAdam``: as given.
- ``Muon`` of an earlier release: a group for each number of elements, of the parameters as given;
  it has an ``update_buffer`` (world size, number of elements).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Optional

from torch import Tensor

from ...parameters.options import Group
from . import matching
from .hyperparameters import convert_options
from .matching import SavedState, Shape, TargetOptimizer, TargetParam
from .per_parameter import read_param, saved_params
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
    """The momentum of each parameter from the rank that updates it, AdamW's state from the first.

    Raises:
        ValueError: that rank does not have the momentum.
    """
    if any("update_buffer" in group.options for group in source.groups):
        matched = _match_by_numel(source, optimizer)
    else:
        matched = [
            _in_saved_order(source, group, targets)
            if group.options.get("use_muon", source.use_muon)
            else targets
            for group, targets in zip(source.groups, matching.match_groups(source, optimizer))
        ]
    matching.check_names(source, matched)
    saved_states = []
    for group, index, target in saved_params(source, matched):
        is_muon = bool(group.options.get("use_muon", source.use_muon))
        options = convert_options(group.options, is_muon)
        if is_muon:
            rank = _updating_rank(source, group, index)
            saved = read_param(source, group, index, target, True, "ema", options, rank)
        else:
            saved = _read_replicated(source, group, index, target, options)
        saved_states.append(saved)
    return saved_states


def _updating_rank(source: SourceOptimizer, group: SavedGroup, index: int) -> int:
    """The rank that has the momentum of a parameter; ranks take those of a group in turns."""
    world, saved_id = len(source.ranks), group.ids[index]
    momenta = [rank.param_state(saved_id).get("momentum_buffer") for rank in source.ranks]
    ranks = [rank for rank, momentum in enumerate(momenta) if momentum is not None]
    buffer = group.options.get("update_buffer")
    saved_world = buffer.shape[0] if isinstance(buffer, Tensor) and buffer.ndim == 2 else world
    if saved_world != world or (ranks != [index % world] and not source.is_fresh):
        raise ValueError(
            f"the momentum of {source.label(group, index)} should be in the state dict of "
            f"rank {index % world} of {world} alone, but is in those of {ranks or 'none'}: give "
            "the state dicts of all ranks, in their order; each holds what its rank has updated"
        )
    return index % world


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


def _match_by_numel(source: SourceOptimizer, optimizer: TargetOptimizer) -> list[list[TargetParam]]:
    """The parameters by number of elements, in the order in which they were given.

    Raises:
        ValueError: the checkpoint's groups have other sizes.
    """
    ordered = optimizer.ordered(source.use_muon)
    matched: list[list[TargetParam]] = []
    for number, group in enumerate(source.groups):
        buffer = group.options.get("update_buffer")
        numel = buffer.shape[1] if isinstance(buffer, Tensor) and buffer.ndim == 2 else -1
        targets = [target for target in ordered if target.numel == numel]
        if len(targets) != len(group.ids):
            raise ValueError(
                f"group {number} of {source.where} has {len(group.ids)} parameters of "
                f"{numel} elements, where this optimizer has {len(targets)}: give the same ones, "
                "or params=, the parameters in the order in which the other optimizer was given "
                "them"
            )
        matched.append(targets)
    if sum(map(len, matched)) != len(ordered):
        in_groups = {target for group in matched for target in group}
        name = next(target.name for target in ordered if target not in in_groups)
        raise ValueError(f"{source.where} has no parameter of the size of {name}")
    return matched
