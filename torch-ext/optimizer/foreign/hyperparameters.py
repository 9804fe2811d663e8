"""Hyperparameters of other optimizers' groups under the keys of `Muon`'s."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# What schedulers of torch keep in groups, to go on from.
SCHEDULED = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")

# Those of Muon's groups, and of AdamW's. How a matrix is orthogonalized is no matter of state.
MUON = ("lr", *SCHEDULED, "weight_decay", "momentum", "nesterov", "beta2", "maximize")
ADAMW = ("lr", *SCHEDULED, "weight_decay", "adamw_betas", "adamw_eps", "maximize")

# What a matrix takes from the group in which AdamW trained it.
FROM_ADAMW = ("lr", "initial_lr", "max_lr", "min_lr", "weight_decay", "maximize")


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
