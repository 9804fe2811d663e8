"""Which parameter of a checkpoint is which of an optimizer's: by names, else by position."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable, Optional

from torch import Tensor

from ...parameters.names import normalize_name
from ...parameters.options import Group
from .reading import SavedGroup, Section

Shape = tuple[int, ...]
Options = Mapping[str, Any]


@dataclass(frozen=True)
class Target:
    """One parameter to find state for.

    Args:
        name: what messages call it.
        fqn: its normalized name, where the optimizer has one.
        shape: of the whole tensor; None of a name that no group of the optimizer has.
        place: group and index in it; None where no group of the optimizer has the parameter.
        use_muon: whether it is Muon's.
    """

    name: str
    fqn: Optional[str]
    shape: Optional[Shape]
    place: Optional[tuple[int, int]]
    use_muon: Optional[bool]

    @property
    def numel(self) -> int:
        return math.prod(self.shape) if self.shape is not None else -1


@dataclass(frozen=True)
class Found:
    """What a checkpoint has of one parameter, whole, under the keys of `Muon`.

    Args:
        target: the parameter.
        where: what messages call its place in the checkpoint.
        is_muon: whether it was Muon's there.
        style: momentum's.
        state: ``momentum_buffer``, ``second_momentum_buffer``, ``step``, ``exp_avg``,
            ``exp_avg_sq``: those there are.
        options: hyperparameters of its group.
    """

    target: Target
    where: str
    is_muon: bool
    style: str
    state: Mapping[str, Any]
    options: Options = field(default_factory=dict)


@dataclass(frozen=True)
class Ours:
    """The parameters to find state for.

    Args:
        groups: of each group of the optimizer its parameters.
        bundles: how a preset divided the groups it was given: numbers of groups that were one.
        given: in the order in which the other optimizer was given them, as far as it was told.
    """

    groups: Sequence[Sequence[Target]]
    bundles: Sequence[Sequence[int]]
    given: Optional[Sequence[Target]]

    def of(self, use_muon: Optional[bool]) -> list[list[Target]]:
        """Of each bundle the parameters that are Muon's, AdamW's, or all, where there are any."""
        bundles = [
            [t for number in numbers for t in self.groups[number]] for numbers in self.bundles
        ]
        chosen = [[t for t in every if use_muon in (None, t.use_muon)] for every in bundles]
        return [targets for targets in chosen if targets]

    def flat(self, use_muon: Optional[bool]) -> list[Target]:
        """In the order given, else in that of the groups."""
        if self.given is not None:
            return [t for t in self.given if use_muon in (None, t.use_muon)]
        return [target for group in self.of(use_muon) for target in group]


def ours_of(
    groups: Sequence[Group],
    names: Sequence[Sequence[str]],
    params: Optional[Iterable[Any]],
    bundles: Callable[[Sequence[Group]], list[list[int]]],
) -> Ours:
    """The parameters of an optimizer.

    Args:
        groups: of the optimizer.
        names: what messages call their parameters.
        params: the order that the user gave: tensors, (name, tensor) pairs, or names.
        bundles: of the source.

    Raises:
        ValueError: ``params`` holds something else, or something twice.
    """
    targets = [
        [
            Target(
                names[number][index],
                normalize_name(group.names[index]) if group.names is not None else None,
                tuple(param.shape),
                (number, index),
                group.use_muon,
            )
            for index, param in enumerate(group.params)
        ]
        for number, group in enumerate(groups)
    ]
    given = None if params is None else _given(params, groups, targets)
    return Ours(targets, bundles(groups), given)


def _given(
    params: Iterable[Any], groups: Sequence[Group], targets: Sequence[Sequence[Target]]
) -> list[Target]:
    by_id = {
        id(param): targets[number][index]
        for number, group in enumerate(groups)
        for index, param in enumerate(group.params)
    }
    by_name = {target.fqn: target for group in targets for target in group if target.fqn}
    found: list[Target] = []
    seen: set[Any] = set()
    for item in params:
        name, param = item if isinstance(item, tuple) and len(item) == 2 else (None, item)
        key: Any = normalize_name(param) if isinstance(param, str) else id(param)
        if not isinstance(param, (str, Tensor)):
            raise ValueError(
                "params must hold parameters, (name, parameter) pairs or names, found a "
                f"{type(param).__name__}"
            )
        if isinstance(param, str):
            target = by_name.get(key) or Target(param, key, None, None, None)
        else:
            stranger = Target(name or f"params[{len(found)}]", name, tuple(param.shape), None, None)
            target = by_id.get(key) or stranger
        if key in seen:
            raise ValueError(f"params has {target.name} twice")
        seen.add(key)
        found.append(target)
    return found


def arrange(section: Section, ours: Ours) -> list[list[Target]]:
    """Of each group of a checkpoint its parameters, in its order.

    Raises:
        ValueError: they can't be told.
    """
    by_name = _by_name(section, ours)
    if by_name is not None:
        return by_name
    lengths = [len(group.ids) for group in section.groups]
    if ours.given is not None:
        return cut(ours.flat(section.use_muon), lengths, section)
    groups = ours.of(section.use_muon)
    if [len(group) for group in groups] != [length for length in lengths if length]:
        raise ValueError(
            f"{section.where} has groups of {lengths} parameters, where this optimizer has "
            f"{[len(group) for group in groups]}: make its groups by the preset of that source, in "
            "the same order, or give params=, the parameters in the order in which the other "
            "optimizer was given them"
        )
    rest = iter(groups)
    arranged = [next(rest) if length else [] for length in lengths]
    check_names(section, arranged)
    return arranged


def cut(flat: Sequence[Target], lengths: Sequence[int], section: Section) -> list[list[Target]]:
    """A list of parameters as groups of ``lengths``."""
    if len(flat) != sum(lengths):
        raise ValueError(
            f"{section.where} has {sum(lengths)} parameters in its groups, where {len(flat)} are "
            "given: params= takes all of them, in the order in which the other optimizer was given "
            "them"
        )
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    groups = [list(flat[start : start + n]) for start, n in zip(starts, lengths)]
    check_names(section, groups)
    return groups


def _by_name(section: Section, ours: Ours) -> Optional[list[list[Target]]]:
    """By names, where the checkpoint and the optimizer have them for all parameters."""
    every = [target for group in ours.groups for target in group]
    if ours.given is not None or any(target.fqn is None for target in every):
        return None
    if any(group.names is None for group in section.groups):
        return None
    known = {target.fqn: target for target in every}
    return [
        [known.get(name) or Target(name, name, None, None, None) for name in group.names or ()]
        for group in section.groups
    ]


def check_names(section: Section, groups: Sequence[Sequence[Target]]) -> None:
    """Whether parameters that were told by position have the names the checkpoint has for them."""
    for saved, targets in zip(section.groups, groups):
        for name, target in zip(saved.names or (), targets):
            if target.fqn not in (None, name):
                raise ValueError(
                    f"{target.name} is where {section.where} has {name}: give the parameters in "
                    "the order they were saved in"
                )


def place_of(saved: SavedGroup, index: int, section: Section) -> str:
    """What messages call a parameter of a checkpoint."""
    name = f" ({saved.names[index]})" if saved.names is not None else ""
    number = [group is saved for group in section.groups].index(True)
    return f"parameter {index}{name} of group {number}"
