"""Thousands of steps on four ranks, with changes of layout, options, offload and what is frozen.

Beside them each rank trains the same weights as one device does, and switches only what changes
results. It has the same gradients, which no weight decides, and never loads a checkpoint.
"""

from __future__ import annotations

import copy
import functools
import gc
import os
import pickle
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from breaking import refused
from checkpointed import CLIP, Run, load_checkpoint, save_checkpoint
from kernel import optimizer
from layouts import ADAMW_ROUNDING, part_for
from ranks import run_ranks

RANKS, STEPS = 4, 2000
ROUND = 100  # steps between looks at memory, each of which ends with a change of layout
WARM = 8  # rounds in which memory may grow
LAYOUTS = ("FSDP2 + TP", "HSDP, spread", "EP + FSDP2", "ZeRO-2")  # in turn
CONSTANT = ("storages", "bytes", "files", "process groups")
CACHED = 32  # as many forms of the iteration may yet be chosen, for shapes under other options
RESIDENT_GROWTH = 8 << 20  # over half of the steps, of what allocators do not give back

OPTIONS: dict[str, list[Any]] = {
    "lr": [0.01, 0.02],
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
WIDE = {"chunk_size": [-1, 1, 2], "warmup_step": [0, 1, 5]}
CHANCES = {"offload": 0.08, "option": 0.1, "freeze": 0.05}
FREEZABLE = ("blocks.0.wq.weight", "blocks.1.down.weight", "experts.w1", "conv.weight")
FAULTS = ("gradient", "option", "logits", "closure", "dtype")


def run_on(layout: str, **options: Any) -> Run:
    """All of Muon's groups have what a checkpoint may be of."""

    def regroup(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        alike = {"momentum_dtype": torch.float32, "beta2": 0.9}
        return [{**group, **(alike if group["use_muon"] else {})} for group in groups]

    return Run.on(layout, regroup=regroup, **CLIP, **options)


class Soak:
    """Both trainings, and what is switched."""

    def __init__(self, directory: Path) -> None:
        self.random, self.directory = random.Random(0), directory  # alike on all ranks
        self.done: Counter[str] = Counter()
        self.run, self.twin = run_on(LAYOUTS[0]), run_on("one device")

    @property
    def groups(self) -> list[Any]:
        """Four of each optimizer."""
        return [*self.run.optim.param_groups, *self.twin.optim.param_groups]

    def both(self, name: str) -> list[nn.Parameter]:
        return [each.model.get_parameter(name) for each in (self.run, self.twin)]

    def switch(self, what: str) -> None:
        draw, optim = self.random, self.run.optim
        if what == "option":
            key, number = draw.choice(list(OPTIONS)), draw.randrange(4)
            value = draw.choice(OPTIONS[key])
            for group in self.groups[number::4]:
                group[key] = value
            self.done[key] += 1
        elif what == "freeze":
            for param in self.both(draw.choice(FREEZABLE)):
                param.requires_grad_(not param.requires_grad)
        elif draw.random() < 0.25:
            optim.turn_off_cpu_offload()
        else:  # in slots of so many bytes that torch's fused AdamW rounds alike
            backend = optimizer.SimulatedHost(delay=1e-5, seed=dist.get_rank())
            optim.turn_on_cpu_offload(slot_bytes=32768, backend=backend)
        self.done[what] += 1

    def settle(self) -> None:
        """What each round ends with."""
        self.run.optim.turn_off_cpu_offload()
        for name in FREEZABLE:
            for param in self.both(name):
                param.requires_grad_(True)
        for group in self.groups:
            group.update(QUIET)

    def step(self, step: int) -> None:
        draw = self.random
        if (step + 1) % ROUND == 0:
            self.settle()
        else:
            for name, chance in CHANCES.items():
                if draw.random() < chance:
                    self.switch(name)
        for each in (self.run, self.twin):
            each.give_gradients(step)
        absent = draw.choice([name for name, _ in self.twin.model.named_parameters()])
        for param in self.both(absent):
            param.grad = None
        logits = {n: torch.tensor([draw.choice([0.5, 3.0]) for _ in range(2)]) for n in range(2)}
        if draw.random() < 0.03:
            self.fail(logits)
        closure = (lambda: step) if draw.random() < 0.1 else None
        assert self.run.optim.step(closure, qk_logits=logits) == (step if closure else None)
        self.twin.optim.step(qk_logits=logits)
        for each in (self.run, self.twin):
            each.model.zero_grad()

    def fail(self, logits: Any) -> None:
        """One rank does something wrong, all raise, and nothing has changed."""
        what, is_bad = self.random.choice(FAULTS), dist.get_rank() == self.random.randrange(RANKS)
        group, param = self.run.optim.param_groups[0], self.run.model.uneven.weight
        saved, kept, arguments = dict(group), param.grad, {"qk_logits": logits}
        group["missing_grad"] = "raise"
        if is_bad and what == "gradient":  # the others have one, or none
            param.grad = part_for(param, torch.ones(param.shape)) if kept is None else None
        elif is_bad and what == "logits":
            arguments["qk_logits"] = {0: torch.ones(3)}
        elif is_bad and what == "closure":
            arguments["closure"] = functools.partial(int, "no number")
        elif is_bad:
            group.update({"momentum_dtype": torch.int8} if what == "dtype" else {"ns_eps": 0.5})
        refused(self.run.optim, **arguments)
        group.update(saved)
        param.grad = kept
        self.done[f"fault: {what}"] += 1

    def move(self, number: int) -> None:
        """Loads its state into itself, and then all of it into a new run on the next layout."""
        optim, way = self.run.optim, ("pickle", "a copy")[number % 2]
        if way == "pickle":
            optim.load_state_dict(pickle.loads(pickle.dumps(optim.state_dict())))
        else:  # and of its parameters
            optim.load_state_dict(copy.deepcopy(optim).state_dict())
        layout = LAYOUTS[(number + 1) % len(LAYOUTS)]
        save_checkpoint(self.run, self.directory / str(number))
        wide = {key: self.random.choice(values) for key, values in WIDE.items()}
        self.run = run_on(layout, zeroed=True, **wide)
        load_checkpoint(self.run, self.directory / str(number))
        self.done.update([way, layout])


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
            run.run.compare(run.twin.held(), ADAMW_ROUNDING, rtol=4e-7)
            rounds.append(resources())
            run.move(step // ROUND)
    return rounds, run.done


@pytest.mark.slow
def test_two_thousand_steps_are_those_of_one_device_and_need_no_more_memory_in_the_end(tmp_path):
    faults = {f"fault: {what}" for what in FAULTS}
    everything = {*OPTIONS, *CHANCES, *LAYOUTS, *faults, "pickle", "a copy"}
    for rounds, done in run_ranks(soak, RANKS, STEPS, tmp_path, timeout=1800):
        assert done.keys() == everything
        settled = rounds[WARM:]
        for key in CONSTANT:
            for turn in range(len(LAYOUTS)):
                values = {found[key] for found in settled[turn :: len(LAYOUTS)]}
                assert len(values) == 1, f"{key}: {[found[key] for found in rounds]}"
        threads = [found["threads"] for found in settled]
        assert min(threads[-4:]) <= min(threads[:4]), threads  # one may still be ending
        assert settled[-1]["cached"] - settled[0]["cached"] <= CACHED
        growth = settled[-1]["resident"] - settled[len(settled) // 2]["resident"]
        assert growth <= RESIDENT_GROWTH, [found["resident"] for found in rounds]
