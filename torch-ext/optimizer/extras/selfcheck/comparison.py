"""Trains the sharded model next to the unsharded one, and finds what differs, and by how much."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.utils._pytree import tree_map_only

from ...distributed import dtensors
from ...muon import Muon
from ...parameters.options import GROUP_OPTIONS
from ..describe.remedy import Remedy, Trap
from .structure import named

# Gradients differ by rounding: up to a few percent if the model computes in bf16. Where there is
# hardly any gradient, as for a bias of keys, it is all rounding.
ROUNDING, LEAST = 0.05, 1e-3
# If even the smallest difference exceeds fp32's, the model may compute in bf16: then differences up
# to NOISE times the rounding of bf16 are accepted.
FP32, NOISE = 1e-5, 4
ADAMW_ROUNDING = 1e-3  # relative to the change of a weight in fp32 or wider
_WHOLE = StateDictOptions(full_state_dict=True)


@dataclasses.dataclass
class Run:
    """A sharded model in training and, on every rank, the same model whole.

    Args:
        model, optim: as ``layout_fn`` returned them, with the optimizer in exact mode.
        reference: the unsharded model.
        data: this rank's part of a batch: its index, and the number of parts.
        loss_fn, backward_fn: see `selfcheck`.
    """

    model: nn.Module
    optim: Muon
    reference: nn.Module
    data: tuple[int, int]
    loss_fn: Callable[..., Tensor]
    backward_fn: Callable[..., Any]

    gradients: float = 0.0  # the largest relative difference
    weights: float = 0.0  # same for changes of weights that can't be bit-identical
    noisy: set[str] = dataclasses.field(default_factory=set)  # gradients are mostly rounding
    idle: Optional[set[str]] = None  # parameters without a gradient in any step so far

    def __post_init__(self) -> None:
        self.params, self.twins = named(self.model), named(self.reference)
        for name, param in self.params.items():  # layout_fn may have cast them
            self.twins[name].data = self.twins[name].data.to(param.dtype)
        names = {id(param): name for name, param in self.params.items()}
        views = self.optim._read_groups()
        self.names = [[names[id(p)] for p in view.params] for view in views]
        self.muons = {n for v, group in zip(views, self.names) if v.use_muon for n in group}
        # The step's own mean may round differently from all-reduce's.
        means = {n for n, p in self.params.items() if self._averaged_by_step(p) is not None}
        self.exact = self.muons - means
        self.reference_optim = self.unsharded_optim(self.reference)
        self.started = copy.deepcopy(self.reference)

    def unsharded_optim(self, model: nn.Module) -> Muon:
        """An optimizer for a whole model, with the options of the sharded model's."""
        params, groups = named(model), []
        for view, names in zip(self.optim._read_groups(), self.names):
            options = {key: getattr(view, key) for key in GROUP_OPTIONS}
            own = {"params": [params[n] for n in names], "names": names, "use_muon": view.use_muon}
            groups.append({**options, **own})
        optim = Muon(groups, exact=True)
        for group, given in zip(optim.param_groups, self.optim.param_groups):
            group.update({key: given[key] for key in given.keys() - group.keys()})  # schedules'
        return optim

    # -- gradients -----------------------------------------------------------------------------

    def backward(self, batch: Any) -> list[Trap]:
        """Compares the gradients of a batch, then copies the sharded model's to the whole one."""
        self.backward_fn(self.model, self.loss_fn(self.model, part_of(batch, *self.data)))
        expected = self._gradients_of(batch, self.reference)
        numel = sum(map(Tensor.numel, expected.values()))
        total = sum(gradient.square().sum().item() for gradient in expected.values())
        different: dict[str, Tensor] = {}
        errors: dict[str, float] = {}
        idle, averages = set(), []
        for name, right in expected.items():
            param, twin = self.params[name], self.twins[name]
            found = self._whole_gradient(param)
            size = max(right.norm().item(), LEAST * (total / numel * right.numel()) ** 0.5, 1e-30)
            error = (found - right).norm().item() / size
            if error or right.any():
                errors[name] = error
            if not error <= ROUNDING:
                different[name] = found
            else:
                self.gradients = max(self.gradients, error)
            if not found.any():
                idle.add(name)
            elif param.grad is not None and self._averaged_by_step(param) is not None:
                averages.append(bool((param.grad - found).norm() <= 1e-6 * found.norm()))
            twin.grad = None if param.grad is None else found.to(twin.dtype)
        self.idle = idle if self.idle is None else self.idle & idle
        if different and len(idle) == len(expected):
            why = "backward() did not run, zero_grad() ran since, or FSDP2's gradient sync is off"
            return [Trap("gradient", "no gradient at any parameter", tuple(different), why)]
        if different and not min(errors.values()) <= FP32:
            noise = self._noise(batch)
            for name in different.keys() & noise.keys():
                error = (different[name] - expected[name]).norm().item()
                if error <= NOISE * noise[name] < float("inf"):
                    self.noisy.add(name)
                    del different[name]
        if different:
            return [self._explain(different, expected, batch)]
        return [_TWICE] if averages and all(averages) and self.data[1] > 1 else []

    def _gradients_of(self, batch: Any, model: nn.Module) -> dict[str, Tensor]:
        """A whole model's gradients of the parameters that the sharded model trains."""
        model.zero_grad()
        self.loss_fn(model, batch).backward()
        twins = {n: p for n, p in named(model).items() if self.params[n].requires_grad}
        return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in twins.items()}

    def _noise(self, batch: Any) -> dict[str, float]:
        """Errors of the whole model's gradients in bf16, by name; empty if it can't run in bf16."""

        def run_in(dtype: torch.dtype) -> dict[str, Tensor]:
            def cast(tensor: Tensor) -> Tensor:
                return tensor.to(dtype) if tensor.is_floating_point() else tensor

            model = copy.deepcopy(self.reference)._apply(cast)
            return self._gradients_of(tree_map_only(Tensor, cast, batch), model)

        try:
            narrow, wide = run_in(torch.bfloat16), run_in(torch.float32)
        except RuntimeError:
            return {}
        return {name: (narrow[name] - right).norm().item() for name, right in wide.items()}

    def _averaged_by_step(self, param: Tensor) -> Any:
        """The replicas over which the step averages a gradient, or None."""
        return None if dtensors.is_dtensor(param) else self.optim._settings.zero2_replicas

    def _whole_gradient(self, param: Tensor) -> Tensor:
        """The whole gradient of a parameter, as the step will see it."""
        gradient = torch.zeros_like(param) if param.grad is None else param.grad
        replicas = self._averaged_by_step(param)
        if replicas is None:
            return whole(gradient.detach())
        gradient = gradient.detach().clone()
        dist.all_reduce(gradient, group=replicas.group)
        return gradient / len(replicas.ranks)

    def _explain(self, different: Mapping[str, Tensor], expected: Any, batch: Any) -> Trap:
        """Explains the first gradient that differs."""
        name, found = next(iter(different.items()))
        right, names, world = expected[name], tuple(different), dist.get_world_size()
        factor = ((found * right).sum() / right.square().sum()).item()
        is_scaled = (found - factor * right).norm() <= ROUNDING * abs(factor) * right.norm()
        counts = [n for n in range(2, world + 1) if world % n == 0 and is_scaled]
        what = f"the gradient of {name} is {factor:.3g} times the unsharded run's"
        if not found.isfinite().all():
            too = "" if right.isfinite().all() else ", nor is the unsharded run's"
            why = "the learning rate is too high, or something divides by zero"
            return Trap("gradient", f"the gradient of {name} is not finite{too}", names, why)
        if not found.any():
            return Trap("gradient", f"no gradient arrives at {name}", names, "it is detached")
        if any(abs(factor * n - 1) < ROUNDING for n in counts):
            why = "it is divided by the number of ranks twice, or loss_fn sums over the batch"
            return Trap("gradient", f"averaged twice: {what}", names, why)
        if any(abs(factor / n - 1) < ROUNDING for n in counts):
            why = "the sum over ranks is not divided by their number, or backward() ran twice"
            return Trap("gradient", f"not averaged but summed: {what}", names, why)
        if is_scaled:
            return Trap("gradient", what, names, "something scales or clips it before step()")
        own = self._gradients_of(part_of(batch, *self.data), self.reference)[name]
        if (found - own).norm() <= ROUNDING * own.norm():
            what = f"not averaged: the gradient of {name} comes from each rank's own data"
            write = "fully_shard or DDP, or Muon(groups, process_group=…, grad_reduce='mean')"
            return Trap("gradient", what, names, "nothing averages it", Remedy(wording=write))
        error = ((found - right).norm() / right.norm()).item()
        return Trap(
            "gradient",
            f"the gradient of {name} is off by {error:.1g} times its norm in the unsharded run",
            names,
            "ranks exchange something other than a mean; or, with tensor parallelism, nothing sums "
            "the parts of ranks (as for a norm of heads), or ranks must see the same data: then "
            "layout_fn must also return the mesh of the data",
        )

    # -- weights and state -----------------------------------------------------------------------

    def compare_weights(self, why: str) -> list[Trap]:
        """The first parameter that differs from the unsharded run's, before the first step or after
        a step with the same gradients; ``why`` says what may be the cause."""
        start = named(self.started)
        for name, param in self.params.items():
            found, right = whole(param.detach()), self.twins[name].detach()
            if not (found.isfinite().all() and right.isfinite().all()):
                what = f"{name} has Inf or NaN"
                return [Trap("weights", what, (name,), "the learning rate is too high, or a NaN")]
            if name in self.exact or not param.requires_grad:
                error = 0.0 if torch.equal(found, right) else 1.0
            else:
                error = distance(found, right, right - start[name])
                self.weights = max(self.weights, error)
            is_wide = right.dtype in (torch.float32, torch.float64)
            if error > (ADAMW_ROUNDING if is_wide and name not in self.muons else ROUNDING):
                turned = right.mT if right.ndim > 1 else right
                is_turned = found.shape == turned.shape and torch.equal(found, turned)
                what = f"{name} differs " + ("in its bits from" if name in self.exact else "from")
                if is_turned:
                    what = f"a transposed stack or matrix: {name} is the transpose of"
                return [Trap("weights", f"{what} the unsharded run's", (name,), why)]
        return []

    def compare_checkpoint(self) -> list[Trap]:
        """Saves the sharded run, loads it as one process would, and compares weights and state."""
        weights, states = get_state_dict(self.model, self.optim, options=_WHOLE)
        optim = self.unsharded_optim(self.started)
        set_state_dict(
            self.started, optim, model_state_dict=weights, optim_state_dict=states, options=_WHOLE
        )
        for name, loaded in named(self.started).items():
            held = {"weight": loaded, **optim.state.get(loaded, {})}
            twin, now = self.twins[name], whole(self.params[name].detach())
            for key, right in {"weight": now, **self.reference_optim.state.get(twin, {})}.items():
                exact = key == "weight" or name in self.exact
                if distance(held[key], right, right) > (0 if exact else ROUNDING):
                    what = f"a checkpoint loaded in one process changes {key} of {name}"
                    return [Trap("checkpoint", what, (name,), "it differs from the saved run's")]
        return []


def distance(found: Tensor, right: Tensor, of: Tensor) -> float:
    """Size of a difference relative to the size of ``of``; 0 for equal bits."""
    if torch.equal(found, right):
        return 0.0
    return (found - right).norm().item() / max(of.norm().item(), 1e-30)


_TWICE = Trap(
    "gradient",
    "averaged twice: all ranks have equal gradients before step() averages them",
    (),
    'DDP or a hook has averaged them, and grad_reduce="mean" does it again',
    Remedy(wording="leave out one of them"),
)


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor; all ranks of a DTensor must call this."""
    return tensor.full_tensor() if dtensors.is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def part_of(batch: Any, index: int, parts: int) -> Any:
    """Part ``index`` of ``parts`` equal parts of a batch's samples, dimension 0 of its tensors."""

    def cut(tensor: Tensor) -> Tensor:
        if len(tensor) % parts:
            raise ValueError(f"{parts} ranks can't divide a batch of {len(tensor)} samples evenly")
        return tensor.chunk(parts)[index]

    return tree_map_only(Tensor, cut, batch)
