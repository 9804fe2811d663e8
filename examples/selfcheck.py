"""Checks a layout on CPU ranks, before GPUs are rented: three steps beside the unsharded model.

    torchrun --standalone --nproc-per-node 4 examples/selfcheck.py --layout fsdp:2+tp:2
    torchrun --standalone --nproc-per-node 2 examples/selfcheck.py --layout ep:2 --experts 4
    torchrun --standalone --nproc-per-node 2 examples/selfcheck.py --model config.json
    torchrun --standalone --nproc-per-node 2 examples/selfcheck.py --model my_training.py

The model is the example's; that of a Hugging Face config.json, made small, which takes transformers
and is sharded and grouped as `describe` advises; or what a Python file's `model_fn()` and
`layout_fn(model)` make. docs/checks.md says what is compared.
"""

from __future__ import annotations

import argparse
import functools
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from model import Experts, ModelConfig, Transformer
from planner.architectures import read_config, weights_of
from planner.deployment import Layout, parse_layout
from ranks import launch, rank, world_size
from train import TrainConfig, apply_tp, build_optimizer, load_kernel

# What configs call sizes, and small ones, where a config has the key at all.
SMALL = {
    **{"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "head_dim": 8},
    **{"num_attention_heads": 8, "num_hidden_layers": 2, "vocab_size": 256},
    **{"shared_expert_intermediate_size": 32, "max_position_embeddings": 64, "sliding_window": 16},
    **{"num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "kv_lora_rank": 16},
    **{"q_lora_rank": 32, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
}
# Which tokens mean something, files' dtypes, and lists of the layers that were left out.
LEFT_OUT = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "layer_types")


def small(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with the keys of a published one: two layers, narrow, and as many heads to a key."""
    kept = {key: value for key, value in config.items() if key not in LEFT_OUT}
    sizes = {key: size for key, size in SMALL.items() if kept.get(key)}
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads")
    if kv_heads:
        sizes["num_key_value_heads"] = max(2, 8 * kv_heads // heads)
    return {**kept, **sizes}


def transformer_of(config: Mapping[str, Any]) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    made = AutoConfig.for_model(**config, use_cache=False)
    return AutoModelForCausalLM.from_config(made, attn_implementation="sdpa").float()


def lay(layout: Layout, config: Mapping[str, Any] | TrainConfig, model: nn.Module) -> Any:
    """The model on the ranks, its optimizer, and the mesh of ranks that see different data."""
    if layout.kind == "ddp":
        model = DistributedDataParallel(model)
    if layout.replicated:
        return model, optimizer_of(layout, config, model)
    outer, inner = (*layout.mesh, 1)[:2]
    mesh = init_device_mesh("cpu", (outer, inner), mesh_dim_names=("outer", "inner"))
    data = mesh if layout.kind in ("hsdp", "ep") else mesh["outer"]
    if layout.kind == "fsdp+tp":
        divide_layers(config, model, mesh["inner"])
    if layout.kind == "ep":
        divide_experts(model, mesh)
        data = init_device_mesh("cpu", (world_size(),))
    inner_model: Any = getattr(model, "model", model)
    for layer in inner_model.layers:
        fully_shard(layer, mesh=data)
    fully_shard(model, mesh=data)
    return model, optimizer_of(layout, config, model), data


def optimizer_of(layout: Layout, config: Mapping[str, Any] | TrainConfig, model: nn.Module) -> Any:
    if isinstance(config, TrainConfig):
        return build_optimizer(config, model)
    kernel = load_kernel()
    options: dict[str, Any] = {"process_group": dist.group.WORLD} if layout.replicated else {}
    if layout.kind == "zero2":
        options["grad_reduce"] = "mean"
    return kernel.Muon.for_model(model, lr=1e-3, expert_keys=["experts"], **options)


def divide_layers(
    config: Mapping[str, Any] | TrainConfig, model: nn.Module, mesh: DeviceMesh
) -> None:
    """Tensor parallelism, by the sides that the planner knows of published models."""
    if isinstance(model, Transformer):
        apply_tp(model, mesh)
        return
    assert not isinstance(config, TrainConfig)
    plan: dict[str, ParallelStyle] = {}
    for weight in weights_of(config):
        path = f"model.{weight.name.removesuffix('.weight')}"
        if path.endswith(("q_norm", "k_norm")):  # of the heads that a rank has
            plan[path] = SequenceParallel(sequence_dim=2, use_local_output=True)
        elif weight.parallel and path.endswith("_proj") and "experts" not in path:
            plan[path] = ColwiseParallel() if weight.parallel == "colwise" else RowwiseParallel()
    parallelize_module(model, mesh, plan)


def divide_experts(model: nn.Module, mesh: DeviceMesh) -> None:
    """Expert parallelism: ranks of "inner" hold some experts each, and send each other tokens."""
    for experts in [module for module in model.modules() if isinstance(module, Experts)]:
        for name, weight in list(experts.named_parameters()):
            divided = distribute_tensor(weight.detach(), mesh["inner"], [Shard(0)])
            experts.register_parameter(name, nn.Parameter(divided))
        experts.forward = functools.partial(forward_of_all, experts, mesh["inner"].get_group())  # type: ignore[method-assign]
        fully_shard(experts, mesh=mesh["outer"])
        # A rank's experts get gradients of all ranks of "inner", each of a mean over its own data.
        for weight in experts.parameters():
            weight.register_post_accumulate_grad_hook(
                functools.partial(divide, mesh["inner"].size())
            )


def divide(ranks: int, weight: Tensor) -> None:
    assert weight.grad is not None
    weight.grad.div_(ranks)


def forward_of_all(experts: Experts, group: dist.ProcessGroup, x: Tensor) -> Tensor:
    """Forward pass of all ranks' tokens for each expert, (E, tokens, D), on the ranks with it."""
    ranks, tokens = dist.get_world_size(group), x.shape[1]
    dist.all_reduce(most := torch.tensor(tokens), dist.ReduceOp.MAX, group=group)
    x = F.pad(x, (0, 0, 0, int(most) - tokens)).unflatten(0, (ranks, -1))  # (P, E / P, most, D)
    x = exchange(x, group).transpose(0, 1).flatten(1, 2)  # (E / P, P * most, D)
    w1, w2, w3 = (
        w.to_local() if isinstance(w, DTensor) else w for w in (experts.w1, experts.w2, experts.w3)
    )
    x = torch.bmm(F.silu(torch.bmm(x, w1.mT)) * torch.bmm(x, w3.mT), w2.mT)
    return (
        exchange(x.unflatten(1, (ranks, -1)).transpose(0, 1), group)
        .flatten(0, 1)[:, :tokens]
        .clone()
    )


def exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sends the r-th index of the first dimension to the r-th rank."""
    return all_to_all_single_autograd(x.contiguous(), None, None, group)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a config.json, or a Python file")
    parser.add_argument("--layout", default="fsdp", help="as of examples/plan.py")
    parser.add_argument(
        "--experts", type=int, default=0, help="of each layer of the example's model"
    )
    parser.add_argument("--steps", type=int, default=3)
    return parser.parse_args()


def functions_of(args: argparse.Namespace) -> tuple[Any, Any]:
    """What makes the model and what shards it.

    Raises:
        ValueError: not a layout of so many ranks; no model.
    """
    if args.model is not None and args.model.suffix == ".py":
        names = runpy.run_path(str(args.model))
        return names["model_fn"], names["layout_fn"]
    layout = parse_layout(args.layout, world_size())
    if args.model is not None:
        config = small(read_config(args.model))
        if layout.kind == "ep":
            raise ValueError("ep is for the example's own model: leave --model out")
        return functools.partial(transformer_of, config), functools.partial(lay, layout, config)
    sizes = ModelConfig(dim=32, hidden_dim=48, experts=args.experts)
    own = TrainConfig(ddp=layout.kind == "ddp", zero2=layout.kind == "zero2", experts=args.experts)
    return functools.partial(Transformer, sizes), functools.partial(lay, layout, own)


def main() -> None:
    args = parse_args()
    if not dist.is_initialized():
        start = "torchrun --standalone --nproc-per-node 2 examples/selfcheck.py"
        raise SystemExit(f"selfcheck.py checks a layout of ranks, which torchrun starts: {start}")
    try:
        model_fn, layout_fn = functions_of(args)
    except ValueError as error:
        raise SystemExit(f"selfcheck.py: {error}") from None
    report = load_kernel().selfcheck(model_fn, layout_fn, steps=args.steps)
    if rank() == 0:
        print(report)
    if not report:
        raise SystemExit(1)


if __name__ == "__main__":
    launch(main)
