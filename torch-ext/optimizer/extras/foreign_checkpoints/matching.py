"""Matches a checkpoint's parameters with this optimizer's, by name or by order."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from torch import Tensor

from ...parameters.names import find_name, normalize_name
from ...parameters.options import Group
from .sources import SourceOptimizer

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class TargetParam:
    """A parameter that gets state from a checkpoint, or a name that the optimizer doesn't have.

    Args:
        name: name in messages.
        fqn: name in its group, if any.
        param: the parameter; None if there is only the name.
        use_muon: True if Muon trains it; None if it is in no group of the optimizer.
    """

    name: str
    fqn: Optional[str]
    param: Optional[Tensor] = None
    use_muon: Optional[bool] = None

    @property
    def shape(self) -> Optional[Shape]:
        """The shape of the whole tensor."""
        return None if self.param is None else tuple(self.param.shape)


Targets = Sequence[Sequence[TargetParam]]  # by groups, of this optimizer or of a source


@dataclass(frozen=True)
class SavedState:
    """The saved state of one parameter, in whole tensors, under the keys of `Muon`.

    Args:
        target: the parameter that gets it.
        where: its position in the checkpoint, for messages.
        is_muon: True if Muon trained it there.
        state: any of ``momentum_buffer``, ``second_momentum_buffer``, ``step``, ``exp_avg`` and
            ``exp_avg_sq``.
        options: hyperparameters of its group.
    """

    target: TargetParam
    where: str
    is_muon: bool
    state: Mapping[str, Any]
    options: Mapping[str, Any]


def targets_of(groups: Sequence[Group], names: Sequence[Sequence[str]]) -> list[list[TargetParam]]:
    """The parameters of each group; ``names`` are their names in messages."""
    return [
        [
            TargetParam(
                names[number][index],
                group.names[index] if group.names is not None else None,
                param,
                group.use_muon,
            )
            for index, param in enumerate(group.params)
        ]
        for number, group in enumerate(groups)
    ]


def targets_in_order(params: Iterable[Any], targets: Iterable[TargetParam]) -> list[TargetParam]:
    """The parameters in the order in which the user passed them.

    Args:
        params: tensors, (name, tensor) pairs, or names.
        targets: all parameters of the optimizer.

    Raises:
        ValueError: ``params`` has an item of another type, or an item twice.
    """
    targets = list(targets)
    by_id = {id(target.param): target for target in targets}
    by_name = {target.fqn: target for target in targets if target.fqn}
    find = find_name(by_name)
    ordered: dict[Any, TargetParam] = {}  # by name or id
    for item in params:
        name, param = item if isinstance(item, tuple) and len(item) == 2 else (None, item)
        if isinstance(param, str):
            key: Any = find(param) or param
            target = by_name.get(key) or TargetParam(param, key)
        elif isinstance(param, Tensor):
            key = id(param)
            unknown = TargetParam(name or f"params[{len(ordered)}]", name, param)
            target = by_id.get(key) or unknown
        else:
            raise ValueError(
                "params must contain parameters, (name, parameter) pairs or names, found a "
                f"{type(param).__name__}"
            )
        if key in ordered:
            raise ValueError(f"params has {target.name} twice")
        ordered[key] = target
    return list(ordered.values())


def match_groups(
    source: SourceOptimizer,
    groups: Targets,
    params: Optional[Sequence[TargetParam]],
) -> list[list[TargetParam]]:
    """The parameters of each group of a source, in its order.

    Args:
        source: the checkpoint.
        groups: the optimizer's parameters, by group of the source.
        params: all parameters passed to the source, in order; None if unknown.

    Raises:
        ValueError: neither names nor order identify the parameters.
    """
    lengths = [len(group.ids) for group in source.groups]
    if params is not None:
        chosen = [target for target in params if source.use_muon in (None, target.use_muon)]
        if len(chosen) != sum(lengths):
            raise ValueError(
                f"{source.where} has {sum(lengths)} parameters, but {len(chosen)} are given: pass "
                "all in params=, in the order in which the other optimizer received them"
            )
    else:
        targets = list(itertools.chain.from_iterable(groups))
        by_name = {target.fqn: target for target in targets if target.fqn is not None}
        saved_names = [group.names for group in source.groups if group.names is not None]
        if all(t.fqn is not None for t in targets) and len(saved_names) == len(lengths):
            find = find_name(by_name)
            return [
                [by_name.get(find(name) or name) or TargetParam(name, name) for name in names]
                for names in saved_names
            ]
        of_source = [[t for t in g if source.use_muon in (None, t.use_muon)] for g in groups]
        found = [len(group) for group in of_source if group]
        if found != [length for length in lengths if length]:
            raise ValueError(
                f"{source.where} has groups of {lengths} parameters, but this optimizer has "
                f"{found}: make its groups with that source's preset, in the same order, or pass "
                "params=, the parameters in the order in which the other optimizer received them"
            )
        chosen = list(itertools.chain.from_iterable(of_source))
    rest = iter(chosen)
    matched = [list(itertools.islice(rest, length)) for length in lengths]
    check_names(source, matched)
    return matched


def check_names(source: SourceOptimizer, groups: Targets) -> None:
    """Checks that parameters matched by order have their names from the checkpoint."""
    for group, targets in zip(source.groups, groups):
        for name, target in zip(group.names or (), targets):
            if target.fqn is not None and normalize_name(target.fqn) != normalize_name(name):
                raise ValueError(
                    f"{target.name} is where {source.where} has {name}: pass the parameters in "
                    "the order in which they were saved"
                )
