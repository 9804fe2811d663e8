"""Other optimizers as they keep and save state, which is in float64, around the formulas of
reference.py: torch's, Motif's, Moonlight's, nanochat's and Keller Jordan's of two releases.

Gradients are the same on all ranks here, so each rank of those that divide work computes all of it,
and keeps the state that is its own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import reference as ref


def some(group: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: group[key] for key in keys}


def adamw(group: dict[str, Any], params: Any = None, update: Any = ref.adamw_update) -> Any:
    """With betas and eps under the keys of its own, or torch's."""
    own = "betas" in group
    betas, eps = group["betas" if own else "adamw_betas"], group["eps" if own else "adamw_eps"]
    decay = group["wd" if "wd" in group else "weight_decay"]
    options = dict(lr=group["lr"], adamw_betas=betas, adamw_eps=eps, weight_decay=decay)
    return ref.ReferenceAdamW(group["params"] if params is None else params, options, update)


class Source(torch.optim.Optimizer):
    moments = ("exp_avg", "exp_avg_sq")

    def __init__(self, groups: Any, defaults: dict[str, Any], distributed: bool = False) -> None:
        super().__init__(groups, defaults)
        self.world, self.rank = 1, 0
        if distributed:
            self.world, self.rank = dist.get_world_size(), dist.get_rank()
        self.parts: list[tuple[list[Tensor], Any]] = []

    def reference(self, group: dict[str, Any]) -> Any:
        raise NotImplementedError

    def divided(self) -> list[tuple[list[Tensor], Any]]:
        """Parameters, and what steps them."""
        return [(group["params"], self.reference(group)) for group in self.param_groups]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.parts = self.parts or self.divided()
        for params, reference in self.parts:
            reference.step([p.grad for p in params])
            for p, W in zip(params, reference.weights):
                p.copy_(W)
            if isinstance(reference, ref.ReferenceAdamW):
                self.keep_moments(params, reference)
            else:
                self.keep_momentum(params, reference)

    def keep_moments(self, params: list[Tensor], reference: Any) -> None:
        first, second = self.moments
        for p, *values in zip(params, reference.steps, reference.exp_avg, reference.exp_avg_sq):
            self.state[p].update(zip(("step", first, second), values))

    def keep_momentum(self, params: list[Tensor], reference: Any) -> None:
        for index, (p, buffer) in enumerate(zip(params, reference.momentum)):
            if index % self.world == self.rank:
                self.state[p]["momentum_buffer"] = buffer


class Motif(Source):
    """Groups with ``use_muon`` and, where it is True, ``names``."""

    moments = ("moment1", "moment2")

    def __init__(self, groups, lr=1e-3, weight_decay=0.1, momentum=0.95, nesterov=True):
        own = dict(lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov)
        more = dict(ns_steps=5, adamw_betas=(0.9, 0.95), adamw_eps=1e-8)
        super().__init__(groups, {**own, **more, "none_grad": True, "use_muon": True})

    def reference(self, group):
        if not group["use_muon"]:
            return adamw(group)
        how = some(group, "lr", "momentum", "nesterov", "weight_decay")
        return ref.MotifReference(group["params"], **how)

    def keep_moments(self, params, reference):
        super().keep_moments(params, reference)
        for p in params:
            self.state[p]["step"] = torch.tensor(float(self.state[p]["step"]))


class Moonlight(Source):
    """All in one group; ``use_muon`` in the state of each parameter."""

    moments = ("moment1", "moment2")

    def __init__(self, lr=1e-3, wd=0.1, muon_params=(), momentum=0.95, adamw_params=()):
        own = dict(momentum=momentum, nesterov=True, ns_steps=5)
        more = dict(adamw_betas=(0.9, 0.95), adamw_eps=1e-8)
        super().__init__([*muon_params, *adamw_params], dict(lr=lr, wd=wd, **own, **more))
        for params, use_muon in ((muon_params, True), (adamw_params, False)):
            for p in params:
                self.state[p]["use_muon"] = use_muon

    def divided(self):
        (group,) = self.param_groups
        muon = [p for p in group["params"] if self.state[p]["use_muon"]]
        others = [p for p in group["params"] if not self.state[p]["use_muon"]]
        matrices = ref.MoonlightReference(muon, **some(group, "lr", "wd", "momentum"))
        return [(muon, matrices), (others, adamw(group, others, ref.moonlight_adamw_update))]


