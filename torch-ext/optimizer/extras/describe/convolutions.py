"""Finds tensors of more than two dimensions, experts and convolutions, that AdamW gets."""

from __future__ import annotations

from collections.abc import Iterator

from ...parameters.default_groups import MOST_CHANNELS, convolutions_of, is_left_by_dimensions
from ...parameters.modules import expert_key
from ...parameters.names import counted
from .learning_rate import is_transformer
from .remedy import Remedy, Trap, literal
from .subject import Subject, names_of, numel

# Convolutions are a trap if they are at least this share of what is trained, or more than Muon's
# matrices, as in a CNN whose linear layers are large. Of fewer, such as the patch embedding of a
# transformer or the stem before one, AdamW is right or does not matter.
SHARE = 0.1
SHARE_OF_OTHERS = 0.01  # the same for tensors of which nobody can tell what they are


def find(subject: Subject, advice: Remedy) -> Iterator[Trap]:
    left = [d for d in subject.decisions if is_left_by_dimensions(d)]
    total = numel(subject.trainable)
    keys_of = {d.name: expert_key(subject.model, subject.info(d), d.param) for d in left}
    experts = {name: key for name, key in keys_of.items() if key is not None}
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
    kernels = convolutions_of(subject.model, subject.infos, subject.decisions)
    layers, muons = [subject.info(d).layer for d in rest], subject.by_algorithm("Muon")
    dense = sum(getattr(layer, "groups", 0) == 1 for layer in layers)
    is_cnn = dense > len(muons) and not is_transformer(muons)
    if kernels and (is_cnn or numel(kernels) >= SHARE * total):
        yield Trap(
            "convolutions",
            f"{counted(kernels, 'convolution')} left to AdamW: {numel(kernels) / total:.0%} of "
            "what is trained",
            names_of(kernels),
            "as matrices (first dimension, all the rest) they can be Muon's; those with at most "
            f"{MOST_CHANNELS} channels on a side, depthwise or of pixels, stay with AdamW",
            Remedy(
                options={"convolutions": True},
                take=names_of(kernels),
                wording="get_default_muon_param_groups(model, {})",
            ),
        )
    others = [
        d
        for d in rest
        if d.param.ndim == 3 and not subject.info(d).is_convolution and min(d.param.shape[-2:]) >= 8
    ]
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
