"""Decides which hyperparameters of other optimizers are taken over, and under which keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...parameters.options import GROUP_OPTIONS, SCHEDULED

# Options that are taken over, of Muon's groups and of AdamW's. How a matrix is orthogonalized is
# not state.
MUON_OPTIONS = ("lr", *SCHEDULED, "weight_decay", "momentum", "nesterov", "beta2", "maximize")
ADAMW_OPTIONS = ("lr", *SCHEDULED, "weight_decay", "adamw_betas", "adamw_eps", "maximize")

# Options that a matrix takes from the group in which AdamW trained it.
MUON_OPTIONS_FROM_ADAMW = ("lr", "initial_lr", "max_lr", "min_lr", "weight_decay", "maximize")

# What sources call these options.
RENAMED = {"betas": "adamw_betas", "eps": "adamw_eps", "wd": "weight_decay"}

# What schedulers keep, and the option that says which values are valid.
_VALID_AS = {
    **dict.fromkeys(("initial_lr", "max_lr", "min_lr"), "lr"),
    **dict.fromkeys(("base_momentum", "max_momentum"), "momentum"),
}


def read_options(saved_group: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The content of a saved group under the keys of `Muon`; messages call the group ``where``.

    Raises:
        ValueError: says the key, what was found and what is accepted.
    """
    options = {}
    for key, value in saved_group.items():
        name = RENAMED.get(key, key)
        if name in (*MUON_OPTIONS, *ADAMW_OPTIONS):
            GROUP_OPTIONS[_VALID_AS.get(name, name)].check(f"{where}: {key}", value)
        if key == "use_muon" and not isinstance(value, bool):
            raise ValueError(f"{where}: use_muon must be True or False, found {value!r}")
        if key == "kind" and value not in ("muon", "adamw"):
            raise ValueError(f"{where}: kind must be 'muon' or 'adamw', found {value!r}")
        options[name] = tuple(value) if name == "adamw_betas" else value
    return options
