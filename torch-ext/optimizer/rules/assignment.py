"""Assigns every parameter of a model to Muon or AdamW, for `Muon.for_model` and `describe`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Optional

from torch import nn

from ..parameters.names import matches
from ..parameters.options import GROUP_OPTIONS
from .decisions import (
    ExpertKeys,
    as_keys,
    changed,
    decide,
    default_is_muon,
    is_left_by_dimensions,
    stacked_experts,
)
from .fused import Fused, fused_in, heads_in, split_patterns
from .heads import possible_heads
from .modules import Decision, ParamInfos, component_of, infos_of, is_paired_row_by_row

AUTO = "auto"

# Least share of trainable elements for a warning about three-dimensional tensors left to AdamW.
_SHARE_OF_STACKS = 0.01


class Undecided(NamedTuple):
    """A parameter that is left to AdamW although it may be Muon's."""

    kind: str  # "stack", "pair", "head", or "fused"
    name: str
    what: str  # what the parameter holds, or may be
    write: str  # the argument of `Muon.for_model` that decides


@dataclass(frozen=True)
class Assignment:
    """Which algorithm trains each parameter of a model, and how Muon reads its parameters.

    Args:
        model: the model.
        infos: where the model registers its parameters.
        decisions: decisions for all parameters, in the model's order.
        expert_keys: components of names that mark stacked experts.
        split: the ``split`` of `Muon`.
        undecided: parameters that are left to AdamW because their meaning is unknown.
        whole: names of projections that ``per_head`` leaves whole because their heads are unknown.
    """

    model: nn.Module
    infos: ParamInfos
    decisions: Sequence[Decision]
    expert_keys: Optional[Sequence[str]]
    split: Any
    undecided: Sequence[Undecided]
    whole: Sequence[str] = ()


def assign(
    model: nn.Module,
    is_muon_func: Callable[..., bool] = default_is_muon,
    expert_keys: ExpertKeys = AUTO,
    adamw_keys: ExpertKeys = None,
    convolutions: bool = False,
    split: Any = AUTO,
    per_head: bool = False,
) -> Assignment:
    """Makes the assignment for a model; arguments are as in `Muon.for_model`.

    Raises:
        ValueError: as `decide`, or if ``per_head`` comes with a ``split`` for all parameters.
    """
    is_found = split == AUTO or isinstance(split, Mapping)
    if per_head and not is_found:
        raise ValueError(f'per_head=True needs split="auto" or a mapping, found split={split!r}')
    if split != AUTO:
        GROUP_OPTIONS["split"].check("split", split)
    named, adamws = None if expert_keys == AUTO else as_keys(expert_keys), as_keys(adamw_keys)
    decisions = decide(model, is_muon_func, named, adamws, convolutions)
    infos, keys = infos_of(model), list(named or ())
    if expert_keys == AUTO or named:
        keys += dict.fromkeys(stacked_experts(model, infos, decisions).values())
    if len(keys) > len(named or ()):  # decide again, as keys may change which layers are heads
        decisions = decide(model, is_muon_func, keys, adamws, convolutions)
    undecided: list[Undecided] = []
    if is_muon_func is default_is_muon:
        undecided = _stacks(model, infos, decisions) + _pairs(infos, decisions)
        undecided += _possible_heads(model, infos, decisions)
    whole: list[str] = []
    if is_found:
        given: Mapping[str, Any] = {} if split == AUTO else split
        muons = [d for d in decisions if d.algorithm == "Muon"]
        by_hand = {d.key for d in muons if any(matches(d.key, pattern) for pattern in given)}
        others = [d for d in muons if d.key not in by_hand]
        found, unknown, whole = find_fused(model, infos, others, per_head)
        undecided += unknown
        splits = {key: fused.split for key, fused in found.items()}
        split = {**given, **split_patterns(splits, [d.key for d in muons])} or None
        holds = {key: fused.holds for key, fused in found.items()}
        holds.update(dict.fromkeys(by_hand, "as given"))
        apart = {d.name: f"{d.reason}, split: {holds[d.key]}" for d in decisions if d.key in holds}
        decisions = changed(decisions, "Muon", apart)
    left = {each.name: f"left to AdamW: {each.what}" for each in undecided}
    decisions = changed(decisions, "AdamW", left)
    return Assignment(model, infos, decisions, keys or None, split, undecided, whole)


def _stacks(model: nn.Module, infos: ParamInfos, decisions: Sequence[Decision]) -> list[Undecided]:
    """Returns three-dimensional tensors that are neither convolutions nor known to be experts."""
    trained = sum(d.param.numel() for d in decisions if d.algorithm != "frozen")
    experts = stacked_experts(model, infos, decisions)
    stacks = [
        d
        for d in decisions
        if is_left_by_dimensions(d)
        and d.name not in experts
        and d.param.ndim == 3
        and not infos[id(d.param)][0].is_convolution
        and min(d.param.shape[-2:]) >= 8
    ]
    if sum(d.param.numel() for d in stacks) < _SHARE_OF_STACKS * trained:
        return []
    what = "three dimensions, and the first may count matrices"
    return [
        Undecided("stack", d.name, what, f'expert_keys=["{component_of(d.name)}"]') for d in stacks
    ]


def _pairs(infos: ParamInfos, decisions: Sequence[Decision]) -> list[Undecided]:
    """Returns gate and up projections with interleaved rows, which no ``split`` can separate."""
    what = "gate and up projection in one tensor, with interleaved rows"
    return [
        Undecided("pair", d.name, what, "storing it as (2, rows, columns)")
        for d in decisions
        if is_left_by_dimensions(d) and is_paired_row_by_row(infos[id(d.param)][0], d.param)
    ]


def _possible_heads(
    model: nn.Module, infos: ParamInfos, decisions: Sequence[Decision]
) -> list[Undecided]:
    muons = [d for d in decisions if d.algorithm == "Muon"]
    return [
        Undecided("head", d.name, "may be an output head", "is_muon_func")
        for d in possible_heads(model, infos, decisions, muons)
        if fused_in(model, infos[id(d.param)][0], d.param) is None
    ]


def find_fused(
    model: nn.Module,
    infos: ParamInfos,
    muons: Iterable[Decision],
    per_head: bool,
) -> tuple[dict[str, Fused], list[Undecided], list[str]]:
    """Returns Muon's weights that hold several matrices or, with ``per_head``, heads, by key.

    Also returns weights with matrices of unknown sizes, and names of those with unknown heads.
    """
    found: dict[str, Fused] = {}
    unknown, whole = [], []
    read = heads_in if per_head else fused_in
    for decision in muons:
        fused = read(model, infos[id(decision.param)][0], decision.param)
        if fused is None:
            continue
        if per_head and fused.by_head is not None:
            holds = fused.holds if fused.split is None else f"{fused.holds}, by head"
            fused = replace(fused, holds=holds, split=fused.by_head)
        elif per_head and fused.has_heads:
            whole.append(decision.name)
        if fused.split is not None:
            found[decision.key] = fused
        elif not fused.has_heads:
            what = f"{fused.holds} in one tensor, of unknown sizes"
            write = fused.argument(decision.name)
            unknown.append(Undecided("fused", decision.name, what, write))
    return found, unknown, whole
