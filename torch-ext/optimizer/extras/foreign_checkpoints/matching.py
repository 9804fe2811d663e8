"""Matches a checkpoint's parameters with this optimizer's: by name, otherwise by order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from torch import Tensor

from ...parameters.names import find_name, normalize_name
from ...parameters.options import Group
from .sources import SourceOptimizer

Shape = tuple[int, ...]
Position = tuple[int, int]  # a group of this optimizer, and an index in it


@dataclass(frozen=True)
class TargetParam:
    """A parameter that gets state from a checkpoint, or a name that the optimizer does not have.

    Args:
        name: what messages call it.
        fqn: its name in its group, where it has one.
        shape: of the whole tensor; None of a name that no group of the optimizer has.
        position: None where no group of the optimizer has the parameter.
        use_muon: whether it is Muon's.
    """

    name: str
    fqn: Optional[str]
    shape: Optional[Shape] = None
    position: Optional[Position] = None
    use_muon: Optional[bool] = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape) if self.shape is not None else -1


@dataclass(frozen=True)
class SavedState:
    """The state of one parameter as a source saved it, in whole tensors, under the keys of `Muon`.

    Args:
        target: the parameter that gets it.
        where: what messages call its position in the checkpoint.
        is_muon: whether it was Muon's there.
        momentum_style: the source's, ``"classical"`` or ``"ema"``.
        state: ``momentum_buffer``, ``second_momentum_buffer``, ``step``, ``exp_avg``,
            ``exp_avg_sq``: those there are.
        options: hyperparameters of its group.
    """

    target: TargetParam
    where: str
    is_muon: bool
    momentum_style: str
    state: Mapping[str, Any]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class TargetOptimizer:
    """The optimizer that gets the state: its parameters.

    Args:
        groups: the parameters of each group.
        source_groups: numbers of groups that are one group of the source.
        params: the parameters in the order in which the source was given them; None if the user
            has not given them.
    """

    groups: Sequence[Sequence[TargetParam]]
    source_groups: Sequence[Sequence[int]]
    params: Optional[Sequence[TargetParam]]

    def grouped(self, use_muon: Optional[bool]) -> list[list[TargetParam]]:
        """The parameters of Muon, of AdamW or, for None, of both, by groups of the source; without
        groups that have none."""
        groups = [[t for n in numbers for t in self.groups[n]] for numbers in self.source_groups]
        chosen = [[t for t in group if use_muon in (None, t.use_muon)] for group in groups]
        return [group for group in chosen if group]

    def ordered(self, use_muon: Optional[bool]) -> list[TargetParam]:
        """The parameters of `grouped` in one list, in the order of ``params``, else of groups."""
        if self.params is not None:
            return [target for target in self.params if use_muon in (None, target.use_muon)]
        return [target for group in self.grouped(use_muon) for target in group]


def target_optimizer(
    groups: Sequence[Group],
    names: Sequence[Sequence[str]],
    params: Optional[Iterable[Any]],
    source_groups: Sequence[Sequence[int]],
) -> TargetOptimizer:
    """The parameters of an optimizer.

    Args:
        groups: of the optimizer.
        names: what messages call their parameters.
        params: as the user gave them, in order: tensors, (name, tensor) pairs, or names.
        source_groups: see `TargetOptimizer`.

    Raises:
        ValueError: ``params`` holds something else, or something twice.
    """
    targets = [
        [
            TargetParam(
                names[number][index],
                group.names[index] if group.names is not None else None,
                tuple(param.shape),
                (number, index),
                group.use_muon,
            )
            for index, param in enumerate(group.params)
        ]
        for number, group in enumerate(groups)
    ]
    ordered = None if params is None else _in_order(params, groups, targets)
    return TargetOptimizer(targets, source_groups, ordered)


def _in_order(
    params: Iterable[Any], groups: Sequence[Group], targets: Sequence[Sequence[TargetParam]]
) -> list[TargetParam]:
    by_id = {
        id(param): targets[number][index]
        for number, group in enumerate(groups)
        for index, param in enumerate(group.params)
    }
    by_name = {target.fqn: target for group in targets for target in group if target.fqn}
    find = find_name(target.fqn for group in targets for target in group if target.fqn)
    ordered: dict[Any, TargetParam] = {}  # by name or id
    for item in params:
        name, param = item if isinstance(item, tuple) and len(item) == 2 else (None, item)
        if isinstance(param, str):
            key: Any = find(param) or param
            target = by_name.get(key) or TargetParam(param, key)
        elif isinstance(param, Tensor):
            key = id(param)
            stranger = TargetParam(name or f"params[{len(ordered)}]", name, tuple(param.shape))
            target = by_id.get(key) or stranger
        else:
            raise ValueError(
                "params must hold parameters, (name, parameter) pairs or names, found a "
                f"{type(param).__name__}"
            )
        if key in ordered:
            raise ValueError(f"params has {target.name} twice")
        ordered[key] = target
    return list(ordered.values())


def match_groups(source: SourceOptimizer, optimizer: TargetOptimizer) -> list[list[TargetParam]]:
    """The parameters of each group of a source, in its order.

    Raises:
        ValueError: neither names nor order tell which they are.
    """
    targets = [target for group in optimizer.groups for target in group]
    has_names = all(target.fqn is not None for target in targets) and all(
        group.names is not None for group in source.groups
    )
    if has_names and optimizer.params is None:
        by_name = {target.fqn: target for target in targets}
        find = find_name(target.fqn for target in targets if target.fqn)
        return [
            [by_name.get(find(name)) or TargetParam(name, name) for name in group.names or ()]
            for group in source.groups
        ]
    lengths = [len(group.ids) for group in source.groups]
    if optimizer.params is not None:
        return cut(optimizer.ordered(source.use_muon), lengths, source)
    groups = optimizer.grouped(source.use_muon)
    if [len(group) for group in groups] != [length for length in lengths if length]:
        raise ValueError(
            f"{source.where} has groups of {lengths} parameters, where this optimizer has "
            f"{[len(group) for group in groups]}: make its groups by the preset of that source, in "
            "the same order, or give params=, the parameters in the order in which the other "
            "optimizer was given them"
        )
    rest = iter(groups)
    matched = [next(rest) if length else [] for length in lengths]
    check_names(source, matched)
    return matched


def cut(
    ordered: Sequence[TargetParam], lengths: Sequence[int], source: SourceOptimizer
) -> list[list[TargetParam]]:
    """A list of parameters as groups of ``lengths``."""
    if len(ordered) != sum(lengths):
        raise ValueError(
            f"{source.where} has {sum(lengths)} parameters in its groups, where {len(ordered)} are "
            "given: params= takes all of them, in the order in which the other optimizer was given "
            "them"
        )
    rest = iter(ordered)
    groups = [list(itertools.islice(rest, length)) for length in lengths]
    check_names(source, groups)
    return groups


def check_names(source: SourceOptimizer, groups: Sequence[Sequence[TargetParam]]) -> None:
    """Checks that parameters matched by order have the names that the checkpoint has for them."""
    for group, targets in zip(source.groups, groups):
        for name, target in zip(group.names or (), targets):
            if target.fqn is not None and normalize_name(target.fqn) != normalize_name(name):
                raise ValueError(
                    f"{target.name} is where {source.where} has {name}: give the parameters in "
                    "the order they were saved in"
                )
