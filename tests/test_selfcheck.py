"""What `selfcheck` says of healthy trainings, and of each failure, made on purpose."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from kernel import optimizer
from rank_pool import RankPool

DIM, HIDDEN, HEADS, EXPERTS = 16, 24, 2, 4

# -- models ----------------------------------------------------------------------------------------


ORDERS: dict[str, tuple[Any, Any]] = {  # how experts are stored, and how they are read
    "experts first": (lambda w: w, lambda w: w),
    "experts last": (lambda w: w.permute(1, 2, 0), lambda w: w.permute(2, 0, 1)),
    "in, out": (lambda w: w.mT, lambda w: w.mT),
    "slab": (lambda w: w.flatten(0, 1), lambda w: w.unflatten(0, (EXPERTS, -1))),
}


class Experts(nn.Module):
    def __init__(self, order: str):
        super().__init__()
        store, self.read = ORDERS[order]
        self.w1 = nn.Parameter(store(torch.randn(EXPERTS, HIDDEN, DIM) / 4).contiguous())
        self.w2 = nn.Parameter(store(torch.randn(EXPERTS, DIM, HIDDEN) / 4).contiguous())

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:  # (B, T, D), (B, T, E)
        h = F.silu(torch.einsum("btd,ehd->bteh", x, self.read(self.w1)))
        return torch.einsum("bteh,edh,bte->btd", h, self.read(self.w2), gates)


class Attention(nn.Module):
    def __init__(self, kv_heads: int, is_fused: bool):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = HEADS, kv_heads, DIM // HEADS
        rows = kv_heads * self.head_dim
        self.sizes = {"q_proj": DIM, "k_proj": rows, "v_proj": rows}
        for name, size in ({"qkv": DIM + 2 * rows} if is_fused else self.sizes).items():
            self.add_module(name, nn.Linear(DIM, size))
        self.proj = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "qkv"):
            parts = self.qkv(x).split(tuple(self.sizes.values()), dim=-1)
        else:
            parts = [self.get_submodule(name)(x) for name in self.sizes]
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.proj(y.transpose(1, 2).flatten(-2))


class Model(nn.Module):
    def __init__(self, order: str = "experts first", kv_heads: int = 1, is_fused: bool = True):
        super().__init__()
        self.embed = nn.Embedding(50, DIM)
        self.layers = nn.ModuleList()
        for _ in range(2):
            layer = {"attn": Attention(kv_heads, is_fused), "norm": nn.RMSNorm(DIM)}
            layer |= {"router": nn.Linear(DIM, EXPERTS, bias=False), "experts": Experts(order)}
            self.layers.append(nn.ModuleDict(layer))
        self.lm_head = nn.Linear(DIM, 50, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer["attn"](x)
            h = layer["norm"](x)
            x = x + layer["experts"](h, layer["router"](h).softmax(-1))
        return self.lm_head(x)


# -- layouts, healthy and not ----------------------------------------------------------------------

SPLIT = {"qkv": [DIM, DIM // 2, DIM // 2]}


def muon(model: nn.Module, expert_keys: Any = ("experts",), **options: Any) -> Any:
    keys = list(expert_keys)
    groups = optimizer.get_default_muon_param_groups(model, expert_keys=keys or None)
    return optimizer.Muon(groups, **{"split": SPLIT, **options})


def fsdp(model: nn.Module, how: Any = None, **options: Any) -> Any:
    fully_shard(model, **(how or {}))
    return model, muon(model, **options)


def mixed(model: nn.Module, **options: Any) -> Any:
    how = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    return fsdp(model, how, **options)


def hsdp(model: nn.Module) -> Any:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    return fsdp(model, {"mesh": mesh})


def ddp(model: nn.Module, **options: Any) -> Any:
    model = DistributedDataParallel(model)
    return model, muon(model, **{"process_group": dist.group.WORLD, **options})


def zero2(model: nn.Module) -> Any:
    return model, muon(model, process_group=dist.group.WORLD, grad_reduce="mean")


def grouped(model: nn.Module) -> Any:
    """Every second matrix with options of its own, vectors without decay, a schedule's keys."""
    fully_shard(model)
    first, *others = optimizer.get_default_muon_param_groups(
        model, expert_keys=["experts"], decay_vectors=False
    )
    halves = [
        {**first, "params": first["params"][i::2], "names": first["names"][i::2], "momentum": m}
        for i, m in enumerate([0.9, 0.95])
    ]
    optim = optimizer.Muon([*halves, *others], split=SPLIT, lr=0.0)
    torch.optim.lr_scheduler.LambdaLR(optim, lambda step: 1 / (1 + step))
    return model, optim


