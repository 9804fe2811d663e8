"""Holds the described model: its parameters, their algorithms, and the caller's options."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from torch import nn

from ...matrices import Matrices
from ...parameters.survey import read_by_options
from ...rules.assignment import Assignment
from ...rules.modules import Decision, ParamInfo, look_up


@dataclass(frozen=True)
class Subject:
    """A model, the decisions about its parameters, and the arguments they were made with.

    Args:
        assignment: the decisions.
        is_muon_func: the function that made them.
        options: the other arguments of `Muon.for_model` that the caller gave.
    """

    assignment: Assignment
    is_muon_func: Any
    options: Mapping[str, Any]

    @property
    def model(self) -> nn.Module:
        return self.assignment.model

    @property
    def decisions(self) -> Sequence[Decision]:
        return self.assignment.decisions

    def by_algorithm(self, algorithm: str) -> list[Decision]:
        return [decision for decision in self.decisions if decision.algorithm == algorithm]

    @property
    def trainable(self) -> list[Decision]:
        return [decision for decision in self.decisions if decision.algorithm != "frozen"]

    def info(self, decision: Decision) -> ParamInfo:
        return self.assignment.infos[id(decision.param)][0]

    def look_up(self, decision: Decision, keys: Sequence[str]) -> Optional[int]:
        """See `rules.modules.look_up`."""
        return look_up(self.model, self.info(decision), keys)

    def read(self, decision: Decision) -> Matrices:
        """The matrices that Muon would read from the parameter.

        Raises:
            ValueError: Muon would refuse it. The message completes "<parameter> …".
        """
        flatten = self.options.get("flatten") or self.options.get("convolutions", False)
        keys, split = self.assignment.expert_keys, self.assignment.split
        return read_by_options(decision.param.shape, decision.key, keys, split, flatten)


def names_of(decisions: Iterable[Decision]) -> tuple[str, ...]:
    return tuple(decision.name for decision in decisions)


def numel(decisions: Iterable[Decision]) -> int:
    return sum(math.prod(decision.param.shape) for decision in decisions)
