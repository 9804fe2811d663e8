"""Checkpoints: training goes on bit for bit on any layout, through each of torch's formats."""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import random
import time
from collections.abc import Callable, Sequence
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
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._pytree import tree_map_only

from checkpointed import CLIP, LAYOUTS, SAVED_AT, Network, Run, load_checkpoint, save_checkpoint
from kernel import optimizer
from layouts import assert_same, case, whole
from ranks import on_ranks, rank_outcomes, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")

# Formats: how to write a checkpoint, and how to read it


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def save_full(run: Run, directory: Path, **how: Any) -> None:
    """One file of all, which rank 0 writes."""
    options = StateDictOptions(full_state_dict=True, **how)
    content = get_state_dict(run.model, run.optim, options=options)
    if rank() == 0:
        torch.save(content, directory / "full.pt")


def load_full(run: Run, directory: Path, weights_first: bool = True, **how: Any) -> None:
    """All ranks read the file, or rank 0 alone and sends it.

    By two calls: `set_state_dict` takes a rank without weights for one that loads none.
    """
    weights, state = {}, {}
    if rank() == 0 or not how.get("broadcast_from_rank0"):
        weights, state = torch.load(directory / "full.pt", weights_only=True)
    options = StateDictOptions(full_state_dict=True, **how)
    if weights_first:
        set_model_state_dict(run.model, weights, options=options)
    set_optimizer_state_dict(run.model, run.optim, state, options=options)
    if not weights_first:
        set_model_state_dict(run.model, weights, options=options)


def save_parts(run: Run, directory: Path) -> None:
    """One file per rank, by torch.save alone."""
    content = {"model": run.model.state_dict(), "optim": run.optim.state_dict()}
    torch.save(content, directory / f"rank{rank()}.pt")


def load_parts(run: Run, directory: Path, **how: Any) -> None:
    content = torch.load(directory / f"rank{rank()}.pt", weights_only=True, **how)
    run.model.load_state_dict(content["model"])
    run.optim.load_state_dict(content["optim"])


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
    """Takes the next step while the checkpoint is being written."""
    multiprocessing.current_process()._config["daemon"] = False  # may start a process of its own
    weights, state = get_state_dict(run.model, run.optim)
    saved = dcp.async_save(
        {"model": weights, "optim": state},
        storage_writer=LateWriter(directory),
        async_checkpointer_type=kind,
        process_group=dist.new_group(),
    )
    run.train([SAVED_AT])
    (directory / "written from now on").touch()
    saved.result()


FLAT = {"flatten_optimizer_state_dict": True}
HOST = {"cpu_offload": True}
SENT = {"broadcast_from_rank0": True}


def both(save: Any, load: Any, of_load: Any = (), **how: Any) -> tuple[Any, Any]:
    return partial(save, **how), partial(load, **how, **dict(of_load))


FORMATS: dict[str, tuple[Callable[[Run, Path], None], Callable[[Run, Path], None]]] = {
    "sharded": both(save_checkpoint, load_checkpoint),
    "sharded, flattened": both(save_checkpoint, load_checkpoint, **FLAT),
    "sharded, cpu_offload": both(save_checkpoint, load_checkpoint, **HOST),
    "sharded, flattened, cpu_offload": both(save_checkpoint, load_checkpoint, **FLAT, **HOST),
    "full": both(save_full, load_full),
    "full, cpu_offload": both(save_full, load_full, **HOST),
    "full, broadcast": both(save_full, load_full, SENT),
    "full, cpu_offload, broadcast": both(save_full, load_full, SENT, **HOST),
    "async, thread": (partial(save_async, kind=AsyncCheckpointerType.THREAD), load_checkpoint),
    "async, process": (partial(save_async, kind=AsyncCheckpointerType.PROCESS), load_checkpoint),
    "a file per rank": both(save_parts, load_parts),
    "a file per rank, mmap": both(save_parts, load_parts, {"mmap": True}),
}
OF_RANKS = ("a file per rank", "a file per rank, mmap")  # which no other layout can read
RESHARDING = [name for name in FORMATS if name not in OF_RANKS]

# What else a run may be like: options, and whether its state is in host memory.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "offloaded when saved": {},
    "offloaded when loaded": {},
    "offloaded": {},
    "tensor lr": {"lr": torch.tensor(0.02)},
    "fp64 momentum": {"momentum_dtype": torch.float64},
    "loaded twice into a trained one": {},
}

# From layout to layout

