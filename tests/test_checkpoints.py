"""Checkpoints: training resumes bit for bit on any layout, through each of torch's formats."""

from __future__ import annotations

import copy
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._pytree import tree_map_only

from checkpointed import CLIP, LAYOUTS, SAVED_AT, Network, Run, load_checkpoint, save_checkpoint
from kernel import optimizer
from layouts import assert_same, case, whole
from ranks import rank_outcomes, run_ranks

Host = optimizer.SimulatedHost

pytestmark = pytest.mark.filterwarnings("ignore")

# -- from layout to layout -------------------------------------------------------------------------


def save(layout: str, directory: Path) -> None:
    run = Run.on(layout, even=False)
    run.train(range(SAVED_AT))
    save_checkpoint(run, directory)
    run.train([SAVED_AT])
    run.write(directory / "expected.pt")


def load(layout: str, directory: Path) -> None:
    run = Run.on(layout, zeroed=True, even=False)
    load_checkpoint(run, directory)
    run.train([SAVED_AT])
    run.check(directory / "expected.pt")


def load_on(layouts: tuple[str, ...], directory: Path) -> None:
    for layout in layouts:
        with case(layout):
            load(layout, directory)


def test_a_checkpoint_of_two_ranks_resumes_on_one_and_on_replicas(tmp_path):
    run_ranks(save, 2, "FSDP2", tmp_path)
    run_ranks(load_on, 2, ("ZeRO-2",), tmp_path)
    run_ranks(load_on, 1, ("one device",), tmp_path)


def scheduled(run: Run, schedule: LambdaLR, steps: range) -> None:
    for step in steps:
        run.train([step])
        schedule.step()


def save_by_recipe(directory: Path) -> None:
    """Twice, the second one while steps are taken."""
    run = Run.on("FSDP2")
    schedule = LambdaLR(run.optim, lambda step: 1 / (1 + step))
    scheduled(run, schedule, range(SAVED_AT))
    weights, state = get_state_dict(run.model, run.optim)
    content = {"model": weights, "optim": state, "schedule": schedule.state_dict()}
    dcp.save(content, checkpoint_id=directory / "at once")
    background = dist.new_group(backend="gloo")
    saving = dcp.async_save(
        content, checkpoint_id=directory / "while training", process_group=background
    )
    scheduled(run, schedule, range(SAVED_AT, SAVED_AT + 3))
    saving.result()
    run.write(directory / "expected.pt")


def load_by_recipe(layout: str, directory: Path) -> None:
    for name in ("at once", "while training"):
        run = Run.on(layout, zeroed=True)
        schedule = LambdaLR(run.optim, lambda step: 1 / (1 + step))
        weights, state = get_state_dict(run.model, run.optim)
        content = {"model": weights, "optim": state, "schedule": schedule.state_dict()}
        dcp.load(content, checkpoint_id=directory / name)
        weights, state = content["model"], content["optim"]
        set_state_dict(run.model, run.optim, model_state_dict=weights, optim_state_dict=state)
        schedule.load_state_dict(content["schedule"])
        scheduled(run, schedule, range(SAVED_AT, SAVED_AT + 3))
        run.check(directory / "expected.pt", steps=3)


@pytest.mark.slow
def test_a_run_with_a_schedule_is_saved_and_resumed_as_documented(tmp_path):
    run_ranks(save_by_recipe, 2, tmp_path)
    for ranks, layout in ((1, "one device"), (2, "FSDP2"), (3, "FSDP2")):
        run_ranks(load_by_recipe, ranks, layout, tmp_path)


ALL = [(ranks, layout) for ranks, layouts in LAYOUTS.items() for layout in layouts]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "layout"), ALL)
def test_a_checkpoint_resumes_on_every_layout(ranks, layout, tmp_path):
    run_ranks(save, ranks, layout, tmp_path)
    for other_ranks, layouts in LAYOUTS.items():
        run_ranks(load_on, other_ranks, layouts, tmp_path)


# -- formats ---------------------------------------------------------------------------------------


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


class LateWriter(dcp.FileSystemWriter):
    """Writes nothing before a file appears: until then the optimizer takes steps."""

    def __init__(self, directory: Path):
        super().__init__(directory)
        self.gate = directory / "written from now on"

    def write_data(self, *args: Any) -> Any:
        while not self.gate.exists():
            time.sleep(0.01)
        return super().write_data(*args)


