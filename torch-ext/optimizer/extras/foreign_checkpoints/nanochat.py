"""Reads nanochat's checkpoints: the state of a group of matrices is one stack.

``MuonAdamW`` saves the state of a ``kind="muon"`` group of K matrices with its first parameter:
``momentum_buffer`` (K, rows, cols), and ``second_momentum_buffer`` (K, rows, 1) or (K, 1, cols),
along the longer side. On each of N ranks, ``DistMuonAdamW`` saves ceil(K/N) of them, padded at the
end. For ``kind="adamw"``, each rank saves all rows of a small parameter and 1/N of the rows of a
large one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from .matching import SavedState, TargetParam, Targets
from .per_parameter import ADAMW_KEYS, select
from .sources import SavedGroup, SourceOptimizer

_STACKS = ("momentum_buffer", "second_momentum_buffer")


def read(source: SourceOptimizer, matched: Targets) -> list[SavedState]:
    saved_states = []
    for group, targets in zip(source.groups, matched):
        if not targets:
            continue
        if group.options["kind"] == "muon":
            saved_states += _unstack(source, group, targets)
        else:
            saved_states += [_join_rows(source, group, i, t) for i, t in enumerate(targets)]
    return saved_states


def _unstack(
    source: SourceOptimizer, group: SavedGroup, targets: Sequence[TargetParam]
) -> list[SavedState]:
    """The state of each matrix of a group.

    Raises:
        ValueError: stacks of ranks are missing, in the wrong order, or of other matrices.
    """
    stacks = [select(param_state, _STACKS) for param_state in source.param_states(group, 0)]
    world, length = len(stacks), -(-len(targets) // len(stacks))  # length of a rank's stack
    name = source.label(group, 0)
    for rank, key in itertools.product(range(world), () if source.is_fresh else _STACKS):
        value = stacks[rank].get(key)
        if not isinstance(value, Tensor) or value.ndim < 3 or len(value) != length:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"{key} of {name} of {source.wheres[rank]} should stack {length} of "
                f"{len(group.ids)} matrices on each of {world} ranks, found {shape}: pass the "
                "state dicts of all ranks, in order"
            )
    for number in range(len(targets), length * world):
        rank, row = divmod(number, length)
        if stacks[rank] and bool(stacks[rank]["momentum_buffer"][row].any()):
            raise ValueError(
                f"{source.wheres[rank]} has momentum after the {len(targets)} matrices of {name}, "
                "where the last ranks have zeros: pass the state dicts in the order of the ranks"
            )
    saved_states = []
    for number, target in enumerate(targets):
        rank, row = divmod(number, length)
        where = f"matrix {row} of {name} of {source.wheres[rank]}"
        state = {key: stack[row] for key, stack in stacks[rank].items()}
        saved_states.append(SavedState(target, where, True, state, group.options))
    return saved_states


def _join_rows(
    source: SourceOptimizer, group: SavedGroup, index: int, target: TargetParam
) -> SavedState:
    """The state of one of AdamW's parameters, joined from all ranks, or from one with all rows.

    Raises:
        ValueError: ranks have different step counts.
    """
    states = [select(each, ADAMW_KEYS) for each in source.param_states(group, index)]
    world, where = len(states), f"{source.label(group, index)} of {source.where}"
    steps = {float(state["step"]) if "step" in state else None for state in states}
    if len(steps) > 1 or len({frozenset(state) for state in states}) > 1:
        raise ValueError(
            f"{where} has step counts {steps}: pass the state dicts of all ranks of one checkpoint"
        )
    joined = dict(states[0])
    for key in joined.keys() - {"step"}:
        slices = [state[key] for state in states]
        if world > 1 and all(
            rows.ndim > 0 and (rows.shape[0] * world, *rows.shape[1:]) == target.shape
            for rows in slices
        ):
            joined[key] = torch.cat(slices)
        if target.shape not in (None, tuple(joined[key].shape)):
            raise ValueError(
                f"{key} of {target.name}, {where}, has shape {tuple(joined[key].shape)}, which is "
                f"neither the parameter's, {target.shape}, nor an equal part of its rows on each "
                f"of {world} ranks: pass the state dicts of all ranks, in order"
            )
    return SavedState(target, where, False, joined, group.options)
