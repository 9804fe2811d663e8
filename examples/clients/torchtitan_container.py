"""torchtitan: its OptimizersContainer makes one Muon of groups by regex, state keyed by name.

    torchrun --standalone --nproc-per-node 2 examples/clients/torchtitan_container.py

In a job's config it is `optimizer=muon(lr=1e-2)`, where the others have `default_adamw(lr=...)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from kernels import get_kernel
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

optimizer = get_kernel("org/optimizer", version=1, trust_remote_code=["org/optimizer"])


class MuonContainer(OptimizersContainer):
    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        if name == "Muon":
            return optimizer.Muon
        return OptimizersContainer._resolve_optimizer_factory(name)


def muon(lr: float, **for_all_groups: Any) -> MuonContainer.Config:
    """AdamW for embeddings, head, norms and biases; Muon for all that is left, the matrices."""
    # CUDA graphs, torchtitan's default, write gradients where they were when the graph was made.
    shared = {"lr": lr, "weight_decay": 0.1, "foreach": None, "none_grad": False}
    return MuonContainer.Config(
        param_groups=[
            ParamGroupConfig(
                pattern=r"(embed\w*|lm_head|output|\w*norm)\.weight$|\.bias$",
                optimizer_name="Muon",
                optimizer_kwargs={"use_muon": False, **shared},
            ),
            ParamGroupConfig(
                pattern=r".*", optimizer_name="Muon", optimizer_kwargs={"use_muon": True, **shared}
            ),
        ],
        optimizer_factory_kwargs_by_name={"Muon": for_all_groups},
    )