def save_async(run: Run, directory: Path, kind: AsyncCheckpointerType) -> None:
    """Steps on while the checkpoint is being written, and goes back."""
    multiprocessing.current_process()._config["daemon"] = False  # may start a process of its own
    before = Run.on(run.layout)
    weights, state = get_state_dict(run.model, run.optim)
    set_state_dict(
        before.model, before.optim, model_state_dict=weights, optim_state_dict=copy.deepcopy(state)
    )
    saved = dcp.async_save(
        {"model": weights, "optim": state},
        storage_writer=LateWriter(directory),
        async_checkpointer_type=kind,
        process_group=dist.new_group() if dist.is_initialized() else None,
    )
    run.train(range(10, 12))
    (directory / "written from now on").touch()
    saved.result()
    run.model, run.optim = before.model, before.optim


FLAT = ("flatten_optimizer_state_dict", True)
HOST = ("cpu_offload", True)
SENT = {"broadcast_from_rank0": True}
FORMATS: dict[str, Format] = {
    "sharded": format_of(save_checkpoint, load_checkpoint),
    "sharded, flattened": format_of(save_checkpoint, load_checkpoint, FLAT),
    "sharded, cpu_offload": format_of(save_checkpoint, load_checkpoint, HOST),
    "sharded, flattened, cpu_offload": format_of(save_checkpoint, load_checkpoint, FLAT, HOST),
    "optimizer alone": format_of(save_optimizer_alone, load_optimizer_alone),
    "optimizer alone, flattened": format_of(save_optimizer_alone, load_optimizer_alone, FLAT),
    "full": format_of(save_whole, load_whole),
    "full, cpu_offload": format_of(save_whole, load_whole, HOST),
    "full, broadcast": format_of(save_whole, load_whole, of_load=SENT),
    "full, cpu_offload, broadcast": format_of(save_whole, load_whole, HOST, of_load=SENT),
    "a file per rank": format_of(save_parts, load_parts, reshards=False),
    "a file per rank, mmap": format_of(
        save_parts, load_parts, of_load={"mmap": True}, reshards=False
    ),
    "async, thread": Format(
        partial(save_async, kind=AsyncCheckpointerType.THREAD), load_checkpoint
    ),
    "async, process": Format(
        partial(save_async, kind=AsyncCheckpointerType.PROCESS), load_checkpoint
    ),
}
SAVED_ON = ("FSDP2", "FSDP2 + TP", "HSDP, spread", "ZeRO-2")  # on 4 ranks
LOADED_ON = {4: ("FSDP2", "EP + FSDP2", "DDP", "ZeRO-2"), 2: ("TP", "ZeRO-2"), 1: ("one device",)}


def save_formatted(name: str, layouts: tuple[str, ...], directory: Path) -> None:
    for layout in layouts:
        with case(layout):
            run = Run.on(layout)
            run.train(range(SAVED_AT))
            place = directory / layout
            place.mkdir(exist_ok=True)
            FORMATS[name].save(run, place)
            run.train([SAVED_AT])
            run.write(place / "expected.pt")


def load_formatted(name: str, layouts: tuple[str, ...], directory: Path) -> None:
    for place in sorted(directory.iterdir()):
        for layout in layouts if FORMATS[name].reshards else (place.name,):
            with case(f"{place.name} on {layout}"):
                run = Run.on(layout, zeroed=True)
                FORMATS[name].load(run, place)
                run.train([SAVED_AT])
                run.check(place / "expected.pt")


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_resumes_on_other_layouts(name, tmp_path):
    layouts = SAVED_ON[:2] if "process" in name else SAVED_ON
    run_ranks(save_formatted, 4, name, layouts, tmp_path)
    for ranks, others in LOADED_ON.items() if FORMATS[name].reshards else [(4, ())]:
        run_ranks(load_formatted, ranks, name, others, tmp_path)


# -- fresh and trained optimizers ------------------------------------------------------------------

HIGH_LOGITS = {layer: torch.tensor([100.0, 50.0]) for layer in (0, 1)}


