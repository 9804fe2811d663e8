"""transformers.Trainer trains as a plain loop does, bit for bit."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from transformers import Trainer, get_scheduler

import plain
import ranked
import transformers_trainer
from kernel import optimizer
from plain import FP32, Trained, assert_same, attach_recorder, whole_weights_of
from task import build_model

STEPS = 16
COSINE = partial(get_scheduler, "cosine", num_warmup_steps=4, num_training_steps=STEPS)
ARGUMENTS: dict[str, Any] = {
    "max_steps": STEPS,
    "train_sampling_strategy": "sequential",
    "use_cpu": True,
    "disable_tqdm": True,
    "save_strategy": "no",
}
SAVING = {"save_strategy": "steps", "save_steps": STEPS // 2}
OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
CLIP = {"clip_config": {"head_dim": 16, "threshold": 0.05}}
pytestmark = pytest.mark.usefixtures("one_thread")


def make_trainer(
    out: Any, options: dict[str, Any] = OPTIONS, way: str = "factory", **arguments: Any
) -> Trainer:
    """A trainer that is given the factory, or the optimizer, or groups and how to make it."""
    trainer = transformers_trainer.make_trainer(str(out), options, **{**ARGUMENTS, **arguments})
    if way == "factory":
        return trainer
    groups = optimizer.get_default_muon_param_groups(trainer.model)
    muon: dict[str, Any] = {"optimizers": (optimizer.Muon(groups, **options), None)}
    if way == "class and kwargs":
        muon = {"optimizer_cls_and_kwargs": (optimizer.Muon, {"params": groups, **options})}
    return Trainer(trainer.model, trainer.args, train_dataset=trainer.train_dataset, **muon)


def train(trainer: Trainer, **kwargs: Any) -> Trained:
    trainer.train(**kwargs)
    assert isinstance(trainer.optimizer.optimizer, optimizer.Muon)
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return Trained(losses, whole_weights_of(trainer.model))


def expected(**kwargs: Any) -> Trained:
    defaults = {"accumulate": 2, "schedule": COSINE, "by_tokens": True}
    return plain.train(STEPS, 8, **{**defaults, **kwargs})


def half_of(out: Any) -> str:
    return f"{out}/checkpoint-{STEPS // 2}"


@pytest.mark.parametrize("way", ["factory", "optimizers", "class and kwargs"])
def test_every_way_equals_a_plain_loop_and_resumes(tmp_path, way):
    whole = train(make_trainer(tmp_path, way=way, **SAVING))
    assert_same(whole, expected())
    again = make_trainer(tmp_path, way=way, **SAVING)
    assert_same(train(again, resume_from_checkpoint=half_of(tmp_path)), whole)


WITHOUT = {"gradient_accumulation_steps": 1, "lr_scheduler_type": "constant", "max_grad_norm": 0}


def test_arguments_of_the_trainer_mean_what_they_do_in_a_plain_loop(tmp_path):
    assert_same(train(make_trainer(tmp_path, bf16=True)), expected(autocast=True))
    plainly = expected(accumulate=1, schedule=None, max_norm=None)
    assert_same(train(make_trainer(tmp_path, **WITHOUT)), plainly)


def test_the_factory_makes_what_for_model_makes(tmp_path):
    options = {**OPTIONS, "adamw_lr": 3e-3, "decay_vectors": False, "adamw_keys": ["mlp"]}
    trainer = make_trainer(tmp_path, options, learning_rate=5.0, weight_decay=5.0)
    made = trainer.create_optimizer()
    assert repr(made) == repr(optimizer.Muon.for_model(trainer.model, **options))
    assert trainer.create_scheduler(STEPS).base_lrs == [1e-2, 3e-3, 3e-3]


def test_the_factory_makes_one_for_each_model_of_model_init(tmp_path):
    template = make_trainer(tmp_path)
    trainer = Trainer(
        args=template.args,
        train_dataset=template.train_dataset,
        model_init=lambda: build_model(),
        optimizer_cls_and_kwargs=(optimizer.MuonForTrainer, OPTIONS),
    )
    for _ in range(2):
        assert_same(train(trainer), expected())


def test_wrong_arguments_of_the_factory_raise(tmp_path):
    for options, names in (({}, "'lr'"), ({**OPTIONS, "warmup": 3}, "warmup.*'warmup_step'")):
        with pytest.raises(TypeError, match=names):
            make_trainer(tmp_path, options).train()
    # The groups that Trainer makes by itself.
    trainer = make_trainer(tmp_path, way="class and kwargs")
    del trainer.optimizer_cls_and_kwargs[1]["params"]
    with pytest.raises(ValueError, match=r"Muon\.for_model"):
        trainer.train()


class WithRecorder(optimizer.MuonForTrainer):
    def __call__(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        optim = super().__call__(model, *args, **kwargs)
        attach_recorder(model, optim)
        return optim


def test_qk_clip_by_a_recorder_equals_a_plain_loop(tmp_path):
    """Steps get no arguments, and attention is transformers' own."""
    trainer = make_trainer(tmp_path)
    trainer.optimizer_cls_and_kwargs = (WithRecorder, {**OPTIONS, **CLIP})
    assert trainer.model.config._attn_implementation == "sdpa"
    assert_same(train(trainer), expected(prepare=attach_recorder, **CLIP))
    stats = trainer.optimizer.optimizer.qk_clip_stats()
    assert stats["steps"] == STEPS and stats["total_clipped"] > 0 and len(stats["layers"]) == 2


