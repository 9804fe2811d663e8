"""Layouts of a model: each a function that places it on ranks.

The model has matrices whose rows ranks divide evenly, unevenly and into empty shards, stacked
experts, a convolution, heads, and what AdamW trains.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from layouts import part
from models import Experts
from ranks import DEVICE


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.wq, self.wk, self.wo = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.up = nn.Linear(16, hidden)
        self.down = nn.Linear(hidden, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.wo(torch.tanh(self.wq(self.norm(x))) * self.wk(x))
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Network(nn.Module):
    """
    Args:
        even: whether shards of shards are of one size, in `Block.up` and the experts.
    """

    def __init__(self, even: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(Block(24 if even else 22) for _ in range(2))
        self.uneven = nn.Linear(8, 10)
        self.three_rows = nn.Linear(16, 3)
        self.one_row = nn.Linear(16, 1, bias=False)
        self.conv = nn.Conv1d(4, 8, 5, padding=2)
        self.experts = Experts(8 if even else 6, 16, 12)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.lm_head = nn.Linear(16, 50, bias=False)
        self.idle = nn.Linear(16, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)  # (batch, 16)
        for block in self.blocks:
            x = block(x)
        parts = [self.uneven(self.frozen(x[:, :8])), self.three_rows(x), self.one_row(x)]
        parts += [self.conv(x.view(-1, 4, 4)).flatten(1), self.experts(x)]
        return self.lm_head(x) + torch.cat(parts, dim=1).mean(1, keepdim=True)


@dataclass(frozen=True)
class Layout:
    """
    Args:
        ranks: how many there are.
        place: puts a model's parameters on this process's rank; returns what the optimizer has to
            be told.
        parts: into how many the ranks divide a batch, those that share a part being neighbours;
            None where the model can't be called, or not by all ranks.
        stage: takes away what other stages of a pipeline have.
    """

    ranks: int
    place: Callable[[Network], dict[str, Any]]
    parts: int | None
    stage: Callable[[Network], None] = lambda model: None


@functools.cache
def mesh_of(**sizes: int) -> DeviceMesh:
    """Makes a mesh of all ranks from the names and sizes of its dimensions."""
    return init_device_mesh(DEVICE, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def world() -> int:
    return dist.get_world_size()


def alone(model: Network) -> dict[str, Any]:
    return {}


def fsdp2(model: Network, mesh: DeviceMesh | None = None, **how: Any) -> dict[str, Any]:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **how)
    fully_shard(model, mesh=mesh, **how)
    return {}


def fsdp2_on_columns(model: Network) -> dict[str, Any]:
    def columns(p: nn.Parameter) -> Shard | None:
        return Shard(p.ndim - 1) if p.ndim > 1 and p.shape[-1] % world() == 0 else None

    return fsdp2(model, shard_placement_fn=columns)


def fsdp2_in_bf16(model: Network) -> dict[str, Any]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fsdp2(model, mp_policy=policy)


def fsdp2_offloaded(model: Network) -> dict[str, Any]:
    return fsdp2(model, offload_policy=CPUOffloadPolicy(pin_memory=False))


def hsdp(model: Network, choice: str = "auto") -> dict[str, Any]:
    fsdp2(model, mesh_of(replicas=2, shards=world() // 2))
    return {"hsdp": choice}


def hsdp_with_context_parallelism(model: Network) -> dict[str, Any]:
    """Replicas × (shards × context parallelism), as torchtitan has it."""
    mesh = mesh_of(replicas=2, shards=2, cp=2)
    if "shards_cp" not in mesh._get_root_mesh()._flatten_mapping:
        mesh["shards", "cp"]._flatten("shards_cp")
    return fsdp2(model, mesh["replicas", "shards_cp"]) | {"hsdp": "spread"}


TENSOR_PARALLEL = {
    **dict.fromkeys(("wq", "wk", "up"), ColwiseParallel()),
    **dict.fromkeys(("wo", "down"), RowwiseParallel()),
}


def tp(model: Network, mesh: DeviceMesh | None = None) -> dict[str, Any]:
    for block in model.blocks:
        parallelize_module(block, mesh or mesh_of(tp=world()), TENSOR_PARALLEL)
    return {}


def fsdp2_and_tp(model: Network, replicas: int = 1) -> dict[str, Any]:
    sizes = {"replicas": replicas} if replicas > 1 else {}
    mesh = mesh_of(**sizes, dp=world() // replicas // 2, tp=2)
    tp(model, mesh["tp"])
    return fsdp2(model, mesh[*sizes, "dp"])


def experts_on(model: Network, mesh: DeviceMesh) -> None:
    model.experts.w1 = nn.Parameter(part(model.experts.w1.detach(), mesh, [Shard(0)]))


def ep_and_fsdp2(model: Network, dim: int = 0) -> dict[str, Any]:
    mesh = mesh_of(fsdp=world() // 2, ep=2)
    experts_on(model, mesh["ep"])
    fully_shard(model.experts, mesh=mesh["fsdp"], shard_placement_fn=lambda p: Shard(dim))
    return fsdp2(model, mesh_of(everyone=world()))


def ep_and_tp(model: Network) -> dict[str, Any]:
    mesh = mesh_of(ep=world() // 2, tp=2)
    both = part(model.experts.w1.detach(), mesh, [Shard(0), Shard(1)])
    model.experts.w1 = nn.Parameter(both)
    return tp(model, mesh["tp"])


def ddp(model: Network) -> dict[str, Any]:
    return {"process_group": dist.group.WORLD}


def zero2(model: Network) -> dict[str, Any]:
    return {"process_group": dist.group.WORLD, "grad_reduce": "mean"}


def ddp_and_tp(model: Network) -> dict[str, Any]:
    mesh = mesh_of(dp=world() // 2, tp=2)
    return tp(model, mesh["tp"]) | {"process_group": mesh["dp"]}


def stage_of(model: Network) -> None:
    """The first stage has other matrices than the second, which has fewer."""
    first = dist.get_rank() < world() // 2
    model.blocks = nn.ModuleList([model.blocks[0 if first else 1]])
    for name in ("uneven", "conv", "embed_tokens") if first else ("experts", "three_rows", "wo"):
        if hasattr(model, name):
            delattr(model, name)


def stage_without_matrices(model: Network) -> None:
    if dist.get_rank() >= world() // 2:
        for name, _ in list(model.named_children()):
            if name != "lm_head":
                delattr(model, name)


def pipeline_and_fsdp2(model: Network) -> dict[str, Any]:
    mesh = mesh_of(pp=2, dp=world() // 2)["dp"]
    fully_shard(model, mesh=mesh)
    return {}


def stages_of_fsdp2_and_tp(model: Network) -> dict[str, Any]:
    """The ranks of a stage together have no process group yet."""
    mesh = mesh_of(pp=2, dp=world() // 4, tp=2)
    tp(model, mesh["tp"])
    return fsdp2(model, mesh["dp"])


redundant, spread = (functools.partial(hsdp, choice=choice) for choice in ("redundant", "spread"))

LAYOUTS = {
    "one rank, FSDP2": Layout(1, fsdp2, 1),
    "one rank, DDP": Layout(1, ddp, 1),
    "one rank, ZeRO-2": Layout(1, zero2, 1),
    "2 ranks, FSDP2": Layout(2, fsdp2, 2),
    "2 ranks, FSDP2 on columns": Layout(2, fsdp2_on_columns, 2),
    "2 ranks, FSDP2, computing in bf16": Layout(2, fsdp2_in_bf16, 2),
    "2 ranks, FSDP2, on the CPU": Layout(2, fsdp2_offloaded, 2),
    "2 ranks, TP": Layout(2, tp, 1),
    "2 ranks, DDP": Layout(2, ddp, 2),
    "2 ranks, ZeRO-2": Layout(2, zero2, 2),
    "2 ranks, PP": Layout(2, alone, None, stage_of),
    "2 ranks, PP without matrices": Layout(2, alone, None, stage_without_matrices),
    "3 ranks, FSDP2": Layout(3, fsdp2, 3),
    "3 ranks, DDP": Layout(3, ddp, 3),
    "3 ranks, ZeRO-2": Layout(3, zero2, None),
    "4 ranks, FSDP2": Layout(4, fsdp2, 4),
    "4 ranks, FSDP2 on columns": Layout(4, fsdp2_on_columns, 4),
    "4 ranks, HSDP, redundant": Layout(4, redundant, 4),
    "4 ranks, HSDP, spread": Layout(4, spread, 4),
    "4 ranks, TP": Layout(4, tp, 1),
    "4 ranks, FSDP2 + TP": Layout(4, fsdp2_and_tp, 2),
    "4 ranks, EP + FSDP2": Layout(4, ep_and_fsdp2, None),
    "4 ranks, EP + FSDP2 on rows": Layout(4, functools.partial(ep_and_fsdp2, dim=1), None),
    "4 ranks, EP + TP": Layout(4, ep_and_tp, None),
    "4 ranks, DDP": Layout(4, ddp, 4),
    "4 ranks, ZeRO-2": Layout(4, zero2, 4),
    "4 ranks, DDP + TP": Layout(4, ddp_and_tp, None),
    "4 ranks, PP + FSDP2": Layout(4, pipeline_and_fsdp2, None, stage_of),
    "8 ranks, FSDP2": Layout(8, fsdp2, 8),
    "8 ranks, HSDP + TP": Layout(8, functools.partial(fsdp2_and_tp, replicas=2), 4),
    "8 ranks, PP + FSDP2 + TP": Layout(8, stages_of_fsdp2_and_tp, None, stage_of),
    "8 ranks, HSDP with context parallelism": Layout(8, hsdp_with_context_parallelism, 8),
}
