"""Checkpoints that have the state of each parameter under that parameter.

``torch.optim.Muon`` (2.9 and later): ``momentum_buffer``, averaged; usually beside
``torch.optim.AdamW``: ``step``, ``exp_avg``, ``exp_avg_sq``. Motif's kernel: ``momentum_buffer``,
summed; of the rest ``step``, ``moment1``, ``moment2``; ``use_muon`` in each group, names in Muon's.
Moonlight's, as LlamaFactory has it: the same state in one group, Muon's parameters first, and
``use_muon`` in the state of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...parameters.options import Group
from ...state.checkpoints import MOTIFS_NAMES
from .hyperparameters import adamw_options, muon_options
from .matching import Found, Options, Ours, Target, arrange, place_of
from .reading import SavedGroup, Section

MUON_KEYS = ("momentum_buffer",)
ADAMW_KEYS = ("step", "exp_avg", "exp_avg_sq")

Position = tuple[SavedGroup, int, Target]


def each_alone(groups: Sequence[Group]) -> list[list[int]]:
    """Bundles of a source whose preset keeps groups as they are."""
    return [[number] for number in range(len(groups))]


def all_in_one(groups: Sequence[Group]) -> list[list[int]]:
    """Bundles of a source that puts all parameters into one group."""
    return [list(range(len(groups)))]


def read_torch(section: Section, ours: Ours) -> list[Found]:
    """torch's Muon, or its AdamW; whichever wrote a group.

    Raises:
        ValueError: Adam wrote it, and its decay is no decoupled one.
    """
    found = []
    for number, saved in enumerate(section.groups):
        decay = saved.options.get("weight_decay", 0.0)
        if saved.options.get("decoupled_weight_decay") is False and decay != 0.0:
            raise ValueError(
                f"group {number} of {section.where} is torch.optim.Adam's, with weight_decay "
                f"{decay} in its gradients, which there is not here: set it to 0 in the state "
                "dict's group, and that of the groups here to what is to follow"
            )
    for saved, index, target in positions(section, arrange(section, ours)):
        is_muon = "betas" not in saved.options
        options = muon_options(saved.options) if is_muon else adamw_options(saved.options)
        found.append(one(section, saved, index, target, is_muon, "ema", options))
    return found


def read_motif(section: Section, ours: Ours) -> list[Found]:
    found = []
    for saved, index, target in positions(section, arrange(section, ours)):
        is_muon, options = bool(saved.options["use_muon"]), saved.options
        brought = muon_options(options) if is_muon else adamw_options(options, prefix="adamw_")
        found.append(one(section, saved, index, target, is_muon, "classical", brought))
    return found


def read_moonlight(section: Section, ours: Ours) -> list[Found]:
    found = []
    for saved, index, target in positions(section, arrange(section, ours)):
        options = {**saved.options, "weight_decay": saved.options["wd"]}
        is_muon = use_muon_of(section, saved, index)
        brought = muon_options(options) if is_muon else adamw_options(options, prefix="adamw_")
        found.append(one(section, saved, index, target, is_muon, "classical", brought))
    return found


def use_muon_of(section: Section, saved: SavedGroup, index: int) -> bool:
    """What the state of a parameter says of itself.

    Raises:
        ValueError: nothing.
    """
    flag = section.ranks[0].state.get(saved.ids[index], {}).get("use_muon")
    if not isinstance(flag, bool):
        raise ValueError(
            f"{place_of(saved, index, section)} has no use_muon in {section.where}, where its "
            "optimizer has one from the start: is the state dict complete?"
        )
    return flag


def positions(section: Section, arranged: Sequence[Sequence[Target]]) -> Iterator[Position]:
    """Every parameter of a checkpoint, with whose it is."""
    for saved, targets in zip(section.groups, arranged):
        for index, target in enumerate(targets):
            yield saved, index, target


def one(
    section: Section,
    saved: SavedGroup,
    index: int,
    target: Target,
    is_muon: bool,
    style: str,
    options: Options,
    rank: int = 0,
) -> Found:
    """A parameter whose state one state dict has whole."""
    own = section.ranks[rank].state.get(saved.ids[index], {})
    where = f"{place_of(saved, index, section)} of {section.ranks[rank].where}"
    state = pick(own, MUON_KEYS if is_muon else ADAMW_KEYS)
    return Found(target, where, is_muon, style, state, options)


def pick(own: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """What is there of ``keys``, by whichever name."""
    renamed = {MOTIFS_NAMES.get(key, key): value for key, value in own.items()}
    return {key: renamed[key] for key in keys if renamed.get(key) is not None}