Place = tuple[int, str]  # number of ranks, and layout
PLACES = [(ranks, layout) for ranks, layouts in LAYOUTS.items() for layout in layouts]


@dataclass(frozen=True)
class Move:
    """A checkpoint saved on one layout and loaded on another."""

    saved: Place
    loaded: Place
    format: str
    kind: str

    def __str__(self) -> str:
        return f"{self.saved} to {self.loaded}, {self.format}, {self.kind}"

    def run(self, layout: str, when: str, zeroed: bool = False) -> Run:
        even = self.format.startswith("full")  # torch divides no whole tensors unevenly in strides
        run = Run.on(layout, zeroed, even, **copy.deepcopy(KINDS[self.kind]))
        run.schedule = LambdaLR(run.optim, lambda step: 1 / (1 + step))
        if self.kind in ("offloaded", f"offloaded when {when}"):
            host = optimizer.SimulatedHost(delay=1e-5, seed=1)
            run.optim.turn_on_cpu_offload(slot_bytes=16384, backend=host)
        return run


def moves() -> list[Move]:
    """All pairs of layouts, with formats and kinds in turn."""
    formats, kinds = itertools.cycle(RESHARDING), itertools.cycle(KINDS)
    found = [Move(*pair, next(formats), next(kinds)) for pair in itertools.product(PLACES, PLACES)]
    names = itertools.cycle(OF_RANKS)
    found += [Move(place, place, next(names), kind) for place, kind in zip(PLACES, kinds)]
    return found


def save(layout: str, moves: Sequence[Move], directory: Path) -> None:
    for number, move in enumerate(moves):
        with case(str(move)):
            place = directory / str(number)
            place.mkdir(exist_ok=True)
            dist.barrier()
            twin = move.run(layout, "never")
            twin.train(range(SAVED_AT + 1))
            twin.write(place / "expected.pt")
            run = move.run(layout, "saved")
            run.train(range(SAVED_AT))
            torch.save(run.schedule.state_dict(), place / "schedule.pt")
            FORMATS[move.format][0](run, place)
            if "async" not in move.format:
                run.train([SAVED_AT])
            run.optim.turn_off_cpu_offload()
            dist.barrier()
            run.check(place / "expected.pt")


def load(moves: Sequence[tuple[int, Move]], directory: Path) -> None:
    for number, move in moves:
        with case(str(move)):
            place = directory / str(number)
            run = move.run(move.loaded[1], "loaded", zeroed=True)
            twice = move.kind == "loaded twice into a trained one"
            if twice:
                run.train(range(20, 22))
            for _ in range(1 + twice):
                FORMATS[move.format][1](run, place)
                run.schedule.load_state_dict(torch.load(place / "schedule.pt"))
                run.train([SAVED_AT])
            run.optim.turn_off_cpu_offload()
            run.check(place / "expected.pt")


def check_moves(moves: Sequence[Move], directory: Path) -> None:
    """Checks moves that are all saved on one layout."""
    ranks, layout = moves[0].saved
    run_ranks(save, ranks, layout, moves, directory, timeout=600)
    for number in LAYOUTS:
        loads = [(index, move) for index, move in enumerate(moves) if move.loaded[0] == number]
        if loads:
            run_ranks(load, number, loads, directory, timeout=600)


QUICK = [m for m in moves() if max(m.saved, m.loaded) < (5,) and "process" not in m.format]


