"""Thousands of steps on four ranks, with everything that can be switched being switched.

Beside them one process trains the same weights and switches only what changes results. It gets the
gradients of the ranks, so that what differs is the optimizers' doing, and never loads a checkpoint.
"""

from __future__ import annotations

import copy
import functools
import gc
import os
import pickle
import random
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.optim import lr_scheduler

from kernel import optimizer
from layouts import EXACT, Weight, local, part, part_for, whole
from models import Attention, Experts
from ranks import run_ranks

Host = optimizer.SimulatedHost

RANKS = 4
ROUND = 100  # steps between looks at memory, each of which ends with a checkpoint
WARM = 5  # rounds in which memory may grow
REAL = 0.1  # of steps whose gradients come from a backward
STEPS = 2000

CONSTANT = ("storages", "bytes", "threads", "python threads", "files", "process groups")
WAYS = 4  # to take a checkpoint, in turn; state that was pickled has meshes of its own
CACHED = 32  # as many forms of the iteration may yet be chosen, for shapes under other options
RESIDENT_GROWTH = 8 << 20  # over half of the steps, of what allocators do not give back

# torch's fused AdamW rounds the ends of shards otherwise; weight decay forgets it.
ADAMW_DRIFT = 1e-6
LOSS_DRIFT = 1e-5

# What has to have happened, beside options.
EVERYTHING = {
    *(f"schedule {number}" for number in range(10)),
    *("offload on", "offload off"),
    *(f"fault: {what}" for what in ("gradient", "option", "logits", "closure", "dtype")),
    *(f"through_{way}" for way in ("files", "pickle", "a_new_one", "a_copy")),
    *("backward", "absent gradient", "logits", "frozen", "group added", "momentum_dtype"),
    *("maximize", "none_grad", "momentum", "replaced"),
}

MODULES = ("embed_tokens", "layers", "experts", "lm_head")

DIM, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 16, 4, 2, 4, 2

CLIP = {"head_dim": HEAD_DIM, "threshold": 30.0}

# torch's fused AdamW rounds alike where pieces have 64 elements times any number.
SLOT_BYTES = 32768

SCHEDULERS: list[Callable[[Any], Any]] = [
    lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.99**step),
    lambda o: lr_scheduler.StepLR(o, 20, gamma=0.7),
    lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=50),
    lambda o: lr_scheduler.CosineAnnealingLR(o, 60),
    lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 30),
    lambda o: lr_scheduler.ExponentialLR(o, 0.99),
    lambda o: lr_scheduler.PolynomialLR(o, 150, power=2.0),
    lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.01, step_size_up=15, cycle_momentum=True),
    lambda o: lr_scheduler.OneCycleLR(o, 0.02, total_steps=2 * ROUND),
    lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=9), lr_scheduler.CosineAnnealingLR(o, 80)],
        milestones=[9],
    ),
]

