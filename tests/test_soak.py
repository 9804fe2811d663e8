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
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as of_torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import lr_scheduler

from breaking import refused
from kernel import optimizer
from layouts import EXACT, Twins, Weight, part, part_for, whole
from models import Model
from ranks import run_ranks

RANKS, STEPS = 4, 2000
ROUND = 100  # steps between looks at memory, each of which ends with a checkpoint
WARM = 5  # rounds in which memory may grow
WAYS = ("files", "pickle", "a new one", "a copy")  # to take a checkpoint, in turn
CONSTANT = ("storages", "bytes", "threads", "python threads", "files", "process groups")
CACHED = 32  # as many forms of the iteration may yet be chosen, for shapes under other options
RESIDENT_GROWTH = 8 << 20  # over half of the steps, of what allocators do not give back

OPTIONS: dict[str, list[Any]] = {
    "none_grad": [True, False],
    "maximize": [True, False, False],
    "nesterov": [True, False],
    "cautious": [True, False],
    "momentum": [0.9, 0.95],
    "beta2": [0.9, 0.95],
    "weight_decay": [0.0, 0.1],
    "momentum_dtype": [torch.float32, torch.bfloat16, None],
    "momentum_style": ["classical", "ema"],
    "decay_lr": ["base", "adjusted"],
    "adjust_lr": ["match_rms_adamw", "original"],
    "missing_grad": ["raise", "zero"],
    "ns_steps": [3, 5],
}
QUIET = {"momentum_dtype": torch.float32, "maximize": False, "none_grad": True}
WIDE = {"chunk_size": [-1, 1, 2], "warmup_step": [0, 1, 5], "hsdp": ["redundant", "spread"]}
CHANCES = {"offload": 0.08, "option": 0.1, "freeze": 0.05, "schedule": 0.02}
FAULTS = ("gradient", "option", "logits", "closure", "dtype")

SCHEDULERS: list[Any] = [
    lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.99**step),
    lambda o: lr_scheduler.StepLR(o, 20, gamma=0.7),
    lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 30),
    lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.01, step_size_up=15, cycle_momentum=True),
    lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(o, 0.1, total_iters=9)]),
]

# Parameters that no module has: FSDP2 over TP, EP over TP, uneven rows, empty shards, replicas.
LOOSE = {
    "blocks.0.attn.wq.weight": Weight((16, 10), (2, 2), (0, 0)),
    "blocks.0.attn.wk.weight": Weight((8, 10), (2, 2), (0, 1)),
    "experts.0.w": Weight((6, 8, 10), (2, 2), (0, 1)),
    "experts.1.w": Weight((3, 8, 12), (RANKS,), (0,)),
    "loose.0.weight": Weight((10, 12), (RANKS,), (0,)),
    "loose.1.weight": Weight((16, 24), (2, 2), (None, 0)),
    "loose.2.weight": Weight((8, 30)),
}
CLIP = {"head_dim": 4, "threshold": 30.0}


def build(model: nn.Module, loose: Any, **wide: Any) -> Any:
    groups = optimizer.muon.get_default_muon_param_groups(model, expert_keys=["experts"])
    groups[0]["beta2"] = 0.9
    options = {"expert_keys": ["experts"], "weight_decay": 0.05, "beta2": 0.95}
    groups.append({"params": [*zip(LOOSE, loose)], "use_muon": True, **options})
    own = {"momentum_dtype": torch.float32, "clip_config": CLIP}
    return optimizer.Muon(groups, lr=0.01, **own, **EXACT, **wide)


