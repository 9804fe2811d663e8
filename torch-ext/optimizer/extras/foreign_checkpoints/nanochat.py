"""nanochat's ``MuonAdamW`` and ``DistMuonAdamW``: the state of a group of matrices is one stack.

The first parameter of a ``kind="muon"`` group of K matrices has ``momentum_buffer``,
(K, rows, cols), and ``second_momentum_buffer``, (K, rows, 1) or (K, 1, cols), by the longer side.
``DistMuonAdamW`` has on each of N ranks ceil(K/N) of them, the last ones padding. Of
``kind="adamw"`` it has on each rank all rows of a small parameter, and 1/N of a large one's.

Before, there were two optimizers: ``Muon`` or ``DistMuon``, in groups by size (`owned`; with second
moments in such stacks), and ``AdamW`` or ``DistAdamW``, in slices of all parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .hyperparameters import adamw_options, muon_options
from .matching import Found, Ours, Target, arrange, place_of
from .owned import is_grouped_by_size, is_stack, owned, regroup
from .per_parameter import ADAMW_KEYS, pick
from .reading import SavedGroup, Section

_STACKS = ("momentum_buffer", "second_momentum_buffer")


def read(section: Section, ours: Ours) -> list[Found]:
    if is_grouped_by_size(section):
        arranged = regroup(section, ours)
        if not any(is_stack(section, saved) for saved in section.groups if saved.ids):
            return owned(section, arranged)
    else:
        arranged = arrange(section, ours)
    found = []
    for saved, targets in zip(section.groups, arranged):
        is_muon = saved.options.get("kind", "muon" if section.use_muon else "adamw") == "muon"
        if not targets:
            continue
        if is_muon:
            found += _unstack(section, saved, targets)
        else:
            found += [_whole(section, saved, i, target) for i, target in enumerate(targets)]
    return found


def _unstack(section: Section, saved: SavedGroup, targets: Sequence[Target]) -> list[Found]:
    """The matrices of a group, each with its own state.

    Raises:
        ValueError: chunks are missing, or in another order, or not of these matrices.
    """
    stacks = [pick(rank.state.get(saved.ids[0], {}), _STACKS) for rank in section.ranks]
    each = -(-len(targets) // len(section.ranks))
    for checkpoint, stack in zip(section.ranks, stacks):
        for key in _STACKS if not section.is_fresh else ():
            _check_chunk(stack.get(key), key, each, checkpoint.where, section, saved)
    for number in range(len(targets), each * len(section.ranks)):
        rank, row = divmod(number, each)
        if stacks[rank] and bool(stacks[rank]["momentum_buffer"][row].any()):
            raise ValueError(
                f"{section.ranks[rank].where} has momentum behind the {len(targets)} matrices of "
                f"{place_of(saved, 0, section)}, where the last ranks have zeros: give the state "
                "dicts in the order of the ranks"
            )
    found = []
    for number, target in enumerate(targets):
        rank, row = divmod(number, each)
        where = f"matrix {row} of {place_of(saved, 0, section)} of {section.ranks[rank].where}"
        state = {key: stack[row] for key, stack in stacks[rank].items()}
        found.append(Found(target, where, True, "ema", state, muon_options(saved.options)))
    return found


def _check_chunk(
    value: Any, key: str, each: int, where: str, section: Section, saved: SavedGroup
) -> None:
    found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
    if not isinstance(value, Tensor) or value.ndim < 3 or value.shape[0] != each:
        raise ValueError(
            f"{key} of {place_of(saved, 0, section)} of {where} should stack {each} of "
            f"{len(saved.ids)} matrices, as each of {len(section.ranks)} ranks has them, found "
            f"{found}: give the state dicts of all ranks, in their order"
        )


def _whole(section: Section, saved: SavedGroup, index: int, target: Target) -> Found:
    """A parameter of AdamW's from the slices of all ranks, or from one that has all of it.

    Raises:
        ValueError: ranks have stepped it differently.
    """
    saved_id, world = saved.ids[index], len(section.ranks)
    where = f"{place_of(saved, index, section)} of {section.where}"
    each = [pick(rank.state.get(saved_id, {}), ADAMW_KEYS) for rank in section.ranks]
    steps = {float(own["step"]) if "step" in own else None for own in each}
    if len(steps) > 1 or len({frozenset(own) for own in each}) > 1:
        raise ValueError(
            f"{where} has been stepped {steps} times: give the state dicts of all ranks of one "
            "checkpoint"
        )
    state = dict(each[0])
    for key in ("exp_avg", "exp_avg_sq"):
        slices = [own.get(key) for own in each]
        if world > 1 and all(isinstance(s, Tensor) and _is_slice(s, target, world) for s in slices):
            state[key] = torch.cat(slices)  # type: ignore[arg-type]
        value = state.get(key)
        if isinstance(value, Tensor) and target.shape not in (None, tuple(value.shape)):
            raise ValueError(
                f"{key} of {target.name}, {where}, has shape {tuple(value.shape)}, neither that of "
                f"the parameter, {target.shape}, nor that of an equal part of its rows on each of "
                f"{world} ranks: give the state dicts of all ranks, in their order"
            )
    return Found(target, where, False, "ema", state, adamw_options(saved.options))


def _is_slice(value: Tensor, target: Target, world: int) -> bool:
    """Whether it is an equal part of the rows of a parameter."""
    shape = target.shape
    if not shape or value.ndim == 0:
        return False
    return (value.shape[0] * world, *value.shape[1:]) == shape
