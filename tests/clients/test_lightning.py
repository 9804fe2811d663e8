"""PyTorch Lightning trains as a plain loop does, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import lightning_module
import plain
import ranked
from lightning_module import Module, batches
from plain import FP32, Trained, assert_same, attach_recorder, linear, weights_of, whole_weights_of

STEPS = 12
pytestmark = pytest.mark.usefixtures("one_thread")


def make_trainer(steps: int = STEPS, **arguments: Any) -> Any:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    defaults = {"accelerator": "cpu", "enable_checkpointing": False, **quiet}
    return lightning_module.make_trainer(steps, **{**defaults, **arguments})


def train(module: Module, trainer: Any, **arguments: Any) -> Trained:
    trainer.fit(module, batches(), **arguments)
    return Trained(module.losses, weights_of(module.model))


def expected(**arguments: Any) -> Trained:
    return plain.train(STEPS, 16, schedule=linear(STEPS), clip_by_groups=True, **arguments)


# A scale is a power of two, and gradients of the forward in fp16 stay far from its ends.
SCALED = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
# Arguments of the trainer, and of the plain loop.
PRECISIONS: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "the example": ({}, {}, 0.0),
    "bf16": ({"precision": "bf16-mixed"}, {"autocast": True}, 0.0),
    "fp16 with a scaler": ({"plugins": SCALED}, {}, 0.1),
}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_training_with_clipping_equals_a_plain_loop(precision):
    arguments, plainly, rounding = PRECISIONS[precision]
    found = train(Module(STEPS), make_trainer(**arguments))
    assert_same(found, expected(**plainly), rounding)


def test_accumulated_gradients_equal_a_plain_loop():
    found = train(Module(STEPS), make_trainer(accumulate_grad_batches=2))
    twin = expected(accumulate=2)
    pairs = zip(found.losses[::2], found.losses[1::2])
    assert_same(Trained([(a + b) / 2 for a, b in pairs], found.weights), twin, rounding=1e-6)
    assert_same(Trained(twin.losses, found.weights), twin)


class ByStep(Module):
    """Batches told by the step: what Lightning's loaders give after a resume is not the matter."""

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        return super().training_step(plain.batch_of(16 * self.global_step, 16), index)


def test_a_resumed_training_equals_an_uninterrupted_one(tmp_path):
    half = make_trainer(STEPS // 2)
    first = train(ByStep(STEPS), half)
    half.save_checkpoint(tmp_path / "half.ckpt")
    rest = train(ByStep(STEPS), make_trainer(), ckpt_path=tmp_path / "half.ckpt")
    assert_same(Trained(first.losses + rest.losses, rest.weights), expected())


def test_qk_clip_by_a_recorder_equals_a_plain_loop():
    clip = {"clip_config": {"head_dim": 16, "threshold": 0.05}}

    class WithRecorder(Module):
        def configure_optimizers(self) -> Any:
            configured = super().configure_optimizers()
            attach_recorder(self, configured["optimizer"])
            return configured

    module, trainer = WithRecorder(STEPS, **clip), make_trainer()
    assert_same(train(module, trainer), expected(prepare=attach_recorder, **clip))
    assert trainer.optimizers[0].qk_clip_stats()["total_clipped"] > 0


class Sharded(ByStep):
    def configure_model(self) -> None:
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])


def ranks_train_sharded(folder: str) -> tuple[Trained, Trained]:
    def trainer(steps: int = STEPS) -> Any:
        return make_trainer(steps, strategy=ModelParallelStrategy(), devices=2)

    module, half = Sharded(STEPS, **FP32), trainer(STEPS // 2)
    train(module, half)
    half.save_checkpoint(folder)
    first = module.losses
    module = Sharded(STEPS, **FP32)
    train(module, trainer(), ckpt_path=folder)
    resumed = Trained(first + module.losses, whole_weights_of(module.model))
    module = Sharded(STEPS, **FP32)
    train(module, trainer())
    return Trained(module.losses, whole_weights_of(module.model)), resumed


def test_fsdp2_by_its_model_parallel_strategy(tmp_path):
    whole, resumed = ranked.run(ranks_train_sharded, tmp_path, folder=str(tmp_path / "half.ckpt"))
    assert_same(resumed, whole)
    assert_same(whole, expected(**FP32), rounding=1e-5)
