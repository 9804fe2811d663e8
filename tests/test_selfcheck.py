"""What `selfcheck` says of healthy trainings, and of each failure, made on purpose."""

from __future__ import annotations

import functools
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from kernel import optimizer
from rank_pool import RankPool

DIM, HIDDEN, HEADS, EXPERTS = 16, 24, 2, 4


class Experts(nn.Module):
    """(E, out, in), or with the experts last, or all below one another."""

    def __init__(self, order: str):
        super().__init__()
        for name, shape in {"w1": (EXPERTS, HIDDEN, DIM), "w2": (EXPERTS, DIM, HIDDEN)}.items():
            weight = torch.randn(shape) / 4
            if order == "experts last":
                weight = weight.permute(1, 2, 0).contiguous()
            elif order == "in, out":
                weight = weight.mT.contiguous()
            elif order == "slab":
                weight = weight.flatten(0, 1)
            setattr(self, name, nn.Parameter(weight))
        self.order = order

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:  # (B, T, D), (B, T, E)
        w1, w2 = self.w1, self.w2
        if self.order == "experts last":
            w1, w2 = w1.permute(2, 0, 1), w2.permute(2, 0, 1)
        elif self.order == "in, out":
            w1, w2 = w1.mT, w2.mT
        elif self.order == "slab":
            w1, w2 = w1.unflatten(0, (EXPERTS, -1)), w2.unflatten(0, (EXPERTS, -1))
        h = F.silu(torch.einsum("btd,ehd->bteh", x, w1))
        return torch.einsum("bteh,edh,bte->btd", h, w2, gates)


class MoE(nn.Module):
    def __init__(self, order: str):
        super().__init__()
        self.router, self.experts = nn.Linear(DIM, EXPERTS, bias=False), Experts(order)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, self.router(x).softmax(-1))