@pytest.mark.parametrize("move", random.Random(16).sample(QUICK, 6), ids=str)
def test_training_goes_on_from_a_checkpoint_of_another_layout(move, tmp_path):
    check_moves([move], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("saved", PLACES, ids=str)
def test_training_goes_on_from_checkpoints_on_every_layout(saved, tmp_path):
    check_moves([move for move in moves() if move.saved == saved], tmp_path)


# Fresh optimizers

HIGH_LOGITS = {layer: torch.tensor([100.0, 50.0]) for layer in (0, 1)}


def take_fresh_state(layouts: tuple[str, ...], flatten: bool, tensor_lr: bool) -> None:
    for layout in layouts:
        with case(layout):
            lr = {"lr": torch.tensor(0.02)} if tensor_lr else {}
            run, twin = (Run.on(layout, **CLIP, **copy.deepcopy(lr)) for _ in range(2))
            schedule = LambdaLR(run.optim, lambda step: 1 / (1 + step))
            before, lrs = run.copy(), copy.deepcopy(schedule.get_last_lr())
            run.optim.set_qk_logits(HIGH_LOGITS)
            options = StateDictOptions(flatten_optimizer_state_dict=flatten)
            state = get_optimizer_state_dict(run.model, run.optim, options=options)
            parts = {tuple(name.split(" of ")) for name in run.held() if " of " in name}
            assert {f"state.{name}.{key}" for key, name in parts} == state_keys(state, flatten)
            named = run.model.named_parameters()
            assert {name for _, name in parts} == {name for name, p in named if p.requires_grad}
            run.optim.set_qk_logits(None)
            assert {n for n in run.changes(before) if " of " not in n} == set()
            assert not any(v.any() for n, v in run.copy()["held"].items() if " of " in n)
            assert all(p.grad is None for p in run.model.parameters())
            assert schedule.last_epoch == 0 and schedule.get_last_lr() == lrs
            assert run.optim.qk_clip_stats()["total_clipped"] == 0
            run.train(range(SAVED_AT))
            twin.train(range(SAVED_AT))
            held, expected = run.held(), twin.held()
            for name in held:
                assert_same(name, held[name], whole(expected[name]), 0.0)


def state_keys(state: Any, is_flat: bool) -> set[str]:
    if is_flat:
        return {key for key in state if key.startswith("state.")}
    return {f"state.{name}.{key}" for name, own in state["state"].items() for key in own}


ALL_RANKS = [(1, False, True), (2, True, False), (4, False, False), (4, True, True)]
SLOW_IF_FOUR = [pytest.param(*row, marks=[pytest.mark.slow] * (row[0] > 2)) for row in ALL_RANKS]


@pytest.mark.parametrize(("ranks", "flatten", "tensor_lr"), SLOW_IF_FOUR)
def test_taking_the_state_of_a_fresh_optimizer_changes_nothing(ranks, flatten, tensor_lr):
    run_ranks(take_fresh_state, ranks, LAYOUTS[ranks], flatten, tensor_lr)


# Files that are broken


def cut(name: str, kept: int) -> Callable[[Path], Any]:
    def damage(directory: Path) -> None:
        file = directory / name
        file.write_bytes(file.read_bytes()[:kept])

    return damage


def without(name: str) -> Callable[[Path], Any]:
    return lambda directory: (directory / name).unlink()


DAMAGES = {
    "a truncated file": cut("__1_0.distcp", 2000),
    "a missing file": without("__1_0.distcp"),
    "no metadata": without(".metadata"),
    "truncated metadata": cut(".metadata", 100),
}


def load_broken(layout: str, damage: str, directory: Path) -> None:
    run = Run.on(layout)
    run.train([7])
    weights, state = get_state_dict(run.model, run.optim, options=StateDictOptions(**FLAT))
    before, begin = run.copy(), time.monotonic()
    with pytest.raises(CheckpointException):
        dcp.load(copy_of({"model": weights, "optim": state}), checkpoint_id=directory)
    assert time.monotonic() - begin < 10
    assert run.changes(before) == set()
    run.train([8])  # ranks still agree
    before = run.copy()
    with pytest.raises(CheckpointException):
        dcp.load({"model": weights, "optim": state}, checkpoint_id=directory)
    if "metadata" in damage:  # read before anything is written
        assert run.changes(before) == set()


def copy_of(content: Any) -> Any:
    """Tensors of its own: dcp.load writes into those it is given, part by part."""
    return tree_map_only(torch.Tensor, torch.clone, content)


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("layout", ["FSDP2", "ZeRO-2"])
def test_a_broken_file_raises_on_every_rank_and_changes_nothing(layout, damage, tmp_path):
    run_ranks(save_all, 4, layout, tmp_path)
    DAMAGES[damage](tmp_path)
    for ranks in (4, 2):
        run_ranks(load_broken, ranks, layout, damage, tmp_path, pg_timeout=10)


def load_where_one_file_is_bad(layout: str, directory: Path) -> None:
    """A file per rank, by torch.load alone: only the rank of the bad one hears of it."""
    run = Run.on(layout)
    run.train([7])
    before = run.copy()
    try:
        load_parts(run, directory)
    except Exception:
        assert rank() == 1 and run.changes(before) == set()
        raise
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"step\(\)"):
        run.train([8])
    assert time.monotonic() - begin < 10


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["FSDP2", "ZeRO-2"])
def test_a_file_that_is_bad_on_one_rank_raises_on_the_others_at_the_next_step(layout, tmp_path):
    run_ranks(save_all, 2, layout, tmp_path)
    cut("rank1.pt", 1000)(tmp_path)
    first, second = rank_outcomes(load_where_one_file_is_bad, 2, layout, tmp_path, pg_timeout=3)
    assert not first.error, first.detail
    assert "PytorchStreamReader" in second.message