# Parameters that no module has, with gradients of their own: EP over TP, uneven rows, empty shards.
LOOSE = [
    Weight((6, 8, 10), (2, 2), (0, 1)),
    Weight((3, 8, 12), (RANKS,), (0,)),
    Weight((10, 12), (RANKS,), (0,)),
    Weight((16, 24), (2, 2), (None, 0)),
    Weight((8, 30)),
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.attention = Attention(DIM, HEADS, KV_HEADS, HEAD_DIM)
        self.up = nn.Linear(DIM, 24)
        self.down = nn.Linear(24, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Blocks under tensor parallelism and FSDP2, experts and the rest under FSDP2 on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(50, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.experts = Experts(6, DIM, 20)
        self.lm_head = nn.Linear(20, 50, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # (batch, tokens)
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.experts(x.flatten(0, 1)))


PLAN = {
    "attention.wq": ColwiseParallel(),
    "attention.wk": ColwiseParallel(),
    "attention.wv": ColwiseParallel(),
    "attention.wo": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}


def sharded(model: Model) -> None:
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for block in model.layers:
        parallelize_module(block, square["tp"], PLAN)
        fully_shard(block, mesh=square["dp"])
    fully_shard(model.experts)
    fully_shard(model)


def loss_of(model: Model, step: int, data_rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2 * step + data_rank)
    tokens = torch.randint(0, 50, (2, 8), generator=generator)
    logits = model(tokens)
    return nn.functional.cross_entropy(logits, tokens.flatten().roll(-1))


class Soak:
    """Both trainings, and what is switched."""

    def __init__(self, directory: str, seed: int) -> None:
        self.random = random.Random(seed)  # alike on all ranks
        self.directory = directory
        self.rank = dist.get_rank()
        self.model, self.whole_model = Model(), Model()
        sharded(self.model)
        meshes = {sizes: init_device_mesh("cpu", sizes) for sizes in ((RANKS,), (2, 2))}
        generator = torch.Generator().manual_seed(1)
        values = [torch.randn(weight.shape, generator=generator) for weight in LOOSE]
        self.loose = [
            nn.Parameter(part(v, meshes[w.mesh], w.placements) if w.mesh else v.clone())
            for w, v in zip(LOOSE, values)
        ]
        self.whole_loose = [nn.Parameter(value.clone()) for value in values]
        self.added: list[nn.Parameter] = []  # in a group of their own, of both optimizers
        self.line = meshes[(RANKS,)]
        self.ours = self.build(self.model, self.loose)
        self.twin = self.build(self.whole_model, self.whole_loose)
        self.schedules: list[Any] = []
        self.kind = 0
        self.done: Counter[str] = Counter()
        self.swap_schedules()

    def build(self, model: nn.Module, loose: list[nn.Parameter], **wide: Any) -> Any:
        groups = optimizer.muon.get_default_muon_param_groups(model, expert_keys=["experts"])
        names = [f"{'experts' if p.ndim > 2 else 'loose'}.{n}.w" for n, p in enumerate(loose)]
        more = {"expert_keys": ["experts"], "weight_decay": 0.05, "beta2": 0.95}
        groups.append({"params": list(loose), "names": names, "use_muon": True, **more})
        groups[0]["beta2"] = 0.9
        return optimizer.Muon(
            groups, lr=0.01, momentum_dtype=torch.float32, clip_config=CLIP, **EXACT, **wide
        )

    # -- what is switched ------------------------------------------------------------------------

    def both(self) -> tuple[Any, Any]:
        return self.ours, self.twin

    def swap_schedules(self) -> None:
        self.kind = self.random.randrange(len(SCHEDULERS))
        self.done[f"schedule {self.kind}"] += 1
        for optim in self.both():
            for group in optim.param_groups:
                for key in ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"):
                    group.pop(key, None)
                group.update(lr=0.01, momentum=0.95)
        self.schedules = [SCHEDULERS[self.kind](optim) for optim in self.both()]

    def switch(self, step: int) -> None:
        """Some of all that may change between steps, more often than not nothing."""
        draw = self.random
        for name, chance in (
            ("offload", 0.08),
            ("option", 0.1),
            ("freeze", 0.05),
            ("schedule", 0.01),
            ("group", 0.01),
        ):
            if draw.random() < chance:
                getattr(self, f"switch_{name}")()

    def switch_offload(self) -> None:
        if self.random.random() < 0.25:
            self.done["offload off"] += 1
            self.ours.turn_off_cpu_offload()
        else:
            self.done["offload on"] += 1
            backend = Host(delay=1e-5, seed=self.rank)
            self.ours.turn_on_cpu_offload(slot_bytes=SLOT_BYTES, backend=backend)

    def switch_option(self) -> None:
        choices = {
            "none_grad": [True, False],
            "maximize": [True, False, False],
            "nesterov": [True, False],
            "cautious": [True, False],
            "momentum": [0.9, 0.95],
            "momentum_dtype": [torch.float32, torch.bfloat16, None],
            "momentum_style": ["classical", "ema"],
            "beta2": [0.9, 0.95],
            "weight_decay": [0.0, 0.1],
            "decay_lr": ["base", "adjusted"],
            "adjust_lr": ["match_rms_adamw", "original"],
            "missing_grad": ["raise", "zero"],
            "ns_steps": [3, 5],
        }
        key = self.random.choice(list(choices))
        value = self.random.choice(choices[key])
        number = self.random.randrange(3)
        self.done[key] += 1
        for optim in self.both():
            optim.param_groups[number][key] = value

    def switch_freeze(self) -> None:
        number = self.random.randrange(len(LOOSE))
        self.done["frozen"] += 1
        for param in (self.loose[number], self.whole_loose[number]):
            param.requires_grad_(not param.requires_grad)

    def switch_schedule(self) -> None:
        self.swap_schedules()

    def switch_group(self) -> None:
        if self.added:
            return
        self.done["group added"] += 1
        value = torch.randn(12, 16, generator=torch.Generator().manual_seed(3))
        self.added = [nn.Parameter(part(value, self.line, [Shard(0)])), nn.Parameter(value.clone())]
        for optim, param in zip(self.both(), self.added):
            group = {"params": [param], "names": ["added.w"], "use_muon": True, "beta2": 0.9}
            optim.add_param_group(group)
        self.swap_schedules()  # which know the groups that there were

    def quiet(self) -> None:
        """What is switched the same way at the end of each round."""
        self.ours.turn_off_cpu_offload()
        for param in (*self.loose, *self.whole_loose):
            param.requires_grad_(True)
        for optim in self.both():
            for group in optim.param_groups:
                group.update(momentum_dtype=torch.float32, maximize=False, none_grad=True)

    # -- steps -----------------------------------------------------------------------------------

    def pairs(self) -> list[tuple[str, Any, Any]]:
        named = zip(self.model.named_parameters(), self.whole_model.parameters())
        found = [(name, p, q) for (name, p), q in named]
        loose = zip(self.loose, self.whole_loose)
        found += [(f"loose.{number}", p, q) for number, (p, q) in enumerate(loose)]
        return found + ([("added", *self.added)] if self.added else [])

    def backward(self, step: int) -> None:
        """Gradients of a loss, at every tenth step or so, else random ones, which cost less."""
        is_real = self.random.random() < REAL
        if is_real:
            self.done["backward"] += 1
            loss_of(self.model, step, self.rank // 2).backward()
        generator = torch.Generator().manual_seed(step)
        absent = self.random.randrange(40)
        for number, (name, p, q) in enumerate(self.pairs()):
            if not (is_real and name.startswith(MODULES)):
                grad = 0.1 * torch.randn(q.shape, generator=generator)
                p.grad, q.grad = part_for(p, grad), grad
            else:
                q.grad = whole(p.grad).clone()
            if number == absent:
                self.done["absent gradient"] += 1
                p.grad = q.grad = None
            if not p.requires_grad:
                p.grad = q.grad = None

    def step(self, step: int) -> None:
        is_last = (step + 1) % ROUND == 0
        if is_last:
            self.quiet()
            if self.added:
                self.drop_added()
        else:
            self.switch(step)
        self.backward(step)
        logits = None
        if is_last or self.random.random() < 0.5:
            self.done["logits"] += 1
            generator = torch.Generator().manual_seed(step)
            scale = self.random.choice([10.0, 30.0, 40.0])
            logits = {n: scale * torch.rand(HEADS, generator=generator) for n in range(LAYERS)}
        if self.random.random() < 0.03:
            self.fail(logits)
        closure = (lambda: step) if self.random.random() < 0.1 else None
        assert self.ours.step(closure, qk_logits=logits) == (step if closure else None)
        self.twin.step(qk_logits=logits)
        for schedule in self.schedules:
            schedule.step()
        if self.kind == 8 and self.schedules[0].last_epoch >= 2 * ROUND - 1:
            self.swap_schedules()
        for _, p, q in self.pairs():
            p.grad = q.grad = None

    def fail(self, logits: Any) -> None:
        """One rank does something wrong, all raise, and nothing has changed."""
        bad = self.random.randrange(RANKS)
        what = self.random.choice(["gradient", "option", "logits", "closure", "dtype"])
        if what == "gradient" and not self.loose[2].requires_grad:
            what = "option"
        self.done[f"fault: {what}"] += 1
        param, group = self.loose[2], self.ours.param_groups[2]
        kept, eps, given = param.grad, group["ns_eps"], logits
        group["missing_grad"], policy = "raise", group["missing_grad"]
        closure = None
        if self.rank == bad:
            if what == "gradient":  # the others have one, or have none
                param.grad = part_for(param, torch.ones(param.shape)) if kept is None else None
            elif what == "option":
                group["ns_eps"] = 0.5
            elif what == "logits":
                given = {0: torch.ones(HEADS + 1)}
            elif what == "dtype":
                group["momentum_dtype"], eps = torch.int8, (eps, group["momentum_dtype"])
            else:
                closure = failing
        try:
            self.ours.step(closure, qk_logits=given)
        except ValueError:
            pass
        else:
            raise AssertionError(f"rank {self.rank} did not raise: {what}")
        finally:
            if isinstance(eps, tuple):
                eps, group["momentum_dtype"] = eps
            group["ns_eps"], param.grad = eps, kept
            group["missing_grad"] = policy

    # -- checkpoints -----------------------------------------------------------------------------

    def checkpoint(self, number: int) -> None:
        """Saves the ranks' optimizer, and loads it into itself or a new one."""
        if self.added:
            self.drop_added()
        ways = [
            self.through_files,
            self.through_pickle,
            self.through_a_new_one,
            self.through_a_copy,
        ]
        way = ways[number % len(ways)]
        self.done[way.__name__] += 1
        way()

    def through_files(self) -> None:
        """torch.distributed.checkpoint, into a new optimizer."""
        holder = nn.ModuleDict({"model": self.model, "loose": nn.ParameterList(self.loose)})
        saved = get_optimizer_state_dict(holder, self.ours)
        directory = f"{self.directory}/{self.done['through_files']}"
        dcp.save({"optim": saved}, checkpoint_id=directory)
        self.replace()
        into = {"optim": get_optimizer_state_dict(holder, self.ours)}
        dcp.load(into, checkpoint_id=directory)
        set_optimizer_state_dict(holder, self.ours, into["optim"])

    def through_pickle(self) -> None:
        self.ours.load_state_dict(pickle.loads(pickle.dumps(self.ours.state_dict())))

    def through_a_new_one(self) -> None:
        saved = copy.deepcopy(self.ours.state_dict())
        self.replace()
        self.ours.load_state_dict(saved)

    def through_a_copy(self) -> None:
        """The optimizer copied with its parameters, of which the state is taken."""
        self.ours.load_state_dict(copy.deepcopy(self.ours).state_dict())

    def replace(self) -> None:
        """A new optimizer for the ranks' parameters, with other options of all groups."""
        wide = {
            "chunk_size": self.random.choice([-1, 1, 2]),
            "warmup_step": self.random.choice([0, 1, 5]),
            "hsdp": self.random.choice(["redundant", "spread"]),
            "consistency_check": "step",
        }
        self.done["replaced"] += 1
        schedule = self.schedules[0].state_dict()
        self.ours = self.build(self.model, self.loose, **wide)
        self.schedules[0] = SCHEDULERS[self.kind](self.ours)
        self.schedules[0].load_state_dict(schedule)

    def drop_added(self) -> None:
        """A new optimizer leaves the last group out; there is no other way."""
        for name, optim in zip(("ours", "twin"), self.both()):
            saved = optim.state_dict()
            (index,) = saved["param_groups"].pop()["params"]
            del saved["state"][index]
            is_ours = name == "ours"
            params = (self.model, self.loose) if is_ours else (self.whole_model, self.whole_loose)
            new = self.build(*params)
            new.load_state_dict(saved)
            setattr(self, name, new)
        self.added = []
        self.swap_schedules()

    # -- what is looked at -----------------------------------------------------------------------

    def compare(self) -> dict[str, float]:
        """Muon's weights and state to the bit; how far AdamW's are apart, and the losses."""
        furthest = 0.0
        for name, p, q in self.pairs():
            ours, twin = self.ours.state[p], self.twin.state[q]
            assert ours.keys() == twin.keys(), name
            expected = local(part_for(p, q.detach()))
            if "exp_avg" in ours:
                assert int(ours["step"]) == int(twin["step"]), name
                apart = (local(p) - expected).abs().max().item() if expected.numel() else 0.0
                furthest = max(furthest, apart)
                continue
            assert torch.equal(local(p), expected), name
            for key, value in ours.items():
                assert torch.equal(whole(value).flatten(), twin[key].flatten()), f"{key} of {name}"
        with torch.no_grad():
            losses = [loss_of(model, 0, 0).item() for model in (self.model, self.whole_model)]
        self.model.reshard()  # which a backward would do
        apart = abs(losses[0] - losses[1])
        return {"AdamW's apart": furthest, "losses apart": apart, "loss": losses[1]}


def failing() -> float:
    raise ValueError("no more data")


def resources() -> dict[str, int]:
    """What must not grow."""
    time.sleep(0.3)  # a thread of gloo may still hold what the last collective has gathered
    for _ in range(2):  # what the first collection frees may end threads
        gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, nn.Parameter):
            storage = thing.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    package = [m for name, m in sys.modules.items() if name.startswith(optimizer.__name__)]
    caches = {
        f"{module.__name__}.{name}": value.cache_info().currsize
        for module in package
        for name, value in vars(module).items()
        if isinstance(value, functools._lru_cache_wrapper)
    }
    groups = [getattr(module, "_groups", ()) for module in package]
    return {
        "storages": len(storages),
        "bytes": sum(storages.values()),
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
        "process groups": len(dist.distributed_c10d._world.pg_map) + sum(map(len, groups)),
        "cached": sum(caches.values()),
    }


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def soak(steps: int, seed: int, directory: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")  # of plain attention, which other ranks might hold, too
    run = Soak(directory, seed)
    rounds = []
    for step in range(steps):
        run.step(step)
        if (step + 1) % ROUND == 0:
            seen = run.compare()
            rounds.append({**seen, **resources(), "resident": resident_bytes()})
            run.checkpoint(step // ROUND)
    return {"rounds": rounds, "done": dict(sorted(run.done.items()))}


@pytest.mark.slow
def test_two_thousand_steps_are_those_of_one_process_and_need_no_more_memory_in_the_end():
    with tempfile.TemporaryDirectory() as directory:
        results = run_ranks(soak, RANKS, STEPS, 0, directory, timeout=1800)
    for rank, result in enumerate(results):
        for number, found in enumerate(result["rounds"]):
            print(f"rank {rank}, round {number}: {found}")
    print(results[0]["done"])
    assert results[0]["done"].keys() >= EVERYTHING
    for result in results:
        rounds = result["rounds"]
        assert all(found["AdamW's apart"] <= ADAMW_DRIFT for found in rounds)
        assert all(found["losses apart"] <= LOSS_DRIFT for found in rounds)
        settled = rounds[WARM:]
        for key in CONSTANT:
            for turn in range(WAYS):
                values = {found[key] for found in settled[turn::WAYS]}
                assert len(values) == 1, f"{key}: {[found[key] for found in rounds]}"
        assert settled[-1]["cached"] - settled[0]["cached"] <= CACHED
        half = len(settled) // 2
        growth = settled[-1]["resident"] - settled[half]["resident"]
        assert growth <= RESIDENT_GROWTH, [found["resident"] for found in rounds]