class Attention(nn.Module):
    """Two query heads that share a key head."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = HEADS, 1, DIM // HEADS
        self.qkv = nn.Linear(DIM, 2 * DIM)
        self.proj = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split([DIM, DIM // 2, DIM // 2], dim=-1)
        q, k, v = (t.unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.proj(y.transpose(1, 2).flatten(-2))


class FullAttention(Attention):
    """As many key heads as query heads, in one weight or in three."""

    def __init__(self, is_fused: bool):
        super().__init__()
        self.num_kv_heads = HEADS
        if is_fused:
            self.qkv = nn.Linear(DIM, 3 * DIM)
        else:
            del self.qkv
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "qkv"):
            q, k, v = self.qkv(x).chunk(3, dim=-1)
        else:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(-2))


class Model(nn.Module):
    def __init__(self, order: str):
        super().__init__()
        self.embed = nn.Embedding(50, DIM)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"attn": Attention(), "norm": nn.RMSNorm(DIM), "moe": MoE(order)})
            for _ in range(2)
        )
        self.lm_head = nn.Linear(DIM, 50, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer["attn"](x)
            x = x + layer["moe"](layer["norm"](x))
        return self.lm_head(x)


def with_full_attention(is_fused: bool) -> nn.Module:
    model = Model("experts first")
    for layer in model.layers:
        layer["attn"] = FullAttention(is_fused)
    return model


def dense() -> nn.Module:
    return nn.Sequential(nn.Embedding(50, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, 50))


EXPERT_KEYS = ["experts"]
SPLIT = {"qkv": [DIM, DIM // 2, DIM // 2]}


def muon(model: nn.Module, expert_keys: Any = EXPERT_KEYS, split: Any = SPLIT, **options: Any):
    groups = optimizer.get_default_muon_param_groups(model, expert_keys=expert_keys)
    return optimizer.Muon(groups, **{"split": split, **options})


def fsdp(model: nn.Module, **options: Any) -> Any:
    fully_shard(model)
    return model, muon(model, **options)


def hsdp(model: nn.Module) -> Any:
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards")))
    return model, muon(model)


def flattened(model: nn.Module) -> Any:
    fully_shard(model)
    groups = optimizer.get_default_muon_param_groups(model, lambda name, p: p.ndim > 1)
    return model, optimizer.Muon(groups, split=SPLIT, flatten=True)


def plain(model: nn.Module) -> Any:
    return model, muon(model)


def ddp(model: nn.Module, **options: Any) -> Any:
    model = DistributedDataParallel(model)
    return model, muon(model, **{"process_group": dist.group.WORLD, **options})


def zero2(model: nn.Module) -> Any:
    return model, muon(model, process_group=dist.group.WORLD, grad_reduce="mean")


def mixed(model: nn.Module, **options: Any) -> Any:
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    return model, muon(model, **options)


def in_fp64(model: nn.Module) -> Any:
    return fsdp(model.double())


def scheduled(model: nn.Module) -> Any:
    model, optim = fsdp(model)
    LambdaLR(optim, lambda step: 1 / (1 + step))
    return model, optim


def with_random_numbers_of_each_rank(model: nn.Module) -> Any:
    torch.manual_seed(dist.get_rank())
    return fsdp(model)


def random_tokens(_: int) -> Tensor:
    return torch.randint(50, (4, 16))


def groups_made_before_sharding(model: nn.Module) -> Any:
    optim = muon(model)
    fully_shard(model)
    return model, optim


def two_groups(model: nn.Module) -> Any:
    """Every second matrix with options of its own, and vectors without decay."""
    fully_shard(model)
    first, *others = optimizer.get_default_muon_param_groups(
        model, expert_keys=EXPERT_KEYS, decay_vectors=False
    )
    halves = [
        {**first, "params": first["params"][i::2], "names": first["names"][i::2], "momentum": m}
        for i, m in enumerate([0.9, 0.95])
    ]
    return model, optimizer.Muon([*halves, *others], split=SPLIT, lr=0.0)


def frozen_half(model: nn.Module) -> Any:
    model.layers[0].requires_grad_(False)
    return fsdp(model)


def frozen_elsewhere_on_each_rank(model: nn.Module) -> Any:
    model.layers[dist.get_rank()].requires_grad_(False)
    return fsdp(model)


def half_in_no_group(model: nn.Module) -> Any:
    fully_shard(model)
    groups = optimizer.get_default_muon_param_groups(model.layers[0], expert_keys=EXPERT_KEYS)
    return model, optimizer.Muon(groups, split=SPLIT)


def all_by_adamw(model: nn.Module) -> Any:
    fully_shard(model)
    return model, optimizer.Muon([{"params": list(model.parameters()), "use_muon": False}])


def made_anew(model: nn.Module) -> Any:
    fully_shard(model)
    nn.init.zeros_(model.lm_head.weight)
    return model, muon(model)


def nothing(*_: Any) -> None:
    """A function without its return, or without its backward."""


def twice(_: nn.Module, loss: Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def not_a_number(_: nn.Module, loss: Tensor) -> None:
    (loss * float("nan")).backward()


def experts_doubled(model: nn.Module, loss: Tensor) -> None:
    """As where expert parallelism does not average."""
    loss.backward()
    for layer in model.layers:
        layer["moe"].experts.w1.grad.mul_(2)


def divided_by_hand(_: nn.Module, loss: Tensor) -> None:
    """As for gradients that are sums over ranks, which FSDP2's are not."""
    (loss / dist.get_world_size()).backward()


def summed_by_hand(model: nn.Module, loss: Tensor) -> None:
    loss.backward()
    for param in model.parameters():
        dist.all_reduce(param.grad)


def not_averaged(model: nn.Module) -> Any:
    """The matrices of one layer are left out of FSDP2."""
    ignored = set(model.layers[0].parameters())
    fully_shard(model, ignored_params=ignored)
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


def turned(model: nn.Module) -> Any:
    """What loads a file into stacks in another order."""
    for layer in model.layers:
        w1 = layer["moe"].experts.w1
        layer["moe"].experts.w1 = nn.Parameter(w1.detach().mT.contiguous())
    return fsdp(model)


