"""Other optimizers as they keep and save state, written from their formulas, in the parameters'
dtype throughout: torch's, Motif's, Moonlight's, nanochat's and Keller Jordan's of two releases.

Those of several ranks exchange what they exchange with the default process group.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import reference as ref


class Source(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self.step_group(group)

    def step_group(self, group: dict[str, Any]) -> None:
        raise NotImplementedError


def orthogonalize(direction: Tensor, family: str, steps: int = 5, factor: float = 1.0) -> Tensor:
    """Of a matrix, or of each of a stack."""
    if direction.ndim > 2:
        return torch.stack([orthogonalize(each, family, steps, factor) for each in direction])
    coefficients = ref.coefficients_of(family, steps)
    return ref.iterate(direction / (factor * direction.norm() + 1e-7), coefficients)


def adam(
    p: Tensor,
    grad: Tensor,
    own: dict[str, Any],
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    keys: tuple[str, str] = ("exp_avg", "exp_avg_sq"),
    update: Any = ref.adamw_update,
) -> None:
    if "step" not in own:
        own.update({"step": 0, **{key: torch.zeros_like(grad) for key in keys}})
    own["step"] = own["step"] + 1
    moments, t = (own[key] for key in keys), float(own["step"])
    new = update(p, grad, *moments, t, lr, betas, eps, weight_decay)
    for tensor, value in zip((p, *(own[key] for key in keys)), new):
        tensor.copy_(value)


def summed(p: Tensor, own: dict[str, Any], mu: float, nesterov: bool) -> Tensor:
    """Classical momentum; returns what is orthogonalized."""
    buffer = own.setdefault("momentum_buffer", torch.zeros_like(p.grad))
    buffer.copy_(mu * buffer + p.grad)
    return p.grad + mu * buffer if nesterov else buffer


def averaged(grad: Tensor, buffer: Tensor, mu: float) -> Tensor:
    buffer.copy_(mu * buffer + (1 - mu) * grad)
    return (1 - mu) * grad + mu * buffer


class Motif(Source):
    """Groups with ``use_muon`` and, where it is True, ``names``."""

    def __init__(self, groups, lr=1e-3, weight_decay=0.1, momentum=0.95, nesterov=True):
        super().__init__(
            groups,
            dict(
                lr=lr,
                weight_decay=weight_decay,
                momentum=momentum,
                nesterov=nesterov,
                ns_steps=5,
                adamw_betas=(0.9, 0.95),
                adamw_eps=1e-8,
                none_grad=True,
                use_muon=True,
            ),
        )

    def step_group(self, group):
        lr, decay = group["lr"], group["weight_decay"]
        for p in group["params"]:
            own = self.state[p]
            if not group["use_muon"]:
                own.setdefault("step", torch.zeros(())), own.setdefault("moment1", p * 0)
                own.setdefault("moment2", p * 0)
                options = lr, group["adamw_betas"], group["adamw_eps"], decay
                adam(p, p.grad, own, *options, keys=("moment1", "moment2"))
                continue
            U = orthogonalize(summed(p, own, group["momentum"], group["nesterov"]), "you")
            p.copy_(p * (1 - lr * decay) - lr * 0.2 * max(p.shape[-2:]) ** 0.5 * U)


class Moonlight(Source):
    """All in one group; ``use_muon`` in the state of each parameter."""

    def __init__(self, lr=1e-3, wd=0.1, muon_params=(), momentum=0.95, adamw_params=()):
        own = dict(momentum=momentum, nesterov=True, ns_steps=5)
        adamw = dict(adamw_betas=(0.9, 0.95), adamw_eps=1e-8)
        super().__init__([*muon_params, *adamw_params], dict(lr=lr, wd=wd, **own, **adamw))
        for params, use_muon in ((muon_params, True), (adamw_params, False)):
            for p in params:
                self.state[p]["use_muon"] = use_muon

    def step_group(self, group):
        lr, decay = group["lr"], group["wd"]
        for p in group["params"]:
            own = self.state[p]
            if not own["use_muon"]:
                options = lr, group["adamw_betas"], group["adamw_eps"], decay
                keys, update = ("moment1", "moment2"), ref.moonlight_adamw_update
                adam(p, p.grad, own, *options, keys=keys, update=update)
                continue
            U = orthogonalize(summed(p, own, group["momentum"], True), "quintic")
            p.copy_(p * (1 - lr * decay) - lr * 0.2 * math.sqrt(max(p.shape)) * U)


class KellerJordan(Source):
    """One group of matrices, or ``MuonWithAuxAdam``'s groups; by size where distributed."""

    def __init__(self, params, distributed=False, **defaults):
        self.distributed = distributed
        params = list(params)
        if not isinstance(params[0], dict):
            defaults = {"lr": 0.02, "weight_decay": 0, "momentum": 0.95, **defaults}
            super().__init__(self.by_size(params), defaults)
            return
        for group in params:
            if group["use_muon"]:
                group["params"] = self.by_size(group["params"])
                defaults = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0}
            else:
                defaults = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0}
            group.update({**defaults, **group})
        super().__init__(params, {})

    def by_size(self, params):
        return sorted(params, key=lambda p: p.size(), reverse=True) if self.distributed else params

    def step_group(self, group):
        lr, decay = group["lr"], group["weight_decay"]
        for index, p in enumerate(group["params"]):
            if not group.get("use_muon", True):
                adam(p, p.grad, self.state[p], lr, group["betas"], group["eps"], decay)
                continue
            owner = index % dist.get_world_size() if self.distributed else 0
            if not self.distributed or owner == dist.get_rank():
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                D = averaged(p.grad, buffer, group["momentum"])
                U = orthogonalize(D.flatten(1), "quintic").view_as(p)
                scale = max(1, p.shape[-2] / p.shape[-1]) ** 0.5
                p.copy_(p * (1 - lr * decay) - lr * scale * U)
            if self.distributed:
                dist.broadcast(p, owner)