def take_fresh_state(layouts: tuple[str, ...], flatten: bool, tensor_lr: bool) -> None:
    for layout in layouts:
        with case(layout):
            lr = {"lr": torch.tensor(0.02)} if tensor_lr else {}
            run, twin = Run.on(layout, **CLIP, **lr), Run.on(layout, **CLIP, **lr)
            schedule = LambdaLR(run.optim, lambda step: 1 / (1 + step))
            before, lrs = run.copy(), schedule.get_last_lr()
            run.optim.set_qk_logits(HIGH_LOGITS)
            options = StateDictOptions(flatten_optimizer_state_dict=flatten)
            state = get_optimizer_state_dict(run.model, run.optim, options=options)
            check_every_parameter_has_state(run, state, flatten)
            run.optim.set_qk_logits(None)
            after = run.copy()
            assert {n for n in run.changes(before) if " of " not in n} == set()
            for name, value in after["held"].items():
                if " of " in name:
                    assert not value.any(), name
            assert all(p.grad is None for p in run.model.parameters())
            assert schedule.last_epoch == 0 and schedule.get_last_lr() == lrs
            assert run.optim.qk_clip_stats()["total_clipped"] == 0
            run.train(range(SAVED_AT))
            twin.train(range(SAVED_AT))
            held, expected = run.held(), twin.held()
            for name in held:
                assert_same(name, held[name], whole(expected[name]), 0.0)


def check_every_parameter_has_state(run: Run, state: Any, flatten: bool) -> None:
    for group in run.optim.param_groups:
        keys = ["exp_avg", "exp_avg_sq", "step"]
        if group["use_muon"]:
            keys = ["momentum_buffer", *(["second_momentum_buffer"] if group["beta2"] else [])]
        held = {id(p) for p in group["params"] if p.requires_grad}
        for name, p in run.model.named_parameters():
            if id(p) in held:
                for key in keys:
                    own = state if flatten else state["state"][name]
                    assert (f"state.{name}.{key}" if flatten else key) in own, (name, key)


@pytest.mark.slow
@pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flattened"])
@pytest.mark.parametrize("tensor_lr", [False, True], ids=["lr", "tensor lr"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_taking_the_state_of_a_fresh_optimizer_changes_nothing(ranks, flatten, tensor_lr):
    run_ranks(take_fresh_state, ranks, LAYOUTS[ranks], flatten, tensor_lr)


def step_with_zeros(layout: str) -> None:
    run = Run.on(layout)
    run.train(range(SAVED_AT))
    before = run.copy()
    for group in run.optim.param_groups:
        group["lr"] = 0.0
    for p in run.model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    run.optim.step()
    after = run.copy()["held"]
    factors = {"blocks.0.up.weight": 0.95, "blocks.1.up.weight": 0.8}
    for name, factor in factors.items():
        assert torch.equal(after[name], before["held"][name])
        momentum = f"momentum_buffer of {name}"
        torch.testing.assert_close(after[momentum], factor * before["held"][momentum])


@pytest.mark.slow
def test_a_step_of_zeros_on_a_trained_optimizer_lets_momentum_decay():
    run_ranks(step_with_zeros, 4, "FSDP2")


def load_often(layout: str, directory: Path) -> None:
    """Into an optimizer that was trained on other gradients, twice, with steps in between."""
    run = Run.on(layout)
    run.train(range(SAVED_AT))
    save_checkpoint(run, directory)
    run.train([SAVED_AT])
    run.write(directory / "expected.pt")
    dist.barrier()
    other = Run.on(layout)
    other.train(range(20, 22))
    for _ in range(2):
        load_checkpoint(other, directory)
        other.train([SAVED_AT])
        other.check(directory / "expected.pt")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["FSDP2 + TP", "ZeRO-2"])
def test_loading_into_a_trained_optimizer_twice_is_loading(layout, tmp_path):
    run_ranks(load_often, 4, layout, tmp_path)


def load_offloaded(layout: str, name: str, directory: Path) -> None:
    """What was saved with offload is loaded without it, and the reverse, and both ways."""
    for number, (saved, loaded) in enumerate([(True, False), (False, True), (True, True)]):
        with case(f"offload when saved: {saved}, when loaded: {loaded}"):
            place = directory / str(number)
            place.mkdir(exist_ok=True)
            run, other = Run.on(layout), Run.on(layout, zeroed=True)
            for each, is_on in ((run, saved), (other, loaded)):
                if is_on:
                    each.optim.turn_on_cpu_offload(
                        slot_bytes=16384, backend=Host(delay=1e-5, seed=number)
                    )
            run.train(range(SAVED_AT))
            FORMATS[name].save(run, place)
            run.train([SAVED_AT])
            dist.barrier()
            FORMATS[name].load(other, place)
            other.train([SAVED_AT])
            for each, is_on in ((run, saved), (other, loaded)):
                if is_on:
                    each.optim.turn_off_cpu_offload()
            run.write(place / "expected.pt")
            dist.barrier()
            other.check(place / "expected.pt")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["FSDP2 + TP", "ZeRO-2"])