class KellerJordan(Source):
    """One group of matrices, or ``MuonWithAuxAdam``'s groups; by size where distributed."""

    def __init__(self, params, distributed=False, **own):
        def by_size(matrices):
            return sorted(matrices, key=lambda p: p.size(), reverse=True)

        muon = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0, **own}
        adam = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0}
        if not isinstance(params[0], dict):
            super().__init__(by_size(params) if distributed else params, muon, distributed)
            return
        groups = [{**(muon if group["use_muon"] else adam), **group} for group in params]
        for group in groups:
            if group["use_muon"] and distributed:
                group["params"] = by_size(group["params"])
        super().__init__(groups, {}, distributed)

    def reference(self, group):
        if not group.get("use_muon", True):
            return adamw(group)
        how = some(group, "lr", "momentum", "weight_decay")
        return ref.KellerJordanReference(group["params"], **how)


class KellerJordanBySize(Source):
    """Earlier: a group for each number of elements, with a buffer; no decay."""

    def __init__(self, params, lr=0.02, momentum=0.95):
        groups = []
        for size in {p.numel() for p in params}:
            b = torch.empty(dist.get_world_size(), size, dtype=torch.bfloat16)
            chosen = [p for p in params if p.numel() == size]
            groups.append(dict(params=chosen, update_buffer=b, update_buffer_views=list(b)))
        defaults = dict(lr=lr, momentum=momentum, nesterov=True, ns_steps=5)
        super().__init__(groups, defaults, distributed=True)

    def reference(self, group):
        return ref.KellerJordanReference(group["params"], **some(group, "lr", "momentum"))


class Nanochat(Source):
    """``MuonAdamW``, or ``DistMuonAdamW``.

    The first matrix of a group has the stack, or this rank's chunk of it.
    """

    small = 1024  # elements; a larger parameter of AdamW is divided by rows

    def __init__(self, groups, distributed=False):
        super().__init__(groups, {}, distributed)

    def reference(self, group):
        if group["kind"] == "adamw":
            return adamw(group)
        how = some(group, "lr", "momentum", "ns_steps", "beta2", "weight_decay")
        return ref.NanochatReference(group["params"], **how)

    def keep_moments(self, params, reference):
        super().keep_moments(params, reference)
        for p in params:
            if p.numel() >= self.small:
                for key in self.moments:
                    self.state[p][key] = self.state[p][key].chunk(self.world)[self.rank]

    def keep_momentum(self, params, reference):
        rows, cols = params[0].shape
        count = -(-len(params) // self.world)
        chunk = range(self.rank * count, min((self.rank + 1) * count, len(params)))
        shapes = {"momentum_buffer": (rows, cols)}
        shapes["second_momentum_buffer"] = (rows, 1) if rows >= cols else (1, cols)
        for key, each in zip(shapes, (reference.momentum, reference.second_moment)):
            stack = self.state[params[0]][key] = params[0].new_zeros(count, *shapes[key])
            for row, index in enumerate(chunk):
                stack[row] = each[index].view(shapes[key])


class TorchMuon(Source):
    """``torch.optim.Muon``, which computes in bfloat16, in float64."""

    def __init__(self, params, lr=1e-3, weight_decay=0.1, momentum=0.95, nesterov=True):
        own = dict(ns_coefficients=(3.4445, -4.7750, 2.0315), eps=1e-7, ns_steps=5)
        defaults = dict(lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov)
        super().__init__(params, {**defaults, **own, "adjust_lr_fn": None})

    def reference(self, group):
        how = some(group, "lr", "weight_decay", "momentum", "nesterov")
        return ref.TorchMuonReference(group["params"], **how)
