"""Decides which hyperparameters of other optimizers are loaded, and under which keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...parameters.options import GROUP_OPTIONS, SCHEDULED

# Options loaded for Muon's and AdamW's groups; options of orthogonalization aren't.
MUON_OPTIONS = ("lr", *SCHEDULED, "weight_decay", "momentum", "nesterov", "beta2", "maximize")
ADAMW_OPTIONS = ("lr", *SCHEDULED, "weight_decay", "adamw_betas", "adamw_eps", "maximize")

# Options loaded for a matrix that AdamW trained.
MUON_OPTIONS_FROM_ADAMW = ("lr", "initial_lr", "max_lr", "min_lr", "weight_decay", "maximize")

# Names that sources have for these options.
RENAMED = {"betas": "adamw_betas", "eps": "adamw_eps", "wd": "weight_decay"}

# Keys that schedulers keep, and the option that validates their values.
_VALID_AS = {
    **dict.fromkeys(("initial_lr", "max_lr", "min_lr"), "lr"),
    **dict.fromkeys(("base_momentum", "max_momentum"), "momentum"),
}


def read_options(saved_group: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A saved group under the keys of `Muon`; ``where`` is its name in messages.

    Raises:
        ValueError: a value isn't accepted. The message names the key.
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