@pytest.mark.parametrize("name", ["sharded", "full", "full, broadcast", "a file per rank"])
def test_offload_may_be_on_or_off_on_either_side(layout, name, tmp_path):
    run_ranks(load_offloaded, 4, layout, name, tmp_path)


# -- files that are broken -------------------------------------------------------------------------


def truncated(directory: Path) -> None:
    file = directory / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def without(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def truncated_metadata(directory: Path) -> None:
    file = directory / ".metadata"
    file.write_bytes(file.read_bytes()[:100])


# What was done to a checkpoint, and what the message says of it.
BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "a truncated file": (truncated, "EOFError|PytorchStreamReader|unexpected end"),
    "a missing file": (without("__1_0.distcp"), "No such file.*__1_0.distcp"),
    "no metadata": (without(".metadata"), "No such file.*metadata"),
    "truncated metadata": (truncated_metadata, "metadata read failed: pickle data was truncated"),
}


def save_once(layout: str, directory: Path, **options: Any) -> None:
    run = Run.on(layout, **options)
    run.train(range(SAVED_AT))
    save_checkpoint(run, directory)


def load_broken(layout: str, directory: Path, words: str) -> None:
    run = Run.on(layout)
    run.train([7])
    weights, state = get_state_dict(run.model, run.optim)
    before = run.copy()
    content = copy_of({"model": weights, "optim": state})
    begin = time.monotonic()
    with pytest.raises(CheckpointException, match=words):
        dcp.load(content, checkpoint_id=directory)
    assert time.monotonic() - begin < 10
    assert run.changes(before) == set()
    run.train([8])  # ranks still agree
    before = run.copy()
    with pytest.raises(CheckpointException, match=words):
        dcp.load({"model": weights, "optim": state}, checkpoint_id=directory)
    if "metadata" in words:  # read before anything is written
        assert run.changes(before) == set()
    elif dist.get_rank() == 0:  # torch has read its own file into what is in use
        assert run.changes(before)


def copy_of(content: Any) -> Any:
    """Tensors of its own: dcp.load writes into those it is given, part by part."""
    return tree_map_only(torch.Tensor, torch.clone, content)


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("layout", ["FSDP2", "ZeRO-2"])
def test_a_broken_file_raises_on_every_rank_and_changes_nothing(layout, name, tmp_path):
    damage, words = BROKEN[name]
    run_ranks(save_once, 4, layout, tmp_path)
    damage(tmp_path)
    for ranks in (4, 2):
        run_ranks(load_broken, ranks, layout, tmp_path, words, pg_timeout=10)


# -- checkpoints of others -------------------------------------------------------------------------


def with_one_more(model: Network) -> None:
    model.added = nn.Linear(8, 8, bias=False)


def with_one_less(model: Network) -> None:
    del model.idle


def renamed(model: Network) -> None:
    model.called_otherwise = model.idle
    del model.idle


def reversed_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return groups[::-1]


def divided_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    first, *rest = groups
    halves = [{**first, **{k: first[k][i::2] for k in ("params", "names")}} for i in (0, 1)]
    return [*halves, *rest]


def moved_to_adamw(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    first, *rest, adamw = groups
    index = first["names"].index("blocks.0.wq.weight")
    moved = {key: [*adamw[key], first[key][index]] for key in ("params", "names")}
    left = {k: [*first[k][:index], *first[k][index + 1 :]] for k in ("params", "names")}
    return [{**first, **left}, *rest, {**adamw, **moved}]


def called_the_other(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**groups[0], "use_muon": False}, *groups[1:]]


