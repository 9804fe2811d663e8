"""Tells by the keys of groups which optimizer wrote a checkpoint; reads groups of torch's AdamW."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..parameters.aliases import ALIASES

KEY_OF_THIS_PACKAGE = "momentum_style"  # no other optimizer's groups have it

# By kind of torch's optimizers, the arguments that a message says to write.
_CALLS_FOR_TORCH = {
    "torch_muon": '{"muon": muon_state_dict, "adamw": adamw_state_dict}',
    "torch_adamw": "state_dict, params=model.parameters()",
}


@contextlib.contextmanager
def names_source(
    saved_groups: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
) -> Iterator[None]:
    """A context in which errors of `Muon.load_state_dict` name who wrote the checkpoint.

    A checkpoint of torch's AdamW fits if all groups here are AdamW's. One of torch's Muon never
    fits, even if shapes do: it has averaged momentum.

    Raises:
        ValueError: the saved groups are those of one of torch's optimizers, and don't fit; or a
            ValueError was raised in the context, to which likely kinds are added.
    """
    has_muon = any(group["use_muon"] is not False for group in groups)
    fits_adamw = not has_muon and len(saved_groups) == len(groups)
    kinds = [kinds_of(group) for group in saved_groups]
    shared = [kind for kind in kinds[0] if all(kind in each for each in kinds)] if kinds else []
    for kind, call in _CALLS_FOR_TORCH.items():
        if kind in shared and not (kind == "torch_adamw" and fits_adamw):
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


def in_words_of_this_package(
    saved_group: Mapping[str, Any], group: Mapping[str, Any]
) -> dict[str, Any]:
    """A group of torch's AdamW under the keys of this package; any other group as it is.

    Keys that this optimizer's group has keep their names.
    """
    if kinds_of(saved_group) != ("torch_adamw",):
        return dict(saved_group)
    renamed = {}
    for key, value in saved_group.items():
        option, _ = ALIASES.get(key, (key, "")) if key not in group else (key, "")
        if key == "amsgrad" and value:
            renamed[key] = value
        elif option is not None:  # keys without one say how torch computes
            renamed[option] = value
    return renamed


def kinds_of(options: Mapping[str, Any]) -> tuple[str, ...]:
    """The kinds of optimizers that may have written a group, by keys that only they have."""
    if KEY_OF_THIS_PACKAGE in options or "dampening" in options:  # SGD's have momentum, too
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
