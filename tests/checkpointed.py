"""One model on every layout, trained by gradients that only the step decides, to save and to load.

`Run.check` compares what a rank holds with its part of what an uninterrupted run came to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from kernel import optimizer
from layouts import ADAMW_ROUNDING, EXACT, assert_same, local, part, part_for, whole
from models import Experts

SAVED_AT = 3  # steps before a checkpoint

# QK-Clip for `FeedForward.wq` and `wk`, and logits of which some are above the threshold.
CLIP: dict[str, Any] = {"clip_config": {"head_dim": 8, "threshold": 1.0}}
LOGITS = {0: torch.tensor([3.0, 0.5]), 1: torch.tensor([0.5, 2.0])}

# By number of ranks; the model has matrices of fewer rows than there are ranks from two of them on.
LAYOUTS: dict[int, tuple[str, ...]] = {
    1: ("one device",),
    2: ("FSDP2", "TP", "DDP", "ZeRO-2"),
    3: ("FSDP2", "DDP"),
    4: (
        "FSDP2",
        "FSDP2 + TP",
        "HSDP, redundant",
        "HSDP, spread",
        "TP",
        "DDP",
        "ZeRO-2",
        "EP + FSDP2",
    ),
    8: ("FSDP2",),
}


class FeedForward(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.wq = nn.Linear(16, 16, bias=False)
        self.wk = nn.Linear(16, 16, bias=False)
        self.up = nn.Linear(16, hidden)
        self.down = nn.Linear(hidden, 16, bias=False)


class Network(nn.Module):
    """Rows that ranks divide evenly, unevenly and into empty shards. Its gradients are given.

    Args:
        even: whether shards of shards are of one size, in `FeedForward.up` and the experts.
    """

    def __init__(self, even: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(FeedForward(24 if even else 22) for _ in range(2))
        self.uneven = nn.Linear(8, 10)
        self.three_rows = nn.Linear(16, 3)
        self.one_row = nn.Linear(16, 1, bias=False)
        self.conv = nn.Conv1d(4, 8, 5)
        self.experts = Experts(8 if even else 6, 16, 12)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.lm_head = nn.Linear(16, 50, bias=False)
        self.idle = nn.Linear(16, 8)


def sharded(model: Network, layout: str) -> None:
    ranks = world_size()
    if layout in ("TP", "FSDP2 + TP"):
        tp = ranks if layout == "TP" else 2
        mesh = init_device_mesh("cpu", (ranks // tp, tp), mesh_dim_names=("dp", "tp"))
        for block in model.blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan)
        if layout == "FSDP2 + TP":
            fully_shard(model, mesh=mesh["dp"])
    elif layout == "EP + FSDP2":
        mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("fsdp", "ep"))
        w1 = nn.Parameter(part(model.experts.w1.detach(), mesh["ep"], [Shard(0)]))
        model.experts.w1 = w1
        fully_shard(model.experts, mesh=mesh["fsdp"])
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    elif layout in ("FSDP2", "HSDP, redundant", "HSDP, spread"):
        sizes = (ranks,) if layout == "FSDP2" else (2, ranks // 2)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "shards")[-len(sizes) :])
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        assert layout in ("one device", "DDP", "ZeRO-2"), layout


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices in groups of different hyperparameters, a convolution, a frozen one among them."""
    muon, adamw = optimizer.muon.get_default_muon_param_groups(model, expert_keys=["experts"])
    pairs = list(zip(muon["names"], muon["params"]))
    first = [pair for pair in pairs if not pair[0].startswith("blocks.1")]
    others = [pair for pair in pairs if pair[0].startswith("blocks.1")]
    rest = [p for p in zip(adamw["names"], adamw["params"]) if p[0] != "conv.weight"]
    styled: dict[str, Any] = {"momentum": 0.8, "momentum_style": "ema", "weight_decay": 0.01}
    flat: dict[str, Any] = {"flatten": True, "momentum_dtype": torch.bfloat16, "lr": 0.05}
    return [
        group(first, muon, beta2=0.9, split={"blocks.0.up": 2}),
        group([("frozen.weight", model.frozen.weight), *others], {"use_muon": True}, **styled),
        group([("conv.weight", model.conv.weight)], {"use_muon": True}, **flat),
        group(rest, adamw, lr=0.003, adamw_betas=(0.8, 0.9)),
    ]


def group(pairs: Iterable[Any], like: dict[str, Any], **options: Any) -> dict[str, Any]:
    names, params = map(list, zip(*pairs))
    return {**like, "params": params, "names": names, **options}


