"""Reads torch's, Motif's and LlamaFactory's checkpoints: each parameter has its own state.

- ``torch.optim.Muon`` (2.9 and later): ``momentum_buffer``, averaged; usually with
  ``torch.optim.AdamW``: ``step``, ``exp_avg``, ``exp_avg_sq``.
- Motif's kernel: ``momentum_buffer``, summed; of AdamW's parameters ``step``, ``moment1``,
  ``moment2``; ``use_muon`` in each group, names in Muon's.
- Moonlight's, as LlamaFactory has it: Motif's state in one group, Muon's parameters first, and
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
                f"{source.label(group, index)} has no use_muon in {source.where}, where its "
                "optimizer has one from the start: is the state dict complete?"
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
    """The state of a parameter that the state dict of ``rank`` has whole."""
    param_state = source.param_states(group, index)[rank]
    state = select(param_state, MUON_KEYS if is_muon else ADAMW_KEYS)
    where = f"{source.label(group, index)} of {source.wheres[rank]}"
    return SavedState(target, where, is_muon, state, group.options)


def select(param_state: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """The values of those ``keys`` that there are, Motif's names for them included."""
    renamed = {MOTIFS_NAMES.get(key, key): value for key, value in param_state.items()}
    return {key: renamed[key] for key in keys if renamed.get(key) is not None}