def reported(layout: Any, order: str, options: dict[str, Any]) -> tuple[str, list[str], str]:
    """What all ranks say: first line, kinds, the whole report."""
    model_fn = options.pop("model_fn", functools.partial(Model, order))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = optimizer.selfcheck(model_fn, layout, steps=2, **options)
    assert bool(report) == (not report.findings)
    return str(report).splitlines()[0], [trap.kind for trap in report.findings], str(report)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


def check(pool: RankPool, layout: Any, order: str = "experts first", **options: Any) -> Any:
    first, other = pool(reported, layout, order, options)
    assert first[1] == other[1]
    return first


@pytest.mark.parametrize("layout", [fsdp, hsdp, ddp, zero2, two_groups])
def test_a_healthy_run_yields_no_finding(pool, layout):
    line, kinds, text = check(pool, layout)
    assert (line, kinds) == ("no finding", []), text
    assert "of Muon's bit-equal to the unsharded run's" in text


HEALTHY: dict[str, tuple[Any, dict[str, Any]]] = {
    "bf16, whose rounding is all that a bias of keys gets": (
        functools.partial(mixed, split=None),
        {"model_fn": functools.partial(with_full_attention, False)},
    ),
    "fp64": (in_fp64, {}),
    "a schedule's keys in the groups": (scheduled, {}),
    "batches of random numbers": (
        with_random_numbers_of_each_rank,
        {"batch_fn": random_tokens},
    ),
    "gradients of parameters in no group": (
        half_in_no_group,
        {"frozen": ["embed", "layers.1", "lm_head"]},
    ),
}


@pytest.mark.parametrize("what", HEALTHY)
def test_what_is_as_it_should_be_is_no_finding(pool, what):
    layout, options = HEALTHY[what]
    line, _, text = check(pool, layout, **options)
    assert line == "no finding", text


