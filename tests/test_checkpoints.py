"""Checkpoints: training resumes bit for bit on any layout, through each of torch's formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

from checkpointed import LAYOUTS, SAVED_AT, Run, world_size
from layouts import case
from ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")

# -- from layout to layout -------------------------------------------------------------------------


def save(layout: str, directory: Path) -> None:
    run = Run.on(layout, even=False)
    run.train(range(SAVED_AT))
    weights, state = get_state_dict(run.model, run.optim)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=directory)
    run.train([SAVED_AT])
    run.write(directory / "expected.pt")


def load(layout: str, directory: Path) -> None:
    run = Run.on(layout, zeroed=True, even=False)
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


# -- formats ---------------------------------------------------------------------------------------


def save_by_dcp(run: Run, directory: Path, **how: Any) -> None:
    weights, state = get_state_dict(run.model, run.optim, options=StateDictOptions(**how))
    dcp.save({"model": weights, "optim": state}, checkpoint_id=directory)


def load_by_dcp(run: Run, directory: Path, **how: Any) -> None:
    options = StateDictOptions(**how)
    weights, state = get_state_dict(run.model, run.optim, options=options)
    content = {"model": weights, "optim": state}
    dcp.load(content, checkpoint_id=directory)
    set_state_dict(
        run.model,
        run.optim,
        model_state_dict=content["model"],
        optim_state_dict=content["optim"],
        options=options,
    )


def save_optimizer_alone(run: Run, directory: Path, **how: Any) -> None:
    options = StateDictOptions(**how)
    state = get_optimizer_state_dict(run.model, run.optim, options=options)
    dcp.save({"model": get_model_state_dict(run.model), "optim": state}, checkpoint_id=directory)


def load_optimizer_alone(run: Run, directory: Path, **how: Any) -> None:
    options = StateDictOptions(**how)
    content = {
        "model": get_model_state_dict(run.model),
        "optim": get_optimizer_state_dict(run.model, run.optim, options=options),
    }
    dcp.load(content, checkpoint_id=directory)
    set_model_state_dict(run.model, content["model"])
    set_optimizer_state_dict(run.model, run.optim, content["optim"], options=options)


def save_whole(run: Run, directory: Path, **how: Any) -> None:
    """One file of all, which rank 0 writes."""
    options = StateDictOptions(full_state_dict=True, **how)
    content = get_state_dict(run.model, run.optim, options=options)
    if rank() == 0:
        torch.save(content, directory / "whole.pt")


def load_whole(run: Run, directory: Path, **how: Any) -> None:
    """All ranks read the file, or rank 0 alone and sends it.

    By two calls: `set_state_dict` takes a rank without weights for one that loads none.
    """
    weights, state = {}, {}
    if rank() == 0 or not how.get("broadcast_from_rank0"):
        weights, state = torch.load(directory / "whole.pt", weights_only=True)
    options = StateDictOptions(full_state_dict=True, **how)
    set_model_state_dict(run.model, weights, options=options)
    set_optimizer_state_dict(run.model, run.optim, state, options=options)


def save_parts(run: Run, directory: Path) -> None:
    """One file per rank, by torch.save alone."""
    content = {"model": run.model.state_dict(), "optim": run.optim.state_dict()}
    torch.save(content, directory / f"rank{rank()}.pt")


def load_parts(run: Run, directory: Path, **how: Any) -> None:
    content = torch.load(directory / f"rank{rank()}.pt", weights_only=True, **how)
    run.model.load_state_dict(content["model"])
    run.optim.load_state_dict(content["optim"])


class Training(Stateful):
    """Model and optimizer as one object that dcp.save and dcp.load ask for its state."""

    def __init__(self, run: Run):
        self.run = run

    def state_dict(self) -> dict[str, Any]:
        weights, state = get_state_dict(self.run.model, self.run.optim)
        return {"model": weights, "optim": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.run.model,
            self.run.optim,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )


def save_stateful(run: Run, directory: Path) -> None:
    dcp.save({"training": Training(run)}, checkpoint_id=directory)


def load_stateful(run: Run, directory: Path) -> None:
    dcp.load({"training": Training(run)}, checkpoint_id=directory)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


@dataclass(frozen=True)
class Format:
    """How to write a checkpoint, how to read it, and whether other ranks can."""

    save: Callable[[Run, Path], None]
    load: Callable[[Run, Path], None]
    reshards: bool = True


def format_of(save: Any, load: Any, *both: Any, of_load: Any = (), reshards: bool = True) -> Format:
    how = dict(both)
    return Format(partial(save, **how), partial(load, **how, **dict(of_load)), reshards)


FLAT = ("flatten_optimizer_state_dict", True)
HOST = ("cpu_offload", True)
SENT = {"broadcast_from_rank0": True}
FORMATS: dict[str, Format] = {
    "sharded": format_of(save_by_dcp, load_by_dcp),
    "sharded, flattened": format_of(save_by_dcp, load_by_dcp, FLAT),
    "sharded, cpu_offload": format_of(save_by_dcp, load_by_dcp, HOST),
    "sharded, flattened, cpu_offload": format_of(save_by_dcp, load_by_dcp, FLAT, HOST),
    "sharded, not strict": format_of(save_by_dcp, load_by_dcp, ("strict", False)),
    "optimizer alone": format_of(save_optimizer_alone, load_optimizer_alone),
    "optimizer alone, flattened": format_of(save_optimizer_alone, load_optimizer_alone, FLAT),
    "full": format_of(save_whole, load_whole),
    "full, cpu_offload": format_of(save_whole, load_whole, HOST),
    "full, broadcast": format_of(save_whole, load_whole, of_load=SENT),
    "full, cpu_offload, broadcast": format_of(save_whole, load_whole, HOST, of_load=SENT),
    "Stateful": format_of(save_stateful, load_stateful),
    "a file per rank": format_of(save_parts, load_parts, reshards=False),
    "a file per rank, mmap": format_of(
        save_parts, load_parts, of_load={"mmap": True}, reshards=False
    ),
}
