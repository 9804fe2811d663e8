"""transformers.Trainer trains as a plain loop does, bit for bit."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from transformers import Trainer, get_scheduler

import plain
import ranked
from kernel import optimizer
from plain import FP32, Trained, assert_same, weights_of, whole_weights_of
from task import build_model
from transformers_trainer import make_trainer

STEPS = 16
COSINE = partial(get_scheduler, "cosine", num_warmup_steps=4, num_training_steps=STEPS)
ARGUMENTS: dict[str, Any] = {
    "max_steps": STEPS,
    "train_sampling_strategy": "sequential",
    "use_cpu": True,
    "disable_tqdm": True,
    "save_strategy": "no",
}
pytestmark = pytest.mark.usefixtures("one_thread")


def train(trainer: Trainer, **kwargs: Any) -> Trained:
    trainer.train(**kwargs)
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return Trained(losses, weights_of(trainer.model))


def expected(**kwargs: Any) -> Trained:
    return plain.train(STEPS, 8, accumulate=2, schedule=COSINE, by_tokens=True, **kwargs)


@pytest.mark.parametrize("gives_class", [False, True], ids=["optimizers", "class and kwargs"])
def test_both_ways_equal_a_plain_loop(tmp_path, gives_class):
    trainer = make_trainer(str(tmp_path), gives_class, **ARGUMENTS)
    assert_same(train(trainer), expected())
    assert isinstance(trainer.optimizer.optimizer, optimizer.Muon)


def test_bf16_equals_autocast_in_a_plain_loop(tmp_path):
    trainer = make_trainer(str(tmp_path), bf16=True, **ARGUMENTS)
    assert_same(train(trainer), expected(autocast=True))


def test_without_clipping_or_schedule(tmp_path):
    arguments = {**ARGUMENTS, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    trainer = make_trainer(str(tmp_path), gradient_accumulation_steps=1, **arguments)
    assert_same(train(trainer), plain.train(STEPS, 8, max_norm=None, by_tokens=True))


@pytest.mark.parametrize("gives_class", [False, True], ids=["optimizers", "class and kwargs"])
def test_a_resumed_training_equals_an_uninterrupted_one(tmp_path, gives_class):
    arguments = {**ARGUMENTS, "save_strategy": "steps", "save_steps": STEPS // 2}
    whole = train(make_trainer(str(tmp_path), gives_class, **arguments))
    again = make_trainer(str(tmp_path), gives_class, **arguments)
    resumed = train(again, resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS // 2}"))
    assert_same(resumed, whole)  # what it logged before is in the checkpoint
    assert_same(whole, expected())


def attach_recorder(model: Any, optim: Any) -> None:
    optim.qk_recorder = optimizer.QKLogitRecorder(model)


def test_qk_clip_by_a_recorder_equals_a_plain_loop(tmp_path):
    """Steps get no arguments, and attention is transformers' own."""
    template = make_trainer(str(tmp_path), **ARGUMENTS)
    model = template.model
    clip = {"clip_config": {"head_dim": 16, "threshold": 0.05}}
    groups = optimizer.muon.get_default_muon_param_groups(model)
    optim = optimizer.Muon(groups, lr=1e-2, weight_decay=0.1, **clip)
    attach_recorder(model, optim)
    assert model.config._attn_implementation == "sdpa"
    data = template.train_dataset
    trainer = Trainer(model, template.args, train_dataset=data, optimizers=(optim, None))
    assert_same(train(trainer), expected(prepare=attach_recorder, **clip))
    stats = optim.qk_clip_stats()
    assert stats["steps"] == STEPS and stats["total_clipped"] > 0 and len(stats["layers"]) == 2


def test_the_groups_that_trainer_makes_by_itself_raise_and_say_what_to_write(tmp_path):
    trainer = make_trainer(str(tmp_path), gives_class=True, **ARGUMENTS)
    del trainer.optimizer_cls_and_kwargs[1]["params"]
    with pytest.raises(ValueError, match=r"Muon\.for_model"):
        trainer.train()


def ranks_train(out: str, share_work: bool) -> tuple[Trained, Trained | str]:
    """A training, and one that goes on from its half."""
    arguments = {**ARGUMENTS, "save_strategy": "steps", "save_steps": STEPS // 2}

    def trainer() -> Trainer:
        template = make_trainer(out, per_device_train_batch_size=4, **arguments)
        model, data = template.model, template.train_dataset
        # There is none before TrainingArguments have made it.
        group = torch.distributed.group.WORLD if share_work else None
        groups = optimizer.muon.get_default_muon_param_groups(model)
        optim = optimizer.Muon(groups, lr=1e-2, weight_decay=0.1, process_group=group, **FP32)
        return Trainer(model, template.args, train_dataset=data, optimizers=(optim, None))

    whole = train(trainer())
    try:
        return whole, train(trainer(), resume_from_checkpoint=half_of(out))
    except ValueError as error:
        return whole, str(error)


def half_of(out: str) -> str:
    return f"{out}/checkpoint-{STEPS // 2}"


@pytest.mark.parametrize("share_work", [False, True], ids=["each its own", "process_group"])
def test_ddp_equals_a_plain_loop_of_the_whole_batch(tmp_path, share_work):
    """But for the order in which gradients are added up."""
    arguments = {"out": str(tmp_path), "share_work": share_work}
    whole, resumed = ranked.run(ranks_train, tmp_path, **arguments)
    assert_same(whole, expected(**FP32), rounding=1e-5)
    if share_work:  # rank 0 has saved its part of the momentum, and no other rank its own
        assert "they have loaded what one rank saved" in resumed
    else:
        assert_same(resumed, whole)


def ranks_train_fsdp2(out: str) -> list[Trained]:
    """By accelerate, which here takes the CPU for an accelerator, as its example does."""
    wrapped = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    arguments = {**ARGUMENTS, "save_strategy": "steps", "save_steps": STEPS // 2}
    found = []
    for resume in (None, half_of(out)):
        template = make_trainer(
            out, per_device_train_batch_size=4, fsdp=True, fsdp_config=wrapped, **arguments
        )
        AcceleratorState._reset_state()
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        model, data = build_model(), template.train_dataset
        groups = optimizer.muon.get_default_muon_param_groups(model)
        muon = (optimizer.Muon, {"params": groups, "lr": 1e-2, "weight_decay": 0.1, **FP32})
        trainer = Trainer(model, template.args, train_dataset=data, optimizer_cls_and_kwargs=muon)
        losses = train(trainer, resume_from_checkpoint=resume).losses
        optim = trainer.optimizer.optimizer
        assert "[Shard(dim=0)] on" in str(optim.summary()) and len(optim.state) == 21
        found.append(Trained(losses, whole_weights_of(trainer.model)))
    return found


def test_fsdp2_which_takes_the_class_alone_equals_a_plain_loop_and_resumes(tmp_path):
    whole, resumed = ranked.run(ranks_train_fsdp2, tmp_path, out=str(tmp_path))
    assert_same(whole, expected(**FP32), rounding=1e-5)
    assert_same(resumed, whole)
