"""Tells which optimizer wrote a checkpoint, by the keys of its groups."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

KEY_OF_THIS_PACKAGE = "momentum_style"  # no other optimizer's groups have it

# What a message tells to write for state dicts of torch's.
_CALLS_FOR_TORCH = {
    "torch_muon": "[muon_state_dict, adamw_state_dict]",
    "torch_adamw": "state_dict, params=model.parameters()",
}


@contextlib.contextmanager
def names_source(saved_groups: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """Within it, an error of `Muon.load_state_dict` names the optimizer that wrote the checkpoint.

    State dicts of torch's optimizers are refused even if they would fit: torch's Muon keeps the
    averaged momentum, and both keep options under other keys.

    Raises:
        ValueError: the groups are those of one of torch's; whatever is raised within it.
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
    """Which kinds may have written a group, by keys that only they have."""
    if KEY_OF_THIS_PACKAGE in options or "dampening" in options:  # SGD has momentum, too
        return ()
    if "kind" in options:
        return ("nanochat",)
    if "wd" in options:
        return ("llamafactory",)
    if "adamw_lr_ratio" in options or "update_buffer" in options:
        return ("keller_jordan",)
    if "use_muon" in options:
        return ("motif",) if "adamw_betas" in options else ("keller_jordan",)
    if "adjust_lr_fn" in options:
        return ("torch_muon",)
    if "betas" in options:
        return ("torch_adamw",)
    if "momentum" in options:  # which both of these group by size, with a momentum for each
        return ("nanochat", "keller_jordan") if "ns_steps" in options else ("keller_jordan",)
    return ()