class Soak:
    """Both trainings, and what is switched."""

    def __init__(self, directory: Path) -> None:
        self.random, self.directory = random.Random(0), directory  # alike on all ranks
        self.done: Counter[str] = Counter()
        meshes = {sizes: init_device_mesh("cpu", sizes) for sizes in ((RANKS,), (2, 2))}
        generator = torch.Generator().manual_seed(1)
        self.model, whole_model = Model(), Model()
        for layer in self.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        values = [torch.randn(weight.shape, generator=generator) for weight in LOOSE.values()]
        whole_loose = nn.ParameterList([value.clone() for value in values])
        self.loose = nn.ParameterList(
            part(value, meshes[w.mesh], w.placements) if w.mesh else value
            for value, w in zip(values, LOOSE.values())
        )
        names = [*(name for name, _ in self.model.named_parameters()), *LOOSE]
        params = [*self.model.parameters(), *self.loose]
        pairs = [*zip(names, params, [*whole_model.parameters(), *whole_loose], strict=True)]
        optims = build(self.model, self.loose), build(whole_model, whole_loose)
        self.twins = Twins(*optims, pairs)
        self.switch_schedule()

    @property
    def groups(self) -> list[Any]:
        """Of both optimizers."""
        return [*self.twins.ours.param_groups, *self.twins.reference.param_groups]

    # -- what is switched --------------------------------------------------------------------------

    def switch_schedule(self) -> None:
        self.kind = self.random.randrange(len(SCHEDULERS))
        for group in self.groups:
            for key in ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"):
                group.pop(key, None)
            group.update(lr=0.01, momentum=0.95)
        self.schedules = [SCHEDULERS[self.kind](o) for o in (self.twins.ours, self.twins.reference)]
        self.done[f"schedule {self.kind}"] += 1

    def switch(self, what: str) -> None:
        draw, ours = self.random, self.twins.ours
        if what == "schedule":
            self.switch_schedule()
        elif what == "option":
            key, number = draw.choice(list(OPTIONS)), draw.randrange(3)
            value = draw.choice(OPTIONS[key])
            for group in self.groups[number::3]:
                group[key] = value
            self.done[key] += 1
        elif what == "freeze":
            for param in draw.choice(self.twins.pairs[-len(LOOSE) :])[1:]:
                param.requires_grad_(not param.requires_grad)
        elif draw.random() < 0.25:
            ours.turn_off_cpu_offload()
        else:  # in slots of so many bytes that torch's fused AdamW rounds alike
            backend = optimizer.SimulatedHost(delay=1e-5, seed=dist.get_rank())
            ours.turn_on_cpu_offload(slot_bytes=32768, backend=backend)
        self.done[what] += 1

    # -- steps -------------------------------------------------------------------------------------

    def give_gradients(self, step: int) -> None:
        """Of a loss at every tenth step or so, else random ones, which cost less."""
        is_real, absent = self.random.random() < 0.1, self.random.randrange(40)
        if is_real:
            generator = torch.Generator().manual_seed(step * 100 + dist.get_rank())
            tokens = torch.randint(0, 50, (8,), generator=generator)
            nn.functional.cross_entropy(self.model(tokens), tokens).backward()
        generator = torch.Generator().manual_seed(step)
        for number, (name, p, q) in enumerate(self.twins.pairs):
            if is_real and name not in LOOSE:
                q.grad = whole(p.grad).clone()
            else:
                q.grad = 0.1 * torch.randn(q.shape, generator=generator)
                p.grad = part_for(p, q.grad)
            if number == absent or not p.requires_grad:
                p.grad = q.grad = None

    def step(self, step: int) -> None:
        draw, is_last = self.random, (step + 1) % ROUND == 0
        if is_last:  # each round ends alike
            self.twins.ours.turn_off_cpu_offload()
            for param in (param for _, *both in self.twins.pairs for param in both):
                param.requires_grad_(True)
            for group in self.groups:
                group.update(QUIET)
        for name, chance in CHANCES.items():
            if draw.random() < chance and not is_last:
                self.switch(name)
        self.give_gradients(step)
        logits = {0: torch.tensor([draw.choice([1.0, 20.0, 40.0]) for _ in range(4)])}
        if draw.random() < 0.03:
            self.fail(logits)
        closure = (lambda: step) if draw.random() < 0.1 else None
        assert self.twins.ours.step(closure, qk_logits=logits) == (step if closure else None)
        self.twins.reference.step(qk_logits=logits)
        for schedule in self.schedules:
            schedule.step()
        for _, p, q in self.twins.pairs:
            p.grad = q.grad = None

    def fail(self, logits: Any) -> None:
        """One rank does something wrong, all raise, and nothing has changed."""
        what, is_bad = self.random.choice(FAULTS), dist.get_rank() == self.random.randrange(RANKS)
        group, param = self.twins.ours.param_groups[2], self.loose[4]
        saved, kept, arguments = dict(group), param.grad, {"qk_logits": logits}
        group["missing_grad"] = "raise"
        if is_bad and what == "gradient" and param.requires_grad:  # the others have one, or none
            param.grad = part_for(param, torch.ones(param.shape)) if kept is None else None
        elif is_bad and what == "logits":
            arguments["qk_logits"] = {0: torch.ones(3)}
        elif is_bad and what == "closure":
            arguments["closure"] = functools.partial(int, "no number")
        elif is_bad:
            group.update({"momentum_dtype": torch.int8} if what == "dtype" else {"ns_eps": 0.5})
        refused(self.twins.ours, **arguments)
        group.update(saved)
        param.grad = kept
        self.done[f"fault: {what}"] += 1

    def checkpoint(self, way: str) -> None:
        """Saves the ranks' optimizer, and loads it into itself, or into a new one."""
        ours, holder = self.twins.ours, nn.ModuleList([self.model, self.loose])
        if way == "files":
            directory = self.directory / str(self.done[way])
            dcp.save(of_torch.get_optimizer_state_dict(holder, ours), checkpoint_id=directory)
            ours = self.replace()
            into = of_torch.get_optimizer_state_dict(holder, ours)
            dcp.load(into, checkpoint_id=directory)
            of_torch.set_optimizer_state_dict(holder, ours, into)
        else:
            saved = {
                "pickle": lambda: pickle.loads(pickle.dumps(ours.state_dict())),
                "a new one": lambda: copy.deepcopy(ours.state_dict()),
                "a copy": lambda: copy.deepcopy(ours).state_dict(),  # and of its parameters
            }[way]()
            (self.replace() if way == "a new one" else ours).load_state_dict(saved)
        self.done[way] += 1

    def replace(self) -> Any:
        """A new optimizer for the ranks' parameters, with other options of all groups."""
        wide = {key: self.random.choice(values) for key, values in WIDE.items()}
        schedule = self.schedules[0].state_dict()
        self.twins.ours = build(self.model, self.loose, **wide)
        self.schedules[0] = SCHEDULERS[self.kind](self.twins.ours)
        self.schedules[0].load_state_dict(schedule)
        return self.twins.ours