# How a model or groups differ from the checkpoint's, what torch.distributed.checkpoint says of it,
# what the functions for full state dicts do, and what Muon.load_state_dict does; None loads.
FOREIGN: dict[str, tuple[dict[str, Any], str | None, str | None, str]] = {
    "other shapes": (
        {"even": False},
        r"Size mismatch .* for model\.blocks\.0\.up\.weight",
        r"momentum_buffer of blocks\.0\.up\.weight has shape \(24, 16\) in the checkpoint",
        r"momentum_buffer of blocks\.0\.up\.weight has shape \(24, 16\) in the checkpoint",
    ),
    "a parameter more": (
        {"change": with_one_more},
        r"Missing key in checkpoint state_dict: model\.added\.weight",
        r"Missing optimizer state for parameter 'added\.weight'",
        r"param_groups\[0\] has 10 parameters where the checkpoint's has 9",
    ),
    "a parameter renamed": (
        {"change": renamed},
        r"Missing key in checkpoint state_dict: model\.called_otherwise",
        r"Missing optimizer state for parameter 'called_otherwise\.weight'",
        r"in the checkpoint, where",
    ),
    "a parameter of the other algorithm": (
        {"regroup": moved_to_adamw},
        r"Missing key in checkpoint state_dict: optim\.state\.blocks\.0\.wq\.weight\.step",
        r"blocks\.0\.wq\.weight is AdamW's here \(use_muon=False\) but has momentum_buffer",
        r"param_groups\[0\] has 8 parameters where the checkpoint's has 9",
    ),
    "a group of the other algorithm": (
        {"regroup": called_the_other},
        r"Missing key in checkpoint state_dict: optim\.state",
        r"param_groups\[0\] has use_muon=False but the checkpoint's has True",
        r"param_groups\[0\] has use_muon=False but the checkpoint's has True",
    ),
    "groups in another order": (
        {"regroup": reversed_groups},
        None,
        None,
        r"param_groups\[0\] has use_muon=False but the checkpoint's has True",
    ),
    "a group more": (
        {"regroup": divided_groups},
        None,
        None,
        "there are 5 param_groups where the checkpoint has 4",
    ),
}


def load_copies(run: Run, directory: Path, **how: Any) -> None:
    """As `load_checkpoint`, with nothing overwritten before all was read."""
    load_checkpoint(run, directory, copy_of, **how)


def load_whole_at_once(run: Run, directory: Path) -> None:
    weights, state = torch.load(directory / "whole.pt", weights_only=True)
    options = StateDictOptions(full_state_dict=True)
    set_optimizer_state_dict(run.model, run.optim, state, options=options)
    set_model_state_dict(run.model, weights, options=options)


def load_optimizer_of_parts(run: Run, directory: Path) -> None:
    run.optim.load_state_dict(torch.load(directory / f"rank{rank()}.pt")["optim"])


def save_all(layout: str, directory: Path) -> None:
    run = Run.on(layout)
    run.train(range(SAVED_AT))
    save_checkpoint(run, directory, **dict([FLAT]))
    save_whole(run, directory)
    save_parts(run, directory)
    run.train([SAVED_AT])
    run.write(directory / "expected.pt")


def load_foreign(layout: str, directory: Path) -> None:
    for name, (difference, *says) in FOREIGN.items():
        loads = [partial(load_copies, **dict([FLAT])), load_whole_at_once, load_optimizer_of_parts]
        for load, words in zip(loads, says):
            with case(f"{name}: {words}"):
                run = Run.on(layout, **difference)
                run.train([7])
                before = run.copy()
                if words is not None:
                    with pytest.raises((Exception, CheckpointException), match=words):
                        load(run, directory)
                    assert run.changes(before) == set()
                else:
                    load(run, directory)
                    run.train([SAVED_AT])
                    run.check(directory / "expected.pt", groups=False)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "layout"), [(1, "one device"), (2, "FSDP2"), (2, "ZeRO-2")])
def test_a_checkpoint_that_does_not_fit_raises_on_every_rank(ranks, layout, tmp_path):
    run_ranks(save_all, ranks, layout, tmp_path)
    run_ranks(load_foreign, ranks, layout, tmp_path, pg_timeout=20)


