"""Checkpoints: training resumes bit for bit on any layout, through each of torch's formats."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from checkpointed import LAYOUTS, SAVED_AT, Run
from layouts import case
from ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")

# -- from layout to layout -------------------------------------------------------------------------


def save(layout: str, directory: Path) -> None:
    run = Run.on(layout)
    run.train(range(SAVED_AT))
    weights, state = get_state_dict(run.model, run.optim)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=directory)
    run.train([SAVED_AT])
    run.write(directory / "expected.pt")


def load(layout: str, directory: Path) -> None:
    run = Run.on(layout, zeroed=True)
    weights, state = get_state_dict(run.model, run.optim)
    dcp.load({"model": weights, "optim": state}, checkpoint_id=directory)
    set_state_dict(run.model, run.optim, model_state_dict=weights, optim_state_dict=state)
    run.train([SAVED_AT])
    run.check(directory / "expected.pt")


def load_on(layouts: tuple[str, ...], directory: Path) -> None:
    for layout in layouts:
        with case(layout):
            load(layout, directory)


ALL = [(ranks, layout) for ranks, layouts in LAYOUTS.items() for layout in layouts]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "layout"), ALL)
def test_a_checkpoint_resumes_on_every_layout(ranks, layout, tmp_path):
    run_ranks(save, ranks, layout, tmp_path)
    for other_ranks, layouts in LAYOUTS.items():
        run_ranks(load_on, other_ranks, layouts, tmp_path)
