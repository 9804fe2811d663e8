"""Holds the model that is described: its parameters, their algorithms, the caller's options."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from torch import nn

from ...matrices import Matrices
from ...parameters.default_groups import Decision
from ...parameters.modules import ParamInfo, ParamInfos, look_up
from ...parameters.survey import read_by_options


@dataclass(frozen=True)
class Subject:
    """A model, which algorithm trains which of its parameters, and by which arguments.

    Args:
        model: as the caller gave it.
        decisions: for all parameters.
        infos: of all parameters.
        is_muon_func: what the decisions were made by.
        options: what the caller gave of the arguments of `Muon` and
            `get_default_muon_param_groups`.
    """

    model: nn.Module
    decisions: Sequence[Decision]
    infos: ParamInfos
    is_muon_func: Any
    options: Mapping[str, Any]

    def by_algorithm(self, algorithm: str) -> list[Decision]:
        return [decision for decision in self.decisions if decision.algorithm == algorithm]

    @property
    def trainable(self) -> list[Decision]:
        return [decision for decision in self.decisions if decision.algorithm != "frozen"]

    def info(self, decision: Decision) -> ParamInfo:
        return self.infos[id(decision.param)][0]

    def look_up(self, decision: Decision, keys: Sequence[str]) -> Optional[int]:
        """See `parameters.modules.look_up`."""
        return look_up(self.model, self.info(decision), keys)

    def read(self, decision: Decision) -> Matrices:
        """How Muon would read the parameter as matrices.

        Raises:
            ValueError: it would not. Completes "<parameter> …".
        """
        keys, split = self.options.get("expert_keys"), self.options.get("split")
        flatten = self.options.get("flatten") or self.options.get("convolutions", False)
        return read_by_options(decision.param.shape, decision.key, keys, split, flatten)


def names_of(decisions: Iterable[Decision]) -> tuple[str, ...]:
    return tuple(decision.name for decision in decisions)


def numel(decisions: Iterable[Decision]) -> int:
    return sum(math.prod(decision.param.shape) for decision in decisions)