def load_of_a_larger_model(layout: str, directory: Path) -> None:
    """What the checkpoint has beyond the model is left in the file, by the sharded form."""
    run = Run.on(layout, change=with_one_less)
    load_copies(run, directory)
    expected = torch.load(directory / "expected.pt", weights_only=True)["values"]
    for name, value in run.held().items():
        assert_same(name, value, expected[name], 0.0)
    if layout == "one device":
        with pytest.raises(ValueError, match=r"param_groups\[0\] has 8 parameters where"):
            load_optimizer_of_parts(run, directory)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        load_whole_at_once(run, directory)


def save_without_a_step(layout: str, directory: Path) -> None:
    run = Run.on(layout)
    run.train(range(SAVED_AT))
    save_checkpoint(run, directory)
    save_whole(run, directory)
    save_parts(run, directory)
    run.write(directory / "expected.pt")


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "layout"), [(1, "one device"), (2, "FSDP2")])
def test_what_a_smaller_model_lacks_is_left_in_the_file_or_raises(ranks, layout, tmp_path):
    run_ranks(save_without_a_step, ranks, layout, tmp_path)
    run_ranks(load_of_a_larger_model, ranks, layout, tmp_path)


def load_of_sgd(layout: str) -> None:
    run = Run.on(layout, regroup=lambda groups: groups[3:])
    run.train([7])
    params = [torch.nn.Parameter(p.detach().clone()) for p in run.optim.param_groups[0]["params"]]
    sgd = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    for p in params:
        p.grad = torch.ones_like(p)
    sgd.step()
    before = run.copy()
    with pytest.raises(ValueError, match=r"AdamW's here .* but has momentum_buffer"):
        run.optim.load_state_dict(sgd.state_dict())
    assert run.changes(before) == set()


@pytest.mark.parametrize("layout", ["one device"])
def test_state_of_sgd_is_refused_for_adamws_parameters(layout):
    run_ranks(load_of_sgd, 1, layout)


def load_where_one_file_is_bad(layout: str, directory: Path) -> tuple[str, float]:
    """A file per rank, by torch.load alone: only the rank of the bad one hears of it."""
    run = Run.on(layout)
    run.train([7])
    before = run.copy()
    try:
        load_parts(run, directory)
    except Exception:
        assert rank() == 1
        assert run.changes(before) == set()
        raise
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        run.train([8])
    return str(raised.value), time.monotonic() - begin


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["FSDP2", "ZeRO-2"])
def test_a_file_that_is_bad_on_one_rank_raises_on_the_others_at_the_next_step(layout, tmp_path):
    run_ranks(save_all, 2, layout, tmp_path)
    file = tmp_path / "rank1.pt"
    file.write_bytes(file.read_bytes()[:1000])
    first, second = rank_outcomes(load_where_one_file_is_bad, 2, layout, tmp_path, pg_timeout=3)
    assert "PytorchStreamReader" in second.message
    assert not first.error, first.detail
    said, seconds = first.value
    assert "have to call step() together" in said and seconds < 10


# -- hyperparameters and dtypes --------------------------------------------------------------------


def keep_momentum_dtype(names: list[str], directory: Path) -> None:
    """Momentum of another dtype than its weights, exact bits through every format."""
    for dtype in (torch.bfloat16, torch.float64):
        for name in names:
            with case(f"{name}, {dtype}"):
                place = directory / f"{name} {dtype}"
                place.mkdir(exist_ok=True)
                dist.barrier()
                run, other = (Run.on("FSDP2", momentum_dtype=dtype) for _ in range(2))
                run.train(range(SAVED_AT))
                FORMATS[name].save(run, place)
                dist.barrier()
                FORMATS[name].load(other, place)
                for each in (run, other):
                    each.train([SAVED_AT])
                assert other.changes(run.copy()) == set()
                momentum = other.held()["momentum_buffer of blocks.0.up.weight"]
                assert momentum.dtype == dtype


@pytest.mark.slow
def test_every_format_keeps_the_dtype_of_momentum(tmp_path):
    names = [name for name in FORMATS if not name.startswith(("async", "optimizer alone"))]
    run_ranks(keep_momentum_dtype, 2, names, tmp_path)


