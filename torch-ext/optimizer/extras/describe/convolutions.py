"""Tensors of more than two dimensions that AdamW gets: stacked experts, convolutions, others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Optional

from torch import nn

from ...parameters.default_groups import DIMENSIONS, Decision
from .code import Advice, literal
from .evidence import EXPERTS, Subject, numel
from .table import counted
from .trap import Trap

# Convolutions are told of where they are that much of what is trained: below, as the patch
# embedding of a transformer or the stem before one, AdamW is right or does not matter.
SHARE = 0.1
# The same for tensors of which nobody can tell what they are.
SHARE_OF_OTHERS = 0.01
_MOST_CHANNELS = 4  # of images; as few come into a depthwise convolution


def find(subject: Subject, advice: Advice) -> Iterator[Trap]:
    left = [d for d in subject.of("AdamW") if d.param.ndim > 2 and _may_be_matrices(d)]
    if not left:
        return
    total = numel(subject.trainable)
    experts = {d.name: key for d in left if (key := _expert_key(d, subject)) is not None}
    if experts:
        keys = list(dict.fromkeys(experts.values()))
        kept = advice.expert_keys
        given = list(kept if kept is not None else subject.expert_keys or ())
        advice.expert_keys = [*given, *keys]
        yield Trap(
            "experts",
            f"{counted(experts, 'tensor')} of stacked experts left to AdamW",
            tuple(experts),
            "expert_keys tells that their first dimension counts matrices, each Muon's",
            f"get_default_muon_param_groups(model, expert_keys={literal(advice.expert_keys)})",
        )
    rest = [d for d in left if d.name not in experts]
    kernels = [d for d in rest if _is_convolution(d, subject)]
    if numel(kernels) >= SHARE * total and kernels:
        advice.take += [d.name for d in kernels]
        advice.options["flatten"] = True
        yield Trap(
            "convolutions",
            f"{counted(kernels, 'convolution')} left to AdamW: {numel(kernels) / total:.0%} of "
            "what is trained",
            tuple(d.name for d in kernels),
            "as matrices (first dimension, all the rest) they can be Muon's",
            "is_muon_func that takes them, and Muon(groups, flatten=True)",
        )
    others = [d for d in rest if not _is_kernel(d, subject) and min(d.param.shape[-2:]) >= 8]
    if numel(others) >= SHARE_OF_OTHERS * total and others:
        name = others[0].name
        part = next((p for p in reversed(name.split(".")) if p != "weight"), name)
        advice.before += [
            f"# {name}:",
            f"#     expert_keys=[{literal(part)}] above, if leading dimensions count matrices.",
        ]
        yield Trap(
            "dimensions",
            f"{counted(others, 'tensor')} of more than two dimensions left to AdamW",
            tuple(d.name for d in others),
            "where leading dimensions count matrices, expert_keys says so; where a matrix was "
            "given more dimensions, is_muon_func and flatten=True read it as (first, the rest)",
            f"expert_keys=[{literal(part)}]",
        )


def _may_be_matrices(decision: Decision) -> bool:
    return decision.reason.endswith(DIMENSIONS) or decision.reason == "is_muon_func"


def _expert_key(decision: Decision, subject: Subject) -> Optional[str]:
    """The component of its name that holds experts, if the name or the config tells of any."""
    place, shape = subject.place(decision), decision.param.shape
    if isinstance(place.layer, _CONVOLUTIONS):
        return None
    parts = decision.name.split(".")
    for part in parts:
        if "expert" in part.lower() and not part.endswith("bias"):
            return part
    is_moe = any("moe" in part.lower().split("_") for part in parts)
    count = subject.look_up(place, EXPERTS)
    if (count is not None and shape[0] == count > 1) or is_moe:
        named = [part for part in parts if not part.isdigit() and part != "weight"]
        return named[-1] if named else None
    return None


_CONVOLUTIONS = (nn.modules.conv._ConvNd,)


def _is_convolution(decision: Decision, subject: Subject) -> bool:
    """Of many channels each way: neither of pixels nor depthwise."""
    return _is_kernel(decision, subject) and min(decision.param.shape[:2]) > _MOST_CHANNELS


def _is_kernel(decision: Decision, subject: Subject) -> bool:
    layer = subject.place(decision).layer
    return isinstance(layer, _CONVOLUTIONS) or decision.param.ndim > 3
