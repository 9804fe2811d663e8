"""A small model of every kind of parameter, its training on one device, and torch's schedulers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils

from kernel import as_arguments, optimizer

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: 0.9**t),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 4)],
        milestones=[3],
    ),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 5, power=2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.1, step_size_up=2),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.001, anneal_epochs=3),
}


class Model(nn.Module):
    """A bit of everything: matrices, a fused one, experts, a convolution, vectors, an embedding."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.conv = nn.Conv1d(6, 4, 3, padding=1)
        self.qkv = nn.Linear(4, 12)
        self.down = nn.Linear(12, 4, bias=False)
        self.experts = nn.Parameter(torch.randn(3, 4, 6) / 4)
        self.frozen = nn.Parameter(torch.ones(6, 6), requires_grad=False)
        self.head = nn.Linear(6, 10, bias=False)
        self.to(dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)  # (batch, length, 6)
        x = self.conv(x.mT).mT
        x = x + self.down(torch.tanh(self.qkv(x)))
        x = torch.einsum("bli,eio->blo", x, self.experts)
        return self.head(x @ self.frozen)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Muon's matrices, its convolution, AdamW's."""
    muon, adamw = optimizer.get_default_muon_param_groups(model, expert_keys=["experts"])
    index = adamw["names"].index("conv.weight")
    conv = {key: [adamw[key].pop(index)] for key in ("params", "names")}
    return [muon, {**conv, "use_muon": True, "flatten": True}, adamw]


def build(dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> tuple[Model, Any]:
    torch.manual_seed(seed)
    model = Model(dtype)
    return model, optimizer.Muon(groups_of(model), **as_arguments({"lr": 0.01, **options}))


def train(model: nn.Module, optim: Any, steps: int, seed: int = 0, schedule: Any = None) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        tokens = torch.randint(0, 10, (4, 5), generator=generator)
        model(tokens).float().square().mean().backward()
        optim.step()
        optim.zero_grad()
        if schedule is not None:
            schedule.step()


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]
