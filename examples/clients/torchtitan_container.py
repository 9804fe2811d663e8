"""torchtitan: an OptimizersContainer with one Muon of groups by regex, its state keyed by name.

    torchrun --standalone --nproc-per-node 2 examples/clients/torchtitan_container.py

In a job's config: `optimizer=muon(lr=1e-2)`, where others have `default_adamw(lr=...)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch.distributed as dist
from kernels import get_kernel
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.components.optimizer import ParamGroupConfig as Group

from task import Sequences, build_model

optimizer = get_kernel("org/optimizer", version=1, trust_remote_code=["org/optimizer"])


class MuonContainer(OptimizersContainer):
    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Any:
        own = name == "Muon"
        return optimizer.Muon if own else OptimizersContainer._resolve_optimizer_factory(name)


def muon(lr: float, **for_all: Any) -> MuonContainer.Config:
    # CUDA graphs, torchtitan's default, need gradients to stay.
    shared = {"lr": lr, "weight_decay": 0.1, "none_grad": False}
    adamw, muon = {"use_muon": False, **shared}, {"use_muon": True, **shared}
    others = r"(embed\w*|lm_head|output|norm)\.weight$|\.bias$"
    return MuonContainer.Config(
        param_groups=[  # the first that matches
            Group(pattern=others, optimizer_name="Muon", optimizer_kwargs=adamw),
            Group(pattern=r".*", optimizer_name="Muon", optimizer_kwargs=muon),
        ],
        optimizer_factory_kwargs_by_name={"Muon": for_all},
    )


def train(steps: int = 40, **options: Any) -> tuple[list[float], nn.Module]:
    dist.init_process_group()
    model = fully_shard(build_model())
    optimizers = muon(lr=1e-2, **options).build(model_parts=[model])
    config = LRSchedulersContainer.Config(warmup_steps=2)
    schedulers = config.build(optimizers=optimizers, training_steps=steps)
    batches = DataLoader(Sequences(16 * steps), batch_size=16 // dist.get_world_size())
    losses = []
    for batch in islice(batches, dist.get_rank(), None, dist.get_world_size()):
        optimizers.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizers.step()
        schedulers.step()
        losses.append(loss.item())
    return losses, model


if __name__ == "__main__":
    losses, _ = train()
    if dist.get_rank() == 0:
        print("losses:", *(f"{loss:.3f}" for loss in losses))
    dist.destroy_process_group()