def ranks_train(out: str, share_work: bool) -> tuple[Trained, Trained | None]:
    """A training, and one that goes on from its half, unless that raises."""

    def trainer() -> Trainer:
        made = make_trainer(out, per_device_train_batch_size=4, **SAVING)
        # There is none before TrainingArguments have made it.
        group = torch.distributed.group.WORLD if share_work else None
        options = {**OPTIONS, "process_group": group, **FP32}
        made.optimizer_cls_and_kwargs = (optimizer.MuonForTrainer, options)
        return made

    whole = train(trainer())
    try:
        return whole, train(trainer(), resume_from_checkpoint=half_of(out))
    except ValueError:
        return whole, None


@pytest.mark.parametrize("share_work", [False, True], ids=["each its own", "process_group"])
def test_ddp_equals_a_plain_loop_of_the_whole_batch(tmp_path, share_work):
    """But for the order in which gradients are added up."""
    whole, resumed = ranked.run(ranks_train, tmp_path, out=str(tmp_path), share_work=share_work)
    assert_same(whole, expected(**FP32), rounding=1e-5)
    if share_work:  # rank 0 has saved its part of the momentum, and no other rank its own
        assert resumed is None
    else:
        assert_same(resumed, whole)


def ranks_train_fsdp2(out: str, way: str) -> list[Trained]:
    """By accelerate, which here takes the CPU for an accelerator, as its example does."""
    wrapped = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    sharded = {"per_device_train_batch_size": 4, "fsdp": True, "fsdp_config": wrapped}
    found = []
    for resume in (None, half_of(out)):
        template = make_trainer(out, **sharded, **SAVING)
        AcceleratorState._reset_state()
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        model, data = build_model(), template.train_dataset
        muon: Any = (optimizer.MuonForTrainer, {**OPTIONS, **FP32})
        if way == "class and kwargs":
            groups = optimizer.get_default_muon_param_groups(model)
            muon = (optimizer.Muon, {"params": groups, **OPTIONS, **FP32})
        trainer = Trainer(model, template.args, train_dataset=data, optimizer_cls_and_kwargs=muon)
        found.append(train(trainer, resume_from_checkpoint=resume))
        optim = trainer.optimizer.optimizer
        assert len(optim.state) == 21 and all(isinstance(p, DTensor) for p in optim.state)
    return found


@pytest.mark.parametrize("way", ["factory", "class and kwargs"])
def test_fsdp2_which_takes_no_optimizer_equals_a_plain_loop_and_resumes(tmp_path, way):
    whole, resumed = ranked.run(ranks_train_fsdp2, tmp_path, out=str(tmp_path), way=way)
    assert_same(whole, expected(**FP32), rounding=1e-5)
    assert_same(resumed, whole)
