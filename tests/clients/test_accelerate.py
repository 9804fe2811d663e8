"""accelerate with FSDP2 trains as a plain loop does, but for the order in which ranks add up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator, skip_first_batches

import accelerate_fsdp2
import plain
import ranked
from kernel import optimizer
from plain import FP32, Trained, assert_same, attach_recorder, batch_of, linear, whole_weights_of

STEPS = 12
# What is told by name, after the parameters were swapped.
BY_NAME = {
    "clip_config": {"head_dim": 16, "threshold": 0.05},
    "split": {"gate_proj": 80, "layers.1.self_attn.q_proj": 16},
}
pytestmark = pytest.mark.usefixtures("one_thread")


def advance(accelerator: Accelerator, prepared: tuple[Any, ...], batches: Any) -> list[float]:
    """With `accelerator.accumulate`, over all batches."""
    model, optim, scheduler, _ = prepared
    losses, total = [], torch.zeros(())
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            total += accelerator.gather(loss.detach()).mean()
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                losses.append(float(total) / accelerator.gradient_accumulation_steps)
                total.zero_()
            optim.step()
            scheduler.step()
            optim.zero_grad()
    return losses


def ranks_accumulate() -> Trained:
    accelerator = accelerate_fsdp2.make_accelerator(gradient_accumulation_steps=2)
    prepared = accelerate_fsdp2.prepare(accelerator, 2 * STEPS, **FP32, **BY_NAME)
    attach_recorder(prepared[0], prepared[1].optimizer)
    losses = advance(accelerator, prepared, prepared[3])
    assert prepared[1].optimizer.qk_clip_stats()["total_clipped"] > 0
    return Trained(losses, whole_weights_of(prepared[0]))


def ranks_resume(folder: str, **arguments: Any) -> tuple[Trained, Trained]:
    accelerator = accelerate_fsdp2.make_accelerator(**arguments)
    prepared = accelerate_fsdp2.prepare(accelerator, STEPS, **FP32)
    batches = list(prepared[3])
    losses = advance(accelerator, prepared, batches[: STEPS // 2])
    accelerator.save_state(folder)
    losses += advance(accelerator, prepared, batches[STEPS // 2 :])
    whole = Trained(losses, whole_weights_of(prepared[0]))

    accelerator.free_memory()
    prepared = accelerate_fsdp2.prepare(accelerator, STEPS, **FP32)
    accelerator.load_state(folder)
    rest = advance(accelerator, prepared, skip_first_batches(prepared[3], STEPS // 2))
    return whole, Trained(losses[: STEPS // 2] + rest, whole_weights_of(prepared[0]))


def ranks_hold_state() -> dict[str, tuple[int, int]]:
    """Tensors of state behind `prepare` and behind a step, with and without device_placement."""
    counts, accelerator = {}, accelerate_fsdp2.make_accelerator()
    for asks in (False, True):
        model = accelerate_fsdp2.build_model()
        optim = optimizer.Muon(optimizer.muon.get_default_muon_param_groups(model))
        accelerator.device_placement = asks
        model, _ = accelerator.prepare(model, optim)
        before = len(optim.state)
        model(**batch_of(0, 16)).loss.backward()
        optim.step()
        counts[asks] = before, len(optim.state)
        accelerator.free_memory()
    return counts


def test_accumulation_with_options_by_name_and_qk_clip_equals_a_plain_loop(tmp_path):
    found = ranked.run(ranks_accumulate, tmp_path)
    options: dict[str, Any] = {**FP32, **BY_NAME, "prepare": attach_recorder, "accumulate": 2}
    expected = plain.train(STEPS, 16, schedule=linear(2 * STEPS), **options)
    assert_same(found, expected, rounding=1e-5)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_loaded_state_goes_on_as_if_nothing_had_been(tmp_path, precision):
    folder = str(tmp_path / "state")
    whole, resumed = ranked.run(ranks_resume, tmp_path, folder=folder, mixed_precision=precision)
    assert_same(resumed, whole)


def test_no_state_of_unsharded_parameters_is_kept(tmp_path):
    assert ranked.run(ranks_hold_state, tmp_path) == {False: (0, 21), True: (21, 21)}