def partly_grouped(model: Any) -> Any:
    """Only one layer's parameters are in a group."""
    fully_shard(model)
    return model, muon(model.layers[0])


def freeze(model: Any, layer: int) -> Any:
    model.layers[layer].requires_grad_(False)
    return model


def seeded(model: nn.Module) -> nn.Module:
    torch.manual_seed(dist.get_rank())
    return model


def flattened(model: nn.Module) -> Any:
    fully_shard(model)
    groups = optimizer.get_default_muon_param_groups(model, lambda name, p: p.ndim > 1)
    return model, optimizer.Muon(groups, split=SPLIT, flatten=True)


def made_before_sharding(model: nn.Module) -> Any:
    optim = muon(model)
    fully_shard(model)
    return model, optim


def all_by_adamw(model: nn.Module) -> Any:
    fully_shard(model)
    return model, optimizer.Muon([{"params": list(model.parameters()), "use_muon": False}])


def transposed(model: Any) -> Any:
    """As what loads a file into stacks in another order."""
    for layer in model.layers:
        w1 = layer["experts"].w1
        layer["experts"].w1 = nn.Parameter(w1.detach().mT.contiguous())
    return fsdp(model)


def reset(model: Any) -> Any:
    fully_shard(model)
    nn.init.zeros_(model.lm_head.weight)
    return model, muon(model)


def unsynchronized(model: nn.Module) -> Any:
    model, optim = fsdp(model)
    model.set_requires_gradient_sync(False)
    return model, optim


def changed_behind_the_step(model: nn.Module) -> Any:
    model, optim = fsdp(model)

    def change(*_: Any) -> None:
        with torch.no_grad():
            model.layers[1]["attn"].proj.weight.mul_(1 + 1e-6)

    optim.register_step_post_hook(change)
    return model, optim


