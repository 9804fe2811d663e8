"""Reads torch's, Motif's and LlamaFactory's checkpoints: each parameter has its own state.

- ``torch.optim.Muon`` (2.9 and later): ``momentum_buffer``, averaged; usually beside
  ``torch.optim.AdamW``: ``step``, ``exp_avg``, ``exp_avg_sq``.
- Motif's kernel: ``momentum_buffer``, summed; of AdamW's parameters ``step``, ``moment1``,
  ``moment2``; ``use_muon`` in each group, names in Muon's.
- Moonlight's, as LlamaFactory has it: Motif's state in one group, Muon's parameters first, and
  ``use_muon`` in the state of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...parameters.options import Group
from ...state.checkpoints import MOTIFS_NAMES
from .hyperparameters import convert_options
from .matching import SavedState, TargetOptimizer, TargetParam, match_groups
from .sources import SavedGroup, SourceOptimizer

MUON_KEYS = ("momentum_buffer",)
ADAMW_KEYS = ("step", "exp_avg", "exp_avg_sq")


def keep_groups(groups: Sequence[Group]) -> list[list[int]]:
    """Each group is one of the source: its preset keeps groups as they are."""
    return [[number] for number in range(len(groups))]


def merge_groups(groups: Sequence[Group]) -> list[list[int]]:
    """All groups are one of the source, which puts all parameters into one."""
    return [list(range(len(groups)))]


def read_torch(source: SourceOptimizer, optimizer: TargetOptimizer) -> list[SavedState]:
    """Reads torch's Muon, or its AdamW; whichever wrote a group.

    Raises:
        ValueError: Adam wrote a group, with a decay that is not decoupled.
    """
    for number, group in enumerate(source.groups):
        decay = group.options.get("weight_decay", 0.0)
        if group.options.get("decoupled_weight_decay") is False and decay != 0.0:
            raise ValueError(
                f"group {number} of {source.where} is torch.optim.Adam's, with weight_decay "
                f"{decay} in its gradients, which there is not here: set it to 0 in the state "
                "dict's group, and that of the groups here to what is to follow"
            )
    saved_states = []
    for group, index, target in saved_params(source, match_groups(source, optimizer)):
        is_muon = "betas" not in group.options
        options = convert_options(group.options, is_muon)
        saved_states.append(read_param(source, group, index, target, is_muon, "ema", options))
    return saved_states


def read_motif(source: SourceOptimizer, optimizer: TargetOptimizer) -> list[SavedState]:
    saved_states = []
    for group, index, target in saved_params(source, match_groups(source, optimizer)):
        is_muon = bool(group.options["use_muon"])
        options = convert_options(group.options, is_muon, prefix="adamw_")
        saved_states.append(read_param(source, group, index, target, is_muon, "classical", options))
    return saved_states


def read_moonlight(source: SourceOptimizer, optimizer: TargetOptimizer) -> list[SavedState]:
    saved_states = []
    for group, index, target in saved_params(source, match_groups(source, optimizer)):
        is_muon = _saved_use_muon(source, group, index)
        options = {**group.options, "weight_decay": group.options["wd"]}
        options = convert_options(options, is_muon, prefix="adamw_")
        saved_states.append(read_param(source, group, index, target, is_muon, "classical", options))
    return saved_states


def _saved_use_muon(source: SourceOptimizer, group: SavedGroup, index: int) -> bool:
    """The ``use_muon`` that a source keeps in the state of a parameter.

    Raises:
        ValueError: the state has none.
    """
    flag = source.ranks[0].param_state(group.ids[index]).get("use_muon")
    if not isinstance(flag, bool):
        raise ValueError(
            f"{source.label(group, index)} has no use_muon in {source.where}, where its "
            "optimizer has one from the start: is the state dict complete?"
        )
    return flag


def saved_params(
    source: SourceOptimizer, matched: Sequence[Sequence[TargetParam]]
) -> Iterator[tuple[SavedGroup, int, TargetParam]]:
    """Every parameter of a checkpoint: its group, its index in it, and which it is here."""
    for group, targets in zip(source.groups, matched):
        for index, target in enumerate(targets):
            yield group, index, target


def read_param(
    source: SourceOptimizer,
    group: SavedGroup,
    index: int,
    target: TargetParam,
    is_muon: bool,
    momentum_style: str,
    options: Mapping[str, Any],
    rank: int = 0,
) -> SavedState:
    """The state of a parameter that the state dict of ``rank`` has whole."""
    state_dict = source.ranks[rank]
    where = f"{source.label(group, index)} of {state_dict.where}"
    state = pick(state_dict.param_state(group.ids[index]), MUON_KEYS if is_muon else ADAMW_KEYS)
    return SavedState(target, where, is_muon, momentum_style, state, options)


def pick(param_state: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """The values of those ``keys`` that there are, Motif's names for them included."""
    renamed = {MOTIFS_NAMES.get(key, key): value for key, value in param_state.items()}
    return {key: renamed[key] for key in keys if renamed.get(key) is not None}