# Checkpoints of other models and groups


def with_one_more(model: Network) -> None:
    model.added = nn.Linear(8, 8, bias=False)


def with_one_less(model: Network) -> None:
    del model.idle


def renamed(model: Network) -> None:
    model.called_otherwise = model.uneven
    del model.uneven


Groups = list[dict[str, Any]]


def divided(groups: Groups) -> Groups:
    first, *rest = groups
    halves = [{**first, **{k: first[k][i::2] for k in ("params", "names")}} for i in (0, 1)]
    return [*halves, *rest]


def moved_to_adamw(groups: Groups) -> Groups:
    first, *rest, adamw = groups
    index = first["names"].index("blocks.0.wq.weight")
    moved = {key: [*adamw[key], first[key][index]] for key in ("params", "names")}
    left = {k: [*first[k][:index], *first[k][index + 1 :]] for k in ("params", "names")}
    return [{**first, **left}, *rest, {**adamw, **moved}]


def called_the_other(groups: Groups) -> Groups:
    return [{**groups[0], "use_muon": False}, *groups[1:]]


# How a model or groups differ from the checkpoint's, and what is in the errors of
# torch.distributed.checkpoint, of full state dicts, and of Muon.load_state_dict; None loads.
UP, WQ = r"blocks\.0\.up\.weight", r"blocks\.0\.wq\.weight"
Row = tuple[dict[str, Any], "str | None", "str | None", str]
OTHERS: dict[str, Row] = {
    "other shapes": ({"even": False}, UP, rf"{UP}.*\(24, 16\)", rf"{UP}.*\(24, 16\)"),
    "a parameter more": ({"change": with_one_more}, "added", "added", r"param_groups\[0\].*11.*10"),
    "a parameter less": ({"change": with_one_less}, None, "idle", r"param_groups\[0\].*9.*10"),
    "renamed": ({"change": renamed}, "called_otherwise", "called_otherwise", "in the checkpoint"),
    "to AdamW": ({"regroup": moved_to_adamw}, rf"{WQ}.step", f"{WQ}.*use_muon=False", "9.*10"),
    "a group to AdamW": ({"regroup": called_the_other}, "state", "use_muon", "use_muon"),
    "another order": ({"regroup": lambda groups: groups[::-1]}, None, None, "use_muon=False"),
    "a group more": ({"regroup": divided}, None, None, "5 param_groups.*4"),
}


def load_copies(run: Run, directory: Path, **how: Any) -> None:
    """As `load_checkpoint`, with nothing overwritten before all was read."""
    load_checkpoint(run, directory, copy_of, **how)


def load_optimizer_of_parts(run: Run, directory: Path) -> None:
    run.optim.load_state_dict(torch.load(directory / f"rank{rank()}.pt")["optim"])


def save_all(layout: str, directory: Path) -> None:
    run = Run.on(layout)
    run.train(range(SAVED_AT))
    save_checkpoint(run, directory, **FLAT)
    save_full(run, directory)
    save_parts(run, directory)
    run.train([SAVED_AT])
    run.write(directory / "expected.pt")


