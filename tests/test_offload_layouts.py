"""CPU offload on layouts: real gloo ranks take the steps that they take without it, to the bit."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from comparisons import assert_equal, assert_same_training
from layouts import FP32, Group, Twins, Weight, backward, case, make, part_for
from models import Model
from offloaded import TINY, Host, Pair
from ranks import rank_outcomes, run_ranks

pytestmark = pytest.mark.usefixtures("traced")

RANKS = 4
SMALL = 32768  # torch's fused AdamW rounds alike where pieces have 64 elements times any number
WAYS = ({"slot_bytes": TINY}, {})

ADAMW = {"use_muon": False}
LINE, SQUARE = (RANKS,), (2, 2)


def on(mesh: tuple[int, ...], dims: tuple[Any, ...], *shapes: tuple[int, ...]) -> list[Weight]:
    return [Weight(shape, mesh, dims) for shape in shapes]


def plain(*shapes: tuple[int, ...]) -> list[Weight]:
    return [Weight(shape) for shape in shapes]


SHARDED = [
    Group(on(LINE, (0,), (16, 24), (10, 3), (3, 12), (1, 8), (24, 40), (8, 8)), {"beta2": 0.9}),
    Group(on(LINE, (0,), (130, 8), (3, 16), (7,)), ADAMW),
]
REPLICATED = [
    Group(plain((16, 24), (20, 8), (3, 12), (1, 8), (8, 30)), {"beta2": 0.9}),
    Group(plain((24, 16)), {"split": [8, 16]}),
    Group(plain((300, 8), (7,), (2, 3)), ADAMW),
]
LANES = [
    Group([*on(LINE, (0,), (16, 24), (3, 12)), *on(SQUARE, (None, 0), (12, 20)), *plain((8, 16))]),
    Group([*on(SQUARE, (0, 0), (16, 8)), *on(SQUARE, (0, 1), (12, 16))], {"beta2": 0.9}),
    Group([*on(LINE, (0,), (64, 8)), *plain((9, 8))], ADAMW),
]
EXPERTS = [
    Group(on(LINE, (0,), (6, 8, 12), (3, 12, 8)), {"beta2": 0.9}),
    Group(on(SQUARE, (0, 1), (4, 8, 12))),
]

Layout = tuple[Sequence[Group], dict[str, Any], str]
LAYOUTS: dict[str, Layout] = {
    "FSDP2": (SHARDED, {}, ""),
    "FSDP2, one matrix at a time": (SHARDED, {"chunk_size": 1}, ""),
    "FSDP2, nothing ahead": (SHARDED, {"warmup_step": 0, "chunk_size": 2}, ""),
    "FSDP2, fp16": (SHARDED, {"ns_dtype": torch.float16}, ""),
    "HSDP, spread": (
        [Group(on(SQUARE, (None, 0), (16, 24), (3, 12), (24, 8)), {"beta2": 0.9})],
        {"hsdp": "spread", "chunk_size": 1},
        "",
    ),
    "HSDP, redundant": (
        [Group(on(SQUARE, (None, 0), (16, 24), (3, 12)))],
        {"hsdp": "redundant"},
        "",
    ),
    "FSDP2 + TP": (
        [
            Group(on(SQUARE, (0, 0), (16, 24), (10, 8)), {"beta2": 0.9}),
            Group(on(SQUARE, (0, 1), (16, 24), (12, 10)), {"momentum_dtype": torch.bfloat16}),
            Group(on(SQUARE, (0, 1), (40, 32)), ADAMW),
        ],
        {"chunk_size": 1},
        "",
    ),
    "experts": (EXPERTS, {"momentum_style": "ema", "nesterov": False}, ""),
    "several meshes": (LANES, {"chunk_size": 1}, ""),
    "DDP": (REPLICATED, {}, "DDP"),
    "ZeRO-2": (REPLICATED, {"chunk_size": 1}, "ZeRO-2"),
    "ZeRO-2 beside DTensors": (LANES, {}, "ZeRO-2"),
}


class PairOnLayout(Pair):
    """Two optimizers of the same parameters on the same layout; one is to be offloaded."""

    def __init__(self, layout: Layout, meshes: dict[tuple[int, ...], Any]):
        groups, options, kind = layout
        if kind:
            reduced = "mean" if kind == "ZeRO-2" else None
            options = {**options, "process_group": dist.group.WORLD, "grad_reduce": reduced}
        options = {**FP32, **options}
        both = (Twins.placed(groups, meshes, options, reference=FP32) for _ in range(2))
        self.ours, self.twin = (twins.ours for twins in both)
        self.own_gradients = kind == "ZeRO-2"
        self.steps = 0

    def give_gradients(self) -> None:
        for index, (p, q) in enumerate(self.params):
            own = self.own_gradients and not isinstance(p, DTensor)
            seed = 1000 * self.steps + 10 * index + (dist.get_rank() if own else 0)
            generator = torch.Generator().manual_seed(seed)
            grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            q.grad = part_for(p, grad)
            p.grad = q.grad.clone()
        self.steps += 1


def step_offloaded(layouts: dict[str, Layout]) -> None:
    meshes = {shape: init_device_mesh("cpu", shape) for shape in (LINE, SQUARE)}
    for name, layout in layouts.items():
        for number, how in enumerate(WAYS):
            with case(f"{name}, {how}"):
                pair, backend = PairOnLayout(layout, meshes), Host(delay=2e-5, seed=dist.get_rank())
                if number % 2:
                    pair.step_and_compare()
                pair.ours.turn_on_cpu_offload(backend=backend, **how)
                pair.step()
                pair.step_and_compare()
                if how.get("slot_bytes") == TINY:
                    assert 0 < backend.peak_bytes <= TINY and backend.allocated_bytes == 0
                pair.ours.turn_off_cpu_offload()
                pair.step_and_compare()
        with case(f"{name}, toggled"):
            pair = PairOnLayout(layout, meshes)
            for how in WAYS:
                pair.ours.turn_on_cpu_offload(backend=Host(), **how)
                pair.step_and_compare()
                pair.ours.turn_off_cpu_offload()
                pair.step()


FAMILIES = {
    "FSDP2": [name for name in LAYOUTS if name.startswith("FSDP2,") or name == "FSDP2"],
    "more dimensions": ["FSDP2 + TP", "HSDP, spread", "HSDP, redundant", "experts"],
    "several lanes": ["several meshes", "ZeRO-2 beside DTensors"],
    "replicas": ["DDP", "ZeRO-2"],
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow
def test_steps_are_those_without_offload_to_the_bit(family):
    assert {name for names in FAMILIES.values() for name in names} == set(LAYOUTS)
    run_ranks(step_offloaded, RANKS, {name: LAYOUTS[name] for name in FAMILIES[family]})


# -- models under FSDP2 ----------------------------------------------------------------------------


def sharded(**options: Any) -> tuple[nn.Module, Any]:
    model = Model()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model, make(model, **{**FP32, **options})


def train(model: nn.Module, optim: Any, steps: Sequence[int]) -> None:
    for step in steps:
        backward(model, step)
        optim.step()
        optim.zero_grad()


def train_fsdp2() -> None:
    (model, optim), (other, twin) = sharded(beta2=0.9), sharded(beta2=0.9)
    backend = Host(delay=2e-5)
    optim.turn_on_cpu_offload(slot_bytes=SMALL, backend=backend)
    for steps in ([0, 1], [2], [3]):
        train(model, optim, steps)
        train(other, twin, steps)
        assert_same_training(model, optim, other, twin)
        assert 0 < backend.peak_bytes <= SMALL and backend.allocated_bytes == 0
    optim.turn_off_cpu_offload()
    train(model, optim, [4])
    train(other, twin, [4])
    assert_same_training(model, optim, other, twin)


@pytest.mark.slow
def test_a_model_under_fsdp2_trains_the_same():
    run_ranks(train_fsdp2, RANKS)


HOW = {
    "nested": {},
    "flattened": {"flatten_optimizer_state_dict": True},
    "full": {"full_state_dict": True, "cpu_offload": True},
    "sharded, to the CPU": {"cpu_offload": True},
}


def checkpoint(directory: str) -> None:
    for name, options in HOW.items():
        with case(name):
            how = StateDictOptions(**options)
            (model, optim), (other, twin) = sharded(beta2=0.9), sharded(beta2=0.9)
            backend = Host()
            optim.turn_on_cpu_offload(slot_bytes=SMALL, backend=backend)
            assert_equal(
                get_optimizer_state_dict(model, optim, options=how),
                get_optimizer_state_dict(other, twin, options=how),
            )
            train(model, optim, [0, 1])
            train(other, twin, [0, 1])
            peak = backend.peak_bytes
            state, expected = (
                get_optimizer_state_dict(m, o, options=how)
                for m, o in ((model, optim), (other, twin))
            )
            assert_equal(state, expected, strides=True)
            assert size(optim.state_dict()) <= 1.01 * size(twin.state_dict())
            assert len(pickle.dumps(optim._offload)) < 1000
            if name != "full":
                resume(f"{directory}/{name}", how, (model, optim), (other, twin), state)
            else:
                saved = copy.deepcopy(expected)  # on rank 0
                for each, its in ((model, optim), (other, twin)):
                    both = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
                    set_optimizer_state_dict(each, its, copy.deepcopy(saved), options=both)
            assert backend.peak_bytes == peak
            assert_same_training(model, optim, other, twin)
            train(model, optim, [2, 3])
            train(other, twin, [2, 3])
            assert_same_training(model, optim, other, twin)


def resume(directory: str, how: Any, ours: Any, theirs: Any, state: Any) -> None:
    """Saves the offloaded state, and loads it into both."""
    dcp.save({"optim": state}, checkpoint_id=directory)
    for model, optim in (ours, theirs):
        into = {"optim": get_optimizer_state_dict(model, optim, options=how)}
        dcp.load(into, checkpoint_id=directory)
        set_optimizer_state_dict(model, optim, into["optim"], options=how)


def size(value: Any) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return file.tell()


@pytest.mark.slow
def test_distributed_checkpoints_see_no_difference():
    with tempfile.TemporaryDirectory() as directory:
        run_ranks(checkpoint, RANKS, directory)


# -- ranks that disagree ---------------------------------------------------------------------------


def disagree(steps_before: int) -> None:
    pair = PairOnLayout(LAYOUTS["FSDP2"], {LINE: init_device_mesh("cpu", LINE)})
    for _ in range(steps_before):
        pair.step()
    if dist.get_rank() == 1:
        pair.ours.turn_on_cpu_offload(slot_bytes=TINY, backend=Host())
    pair.step_and_compare()


@pytest.mark.parametrize("steps_before", [0, 2])
def test_streaming_on_some_ranks_only_raises_on_all(steps_before):
    outcomes = rank_outcomes(disagree, RANKS, steps_before)
    assert [outcome.error for outcome in outcomes] == ["ValueError"] * RANKS
    assert len({outcome.message for outcome in outcomes}) == 1
    assert "(turn_on_cpu_offload) = True" in outcomes[0].message


# -- copies ----------------------------------------------------------------------------------------


def copied(kind: str) -> None:
    pair = PairOnLayout(LAYOUTS[kind], {LINE: init_device_mesh("cpu", LINE)})
    pair.step()
    pair.ours.turn_on_cpu_offload(slot_bytes=TINY, backend=Host(delay=2e-5))
    pair.step()
    own = [t for own in pair.ours.state.values() for t in own.values()]
    pickled = pickle.dumps(pair.ours.state_dict()), pickle.dumps(pair.twin.state_dict())
    assert len(pickled[0]) <= 1.01 * len(pickled[1])
    for data, optim in zip(pickled, (pair.ours, pair.twin)):
        optim.load_state_dict(pickle.loads(data))
    assert not {id(t) for t in own} & {id(t) for o in pair.ours.state.values() for t in o.values()}
    pair.step_and_compare()


@pytest.mark.parametrize("kind", ["FSDP2", "DDP", "ZeRO-2"])
def test_pickled_state_of_ranks_is_theirs_alone(kind):
    run_ranks(copied, RANKS, kind)
