"""One model on every layout, trained by gradients that only the step decides, to save and to load.

`Run.check` compares what a rank holds with its part of what an uninterrupted run came to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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

import model_layouts
from kernel import optimizer
from layouts import ADAMW_ROUNDING, EXACT, assert_same, local, part_for, whole
from model_layouts import Network

SAVED_AT = 3  # steps before a checkpoint

# QK-Clip for `wq` and `wk` of each block, and logits of which some are above the threshold.
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


def placed_on(model: Network, layout: str) -> dict[str, Any]:
    """Places it; returns what its optimizer has to be told."""
    return model_layouts.LAYOUTS[f"{world_size()} ranks, {layout}"].place(model)


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
        told = {} if layout == "one device" else placed_on(model, layout)
        if zeroed:
            with torch.no_grad():
                for p in model.parameters():
                    p.zero_()
        options = {"lr": 0.02, **EXACT, **told, **options}
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
        """Copies what `held` returns, and the hyperparameters."""
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

    def check(self, file: Path, groups: bool = True, lacks: str = "?") -> None:
        """Bit for bit; AdamW's on another layout within the rounding of its kernel.

        Args:
            file: that `write` wrote.
            groups: whether they, too, are to be the same.
            lacks: what is in the names of parameters that only the other model has.
        """
        expected = torch.load(file, weights_only=True)
        values = {name: v for name, v in expected["values"].items() if lacks not in name}
        is_same = expected["layout"] == (self.layout, world_size())
        self.compare(values, 0.0 if is_same else ADAMW_ROUNDING)
        assert not groups or hyperparameters(self.optim) == expected["groups"]

    def compare(self, values: Mapping[str, torch.Tensor], atol: float, rtol: float = 0.0) -> None:
        """With whole tensors by name, as `held` has them: bit for bit, AdamW's within bounds."""
        held = self.held()
        assert held.keys() == values.keys()
        for name, value in values.items():
            is_adamw = f"exp_avg of {name.split(' of ')[-1]}" in held
            assert_same(name, held[name], value, *((atol, rtol) if is_adamw else (0.0, 0.0)))


def save_checkpoint(run: Any, directory: Path, **how: Any) -> None:
    """Saves what a run, or anything else with a `model` and its `optim`, holds."""
    weights, state = get_state_dict(run.model, run.optim, options=StateDictOptions(**how))
    dcp.save({"model": weights, "optim": state}, checkpoint_id=directory)


def load_checkpoint(
    run: Any, directory: Path, prepare: Callable[[Any], Any] = lambda content: content, **how: Any
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