def resources() -> dict[str, int]:
    """What must not grow."""
    time.sleep(0.3)  # a thread of gloo may still hold what the last collective has gathered
    for _ in range(2):  # what the first collection frees may end threads
        gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter)]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    package = [m for name, m in sys.modules.items() if name.startswith(optimizer.__name__)]
    values = [value for module in package for value in vars(module).values()]
    caches = [f.cache_info() for f in values if isinstance(f, functools._lru_cache_wrapper)]
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "storages": len(storages),
        "bytes": sum(storages.values()),
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
        "process groups": len(dist.distributed_c10d._world.pg_map),
        "cached": sum(cache.currsize for cache in caches),
        "resident": pages * os.sysconf("SC_PAGE_SIZE"),
    }


def soak(steps: int, directory: Path) -> tuple[list[dict[str, int]], Counter[str]]:
    run, rounds = Soak(directory), []
    for step in range(steps):
        run.step(step)
        if (step + 1) % ROUND == 0:
            run.twins.compare()
            rounds.append(resources())
            run.checkpoint(WAYS[step // ROUND % len(WAYS)])
    return rounds, run.done


@pytest.mark.slow
def test_two_thousand_steps_are_those_of_one_process_and_need_no_more_memory_in_the_end(tmp_path):
    everything = {*OPTIONS, *WAYS, *CHANCES, *(f"fault: {what}" for what in FAULTS)}
    everything |= {f"schedule {number}" for number in range(len(SCHEDULERS))}
    for rounds, done in run_ranks(soak, RANKS, STEPS, tmp_path, timeout=1800):
        assert done.keys() == everything
        settled = rounds[WARM:]
        for key in CONSTANT:
            for turn in range(len(WAYS)):  # state that was pickled has meshes of its own
                values = {found[key] for found in settled[turn :: len(WAYS)]}
                assert len(values) == 1, f"{key}: {[found[key] for found in rounds]}"
        assert settled[-1]["cached"] - settled[0]["cached"] <= CACHED
        growth = settled[-1]["resident"] - settled[len(settled) // 2]["resident"]
        assert growth <= RESIDENT_GROWTH, [found["resident"] for found in rounds]
