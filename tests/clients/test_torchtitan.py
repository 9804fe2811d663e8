"""torchtitan's container and schedules train as a plain loop does; its state goes through files."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchtitan.components.optimizer import LRSchedulersContainer

import plain
import ranked
from kernel import optimizer
from plain import FP32, Trained, assert_same, batch_of, weights_of, whole_weights_of
from task import build_model
from torchtitan_container import MuonContainer, muon

STEPS = 12
pytestmark = pytest.mark.usefixtures("one_thread")


def schedule(optim: Any) -> Any:
    config = LRSchedulersContainer.Config(warmup_steps=2)
    return config.build(optimizers=[optim], training_steps=STEPS)


class Run:
    """What torchtitan's Trainer holds and saves."""

    def __init__(self, shards: bool, **options: Any):
        self.model = build_model()
        if shards:
            fully_shard(self.model)
        self.optimizers = muon(lr=1e-2, **options).build(model_parts=[self.model])
        self.schedulers = schedule(self.optimizers.optimizers[0])
        self.losses: list[float] = []

    def advance(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizers.zero_grad()
            loss = self.model(**batch_of(16 * len(self.losses), 16)).loss
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizers.step()
            self.schedulers.step()
            self.losses.append(loss.item())

    def parts(self) -> dict[str, Any]:
        model = self.model.state_dict()
        return {"model": model, "optimizer": self.optimizers, "lr_scheduler": self.schedulers}

    def load(self, folder: str, losses: list[float]) -> None:
        dcp.load(self.parts(), checkpoint_id=folder)
        self.losses = list(losses)

    def trained(self) -> Trained:
        return Trained(self.losses, whole_weights_of(self.model))


def ranks_resume(path: str) -> tuple[Trained, Trained]:
    dist.init_process_group()
    run, again = Run(shards=True, **FP32), Run(shards=True, **FP32)
    run.advance(STEPS // 2)
    dcp.save(run.parts(), checkpoint_id=path)
    losses = list(run.losses)
    run.advance(STEPS // 2)
    again.load(path, losses)
    again.advance(STEPS // 2)
    return run.trained(), again.trained()


def test_one_process_equals_a_plain_loop_also_behind_a_first_state_dict():
    run = Run(shards=False)
    saved = run.optimizers.state_dict()
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not saved[f"state.{name}.momentum_buffer"].any()
    assert saved[f"param_groups.{name}.use_muon"] is True
    run.optimizers.load_state_dict(saved)
    run.advance(STEPS)
    assert_same(run.trained(), plain.train(STEPS, 16, schedule=schedule))


def test_saved_shards_go_on_as_if_nothing_had_been_and_load_on_one_process(tmp_path):
    path = str(tmp_path / "half")
    whole, resumed = ranked.run(ranks_resume, tmp_path, path=path)
    assert_same(resumed, whole)
    run = Run(shards=False, **FP32)
    run.load(path, whole.losses[: STEPS // 2])
    run.advance(STEPS // 2)
    assert_same(run.trained(), whole, rounding=1e-5)


def test_muon_beside_adamw_as_two_optimizers_of_one_container():
    config = muon(lr=1e-2)
    others = config.param_groups[0]
    others.optimizer_name = "AdamW"
    others.optimizer_kwargs = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95)}
    model = build_model()
    container = config.build(model_parts=[model])
    assert isinstance(container, MuonContainer)
    assert [type(optim) for optim in container.optimizers] == [torch.optim.AdamW, optimizer.Muon]
    model(**batch_of(0, 16)).loss.backward()
    container.step()
    container.load_state_dict(container.state_dict())
    expected = plain.train(1, 16, max_norm=None).weights
    torch.testing.assert_close(weights_of(model), expected, rtol=0, atol=1e-7)