def saved_otherwise(model: nn.Module) -> Any:
    model, optim = fsdp(model)

    def round_momentum(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        states = {
            number: {key: v.bfloat16() if "momentum" in key else v for key, v in state.items()}
            for number, state in state_dict["state"].items()
        }
        return {**state_dict, "state": states}

    optim.register_state_dict_post_hook(round_momentum)
    return model, optim


def raises(model: nn.Module) -> Any:
    raise ZeroDivisionError("no ranks to divide by")


def raises_within_torch(model: nn.Module) -> Any:
    return fully_shard(model, mesh=init_device_mesh("cpu", (3,)))


def nothing(*_: Any) -> None:
    """A function without its return, or without its backward."""


def twice(_: nn.Module, loss: Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def doubled(model: Any, loss: Tensor) -> None:
    """As where expert parallelism does not average."""
    loss.backward()
    for layer in model.layers:
        layer["experts"].w1.grad.mul_(2)


def summed_by_hand(model: nn.Module, loss: Tensor) -> None:
    loss.backward()
    for param in model.parameters():
        dist.all_reduce(param.grad)


# -- reports ---------------------------------------------------------------------------------------


def apart() -> nn.Module:
    return Model(kv_heads=HEADS, is_fused=False)


def random_tokens(_: int) -> Tensor:
    return torch.randint(50, (4, 16))


def dense() -> nn.Module:
    return nn.Sequential(nn.Embedding(50, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, 50))


class Routed(nn.Sequential):
    """A layer of it is idle where all tokens are 0."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) if tokens.any() else self[2](self[0](tokens))


ON_PURPOSE = ["embed", "layers.1", "lm_head"]
# Layouts, and other arguments of `selfcheck`.
HEALTHY: dict[str, tuple[Any, dict[str, Any]]] = {
    "FSDP2": (fsdp, {}),
    "HSDP": (hsdp, {}),
    "DDP": (ddp, {}),
    "ZeRO-2": (zero2, {}),
    "groups, and a schedule": (grouped, {}),
    "fp64": (lambda model: fsdp(model.double()), {}),
    "bf16, with noise in keys' biases": (lambda m: mixed(m, split=None), {"model_fn": apart}),
    "random batches": (lambda model: fsdp(seeded(model)), {"batch_fn": random_tokens}),
    "frozen on purpose": (lambda model: fsdp(freeze(model, 0)), {"frozen": ["layers.0"]}),
    "in no group on purpose": (partly_grouped, {"frozen": ON_PURPOSE}),
    "idle in one of two batches": (
        lambda model: fsdp(model, split=None, expert_keys=()),
        {"model_fn": lambda: Routed(*dense()), "batch_fn": lambda i: i * random_tokens(i)},
    ),
}


def by(backward: Any) -> dict[str, Any]:
    return {"backward_fn": backward}


def of(*sizes: Any) -> dict[str, Any]:
    return {"model_fn": lambda: Model(*sizes)}


def fsdp_by(**options: Any) -> Any:
    return lambda model: fsdp(model, **options)


# What is wrong, the kind of the first finding, and facts that it tells.
FAILURES: dict[str, tuple[Any, dict[str, Any], str, str]] = {
    "groups before sharding": (made_before_sharding, {}, "replaced", "before sharding"),
    "half frozen": (lambda model: fsdp(freeze(model, 0)), {}, "frozen", "trains 8 of"),
    "half in no group": (partly_grouped, {}, "frozen", "trains 10 of"),
    "ranks differ": (lambda m: fsdp(freeze(m, dist.get_rank())), {}, "frozen", "Not all ranks"),
    "AdamW only": (all_by_adamw, {"model_fn": dense}, "nothing", "AdamW"),
    "DDP alone": (lambda m: ddp(m, process_group=None), {}, "replicas", "2 ranks, .*group"),
    "no group": (lambda model: (model, muon(model)), {}, "replicas", "2 ranks, .*group"),
    "divided": (
        fsdp,
        by(lambda _, loss: (loss / dist.get_world_size()).backward()),
        "gradient",
        "twice: .*embed.weight is 0.5",
    ),
    "averaged twice": (lambda m: ddp(m, grad_reduce="mean"), {}, "gradient", "twice: all ranks"),
    "summed": (ddp, by(summed_by_hand), "gradient", "not averaged but summed: "),
    "backward twice": (fsdp, by(twice), "gradient", "ran twice"),
    "not averaged": (
        lambda m: fsdp(m, {"ignored_params": {*m.layers[0].parameters()}}),
        {},
        "gradient",
        r"not averaged: .*layers\.0",
    ),
    "unsynchronized": (unsynchronized, {}, "gradient", "no gradient at any"),
    "no backward": (fsdp, by(nothing), "gradient", "no gradient at any"),
    "NaN": (fsdp, by(lambda _, loss: (loss * math.nan).backward()), "gradient", "embed.* finite"),
    "doubled": (fsdp, by(doubled), "gradient", r"experts\.w1 is 2 times"),
    "doubled in bf16": (mixed, by(doubled), "gradient", r"experts\.w1 is 2"),
    "other weights": (reset, {}, "weights", r"lm_head(.|\n)*layout_fn has changed"),
    "a hook": (changed_behind_the_step, {}, "weights", r"layers\.1\.attn\.proj\.weight"),
    "a checkpoint": (saved_otherwise, {}, "checkpoint", r"momentum_buffer of layers\.0"),
    "transposed": (transposed, {}, "shape", r"w1 is \(4, 16, 24\)"),
    "experts last": (fsdp, of("experts last"), "transposed", "4 stacks"),
    "in, out": (fsdp_by(adjust_lr="original"), of("in, out"), "transposed", "4 stacks"),
    "a slab": (fsdp, of("slab"), "experts", "4 stacks"),
    "flattened": (flattened, {}, "experts", "4 stacks"),
    "experts by AdamW": (fsdp_by(expert_keys=()), {}, "experts", "stacked experts .*AdamW"),
    "split": (fsdp_by(split={"qkv": [8, 16, 8]}), {}, "split", "wrong split"),
    "halves": (
        fsdp_by(split={"qkv": [24] * 2}),
        of("experts first", HEADS),
        "split",
        r"\[16, 16, 16\]",
    ),
    "more rows": (fsdp_by(split={"qkv": [16] * 3}), {}, "raised", r"\[16, 16, 16\] adds up"),
    "whole": (fsdp_by(split=None), {}, "fused", "Q, K and V"),
    "no model": (fsdp, {"model_fn": nothing}, "raised", "TypeError: model_fn .*NoneType"),
    "no layout": (nothing, {}, "raised", "TypeError: layout_fn .*NoneType"),
    "raises": (raises, {}, "raised", "ZeroDivisionError: no ranks to divide by"),
    "raises within torch": (raises_within_torch, {}, "raised", "in raises_within_torch\n"),
}


def reported(name: str) -> tuple[list[str], str]:
    """Kinds of findings, and the whole report, of a row that ranks look up by its name."""
    layout, options, *_ = {**HEALTHY, **FAILURES}[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = optimizer.selfcheck(
            **{"model_fn": Model, "layout_fn": layout, "steps": 2, **options}
        )
    assert bool(report) == (not report.findings)
    return [trap.kind for trap in report.findings], str(report)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


def check(pool: RankPool, name: str) -> tuple[list[str], str]:
    first, other = pool(reported, name)
    assert first[0] == other[0]
    return first


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_yields_no_finding(pool, name):
    kinds, text = check(pool, name)
    assert kinds == [] and text.startswith("no finding\n2 steps on 2 ranks"), text
    assert re.search(r"\d+ parameters of Muon bit-identical", text)


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_is_the_first_finding(pool, name):
    *_, kind, facts = FAILURES[name]
    kinds, text = check(pool, name)
    assert kinds[0] == kind and text.startswith("1. "), (kinds, text)
    assert re.search(facts, text), text


def test_what_a_function_raises_is_told_with_its_own_lines_and_none_of_the_package(pool):
    text = check(pool, "raises")[1]
    assert f"→ {__file__}:" in text and text.count(".py:") == 1
    assert check(pool, "raises within torch")[1].count(".py:") == 2


# -- without ranks ---------------------------------------------------------------------------------

SCRIPT = """
import torch
from kernels import get_kernel
from torch import nn
from torch.distributed.fsdp import fully_shard

optimizer = get_kernel("org/optimizer", version=1)


def model_fn():
    return nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 16), nn.Linear(16, 40))


