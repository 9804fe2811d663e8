"""Maps other optimizers' names of options to `Muon`'s, and suggests options for unknown names.

The constructor, group keys, presets, and `describe` all use this table.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Collection
from typing import Any, Optional, TypeVar, cast

from .options import ARGUMENTS, NS_DEFAULTS

_EPS = "adamw_eps", "for AdamW, 'ns_eps' for the orthogonalization"
_BETAS = "adamw_betas", "for AdamW; Muon has 'momentum'"
_BY_GROUP = "as groups with use_muon, which presets.moonlight makes"

# By another optimizer's name: the option and a note, or None and what to do instead.
ALIASES: dict[Any, tuple[Optional[str], str]] = {
    # torch.optim.AdamW, Adam, and SGD
    "betas": _BETAS,
    "eps": _EPS,
    "fused": (None, "leave it out: AdamW is fused by itself"),
    "amsgrad": (None, "leave it out: this AdamW has no AMSGrad variant"),
    "differentiable": (None, "leave it out: steps are not differentiable"),
    "decoupled_weight_decay": (None, "leave it out: weight_decay is always decoupled"),
    "dampening": ("momentum_style", "'ema' weighs gradients by 1 − momentum"),
    # torch.optim.Muon
    "adjust_lr_fn": ("adjust_lr", "torch's None is 'original'"),
    # Moonlight's
    "wd": ("weight_decay", ""),
    "muon_params": ("params", _BY_GROUP),
    "adamw_params": ("params", _BY_GROUP),
    # Keller Jordan's
    "backend_steps": ("ns_steps", ""),
    # dion's
    "mu": ("momentum", ""),
    "beta1": _BETAS,
    "epsilon": _EPS,
    "cautious_wd": ("cautious", ""),
    "distributed_mesh": ("process_group", "only for replicas without DTensors"),
    # Emerging-Optimizers'
    "use_nesterov": ("nesterov", ""),
    "coefficient_type": ("ns_coefficients", ""),
    "num_ns_steps": ("ns_steps", ""),
    "scale_mode": ("adjust_lr", ""),
    # trainers'
    "learning_rate": ("lr", ""),
    "adamw_lr": (
        "lr",
        "in the group with use_muon=False, as Muon.for_model(model, lr, adamw_lr=…) does",
    ),
    "muon_lr": ("lr", "in the group with use_muon=True"),
}


def suggestion(word: Any, known: Collection[str], cutoff: float = 0.7) -> Optional[str]:
    """Returns what to write instead of an unknown word, or None if nothing is known about it.

    A word that contains an option, such as ``max_weight_decay``, doesn't count as a typo.

    Args:
        known: the valid words.
        cutoff: how similar a typo must be to a valid word, from 0 to 1.
    """
    if not isinstance(word, str):
        return None
    if word in ALIASES:
        option, note = ALIASES[word]
        if option is None:
            return note
        if option in known:
            return f"use {option!r}" + (f" ({note})" if note else "")
    close = difflib.get_close_matches(word, known, n=1, cutoff=cutoff)
    if not close or f"_{close[0]}_" in f"_{word}_":
        return None
    return f"did you mean {close[0]!r}?"


def refusal(caller: str, word: str) -> str:
    """Returns the message for an unknown argument, with what to write instead."""
    instead = suggestion(word, ARGUMENTS)
    if word in NS_DEFAULTS:
        instead = f"use ns_options={{{word.removeprefix('ns_')!r}: …}}"
    problem = f"{caller}() got an unexpected keyword argument {word!r}"
    return f"{problem}: {instead}" if instead else problem


_Function = TypeVar("_Function", bound=Callable[..., Any])


def refuses_unknown_arguments(constructor: _Function) -> _Function:
    """Decorates a constructor with `Muon`'s arguments, to improve the TypeError for any others."""

    @functools.wraps(constructor)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        for word in kwargs:
            if word not in ARGUMENTS:
                raise TypeError(refusal(type(self).__name__, word))
        return constructor(self, *args, **kwargs)

    return cast(_Function, checked)
