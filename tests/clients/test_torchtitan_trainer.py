"""torchtitan's own Trainer, with FSDP2 on two ranks: its debug model, schedule and checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ranked
from plain import FP32, Trained, assert_falls, assert_same, whole_weights_of

STEPS = 6
pytest.importorskip("triton")  # without which torchtitan's models are not to be imported


def ranks_train(out: str) -> tuple[Trained, str]:
    import titan_on_cpu
    from torchtitan_container import muon

    trainer = titan_on_cpu.make_trainer(out, STEPS, muon(lr=1e-2, **FP32))
    losses: list[float] = []
    forward_backward = trainer.forward_backward_step

    def and_keep_the_loss(**kwargs: object) -> torch.Tensor:
        loss = forward_backward(**kwargs)
        dist.all_reduce(total := loss.detach().clone())
        losses.append(total.item())
        return loss

    trainer.forward_backward_step = and_keep_the_loss
    trainer.train()
    summary = str(trainer.optimizers.optimizers[0].summary())
    return Trained(losses, whole_weights_of(trainer.model_parts[0])), summary


def ranks_train_and_resume(out: str) -> tuple[Trained, Trained, str]:
    whole, summary = ranks_train(out)
    if dist.get_rank() == 0:
        shutil.rmtree(Path(out, "checkpoint", f"step-{STEPS}"))
    dist.barrier()
    resumed, _ = ranks_train(out)
    return whole, resumed, summary


def test_it_trains_and_goes_on_from_its_checkpoint_as_if_nothing_had_been(tmp_path):
    whole, resumed, summary = ranked.run(ranks_train_and_resume, tmp_path, out=str(tmp_path))
    assert_falls(whole.losses)
    assert len(whole.losses) == STEPS and "[Shard(dim=0)] on" in summary
    assert resumed.losses == whole.losses[STEPS // 2 :]
    assert_same(Trained(whole.losses, resumed.weights), whole)
