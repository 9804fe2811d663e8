"""Keeps residuals and random keys that round bf16 weights between steps, see `weight_rounding`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import regions
from ..cpu_offload import CPUOffload
from ..distributed import dtensors
from ..parameters.names import normalize_name, state_dict_key
from ..parameters.options import Group
from ..weight_rounding import RandomBits, RoundedBy, as_int16, random_key, round_into, widen

OptimizerState = Mapping[Any, Mapping[str, Any]]  # by parameter


class Rounding:
    """The residuals or random keys that an optimizer's weights are rounded with.

    A residual belongs to the weight that a step has rounded. If the weight has changed since, for
    example because a model was loaded, the residual is ignored. Version counters show such changes,
    except changes through ``.data``, by collectives, or of DTensors by ``_foreach`` functions.
    Counters are compared only from one step to the next, so that model and optimizer may be loaded
    in any order. A copy's parameters have their own counters, which start with the copy.

    Args:
        offload: knows where residuals live.
        rounded: for a copy, its parameters that the original's last step has rounded.

    Attributes:
        residuals: residuals by parameter, since the last `begin`.
    """

    def __init__(self, offload: CPUOffload, rounded: Iterable[Tensor] = ()):
        self.residuals: dict[Tensor, Tensor] = {}
        self._offload = offload
        # Counters after the last step; empty within a step.
        self._versions = {param: _versions(param) for param in rounded}
        self._next_steps: list[int] = []  # by group, ``rounding_step`` after the last step
        self._names: dict[Tensor, str] = {}

    def __reduce__(self) -> tuple:
        return Rounding, (self._offload, list(self._versions))

    def begin(self, groups: Sequence[Group], state: OptimizerState) -> None:
        """Zeroes the residuals of weights that have changed since the last step."""
        self.residuals, self._names = {}, {}
        outdated = []
        for group in groups:
            if group.weight_rounding == "nearest":
                continue
            for index, param in enumerate(group.params):
                if not group.updates_in_fp32(param.dtype):
                    continue
                self._names[param] = normalize_name(group.name_of(index))
                # A frozen parameter has a residual if it was trained before.
                residual = state.get(param, {}).get("weight_residual")
                if group.weight_rounding == "exact" and residual is not None:
                    self.residuals[param] = residual
                    if self._versions.get(param, _versions(param)) != _versions(param):
                        outdated.append(residual)
        if outdated:
            self._offload.synchronize()  # a copy in flight would undo the zeros
            for residual in outdated:
                dtensors.local(residual).zero_()

    def begin_step(self, groups: Sequence[Group], state: OptimizerState) -> None:
        """Like `begin`; from now on until `end`, only the step may change weights."""
        self.begin(groups, state)
        self._versions = {}  # an interrupt may keep `end` from being called
        self._next_steps = [group.rounding_step + 1 for group in groups]

    def tensor(self, param: Tensor, group: Group) -> Tensor:
        """The residual of this rank's part of a parameter, or a meta view that places its bits."""
        if group.weight_rounding == "exact":
            return as_int16(dtensors.local(self.residuals[param]))
        sharding, shape = dtensors.sharding_of(param), tuple(param.shape)
        region = regions.whole(shape)
        if sharding is not None:
            region = sharding.region(shape, dtensors.this_rank())
        return torch.empty(shape, device="meta")[regions.slices(region)]

    def by(
        self, params: Sequence[Tensor], tensors: Sequence[Tensor], group: Group
    ) -> list[RoundedBy]:
        """Residuals or random bits for pieces of parameters; ``tensors`` are pieces of `tensor`."""
        if group.weight_rounding == "exact":
            return list(tensors)
        return [
            RandomBits(random_key(group.rounding_step, self._names[param]), places)
            for param, places in zip(params, tensors)
        ]

    def end(self) -> None:
        """Records the version counters of weights after a step."""
        self._versions = {param: _versions(param) for param in self.residuals}

    def count_step(self, groups: Sequence[dict[str, Any]]) -> None:
        """Counts the last step once, even if called again, in groups with stochastic rounding."""
        for group, step in zip(groups, self._next_steps):
            if group["weight_rounding"] == "stochastic":
                group["rounding_step"] = step

    def by_key(self, groups: Sequence[Group]) -> dict[str, Tensor]:
        """Parameters with a residual, by their keys in the model's ``state_dict()``.

        Raises:
            ValueError: a parameter has no name, or shares its name with another.
        """
        counts = Counter(state_dict_key(n) for group in groups for n in group.names or ())
        by_key = {}
        for group in groups:
            for index, param in enumerate(group.params):
                if param not in self.residuals:
                    continue
                if group.names is None:
                    raise ValueError(
                        f"{group.where}: exact weights need names, the keys of the model's "
                        'state_dict(): give the group "names", one for each parameter'
                    )
                key = state_dict_key(group.names[index])
                if counts[key] > 1:
                    raise ValueError(
                        f"{counts[key]} parameters are called {key}, so that exact weights can't "
                        "tell them apart: give groups the names of one module that holds all models"
                    )
                by_key[key] = param
        return by_key

    def exact(self, param: Tensor) -> Tensor:
        """A parameter with its residual, as a new fp32 tensor."""
        weights, residual = dtensors.local(param), self.residuals[param]
        self._offload.synchronize()
        kept = dtensors.local(residual).to(weights.device)
        if not dtensors.is_dtensor(param):
            kept = dtensors.gathered(kept, residual)  # replicas may divide it
        (exact,) = widen([weights], [as_int16(kept)])
        placed = dtensors.mesh_placements_of(param)
        if placed is None:
            return exact
        return dtensors.dtensor_of(exact, placed, param.shape, param.stride())

    def set_exact(self, param: Tensor, value: Tensor) -> None:
        """Sets a parameter and its residual from an fp32 tensor with the parameter's placement."""
        weights, residual = dtensors.local(param), self.residuals[param]
        rounded_off = torch.empty_like(weights, dtype=torch.int16)
        round_into([dtensors.local(value).to(weights.device, copy=True)], [weights], [rounded_off])
        divided = dtensors.mesh_placements_of(residual)
        if divided is not None and not dtensors.is_dtensor(param):
            rounded_off = dtensors.local(dtensors.shard_tensor(rounded_off, divided))
        self._offload.synchronize()  # a copy in flight would undo the writes, as in `begin`
        as_int16(dtensors.local(residual)).copy_(rounded_off)
        torch.autograd.graph.increment_version(param)
        self._versions[param] = _versions(param)


def _versions(param: Tensor) -> tuple[int, int]:
    """Version counters of a parameter and of its local tensor: either may change alone."""
    return param._version, dtensors.raw_local(param)._version
