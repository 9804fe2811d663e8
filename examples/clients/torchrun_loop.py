"""A plain loop under torchrun: FSDP2, a schedule, clipping, no trainer.

torchrun --standalone --nproc-per-node 2 examples/clients/torchrun_loop.py
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from kernels import get_kernel
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler

from task import Sequences, build_model

optimizer = get_kernel("org/optimizer", version=1, trust_remote_code=["org/optimizer"])


def train(steps: int = 40, **options: Any) -> tuple[list[float], nn.Module]:
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    if device.type != "cpu":
        torch.accelerator.set_device_index(dist.get_node_local_rank())
    dist.init_process_group()
    model = build_model().to(device)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)

    # Of the sharded parameters:
    optim = optimizer.Muon.for_model(model, lr=1e-2, weight_decay=0.1, **options)
    scheduler = LambdaLR(optim, lambda step: 1 - step / steps)

    data = Sequences(16 * steps)
    sampler: DistributedSampler = DistributedSampler(data, shuffle=False)
    losses = []
    for batch in DataLoader(data, batch_size=16 // dist.get_world_size(), sampler=sampler):
        loss = model(**{key: tokens.to(device) for key, tokens in batch.items()}).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        optim.zero_grad()
        scheduler.step()
        dist.all_reduce(mean := loss.detach() / dist.get_world_size())
        losses.append(mean.item())
    return losses, model


if __name__ == "__main__":
    losses, _ = train()
    if dist.get_rank() == 0:
        print("losses:", *(f"{loss:.3f}" for loss in losses))
    dist.destroy_process_group()