def layout_fn(model):
    fully_shard(model)
    return model


def batch_fn(step):
    return torch.randint(40, (6, 16), generator=torch.Generator().manual_seed(step))


if __name__ == "__main__":
    print(optimizer.selfcheck(model_fn, layout_fn, batch_fn, steps=2, ranks=3))
"""
RAISING = """if torch.distributed.get_rank() == 1:
        raise OSError('no such disk')
    torch.distributed.barrier()
    fully_shard(model)
"""
INNER = "    def batch_fn(step): pass\n    batch_fn.__qualname__ = 'none'\n    print("
# Changes of the script; how its output begins, or that of its errors if it prints nothing.
SCRIPTS: dict[str, tuple[str, str, str]] = {
    "healthy": ("", "", "no finding\n2 steps on 3 ranks"),
    "one raises": ("fully_shard(model)\n", RAISING, "1. OSError: no such disk"),
    "lambda": ("selfcheck(model_fn", "selfcheck(lambda: model_fn()", "ValueError: "),
    "not at the top": ("    print(", INNER, "ValueError: "),
    "no guard": ('if __name__ == "__main__"', "if True", "ValueError: "),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_plain_process_starts_ranks_that_import_its_functions(tmp_path, name):
    old, new, told = SCRIPTS[name]
    script = tmp_path / "check.py"
    script.write_text(SCRIPT.replace(old, new, 1))
    assert old in SCRIPT
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert (run.stdout or run.stderr.splitlines()[-1]).startswith(told), run.stdout + run.stderr
    assert bool(run.stdout) == (told != "ValueError: ")
    assert name != "one raises" or "rank 1: 1. OSError" in run.stderr
