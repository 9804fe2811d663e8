"""Finds tensors with more than two dimensions, experts and convolutions, that AdamW gets."""

from __future__ import annotations

from collections.abc import Iterator

from ...parameters.names import counted
from ...rules.decisions import (
    MOST_CHANNELS,
    convolutions_of,
    is_left_by_dimensions,
    stacked_experts,
    takes_expert_keys,
)
from .learning_rate import is_transformer
from .remedy import Remedy, Trap
from .subject import Subject, names_of, numel

# Convolutions are a trap if they are at least this share of what is trained, or outnumber Muon's
# matrices, as in a CNN with large linear layers. For fewer, such as a transformer's patch embedding
# or stem, AdamW is right or doesn't matter.
SHARE = 0.1


def find(subject: Subject, advice: Remedy) -> Iterator[Trap]:
    total = numel(subject.trainable)
    experts = stacked_experts(subject.model, subject.assignment.infos, subject.decisions)
    function = subject.is_muon_func
    if experts and (function is None or takes_expert_keys(function)):
        keys = subject.assignment.expert_keys or ()
        yield Trap(
            "experts",
            f"{counted(experts, 'tensor')} of stacked experts left to AdamW",
            tuple(experts),
            "with expert_keys, Muon trains each matrix along their first dimension",
            Remedy({"expert_keys": [*keys, *dict.fromkeys(experts.values())]}),
        )
    left = [d for d in subject.decisions if is_left_by_dimensions(d)]
    rest = [d for d in left if d.name not in experts]
    kernels = convolutions_of(subject.model, subject.assignment.infos, subject.decisions)
    layers, muons = [subject.info(d).layer for d in rest], subject.by_algorithm("Muon")
    dense = sum(getattr(layer, "groups", 0) == 1 for layer in layers)
    is_cnn = dense > len(muons) and not is_transformer(muons)
    if kernels and (is_cnn or numel(kernels) >= SHARE * total):
        yield Trap(
            "convolutions",
            f"{counted(kernels, 'convolution')} left to AdamW: {numel(kernels) / total:.0%} of "
            "what is trained",
            names_of(kernels),
            "Muon can train them as matrices (first dimension, all the rest); those with at most "
            f"{MOST_CHANNELS} input or output channels, depthwise or of pixels, stay with AdamW",
            Remedy({"convolutions": True}, take=names_of(kernels)),
        )
