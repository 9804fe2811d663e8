"""Trains the sharded model beside the unsharded one, and finds what differs, and by how much."""

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

# Gradients differ by rounding, which bf16 within a model makes up to some percent of them. Of a
# parameter with hardly any gradient, such as a bias of keys, rounding is all there is.
ROUNDING, LEAST = 0.05, 1e-3
# Where even the smallest difference is more than fp32's, the model may run in bf16: then what
# differs by no more than so many times the rounding of bf16 is as it should be.
FP32, NOISE = 1e-5, 4
ADAMW_ROUNDING = 1e-3  # of what a weight moved, where it is no narrower than fp32
_WHOLE = StateDictOptions(full_state_dict=True)


@dataclasses.dataclass
class Run:
    """A sharded model in training and, on every rank, the same model whole.

    Args:
        model, optim: as ``layout_fn`` returned them, the optimizer in exact mode.
        reference: the unsharded model.
        data: which part of a batch this rank trains on, and of how many.
        loss_fn, backward_fn: see `selfcheck`.
    """

    model: nn.Module
    optim: Muon
    reference: nn.Module
    data: tuple[int, int]
    loss_fn: Callable[..., Tensor]
    backward_fn: Callable[..., Any]

    gradients: float = 0.0  # the largest relative difference
    weights: float = 0.0  # of those that can't be the same bits, of what they moved
    noisy: set[str] = dataclasses.field(default_factory=set)  # whose gradients are mostly rounding
    idle: Optional[set[str]] = None  # parameters that have had no gradient in any step

    def __post_init__(self) -> None:
        self.params, self.twins = named(self.model), named(self.reference)
        for name, param in self.params.items():  # layout_fn may have cast them
            self.twins[name].data = self.twins[name].data.to(param.dtype)
        names = {id(param): name for name, param in self.params.items()}
        views = self.optim._read_groups()
        self.names = [[names[id(p)] for p in view.params] for view in views]
        self.muons = {n for v, group in zip(views, self.names) if v.use_muon for n in group}
        # A mean that the step makes may round otherwise than that of all-reduce.
        means = {n for n, p in self.params.items() if self._averaged_by_step(p) is not None}
        self.exact = self.muons - means
        self.reference_optim = self.unsharded_optim(self.reference)
        self.started = copy.deepcopy(self.reference)

    def unsharded_optim(self, model: nn.Module) -> Muon:
        """An optimizer of a whole model, with the options of the sharded model's."""
        params, groups = named(model), []
        for view, names in zip(self.optim._read_groups(), self.names):
            options = {key: getattr(view, key) for key in GROUP_OPTIONS}
            own = {"params": [params[n] for n in names], "names": names, "use_muon": view.use_muon}
            groups.append({**options, **own})
        optim = Muon(groups, exact=True)
        for group, given in zip(optim.param_groups, self.optim.param_groups):
            group.update({key: given[key] for key in given.keys() - group.keys()})  # a schedule's
        return optim

    # -- gradients -----------------------------------------------------------------------------

    def backward(self, batch: Any) -> list[Trap]:
        """Compares gradients of a batch; then gives those of the sharded model to the whole one."""
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
            why = "backward() has not run, or zero_grad() has, or FSDP2's gradient sync is off"
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
        """Gradients of a whole model, of the parameters that the sharded one trains."""
        model.zero_grad()
        self.loss_fn(model, batch).backward()
        twins = {n: p for n, p in named(model).items() if self.params[n].requires_grad}
        return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in twins.items()}

    def _noise(self, batch: Any) -> dict[str, float]:
        """How far the whole model's gradients are off in bf16; nothing if it does not run so."""

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
        """The ranks over which the step averages a gradient, if it does."""
        return None if dtensors.is_dtensor(param) else self.optim._settings.zero2_replicas

    def _whole_gradient(self, param: Tensor) -> Tensor:
        """The gradient that the step takes, of all of a parameter."""
        gradient = torch.zeros_like(param) if param.grad is None else param.grad
        replicas = self._averaged_by_step(param)
        if replicas is None:
            return whole(gradient.detach())
        gradient = gradient.detach().clone()
        dist.all_reduce(gradient, group=replicas.group)
        return gradient / len(replicas.ranks)

    def _explain(self, different: Mapping[str, Tensor], expected: Any, batch: Any) -> Trap:
        """What the first gradient that differs is, and why."""
        name, found = next(iter(different.items()))
        right, names, world = expected[name], tuple(different), dist.get_world_size()
        factor = ((found * right).sum() / right.square().sum()).item()
        is_scaled = (found - factor * right).norm() <= ROUNDING * abs(factor) * right.norm()
        counts = [n for n in range(2, world + 1) if world % n == 0 and is_scaled]
        what = f"the gradient of {name} is {factor:.3g} times that of the unsharded run"
        if not found.isfinite().all():
            too = "" if right.isfinite().all() else ", nor is that of the unsharded run"
            why = "the learning rate is too high, or something divides by zero"
            return Trap("gradient", f"the gradient of {name} is not finite{too}", names, why)
        if not found.any():
            return Trap("gradient", f"no gradient arrives at {name}", names, "it is detached")
        if any(abs(factor * n - 1) < ROUNDING for n in counts):
            why = "ranks divide it twice by their number, or loss_fn is a sum over the batch"
            return Trap("gradient", f"averaged twice: {what}", names, why)
        if any(abs(factor / n - 1) < ROUNDING for n in counts):
            why = "nothing has divided the sum over ranks by their number, or backward() ran twice"
            return Trap("gradient", f"not averaged but summed: {what}", names, why)
        if is_scaled:
            return Trap("gradient", what, names, "something scales or clips it before step()")
        own = self._gradients_of(part_of(batch, *self.data), self.reference)[name]
        if (found - own).norm() <= ROUNDING * own.norm():
            what = f"not averaged: the gradient of {name} is that of each rank's own data"
            write = "fully_shard or DDP, or Muon(groups, process_group=…, grad_reduce='mean')"
            return Trap("gradient", what, names, "nothing averages it", Remedy(wording=write))
        error = ((found - right).norm() / right.norm()).item()
        return Trap(
            "gradient",
            f"the gradient of {name} differs by {error:.1g} times its norm from that of the "
            "unsharded run",
            names,
            "ranks exchange something else than a mean; or nothing adds up what each has of it, as "
            "of a norm of heads under tensor parallelism; or ranks have to see the same data, as "
            "there: layout_fn then returns the mesh of the data, too",
        )

    # -- weights and state -----------------------------------------------------------------------

    def compare_weights(self, why: str) -> list[Trap]:
        """The first parameter that is not as in the unsharded run, before the first step or after a
        step with the same gradients; ``why`` says what may be the cause."""
        start = named(self.started)
        for name, param in self.params.items():
            found, right = whole(param.detach()), self.twins[name].detach()
            if not (found.isfinite().all() and right.isfinite().all()):
                what = f"{name} has elements that are not finite"
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
                what = f"{name} is not bit-equal to" if name in self.exact else f"{name} is not"
                if is_turned:
                    what = f"a transposed stack or matrix: {name} is the transpose of"
                return [Trap("weights", f"{what} that of the unsharded run", (name,), why)]
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
                    what = f"a checkpoint that one process loads has another {key} of {name}"
                    return [Trap("checkpoint", what, (name,), "than the run that was saved")]
        return []


def distance(found: Tensor, right: Tensor, of: Tensor) -> float:
    """The size of a difference, relative to that of another tensor; 0 for equal bits."""
    if torch.equal(found, right):
        return 0.0
    return (found - right).norm().item() / max(of.norm().item(), 1e-30)


_TWICE = Trap(
    "gradient",
    "averaged twice: all ranks have equal gradients before step(), which averages them, too",
    (),
    'DDP or a hook has averaged them, and grad_reduce="mean" does so again',
    Remedy(wording="leave out one of the two"),
)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor; all ranks of a DTensor have to call this."""
    return tensor.full_tensor() if dtensors.is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def part_of(batch: Any, index: int, parts: int) -> Any:
    """Part ``index`` of ``parts`` equal parts of a batch's samples, dimension 0 of its tensors."""

    def cut(tensor: Tensor) -> Tensor:
        if len(tensor) % parts:
            raise ValueError(f"a batch of {len(tensor)} samples can't be shared by {parts} ranks")
        return tensor.chunk(parts)[index]

    return tree_map_only(Tensor, cut, batch)
