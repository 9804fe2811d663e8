"""Hyperparameters of other optimizers' groups under the keys of `Muon`'s."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...parameters.options import GROUP_OPTIONS, is_number

# What schedulers of torch keep in groups, to go on from.
SCHEDULED = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")

# Those of Muon's groups, and of AdamW's. How a matrix is orthogonalized is no matter of state.
MUON = ("lr", *SCHEDULED, "weight_decay", "momentum", "nesterov", "beta2", "maximize")
ADAMW = ("lr", *SCHEDULED, "weight_decay", "adamw_betas", "adamw_eps", "maximize")

# What a matrix takes from the group in which AdamW trained it.
FROM_ADAMW = ("lr", "initial_lr", "max_lr", "min_lr", "weight_decay", "maximize")


# What others call them.
_TERMS = {
    **{
        "betas": "adamw_betas",
        "eps": "adamw_eps",
        "wd": "weight_decay",
        "adamw_wd": "weight_decay",
    },
    **{"initial_lr": "lr", "max_lr": "lr", "min_lr": "lr"},
    **{"base_momentum": "momentum", "max_momentum": "momentum"},
}


def check_options(options: Mapping[str, Any], place: str) -> None:
    """Whether the hyperparameters of a group are some.

    Raises:
        ValueError: says the key, what was found and what is accepted.
    """
    for key, value in options.items():
        option = GROUP_OPTIONS.get(_TERMS.get(key, key))
        if key in (*MUON, *ADAMW, *_TERMS) and option is not None:
            option.check(f"{place}: {key}", value)
        if key == "use_muon" and not isinstance(value, bool):
            raise ValueError(f"{place}: use_muon must be True or False, found {value!r}")
        if key == "kind" and value not in ("muon", "adamw"):
            raise ValueError(f"{place}: kind must be 'muon' or 'adamw', found {value!r}")
        if key == "adamw_lr_ratio" and not is_number(value):
            raise ValueError(f"{place}: adamw_lr_ratio must be a number, found {value!r}")


def muon_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Of a group that has them under the same names."""
    return {key: options[key] for key in MUON if key in options}


def adamw_options(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Of a group that has betas and eps with that prefix."""
    own = {key: options[key] for key in ADAMW if key in options}
    for key in ("betas", "eps"):
        if f"{prefix}{key}" in options:
            own[f"adamw_{key}"] = options[f"{prefix}{key}"]
    if "adamw_betas" in own:
        own["adamw_betas"] = tuple(own["adamw_betas"])
    return own