class KellerJordanBySize(Source):
    """Earlier: a group for each number of elements, with a buffer; no decay."""

    def __init__(self, params, lr=0.02, momentum=0.95):
        params, groups = list(params), []
        for size in {p.numel() for p in params}:
            b = torch.empty(dist.get_world_size(), size, dtype=torch.bfloat16)
            views = [b[i] for i in range(len(b))]
            chosen = [p for p in params if p.numel() == size]
            groups.append(dict(params=chosen, update_buffer=b, update_buffer_views=views))
        super().__init__(groups, dict(lr=lr, momentum=momentum, nesterov=True, ns_steps=5))

    def step_group(self, group):
        for index, p in enumerate(group["params"]):
            owner = index % dist.get_world_size()
            if owner == dist.get_rank():
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                U = orthogonalize(averaged(p.grad, buffer, group["momentum"]), "quintic")
                p.sub_(group["lr"] * max(1, p.shape[-2] / p.shape[-1]) ** 0.5 * U)
            dist.broadcast(p, owner)


class Nanochat(Source):
    """``MuonAdamW``, or ``DistMuonAdamW``: the gradients are the same on all ranks here.

    The first matrix of a group has the stack, or this rank's chunk of it.
    """

    small = 1024  # elements; a larger parameter of AdamW is divided by rows

    def __init__(self, groups, distributed=False):
        super().__init__(groups, {})
        self.world = dist.get_world_size() if distributed else 1
        self.rank = dist.get_rank() if distributed else 0

    def step_group(self, group):
        (self.step_adamw if group["kind"] == "adamw" else self.step_muon)(group)

    def step_adamw(self, group):
        for p in group["params"]:
            rows, grad, is_small = p, p.grad, p.numel() < self.small
            if not is_small:
                assert len(p) % self.world == 0
                rows, grad = (t.chunk(self.world)[self.rank] for t in (p, p.grad))
            options = group["lr"], group["betas"], group["eps"], group["weight_decay"]
            adam(rows, grad, self.state[p], *options)
            if self.world > 1 and not is_small:
                dist.all_gather(list(p.chunk(self.world)), rows.clone())

    def step_muon(self, group):
        params = group["params"]
        own, shape = self.state[params[0]], params[0].shape
        each = -(-len(params) // self.world)
        tall = shape[-2] >= shape[-1]
        if not own:
            like = params[0].new_zeros
            flat = (*shape[:-1], 1) if tall else (*shape[:-2], 1, shape[-1])
            own["momentum_buffer"] = like(each, *shape)
            own["second_momentum_buffer"] = like(each, *flat)
        for index, p in enumerate(params):
            owner, row = divmod(index, each)
            if owner == self.rank:
                self.step_matrix(p, own, row, group, -1 if tall else -2)
            if self.world > 1:
                dist.broadcast(p, owner)

    @staticmethod
    def step_matrix(p, own, row, group, dim):
        B, V = own["momentum_buffer"][row], own["second_momentum_buffer"][row]
        D = averaged(p.grad, B, group["momentum"])
        U = orthogonalize(D, "polar_express", group["ns_steps"], 1.02)
        beta2 = group["beta2"] or 0.0
        V.copy_(beta2 * V + (1 - beta2) * U.square().mean(dim, keepdim=True))
        scaled = U / V.clamp(min=1e-10).sqrt()
        norms = [t.square().sum((-2, -1), keepdim=True).sqrt() for t in (U, scaled)]
        U = scaled * (norms[0] / norms[1].clamp(min=1e-10))
        lr = group["lr"] * max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5
        p.sub_(lr * U + lr * group["weight_decay"] * p * (U * p >= 0))


class TorchMuon(Source):
    """``torch.optim.Muon``, which computes in bfloat16, in the parameters' dtype."""

    def __init__(self, params, lr=1e-3, weight_decay=0.1, momentum=0.95, nesterov=True):
        own = dict(ns_coefficients=(3.4445, -4.7750, 2.0315), eps=1e-7, ns_steps=5)
        defaults = dict(lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov)
        super().__init__(params, {**defaults, **own, "adjust_lr_fn": None})

    def step_group(self, group):
        lr, decay = group["lr"], group["weight_decay"]
        for p in group["params"]:
            buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
            D = averaged(p.grad, buffer, group["momentum"])
            U = orthogonalize(D if group["nesterov"] else buffer, "quintic")
            scale = math.sqrt(max(1, p.shape[0] / p.shape[1]))
            p.copy_(p * (1 - lr * decay) - lr * scale * U)
