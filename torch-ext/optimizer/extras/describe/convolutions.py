"""Finds tensors of more than two dimensions, experts and convolutions, that AdamW gets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Optional

from torch import nn

from ...parameters.default_groups import DIMENSIONS, Decision
from .remedy import Remedy, Trap, literal
from .subject import Subject, names_of, numel
from .table import counted

# Convolutions are a trap if they are at least this share of what is trained. Of fewer, such as the
# patch embedding of a transformer or the stem before one, AdamW is right or does not matter.
SHARE = 0.1
SHARE_OF_OTHERS = 0.01  # the same for tensors of which nobody can tell what they are
_MOST_CHANNELS = 4  # of images; as few come into a depthwise convolution
_CONVOLUTIONS = (nn.modules.conv._ConvNd,)
# What configurations and modules call their number of experts.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "n_experts")


def find(subject: Subject, advice: Remedy) -> Iterator[Trap]:
    left = [
        d
        for d in subject.by_algorithm("AdamW")
        if d.param.ndim > 2 and (d.reason.endswith(DIMENSIONS) or d.reason == "is_muon_func")
    ]
    total = numel(subject.trainable)
    experts = {d.name: key for d in left if (key := expert_key(d, subject)) is not None}
    if experts:
        keys = advice.applied_to(subject.options).get("expert_keys") or ()
        yield Trap(
            "experts",
            f"{counted(experts, 'tensor')} of stacked experts left to AdamW",
            tuple(experts),
            "expert_keys tells that their first dimension counts matrices, each Muon's",
            Remedy(
                options={"expert_keys": [*keys, *dict.fromkeys(experts.values())]},
                wording="get_default_muon_param_groups(model, {})",
            ),
        )
    rest = [d for d in left if d.name not in experts]
    # Of many channels each way: neither of pixels nor depthwise.
    kernels = [
        d for d in rest if _is_kernel(d, subject) and min(d.param.shape[:2]) > _MOST_CHANNELS
    ]
    if kernels and numel(kernels) >= SHARE * total:
        yield Trap(
            "convolutions",
            f"{counted(kernels, 'convolution')} left to AdamW: {numel(kernels) / total:.0%} of "
            "what is trained",
            names_of(kernels),
            "as matrices (first dimension, all the rest) they can be Muon's; those with at most "
            f"{_MOST_CHANNELS} channels on a side, depthwise or of pixels, stay with AdamW",
            Remedy(
                options={"flatten": True},
                take=names_of(kernels),
                wording="is_muon_func that takes them, and Muon(groups, {})",
            ),
        )
    others = [d for d in rest if not _is_kernel(d, subject) and min(d.param.shape[-2:]) >= 8]
    if others and numel(others) >= SHARE_OF_OTHERS * total:
        name = others[0].name
        component = next((c for c in reversed(name.split(".")) if c != "weight"), name)
        expert_keys = f"expert_keys=[{literal(component)}]"
        yield Trap(
            "dimensions",
            f"{counted(others, 'tensor')} of more than two dimensions left to AdamW",
            names_of(others),
            "where leading dimensions count matrices, expert_keys says so; where a matrix was "
            "given more dimensions, is_muon_func and flatten=True read it as (first, the rest)",
            Remedy(
                comments=(
                    f"# {name}:",
                    f"#     {expert_keys} above, if leading dimensions count matrices.",
                ),
                wording=expert_keys,
            ),
        )


def expert_key(decision: Decision, subject: Subject) -> Optional[str]:
    """The component of a parameter's name that holds experts, if name or config tells of any."""
    if isinstance(subject.info(decision).layer, _CONVOLUTIONS):
        return None
    components = decision.name.split(".")
    for component in components:
        if "expert" in component.lower() and not component.endswith("bias"):
            return component
    is_moe = any("moe" in component.lower().split("_") for component in components)
    count = subject.look_up(decision, EXPERTS)
    if (count is not None and decision.param.shape[0] == count > 1) or is_moe:
        named = [c for c in components if not c.isdigit() and c != "weight"]
        return named[-1] if named else None
    return None


def _is_kernel(decision: Decision, subject: Subject) -> bool:
    return isinstance(subject.info(decision).layer, _CONVOLUTIONS) or decision.param.ndim > 3
