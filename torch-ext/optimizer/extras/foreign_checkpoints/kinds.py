"""Recognizes the optimizer that wrote a checkpoint by the keys of its groups."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Optional

from ...state.checkpoints import OWN_KEY

KINDS = ("torch_muon", "torch_adamw", "motif", "llamafactory", "nanochat", "keller_jordan")

# Arguments that messages suggest, by kind of torch's optimizers.
_CALLS_FOR_TORCH = {
    "torch_muon": '{"muon": muon_state_dict, "adamw": adamw_state_dict}',
    "torch_adamw": "state_dict, params=model.parameters()",
}


def kind_of(options: Mapping[str, Any]) -> Optional[str]:
    """The kind of optimizer that may have written a group, by keys that only this kind has."""
    if OWN_KEY in options or "dampening" in options:  # SGD also has momentum
        return None
    if "kind" in options:
        return "nanochat"
    if "wd" in options:
        return "llamafactory"
    if "use_muon" in options:
        return "motif" if "adamw_betas" in options else "keller_jordan"
    if "adjust_lr_fn" in options:
        return "torch_muon"
    if "betas" in options:
        return "torch_adamw"
    return "keller_jordan" if "momentum" in options else None


@contextlib.contextmanager
def suggesting_kind(saved_groups: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """A context in which errors of `Muon.load_state_dict` say which optimizer wrote the checkpoint.

    Raises:
        ValueError: one of torch's optimizers wrote the checkpoint. It never fits, even if shapes
            do: its keys differ, and its Muon averages momentum. Or the context raised a ValueError,
            to which the likely kind is added.
    """
    kinds = set(map(kind_of, saved_groups))
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind in _CALLS_FOR_TORCH:
        raise ValueError(
            f"the checkpoint has kind {kind!r}, judging by the keys of its groups: "
            f"load_foreign_state_dict({_CALLS_FOR_TORCH[kind]}, kind={kind!r}) converts it"
        )
    try:
        yield
    except ValueError as error:
        if kind is None:
            raise
        raise ValueError(
            f"{error}. The checkpoint's groups look like kind {kind!r}, which "
            "load_foreign_state_dict converts"
        ) from None
