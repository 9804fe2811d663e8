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

# Keys of other optimizers, and the option of `Muon` that says which values are valid.
_OPTION_OF_KEY = {
    "betas": "adamw_betas",
    "eps": "adamw_eps",
    "wd": "weight_decay",
    **dict.fromkeys(("initial_lr", "max_lr", "min_lr"), "lr"),
    **dict.fromkeys(("base_momentum", "max_momentum"), "momentum"),
}


def check_options(options: Mapping[str, Any], where: str) -> None:
    """Checks the hyperparameters of a group, which messages call ``where``.

    Raises:
        ValueError: says the key, what was found and what is accepted.
    """
    for key, value in options.items():
        option = GROUP_OPTIONS.get(_OPTION_OF_KEY.get(key, key))
        if key in (*MUON_OPTIONS, *ADAMW_OPTIONS, *_OPTION_OF_KEY) and option is not None:
            option.check(f"{where}: {key}", value)
        if key == "use_muon" and not isinstance(value, bool):
            raise ValueError(f"{where}: use_muon must be True or False, found {value!r}")
        if key == "kind" and value not in ("muon", "adamw"):
            raise ValueError(f"{where}: kind must be 'muon' or 'adamw', found {value!r}")


def convert_options(options: Mapping[str, Any], is_muon: bool, prefix: str = "") -> dict[str, Any]:
    """The hyperparameters of a group under the keys of `Muon`.

    Args:
        options: the group's, in which ``prefix`` stands before AdamW's ``betas`` and ``eps``.
        is_muon: whether Muon trained the group; else AdamW.
    """
    if is_muon:
        return {key: options[key] for key in MUON_OPTIONS if key in options}
    converted = {key: options[key] for key in ADAMW_OPTIONS if key in options}
    for key in ("betas", "eps"):
        if f"{prefix}{key}" in options:
            converted[f"adamw_{key}"] = options[f"{prefix}{key}"]
    if "adamw_betas" in converted:
        converted["adamw_betas"] = tuple(converted["adamw_betas"])
    return converted
