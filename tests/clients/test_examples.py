"""The examples run by the commands in their first lines, and those on ranks equal a plain loop."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import plain
import ranked
from plain import FP32, Trained, assert_falls, assert_same, linear, whole_weights_of
from test_torchtitan import STEPS
from test_torchtitan import schedule as warmed_up

ON_RANKS = {
    "accelerate_fsdp2": linear(STEPS),
    "torchrun_loop": linear(STEPS),
    "torchtitan_container": warmed_up,
}
SCRIPTS = sorted(path.stem for path in ranked.EXAMPLES.glob("*.py") if path.stem != "task")


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_runs_and_its_loss_falls(name, tmp_path):
    script = ranked.EXAMPLES / f"{name}.py"
    if name in ON_RANKS:
        printed = ranked.torchrun(script)
    else:
        command = [sys.executable, str(script)]
        printed = subprocess.run(
            command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, check=True
        ).stdout
    listed = re.findall(r"losses: ([\d. ]+)", printed)
    losses = listed[0].split() if listed else re.findall(r"'loss': '([\d.]+)'", printed)
    assert len(losses) in (20, 40)
    assert_falls(map(float, losses))


def ranks_train(name: str) -> Trained:
    losses, model = importlib.import_module(name).train(STEPS, **FP32)
    dist.all_reduce(total := torch.tensor(losses))
    return Trained((total / dist.get_world_size()).tolist(), whole_weights_of(model))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ON_RANKS)
def test_an_example_on_ranks_equals_a_plain_loop(name, tmp_path):
    """But for the order in which ranks add up."""
    found = ranked.run(ranks_train, tmp_path, name=name)
    assert_same(found, plain.train(STEPS, 16, schedule=ON_RANKS[name], **FP32), rounding=1e-5)
