"""Makes parameter groups for a model: the default groups, and the groups of `Muon.for_model`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Optional

from torch import nn

from ..parameters.names import did_you_mean
from ..parameters.replaced import ModelNames
from ..parameters.validation import warn
from .assignment import AUTO, Assignment, assign, find_fused
from .decisions import (
    ExpertKeys,
    as_keys,
    decide,
    default_is_muon,
    stacked_experts,
    unmatched_keys,
)
from .fused import split_patterns
from .modules import Decision, component_of, infos_of


def get_default_muon_param_groups(
    model: nn.Module,
    is_muon_func: Callable[..., bool] = default_is_muon,
    expert_keys: Optional[Sequence[str]] = None,
    *,
    adamw_keys: ExpertKeys = None,
    adamw_lr: Any = None,
    decay_vectors: bool = True,
    convolutions: bool = False,
    per_head: bool = False,
) -> list[dict[str, Any]]:
    """Makes Muon's and AdamW's parameter groups of a model, without frozen parameters.

    AdamW gets the weights of ``nn.Embedding`` and any weights tied to them, whatever their names,
    and output heads that the model's structure shows. `describe` shows where each parameter goes
    and why, and which decisions are uncertain.

    Args:
        model: the model, sharded or not.
        is_muon_func: a function of ``(name, param)`` or ``(name, param, expert_keys)`` that returns
            True if Muon trains the parameter.
        expert_keys: see `default_is_muon`. They become a key of the Muon group.
        adamw_keys: whole name components whose parameters AdamW trains in any case, for example
            ``["router"]``.
        adamw_lr: learning rate of AdamW's group; None uses the optimizer's ``lr``.
        decay_vectors: False puts parameters with fewer than two dimensions, such as norms' weights
            and biases, into their own group without weight decay.
        convolutions: True gives Muon the convolutions with more than four input and output channels
            too, as matrices (first dimension, all the rest): its group gets ``flatten=True``.
        per_head: True splits query, key, and value projections by head, and Muon orthogonalizes
            each head separately: its group gets a ``split``. Head sizes come from the modules and
            their config. Projections whose head size is unknown stay whole, with one warning.

    Raises:
        ValueError: ``model`` isn't a module, or FSDP1 has flattened its parameters.

    Returns:
        Two groups, with ``use_muon`` True and False, either of which may be empty. Each has
        ``params`` and ``names``, the keys of the model's ``state_dict()``. ``decay_vectors=False``
        adds a third group, also AdamW's.
    """
    expert_keys, adamw_keys = as_keys(expert_keys), as_keys(adamw_keys)
    decisions = decide(model, is_muon_func, expert_keys, adamw_keys, convolutions)
    infos = infos_of(model)
    is_meant = expert_keys == [] or is_muon_func is not default_is_muon
    left = {} if is_meant else stacked_experts(model, infos, decisions)
    problems = []
    if left:
        sizes = {d.name: d.param.numel() for d in decisions if d.algorithm != "frozen"}
        share = sum(sizes[name] for name in left) / sum(sizes.values())
        names = f"{next(iter(left))}{' and others' if len(left) > 1 else ''}"
        keys = [*(expert_keys or ()), *dict.fromkeys(left.values())]
        problems = [
            f"stacked experts, {share:.0%} of the trainable elements: {names}. Muon trains them "
            f"with expert_keys={keys}; expert_keys=[] leaves them to AdamW without this warning"
        ]
    groups = groups_of(model, decisions, expert_keys, adamw_lr, decay_vectors, convolutions)
    whole: Sequence[str] = ()
    if per_head:
        muons = [d for d in decisions if d.algorithm == "Muon"]
        found, _, whole = find_fused(model, infos, muons, per_head)
        by_head = {key: fused.by_head for key, fused in found.items() if fused.by_head is not None}
        if by_head:
            groups[0]["split"] = split_patterns(by_head, groups[0]["names"])
    check_and_warn(model, decisions, expert_keys, adamw_keys, problems, whole)
    return groups


def check_and_warn(
    model: nn.Module,
    decisions: Sequence[Decision],
    expert_keys: ExpertKeys,
    adamw_keys: ExpertKeys,
    left_to_adamw: Sequence[str],
    whole: Sequence[str],
) -> None:
    """Checks a model after its groups are made, and warns about likely mistakes.

    Args:
        left_to_adamw: texts about parameters left to AdamW, with the arguments that decide.
        whole: names of projections whose heads are unknown.
    """
    _check_not_flattened(model)
    names = [decision.name for decision in decisions]
    problems = [f"left to AdamW: {'; '.join(left_to_adamw)}"] if left_to_adamw else []
    if whole:
        split = ", ".join(f'"{key}": …' for key in dict.fromkeys(map(component_of, whole)))
        problems.append(
            f"per_head: found no head size that fits {whole[0]}"
            f"{f' and {len(whole) - 1} more' if whole[1:] else ''}, which stay as without "
            f"per_head. Set head_dim on the attention module, or split={{{split}}} to the rows of "
            "a head"
        )
    for option, keys in (("expert_keys", expert_keys), ("adamw_keys", adamw_keys)):
        for key in unmatched_keys(decisions, as_keys(keys)):
            instead = did_you_mean([key], names)
            problems.append(f"{option}: no parameter has a component {key!r}{instead}")
    chosen = {decision.algorithm for decision in decisions if decision.param.ndim > 1}
    if "AdamW" in chosen and "Muon" not in chosen:
        problems.append(
            "no parameter of this model is Muon's: optimizer.describe(model) says why and what to "
            "write"
        )
    for problem in problems:
        warn(problem)


def groups_of(
    model: nn.Module,
    decisions: Sequence[Decision],
    expert_keys: Optional[Sequence[str]],
    adamw_lr: Any,
    decay_vectors: bool,
    convolutions: bool,
) -> list[dict[str, Any]]:
    """Makes groups from decisions, as `get_default_muon_param_groups` describes."""
    rate = {} if adamw_lr is None else {"lr": adamw_lr}
    groups: list[dict[str, Any]] = [
        {"params": [], "names": ModelNames([], model), "use_muon": True},
        {"params": [], "names": ModelNames([], model), "use_muon": False, **rate},
    ]
    if expert_keys is not None:
        groups[0]["expert_keys"] = list(expert_keys)
    if convolutions:
        groups[0]["flatten"] = True
    if not decay_vectors:
        groups.append(
            {**groups[1], "params": [], "names": ModelNames([], model), "weight_decay": 0.0}
        )
    for decision in decisions:
        if decision.algorithm != "frozen":
            number = 0 if decision.algorithm == "Muon" else 1
            if number == 1 and decision.param.ndim < 2:
                number = len(groups) - 1
            groups[number]["params"].append(decision.param)
            groups[number]["names"].append(decision.key)
    return groups


def _check_not_flattened(model: nn.Module) -> None:
    """Raises ValueError for FSDP1, which flattens matrices: AdamW would silently train them all."""
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    wrappers = [module for module in model.modules() if isinstance(module, fsdp)]
    if any(wrapper.sharding_strategy.name != "NO_SHARD" for wrapper in wrappers):
        raise ValueError(
            "the model is wrapped in FullyShardedDataParallel (FSDP1), whose parameters are pieces "
            "of one long vector, not matrices: use fully_shard (FSDP2), which is fsdp_version=2 in "
            "accelerate and transformers"
        )


def groups_for(
    model: nn.Module,
    is_muon_func: Callable[..., bool],
    expert_keys: ExpertKeys,
    adamw_keys: ExpertKeys,
    convolutions: bool,
    split: Any,
    per_head: bool,
    adamw_lr: Any,
    decay_vectors: bool,
) -> tuple[list[dict[str, Any]], Any]:
    """Returns groups and ``split`` of `Muon.for_model`; warns once about undecided parameters."""
    made = assign(model, is_muon_func, expert_keys, adamw_keys, convolutions, split, per_head)
    keys = None if expert_keys == AUTO else expert_keys
    problems = [
        f"{what}: {_listed(made, what)}" for what in dict.fromkeys(e.what for e in made.undecided)
    ]
    check_and_warn(model, made.decisions, keys, adamw_keys, problems, made.whole)
    groups = groups_of(
        model, made.decisions, made.expert_keys, adamw_lr, decay_vectors, convolutions
    )
    return groups, made.split


def _listed(made: Assignment, what: str) -> str:
    """Describes the parameters that are undecided for one reason, and the argument that decides."""
    undecided = [each for each in made.undecided if each.what == what]
    others = f" and {len(undecided) - 1} more" if len(undecided) > 1 else ""
    return f"{undecided[0].name}{others} ({undecided[0].write} decides)"
