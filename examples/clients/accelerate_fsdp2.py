"""accelerate with FSDP2, which shards the model after the optimizer was made of it.

torchrun --standalone --nproc-per-node 2 examples/clients/accelerate_fsdp2.py
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType
from kernels import get_kernel
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from task import Sequences, build_model

optimizer = get_kernel("org/optimizer", version=1, trust_remote_code=["org/optimizer"])


def make_accelerator(**arguments: Any) -> Accelerator:
    if not torch.accelerator.is_available():  # accelerate shards nothing on CPUs, unless told so
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type="SHARDED_STATE_DICT",
    )
    return Accelerator(fsdp_plugin=plugin, **arguments)


def prepare(accelerator: Accelerator, steps: int, **options: Any) -> tuple[Any, ...]:
    """Model, optimizer, scheduler and batches."""
    model = build_model()
    optim = optimizer.Muon.for_model(model, lr=1e-2, weight_decay=0.1, **options)
    # A prepared scheduler goes a step for every process.
    scheduler = LambdaLR(optim, lambda step: 1 - step / (steps * accelerator.num_processes))
    loader = DataLoader(Sequences(16 * steps), batch_size=16 // accelerator.num_processes)
    # Keeps accelerate from asking for the state, of the whole model, before it is sharded.
    accelerator.device_placement = False
    model, optim, scheduler = accelerator.prepare(model, optim, scheduler)
    return model, optim, scheduler, accelerator.prepare_data_loader(loader, device_placement=True)


def train(steps: int = 40, **options: Any) -> tuple[list[float], nn.Module]:
    accelerator = make_accelerator()
    model, optim, scheduler, batches = prepare(accelerator, steps, **options)
    losses = []
    for batch in batches:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        scheduler.step()
        optim.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    accelerator.print("losses:", *(f"{loss:.3f}" for loss in losses))
    return losses, model


if __name__ == "__main__":
    train()
    torch.distributed.destroy_process_group()
