"""Keeps what weights in bf16 are rounded by, see `weight_rounding`, between the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..cpu_offload import CPUOffload
from ..distributed import regions
from ..distributed import utils as dtensors
from ..parameters.options import Group
from ..weight_rounding import Noise, RoundedBy, as_int16, noise_key, round_into, widen

State = Mapping[Any, Mapping[str, Any]]


class Rounding:
    """What the weights of an optimizer are rounded by.

    A residual belongs to the weight that a step has rounded. Weights that were changed since, by
    loading a model for example, count as they are. Their version counters tell, which count what is
    done to a tensor, but not to its ``.data``, nor by collectives, nor to DTensors by functions
    whose names begin with ``_foreach``. They are compared only between two steps, so that it does
    not matter which of model and optimizer is loaded first.

    Attributes:
        residuals: by parameter, since the last `begin`.
    """

    def __init__(self, offload: CPUOffload):
        self.residuals: dict[Tensor, Tensor] = {}
        self._offload = offload
        self._versions: dict[Tensor, tuple[int, int]] = {}  # after the last step
        self._names: dict[Tensor, str] = {}

    def begin(self, groups: Sequence[Group], state: State) -> None:
        """Sets residuals to zero whose weights were changed since the last step."""
        self.residuals, self._names = {}, {}
        outdated = []
        for group in groups:
            for index, param in enumerate(group.params):
                if not group.updates_in_fp32(param.dtype):
                    continue
                self._names[param] = group.name_of(index)
                # A parameter that is frozen now has a residual if it was trained before.
                residual = state.get(param, {}).get("weight_residual")
                if group.weight_rounding == "exact" and residual is not None:
                    self.residuals[param] = residual
                    if self._versions.get(param, _versions(param)) != _versions(param):
                        outdated.append(residual)
        if outdated:
            self._offload.evict()  # a copy on its way to the device or back would undo the zeros
            for residual in outdated:
                self._offload.current(residual).zero_()

    def of(self, param: Tensor, group: Group) -> RoundedBy:
        """What this rank's part of a parameter is rounded by in this step."""
        if group.weight_rounding == "exact":
            return as_int16(self._offload.current(self.residuals[param]))
        key = noise_key(group.rounding_seed, group.rounding_step, self._names[param])
        sharding, shape = dtensors.sharding_of(param), tuple(param.shape)
        region = regions.whole(shape)
        if sharding is not None:
            region = sharding.region(shape, dtensors.this_rank())
        return Noise(key, torch.empty(shape, device="meta")[regions.slices(region)])

    def end(self) -> None:
        """Takes note of the weights that a step has left."""
        self._versions = {param: _versions(param) for param in self.residuals}

    def exact(self, param: Tensor) -> Tensor:
        """A parameter in fp32 with its residual, a new tensor."""
        weights, residual = dtensors.local(param), self.residuals[param]
        self._offload.wait_reload()
        rest = self._offload.current(residual).to(weights.device)
        if dtensors.is_dtensor(residual) and not dtensors.is_dtensor(param):  # replicas' rows
            rest = dtensors.with_local(residual, rest).full_tensor()  # type: ignore[attr-defined]
        (exact,) = widen([weights], [as_int16(rest)])
        placed = dtensors.mesh_placements_of(param)
        return (
            exact
            if placed is None
            else dtensors.dtensor_of(exact, placed, param.shape, param.stride())
        )

    def set_exact(self, param: Tensor, value: Tensor) -> None:
        """Sets a parameter and its residual to a tensor in fp32 that lies as the parameter does."""
        weights, residual = dtensors.local(param), self.residuals[param]
        rest = torch.empty_like(weights, dtype=torch.int16)
        round_into([dtensors.local(value).to(weights.device, copy=True)], [weights], [rest])
        if dtensors.is_dtensor(residual) and not dtensors.is_dtensor(param):
            sharding = dtensors.sharding_of(residual)
            assert sharding is not None
            rest = rest[regions.slices(sharding.region(param.shape, dtensors.this_rank()))]
        self._offload.evict()  # as above
        as_int16(self._offload.current(residual)).copy_(rest)
        torch.autograd.graph.increment_version(param)
        self._versions[param] = _versions(param)


def _versions(param: Tensor) -> tuple[int, int]:
    """Of a parameter and of its local tensor, which may be changed apart."""
    return param._version, dtensors.raw_local(param)._version
