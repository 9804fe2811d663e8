"""Lists words of other optimizers, and proposes an option in place of a word that is no option.

The constructor, group keys, presets and `describe` all propose by this table.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, Optional, TypeVar, cast


class ForeignWord(NamedTuple):
    """A word of another optimizer.

    Args:
        option: what it is called in this package; None where it has no counterpart.
        note: what else there is to say, or what to do where there is no counterpart.
    """

    option: Optional[str]
    note: str = ""


_EPS = ForeignWord("adamw_eps", "for AdamW, 'ns_eps' for the orthogonalization")
_BETAS = ForeignWord("adamw_betas", "for AdamW; Muon has 'momentum'")
_BY_GROUP = "groups say use_muon; presets.moonlight makes them"

FOREIGN_WORDS: dict[Any, ForeignWord] = {
    # torch.optim.AdamW, Adam and SGD
    "betas": _BETAS,
    "eps": _EPS,
    "fused": ForeignWord(None, "leave it out: AdamW is fused by itself"),
    "amsgrad": ForeignWord(None, "leave it out: AdamW has no such variant here"),
    "differentiable": ForeignWord(None, "leave it out: no step can be differentiated here"),
    "decoupled_weight_decay": ForeignWord(None, "leave it out: weight_decay always is decoupled"),
    "dampening": ForeignWord("momentum_style", "'ema' weighs gradients by 1 − momentum"),
    # torch.optim.Muon
    "adjust_lr_fn": ForeignWord("adjust_lr", "torch's None is 'original'"),
    # Moonlight's
    "wd": ForeignWord("weight_decay"),
    "muon_params": ForeignWord("params", _BY_GROUP),
    "adamw_params": ForeignWord("params", _BY_GROUP),
    # Keller Jordan's
    "backend_steps": ForeignWord("ns_steps"),
    # dion's
    "mu": ForeignWord("momentum"),
    "beta1": _BETAS,
    "epsilon": _EPS,
    "cautious_wd": ForeignWord("cautious"),
    "distributed_mesh": ForeignWord("process_group", "and only for replicas without DTensors"),
    # Emerging-Optimizers'
    "use_nesterov": ForeignWord("nesterov"),
    "coefficient_type": ForeignWord("ns_coefficients"),
    "num_ns_steps": ForeignWord("ns_steps"),
    "scale_mode": ForeignWord("adjust_lr"),
    # Gram Newton-Schulz's
    "ns_epsilon": ForeignWord("ns_eps"),
    "gram_newton_schulz_num_restarts": ForeignWord(
        "ns_algorithm", "'auto' and 'gram' restart as often as is safe"
    ),
    # trainers'
    "learning_rate": ForeignWord("lr"),
    "adamw_lr": ForeignWord(
        "lr", "in the group with use_muon=False, as get_default_muon_param_groups(adamw_lr=…) does"
    ),
    "muon_lr": ForeignWord("lr", "in the group with use_muon=True"),
}


def proposal(word: Any, known: Collection[str], cutoff: float = 0.7) -> Optional[str]:
    """What to write instead of a word that means nothing; None where nothing is known of it.

    An option with words around it, such as ``max_weight_decay``, is no mistyped option.

    Args:
        known: the words that mean something where this one was written.
        cutoff: how close a mistyped word is to what it was meant to be, from 0 to 1.
    """
    if not isinstance(word, str):
        return None
    foreign = FOREIGN_WORDS.get(word)
    if foreign is not None and foreign.option is None:
        return foreign.note
    if foreign is not None and foreign.option in known:
        return f"use {foreign.option!r}" + (f" ({foreign.note})" if foreign.note else "")
    close = difflib.get_close_matches(word, known, n=1, cutoff=cutoff)
    if not close or f"_{close[0]}_" in f"_{word}_":
        return None
    return f"did you mean {close[0]!r}?"


def refusal(caller: str, word: str, known: Collection[str]) -> str:
    """Says that a function has no such argument, and what to write instead."""
    instead = proposal(word, known)
    return f"{caller}() got an unexpected keyword argument {word!r}" + (
        f": {instead}" if instead else ""
    )


_Function = TypeVar("_Function", bound=Callable[..., Any])


def explains_unknown_arguments(known: Collection[str]) -> Callable[[_Function], _Function]:
    """Decorates a constructor: its TypeError for an unknown argument says what to write instead.

    The signature stays that of the constructor.
    """

    def decorate(constructor: _Function) -> _Function:
        @functools.wraps(constructor)
        def explained(self: Any, *args: Any, **kwargs: Any) -> Any:
            for word in kwargs:
                if word not in known:
                    raise TypeError(refusal(type(self).__name__, word, known))
            return constructor(self, *args, **kwargs)

        return cast(_Function, explained)

    return decorate