def load_what_does_not_fit(layout: str, directory: Path) -> None:
    loads = [partial(load_copies, **FLAT), partial(load_full, weights_first=False)]
    for name, (difference, *says) in OTHERS.items():
        for load, words in zip([*loads, load_optimizer_of_parts], says):
            with case(f"{name}: {words}"):
                run = Run.on(layout, **difference)
                run.train([7])
                before = run.copy()
                if words is None:
                    load(run, directory)
                    run.train([SAVED_AT])
                    lacks = "idle" if name == "a parameter less" else "?"
                    run.check(directory / "expected.pt", groups=False, lacks=lacks)
                    continue
                with pytest.raises((Exception, CheckpointException), match=words):
                    load(run, directory)
                # torch has loaded the optimizer before it finds that the model lacks something
                assert run.changes(before) == set() or words == "idle"


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (1, "one device"),
        pytest.param(2, "FSDP2", marks=pytest.mark.slow),
        pytest.param(2, "ZeRO-2", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_that_does_not_fit_raises_on_every_rank(ranks, layout, tmp_path):
    run_ranks(save_all, ranks, layout, tmp_path)
    run_ranks(load_what_does_not_fit, ranks, layout, tmp_path, pg_timeout=20)


# Dtypes, keys and options of the checkpoint


@pytest.mark.slow
@on_ranks(2)
def test_files_are_read_in_the_dtype_of_the_momentum_that_is_there(tmp_path) -> None:
    """dcp.load writes into the momentum there is: its dtype decides what is read."""
    run = Run.on("FSDP2", momentum_dtype=torch.float64)
    run.train(range(SAVED_AT))
    save_checkpoint(run, tmp_path)
    dist.barrier()
    other = Run.on("FSDP2")
    load_checkpoint(other, tmp_path)
    name = "momentum_buffer of blocks.0.up.weight"
    expected, actual = (each.held()[name].to_local() for each in (run, other))
    assert actual.dtype == torch.float64  # the group's momentum_dtype is the checkpoint's
    assert torch.equal(actual, expected.float().double()) and not torch.equal(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flattened"])
@on_ranks(2)
def test_files_with_a_group_key_less_and_one_more_load_partially(flatten, tmp_path) -> None:
    """As of a version with one option less and another one more."""
    run = Run.on("FSDP2")
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
    dcp.save({"model": weights, "optim": state}, checkpoint_id=tmp_path)
    run.train([SAVED_AT])
    run.write(tmp_path / "expected.pt")
    dist.barrier()
    other = Run.on("FSDP2", zeroed=True)
    with pytest.raises(CheckpointException, match=r"ns_eps"):
        load_checkpoint(other, tmp_path, flatten_optimizer_state_dict=flatten)
    weights, own = get_state_dict(other.model, other.optim, options=options)
    content = {"model": weights, "optim": own}
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(content, checkpoint_id=tmp_path, planner=planner)
    set_model_state_dict(other.model, weights)
    set_optimizer_state_dict(other.model, other.optim, content["optim"], options=options)
    other.train([SAVED_AT])
    other.check(tmp_path / "expected.pt")


def without_beta2(groups: Groups) -> Groups:
    return [{key: value for key, value in group.items() if key != "beta2"} for group in groups]


def hand_over(saved: Run, loaded: Run, how: dict[str, Any] | None) -> None:
    """Weights and state; by the optimizers' own methods, or by torch's with these options."""
    loaded.model.load_state_dict(saved.model.state_dict())
    if how is None:
        loaded.optim.load_state_dict(copy.deepcopy(saved.optim.state_dict()))
        return
    options = StateDictOptions(**how)
    state = get_optimizer_state_dict(saved.model, saved.optim, options=options)
    set_optimizer_state_dict(loaded.model, loaded.optim, copy.deepcopy(state), options=options)


def load_beside_other_beta2(layout: str, has_beta2: bool, directory: Path) -> None:
    regroups = {True: None, False: without_beta2}
    run = Run.on(layout, regroup=regroups[has_beta2])
    run.train(range(SAVED_AT))
    kept = Run.on(layout)
    hand_over(run, kept, None)
    run.train([SAVED_AT])
    run.write(directory / "expected.pt")
    dist.barrier()
    for how in (None, {}, {"full_state_dict": True}, FLAT):
        with case(str(how)):
            other = Run.on(layout, zeroed=True, regroup=regroups[not has_beta2])
            if has_beta2 and how == FLAT:
                with pytest.raises(ValueError, match=rf"beta2=0\.9.*{WQ}"):
                    hand_over(kept, other, how)
                continue
            hand_over(kept, other, how)
            if not has_beta2 and how == {"full_state_dict": True}:
                for own in other.optim.state.values():  # torch adds what the optimizer had
                    own.pop("second_momentum_buffer", None)
            other.train([SAVED_AT])
            other.check(directory / "expected.pt")


@pytest.mark.parametrize("has_beta2", [True, False])
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [p if p == (1, "one device") else pytest.param(*p, marks=pytest.mark.slow) for p in PLACES],
)
def test_beta2_and_second_moments_are_a_checkpoints(ranks, layout, has_beta2, tmp_path):
    run_ranks(load_beside_other_beta2, ranks, layout, has_beta2, tmp_path)


@pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flattened"])
@on_ranks(2)
def test_files_of_which_second_moments_would_not_be_read_are_refused(flatten, tmp_path) -> None:
    run = Run.on("FSDP2")
    run.train([0])
    save_checkpoint(run, tmp_path, flatten_optimizer_state_dict=flatten)
    other = Run.on("FSDP2", regroup=without_beta2)
    with pytest.raises(ValueError, match=rf"beta2=0\.9.*{WQ}"):
        load_checkpoint(other, tmp_path, flatten_optimizer_state_dict=flatten)


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
    with pytest.warns(UserWarning, match="left out") as warned:
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