def load_into_another_dtype(directory: Path) -> None:
    """dcp.load writes into the momentum there is: its dtype decides what is read."""
    run = Run.on("FSDP2", momentum_dtype=torch.float64)
    run.train(range(SAVED_AT))
    save_checkpoint(run, directory)
    dist.barrier()
    other = Run.on("FSDP2")
    load_checkpoint(other, directory)
    name = "momentum_buffer of blocks.0.up.weight"
    expected = run.held()[name].to_local()
    found = other.held()[name].to_local()
    assert found.dtype == torch.float64  # the group's momentum_dtype is the checkpoint's
    assert torch.equal(found, expected.float().double()) and not torch.equal(found, expected)


@pytest.mark.slow
def test_files_are_read_in_the_dtype_of_the_momentum_that_is_there(tmp_path):
    run_ranks(load_into_another_dtype, 2, tmp_path)


def load_with_other_keys(layout: str, flatten: bool, directory: Path) -> None:
    """As of a version with one option less and another one more."""
    run = Run.on(layout)
    run.train(range(SAVED_AT))
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    weights, state = get_state_dict(run.model, run.optim, options=options)
    if flatten:
        state = {k: v for k, v in state.items() if not k.endswith(".ns_eps")}
        state.update({k.replace(".lr", ".gone"): 1 for k in list(state) if k.endswith(".lr")})
    else:
        for group in state["param_groups"]:
            del group["ns_eps"]
            group["gone"] = 1
    dcp.save({"model": weights, "optim": state}, checkpoint_id=directory)
    run.train([SAVED_AT])
    run.write(directory / "expected.pt")
    dist.barrier()
    other = Run.on(layout, zeroed=True)
    weights, own = get_state_dict(other.model, other.optim, options=options)
    content = {"model": weights, "optim": own}
    with pytest.raises(CheckpointException, match=r"Missing key.*ns_eps"):
        dcp.load(content, checkpoint_id=directory)
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(content, checkpoint_id=directory, planner=planner)
    set_state_dict(
        other.model,
        other.optim,
        model_state_dict=weights,
        optim_state_dict=content["optim"],
        options=options,
    )
    other.train([SAVED_AT])
    other.check(directory / "expected.pt")


@pytest.mark.slow
@pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flattened"])
def test_files_with_a_group_key_less_and_one_more_load_partially(flatten, tmp_path):
    run_ranks(load_with_other_keys, 2, "FSDP2", flatten, tmp_path)


def without_beta2(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "beta2"} for group in groups]


def hand_over(saved: Run, loaded: Run, how: dict[str, Any] | None) -> None:
    """Weights and state; by the optimizers' own methods, or by torch's with these options."""
    loaded.model.load_state_dict(saved.model.state_dict())
    if how is None:
        loaded.optim.load_state_dict(copy.deepcopy(saved.optim.state_dict()))
        return
    options = StateDictOptions(**how)
    state = get_optimizer_state_dict(saved.model, saved.optim, options=options)
    state = copy.deepcopy(state)
    set_optimizer_state_dict(loaded.model, loaded.optim, state, options=options)


BETWEEN_BETA2: dict[str, dict[str, Any] | None] = {
    "its own": None,
    "nested": {},
    "full": {"full_state_dict": True},
    "flattened": {"flatten_optimizer_state_dict": True},
}


def load_beside_other_beta2(layouts: tuple[str, ...], directory: Path) -> None:
    regroups = {True: None, False: without_beta2}
    for layout in layouts:
        for has_beta2 in (True, False):
            run = Run.on(layout, regroup=regroups[has_beta2])
            run.train(range(SAVED_AT))
            kept = Run.on(layout)
            hand_over(run, kept, None)
            run.train([SAVED_AT])
            run.write(directory / "expected.pt")
            if dist.is_initialized():
                dist.barrier()
            for name, how in BETWEEN_BETA2.items():
                with case(f"{layout}, {name}, from {'with' if has_beta2 else 'without'} beta2"):
                    other = Run.on(layout, zeroed=True, regroup=regroups[not has_beta2])
                    if has_beta2 and name == "flattened":
                        with pytest.raises(ValueError, match=r"beta2=0\.9.*blocks\.0\.wq"):
                            hand_over(kept, other, how)
                        continue
                    hand_over(kept, other, how)
                    if not has_beta2 and name == "full":  # torch adds what the optimizer had
                        for own in other.optim.state.values():
                            own.pop("second_momentum_buffer", None)
                    other.train([SAVED_AT])
                    other.check(directory / "expected.pt")


