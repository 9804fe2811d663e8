"""Tells by the keys of groups which optimizer wrote a checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...state.checkpoints import OWN_KEY

# By kind of torch's optimizers, the arguments that a message says to write.
_CALLS_FOR_TORCH = {
    "torch_muon": '{"muon": muon_state_dict, "adamw": adamw_state_dict}',
    "torch_adamw": "state_dict, params=model.parameters()",
}


@contextlib.contextmanager
def names_source(saved_groups: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """A context in which errors of `Muon.load_state_dict` name who wrote the checkpoint.

    Raises:
        ValueError: the saved groups are those of one of torch's optimizers, which never fit, even
            if shapes do: its keys are others, and its Muon has averaged momentum. Or a ValueError
            was raised in the context, to which likely kinds are added.
    """
    kinds = [kinds_of(group) for group in saved_groups]
    shared = [kind for kind in kinds[0] if all(kind in each for each in kinds)] if kinds else []
    for kind, call in _CALLS_FOR_TORCH.items():
        if kind in shared:
            raise ValueError(
                f"the checkpoint is of kind {kind!r}, as the keys of its groups show: "
                f"load_foreign_state_dict({call}, kind={kind!r}) converts it"
            )
    try:
        yield
    except ValueError as error:
        if not shared:
            raise
        raise ValueError(
            f"{error}. The groups of the checkpoint look like those of kind "
            f"{' or '.join(map(repr, shared))}, which load_foreign_state_dict converts"
        ) from None


def kinds_of(options: Mapping[str, Any]) -> tuple[str, ...]:
    """The kinds of optimizers that may have written a group, by keys that only they have."""
    if OWN_KEY in options or "dampening" in options:  # SGD's have momentum, too
        return ()
    if "kind" in options:
        return ("nanochat",)
    if "wd" in options:
        return ("llamafactory",)
    if "update_buffer" in options:
        return ("keller_jordan",)
    if "use_muon" in options:
        return ("motif",) if "adamw_betas" in options else ("keller_jordan",)
    if "adjust_lr_fn" in options:
        return ("torch_muon",)
    if "betas" in options:
        return ("torch_adamw",)
    return ("keller_jordan",) if "momentum" in options else ()