@dataclass
class Run:
    """A model on one layout and its optimizer."""

    layout: str
    model: Network
    optim: Any
    schedule: Any = None

    @classmethod
    def on(
        cls,
        layout: str,
        zeroed: bool = False,
        even: bool = True,
        change: Callable[[Network], None] | None = None,
        regroup: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] | None = None,
        **options: Any,
    ) -> Run:
        """A new one.

        Args:
            layout: one of `LAYOUTS`.
            zeroed: weights are those of a process that is going to load others.
            even: see `Network`.
            change: of the model, before it is sharded.
            regroup: takes the groups and returns others.
            options: of the optimizer.
        """
        model = Network(even)
        if change is not None:
            change(model)
        sharded(model, layout)
        if zeroed:
            with torch.no_grad():
                for p in model.parameters():
                    p.zero_()
        world = dist.group.WORLD if dist.is_initialized() else None
        wide: dict[str, dict[str, Any]] = {
            "DDP": {"process_group": world},
            "ZeRO-2": {"process_group": world, "grad_reduce": "mean"},
            "HSDP, redundant": {"hsdp": "redundant"},
            "HSDP, spread": {"hsdp": "spread"},
        }
        options = {"lr": 0.02, **EXACT, **wide.get(layout, {}), **options}
        groups = groups_of(model) if regroup is None else regroup(groups_of(model))
        return cls(layout, model, optimizer.Muon(groups, **options))

    def train(self, steps: Iterable[int]) -> None:
        for step in steps:
            self.give_gradients(step)
            self.optim.step()
            if self.schedule is not None:
                self.schedule.step()
        for p in self.model.parameters():
            p.grad = None

    def give_gradients(self, step: int) -> None:
        """The same ones on all ranks, so that a mean of 2ⁿ ranks changes no bit."""
        generator = torch.Generator().manual_seed(step)
        for name, p in self.model.named_parameters():
            grad = torch.randn(p.shape, generator=generator)
            if p.requires_grad and not name.startswith("idle"):
                p.grad = part_for(p, grad.to(p.dtype))

    def held(self) -> dict[str, Any]:
        """Weights and state by name: what this rank holds, itself."""
        names = list(self.model.named_parameters())
        state = {
            f"{key} of {name}": value
            for name, p in names
            for key, value in self.optim.state.get(p, {}).items()
        }
        return {**dict(names), **state}

    def copy(self) -> dict[str, Any]:
        """Of `held`, and the hyperparameters."""
        return {
            "held": {name: local(t).clone() for name, t in self.held().items()},
            "groups": hyperparameters(self.optim),
        }

    def changes(self, before: dict[str, Any]) -> set[str]:
        """What is not as it was when `copy` made ``before``."""
        now = self.copy()
        names = now["held"].keys() & before["held"].keys()
        changed = {n for n in names if not same(now["held"][n], before["held"][n])}
        changed |= now["held"].keys() ^ before["held"].keys()
        return changed | ({"groups"} if now["groups"] != before["groups"] else set())

    def write(self, file: Path) -> None:
        """What this run came to, for `check`."""
        values = {name: whole(t).detach().clone() for name, t in self.held().items()}
        if not dist.is_initialized() or dist.get_rank() == 0:
            content = {"values": values, "groups": hyperparameters(self.optim)}
            torch.save({**content, "layout": (self.layout, world_size())}, file)

    def check(self, file: Path, groups: bool = True, steps: int = 1, lacks: str = "?") -> None:
        """Bit for bit; AdamW's on another layout within the rounding of its kernel.

        Args:
            file: that `write` wrote.
            groups: whether they, too, are to be the same.
            steps: how many that rounding is of.
            lacks: what is in the names of parameters that only the other model has.
        """
        expected, held = torch.load(file, weights_only=True), self.held()
        values = {name: v for name, v in expected["values"].items() if lacks not in name}
        assert held.keys() == values.keys()
        is_same = expected["layout"] == (self.layout, world_size())
        for name, value in values.items():
            param = name.split(" of ")[-1]
            is_adamw = f"exp_avg of {param}" in held
            atol = steps * ADAMW_ROUNDING if is_adamw and not is_same else 0.0
            assert held[name].dtype == value.dtype, name
            assert_same(name, held[name], value, atol)
        assert not groups or hyperparameters(self.optim) == expected["groups"]


def save_checkpoint(run: Run, directory: Path, **how: Any) -> None:
    weights, state = get_state_dict(run.model, run.optim, options=StateDictOptions(**how))
    dcp.save({"model": weights, "optim": state}, checkpoint_id=directory)


def load_checkpoint(
    run: Run, directory: Path, prepare: Callable[[Any], Any] = lambda content: content, **how: Any
) -> None:
    options = StateDictOptions(**how)
    weights, state = get_state_dict(run.model, run.optim, options=options)
    content = prepare({"model": weights, "optim": state})
    dcp.load(content, checkpoint_id=directory)
    set_state_dict(
        run.model,
        run.optim,
        model_state_dict=content["model"],
        optim_state_dict=content["optim"],
        options=options,
    )


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def hyperparameters(optim: Any) -> list[dict[str, Any]]:
    """As plain values: torch makes lists of tuples, and adds `differentiable` to what it loads."""
    skipped = ("params", "differentiable")
    return [
        {key: plain(value) for key, value in group.items() if key not in skipped}
        for group in optim.param_groups
    ]


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value