FAILURES: dict[str, tuple[Any, dict[str, Any]]] = {
    "groups made before sharding": (groups_made_before_sharding, {}),
    "averaged twice: the gradient of embed.weight is 0.5": (fsdp, {"backward_fn": divided_by_hand}),
    "averaged twice: all ranks": (functools.partial(ddp, grad_reduce="mean"), {}),
    "not averaged but summed": (ddp, {"backward_fn": summed_by_hand}),
    "not averaged: the gradient of layers.0": (not_averaged, {}),
    "frozen: nothing trains 8": (frozen_half, {}),
    "frozen: nothing trains 10": (half_in_no_group, {}),
    "DDP on 2 ranks, without a process_group": (functools.partial(ddp, process_group=None), {}),
    "plain parameters on 2 ranks, without a process_group": (plain, {}),
    "stacked experts left to AdamW": (functools.partial(fsdp, expert_keys=None), {}),
    "experts not named: 4 stacks": (flattened, {}),
    "experts not named: 4 stacks of": (fsdp, {"order": "slab"}),
    "no gradient at any parameter": (unsynchronized, {}),
    "no gradient at any": (fsdp, {"backward_fn": nothing}),
    "the gradient of embed.weight is not finite": (fsdp, {"backward_fn": not_a_number}),
    "experts.w1 is 2 times": (fsdp, {"backward_fn": experts_doubled}),
    "experts.w1 is 2": (mixed, {"backward_fn": experts_doubled}),
    "TypeError: model_fn returns the model, found NoneType": (fsdp, {"model_fn": nothing}),
    "TypeError: layout_fn returns a model, (model, Muon)": (nothing, {}),
    "layers.1.attn.proj.weight is not bit-equal": (changed_behind_the_step, {}),
    "has another momentum_buffer of layers.0.attn.qkv.weight": (saved_otherwise, {}),
    "a transposed stack or matrix": (turned, {}),
    "a transposed stack: 4 stacks whose first": (fsdp, {"order": "experts last"}),
    "a transposed stack: 4 stacks stored (experts, in, out)": (
        functools.partial(fsdp, adjust_lr="original"),
        {"order": "in, out"},
    ),
    "a wrong split": (functools.partial(fsdp, split={"qkv": [DIM // 2, DIM, DIM // 2]}), {}),
    "a wrong split: matrices of layers.0.attn.qkv.weight": (
        functools.partial(fsdp, split={"qkv": [DIM * 3 // 2] * 2}),
        {"model_fn": functools.partial(with_full_attention, True)},
    ),
    "but split=[16, 16, 16] adds up to": (functools.partial(fsdp, split={"qkv": [DIM] * 3}), {}),
    "hold Q, K and V in one tensor": (functools.partial(fsdp, split=None), {}),
}


@pytest.mark.parametrize("words", FAILURES)
def test_a_failure_is_named_in_the_first_line(pool, words):
    layout, options = FAILURES[words]
    line, _, text = check(pool, layout, **options)
    assert words in line, text


CAUSES: dict[str, tuple[Any, dict[str, Any]]] = {
    'split={"qkv": [16, 16, 16]}': FAILURES["a wrong split: matrices of layers.0.attn.qkv.weight"],
    "Not all ranks find the same": (frozen_elsewhere_on_each_rank, {}),
    "layout_fn has changed it": (made_anew, {}),
    "or backward() ran twice": (fsdp, {"backward_fn": twice}),
    "AdamW trains all of them, by their groups": (all_by_adamw, {"model_fn": dense}),
}


@pytest.mark.parametrize("words", CAUSES)
def test_a_report_names_the_cause(pool, words):
    layout, options = CAUSES[words]
    assert words in (text := check(pool, layout, **options)[2]), text


def test_what_a_function_raises_is_a_finding(pool):
    line, kinds, text = check(pool, raises)
    assert line == "1. ZeroDivisionError: no ranks to divide by" and kinds == ["raised"]
    assert f"→ {__file__}:" in text and text.count(".py:") == 1  # not lines of the package
    text = check(pool, raises_within_torch)[2]
    assert ", in raises_within_torch\n" in text and text.count(".py:") == 2


def raises(model: nn.Module) -> Any:
    raise ZeroDivisionError("no ranks to divide by")


def raises_within_torch(model: nn.Module) -> Any:
    return fully_shard(model, mesh=init_device_mesh("cpu", (3,)))


def test_what_is_meant_to_be_frozen_is_no_finding(pool):
    line, _, text = check(pool, frozen_half, frozen=["layers.0"])
    assert line == "no finding", text


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


def started(tmp_path: Path, *changes: tuple[str, str]) -> subprocess.CompletedProcess[str]:
    script, source = tmp_path / "check.py", SCRIPT
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    script.write_text(source)
    return subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_a_plain_process_starts_ranks(tmp_path):
    run = started(tmp_path)
    assert run.stdout.startswith("no finding\n2 steps on 3 ranks"), run.stdout + run.stderr


@pytest.mark.slow
def test_what_one_rank_raises_while_others_wait_for_it_is_a_finding(tmp_path):
    raising = "if torch.distributed.get_rank() == 1:\n        raise OSError('no such disk')\n"
    wait = "    torch.distributed.barrier()\n    fully_shard(model)"
    run = started(tmp_path, ("fully_shard(model)\n", f"{raising}{wait}\n"))
    assert run.stdout.startswith("1. OSError: no such disk"), run.stdout + run.stderr
    assert "rank 1: 1. OSError: no such disk" in run.stderr  # all that torchrun shows


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        ("selfcheck(model_fn", "selfcheck(lambda: model_fn()"),
        (
            "    print(",
            "    def batch_fn(step): pass\n    batch_fn.__qualname__ = 'none'\n    print(",
        ),
        ('if __name__ == "__main__"', "if True"),
    ],
    ids=["lambda", "not at the top level", "no guard"],
)
def test_functions_that_processes_cant_import_are_refused(tmp_path, change):
    error = started(tmp_path, change).stderr
    assert "ValueError: processes that are started import the script" in error.splitlines()[-1], (
        error
    )
