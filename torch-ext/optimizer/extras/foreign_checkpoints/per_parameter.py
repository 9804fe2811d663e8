"""Reads torch's, Motif's and LlamaFactory's checkpoints, which keep state by parameter.

- ``torch.optim.Muon`` (2.9 and later): ``momentum_buffer``, averaged; usually with
  ``torch.optim.AdamW``: ``step``, ``exp_avg``, ``exp_avg_sq``.
- Motif's kernel: ``momentum_buffer``, summed; for AdamW's parameters ``step``, ``moment1``,
  ``moment2``; ``use_muon`` in each group, names in Muon's.
- Moonlight's, as LlamaFactory ships it: Motif's state in one group, Muon's parameters first, with
  ``use_muon`` in the state of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...state.checkpoints import MOTIFS_NAMES
from .matching import SavedState, TargetParam, Targets
from .sources import SavedGroup, SourceOptimizer

MUON_KEYS = ("momentum_buffer",)
ADAMW_KEYS = ("step", "exp_avg", "exp_avg_sq")


def read_torch(source: SourceOptimizer, matched: Targets) -> list[SavedState]:
    """Reads torch's Muon or AdamW, whichever wrote a group.

    Raises:
        ValueError: Adam wrote a group, with a decay that isn't decoupled.
    """
    for number, group in enumerate(source.groups):
        decay = group.options.get("weight_decay", 0.0)
        if group.options.get("decoupled_weight_decay") is False and decay != 0.0:
            raise ValueError(
                f"group {number} of {source.where} is torch.optim.Adam's, with weight_decay "
                f"{decay} added to gradients, which Muon does not do: set it to 0 in the state "
                "dict, and set weight_decay of the groups here for the steps to come"
            )
    return _read(source, matched, lambda group, _: "adamw_betas" not in group.options)


def read_motif(source: SourceOptimizer, matched: Targets) -> list[SavedState]:
    return _read(source, matched, lambda group, _: group.options["use_muon"])


def read_moonlight(source: SourceOptimizer, matched: Targets) -> list[SavedState]:
    """Reads Moonlight's ``Muon``.

    Raises:
        ValueError: the state of a parameter has no ``use_muon``.
    """

    def is_muon(group: SavedGroup, index: int) -> bool:
        flag = source.param_states(group, index)[0].get("use_muon")
        if not isinstance(flag, bool):
            raise ValueError(
                f"{source.label(group, index)} has no use_muon in {source.where}, although its "
                "optimizer sets it from the start: is the state dict complete?"
            )
        return flag

    return _read(source, matched, is_muon)


def _read(
    source: SourceOptimizer, matched: Targets, is_muon: Callable[[SavedGroup, int], bool]
) -> list[SavedState]:
    return [
        read_param(source, group, index, target, is_muon(group, index))
        for group, targets in zip(source.groups, matched)
        for index, target in enumerate(targets)
    ]


def read_param(
    source: SourceOptimizer,
    group: SavedGroup,
    index: int,
    target: TargetParam,
    is_muon: bool,
    rank: int = 0,
) -> SavedState:
    """The state of a parameter that is whole in the state dict of ``rank``."""
    param_state = source.param_states(group, index)[rank]
    state = select(param_state, MUON_KEYS if is_muon else ADAMW_KEYS)
    where = f"{source.label(group, index)} of {source.wheres[rank]}"
    return SavedState(target, where, is_muon, state, group.options)


def select(param_state: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """The values of the ``keys`` that exist, including under Motif's names."""
    renamed = {MOTIFS_NAMES.get(key, key): value for key, value in param_state.items()}
    return {key: renamed[key] for key in keys if renamed.get(key) is not None}