@pytest.mark.slow
def test_beta2_and_second_moments_are_a_checkpoints_or_it_is_refused(tmp_path):
    run_ranks(load_beside_other_beta2, 2, ("FSDP2",), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "layout"), [pair for pair in ALL if pair[0] <= 4])
def test_beta2_and_second_moments_are_a_checkpoints_on_every_layout(ranks, layout, tmp_path):
    run_ranks(load_beside_other_beta2, ranks, (layout,), tmp_path)


def load_file_beside_other_beta2(flatten: bool, directory: Path) -> None:
    run = Run.on("FSDP2")
    run.train([0])
    how = {"flatten_optimizer_state_dict": flatten}
    save_checkpoint(run, directory, **how)
    other = Run.on("FSDP2", regroup=without_beta2)
    with pytest.raises(ValueError, match=r"beta2=0\.9.*blocks\.0\.wq"):
        load_checkpoint(other, directory, **how)


@pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flattened"])
def test_files_of_which_second_moments_would_not_be_read_are_refused(flatten, tmp_path):
    run_ranks(load_file_beside_other_beta2, 2, flatten, tmp_path)


def load_tensor_lr(layout: str, flatten: bool, directory: Path) -> None:
    how = {"flatten_optimizer_state_dict": flatten}
    run = Run.on(layout, lr=torch.tensor(0.02))
    schedule = LambdaLR(run.optim, lambda step: 1 / (1 + step))
    for step in range(SAVED_AT):
        run.train([step])
        schedule.step()
    save_checkpoint(run, directory, **how)
    run.train([SAVED_AT])
    run.write(directory / "expected.pt")
    dist.barrier()
    other = Run.on(layout, zeroed=True, lr=torch.tensor(0.5))
    LambdaLR(other.optim, lambda step: 1.0)
    load_checkpoint(other, directory, **how)
    assert isinstance(other.optim.param_groups[0]["lr"], torch.Tensor)
    other.train([SAVED_AT])
    other.check(directory / "expected.pt")


@pytest.mark.slow
@pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flattened"])
@pytest.mark.parametrize("layout", ["FSDP2", "ZeRO-2"])
def test_a_tensor_learning_rate_is_loaded_as_one(layout, flatten, tmp_path):
    run_ranks(load_tensor_lr, 2, layout, flatten, tmp_path)


def wave(param: torch.Tensor, number: int) -> torch.Tensor:
    places = torch.arange(param.numel(), dtype=torch.float64)
    return torch.sin(places * (number + 1.3)).view(param.shape).to(param.dtype)


@pytest.mark.parametrize("name", ["one_device", "by_name"])
def test_a_checkpoint_with_keys_that_mean_nothing_loads_with_one_warning(name):
    """The files were written after two steps, with the weights after a third, by commit 71ead3e,
    whose groups had options that are gone: ``state_dict()`` of fp32 weights, and
    ``get_optimizer_state_dict`` of bf16 weights with residuals and second moments."""
    saved = torch.load(Path(__file__).with_name("data") / f"{name}.pt", weights_only=True)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)).to(saved["model"]["0.weight"].dtype)
    model.load_state_dict(saved["model"])
    options = {"ns_dtype": torch.float32, "comm_dtype": torch.float32}
    if name == "by_name":
        options |= {"weight_rounding": "exact", "beta2": 0.9, "momentum_style": "ema"}
    groups = optimizer.get_default_muon_param_groups(model)
    optim = optimizer.Muon(groups, lr=1.0, **options)
    with pytest.warns(UserWarning, match="mean nothing here, and are left out") as warned:
        if name == "by_name":
            set_optimizer_state_dict(model, optim, saved["optimizer"])
        else:
            optim.load_state_dict(saved["optimizer"])
    assert len(warned) == 1
    assert optim.param_groups[0]["lr"] == 0.1
    for number, param in enumerate(model.parameters()):
        param.grad = wave(param, 20 + number)
    optim.step()
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, saved["after"][key])
