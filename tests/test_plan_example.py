"""What `examples/plan.py` prints: sizes of published models, and costs that steps really have."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, debug, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from counters import count
from kernel import optimizer
from ranks import run_ranks

sys.path.append(str(Path(__file__).parent.parent / "examples"))

import costs
import deployment
from architectures import MODELS, Weight, weights_of

# -- models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "billions"),
    [("llama-3-8b", 8.03), ("llama-3-70b", 70.6), ("qwen3-30b-a3b", 30.5), ("kimi-k2", 1030)],
)
def test_models_have_as_many_parameters_as_was_published(model, billions):
    numel = sum(weight.numel for weight in weights_of(MODELS[model]))
    assert numel == pytest.approx(billions * 1e9, rel=0.01)


# -- steps, on a fake process group ----------------------------------------------------------------

RANKS = 64
RANKS_PER_HOST = 8

# Rows that 64, 16 and 4 ranks divide evenly, unevenly, and into empty shards.
DENSE = [
    *[Weight(f"layers.{i}.wide.weight", (128, 64), "colwise") for i in range(3)],
    *[Weight(f"layers.{i}.tall.weight", (100, 36), "colwise") for i in range(6)],
    *[Weight(f"layers.{i}.flat.weight", (30, 48), "rowwise") for i in range(12)],
    *[Weight(f"layers.{i}.router.weight", (7, 33)) for i in range(3)],
]
MORE = [Weight(f"layers.{i}.small.weight", (40, 24)) for i in range(60)]  # than there are ranks
EXPERTS = [
    Weight("layers.0.experts.gate_proj", (72, 24, 16), "colwise"),
    Weight("layers.0.experts.down_proj", (72, 16, 24), "rowwise"),
    Weight("layers.1.experts.gate_proj", (10, 40, 16), "colwise"),
    Weight("layers.1.experts.down_proj", (10, 16, 40), "rowwise"),
]


class Exchanges(TorchDispatchMode):
    """Bytes to and from each rank of every all-to-all, in order, (directions, ranks)."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[np.ndarray] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._opname == "alltoall_base_":
            output, input, group, received, sent = args[:5]
            moved = np.zeros((2, RANKS), np.int64)
            ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(group))
            moved[costs.SENT, ranks] = np.array(sent) * input.element_size()
            moved[costs.RECEIVED, ranks] = np.array(received) * output.element_size()
            self.found.append(moved)
            if not input.numel():  # a fake group copies what comes from what goes
                output.zero_()
                stand_in = input.new_zeros(len(ranks))
                args = (stand_in, stand_in.clone(), group, [], [], *args[5:])
        return func(*args, **(kwargs or {}))

    def by_link(self, rank: int) -> list[np.ndarray]:
        """(directions, links) of each."""
        near = np.arange(RANKS) // RANKS_PER_HOST == rank // RANKS_PER_HOST
        return [np.stack((of[:, near].sum(1), of[:, ~near].sum(1)), 1) for of in self.found]


def predicted(lanes: list[costs.LaneCosts], rank: int) -> list[np.ndarray]:
    """(directions, links) of each all-to-all of a rank, in the order of their launch."""
    launched: list[np.ndarray] = []

    def task(lane: costs.LaneCosts, chunk: int) -> Iterator[None]:
        for way in (costs.GATHER, costs.SCATTER):
            launched.append(lane.bytes[chunk, way, :, :, lane.peers.index(rank)])
            yield

    interleave = importlib.import_module(f"{optimizer.__name__}.async_utils").interleave
    for lane in lanes:
        interleave((task(lane, chunk) for chunk in range(len(lane.bytes))), lane.in_flight)
    return launched


def placed(weight: Weight, layout: deployment.Layout, meshes: dict) -> nn.Parameter:
    if layout.replicated:
        param = nn.Parameter(torch.randn(weight.shape))
        param.grad = torch.randn_like(param)
        return param
    sharding = deployment.sharding_of(optimizer, weight, layout)
    if sharding.mesh not in meshes:
        meshes[sharding.mesh] = init_device_mesh("cpu", sharding.mesh)
    mesh: DeviceMesh = meshes[sharding.mesh]
    placements: list[Any] = []
    for index, split in enumerate(sharding.placements):
        if split is None:
            placements.append(Replicate())
        elif split.strided:
            pieces = sharding.mesh[index + 1]
            placements.append(_StridedShard(split.dim, split_factor=pieces))
        else:
            placements.append(Shard(split.dim))
    whole = torch.randn(weight.shape)
    param = nn.Parameter(distribute_tensor(whole, mesh, placements, src_data_rank=None))
    param.grad = torch.randn_like(param)
    return param


def step_as_every_rank(text: str, weights: list[Weight], options: dict[str, Any]) -> int:
    """Compares what a step does with what was predicted, rank by rank; returns the chunks."""
    planning = optimizer.distributed.plan
    planning.CHUNK_BYTES["cpu"] = (256, 1024)  # several chunks of small matrices
    layout = deployment.parse_layout(text, RANKS)
    entries = deployment.entries_of(
        optimizer,
        weights,
        layout,
        dtype=torch.float32,
        device_type="cpu",
        wire=options.get("comm_dtype", torch.bfloat16),
        second_moment="beta2" in options,
    )
    wide = {key: options[key] for key in ("chunk_size", "warmup_step") if key in options}
    found = costs.costs_of(optimizer, entries, RANKS, RANKS_PER_HOST, **wide)
    for rank in range(RANKS):
        dist.destroy_process_group()
        debug._clear_sharding_prop_cache()  # it holds meshes, whose groups are gone
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
        meshes: dict[tuple[int, ...], DeviceMesh] = {}
        params = [placed(weight, layout, meshes) for weight in weights]
        group = {"params": params, "names": [w.name for w in weights], "use_muon": True}
        ranks = {"process_group": dist.group.WORLD} if layout.replicated else {"hsdp": layout.hsdp}
        optim = optimizer.Muon([group], expert_keys=["experts"], **ranks, **options)
        with FlopCounterMode(display=False) as flops, Exchanges() as exchanges:
            counted = count(optim.step)
        lanes = found.lanes_of(rank)
        assert flops.get_total_flops() == found.flops[rank], rank
        assert len(counted.messages) == sum(2 * len(lane.bytes) for lane in lanes), rank
        assert counted.sent == found.bytes[:, costs.SENT, :, rank].sum(), rank
        np.testing.assert_array_equal(exchanges.by_link(rank), predicted(lanes, rank), str(rank))
    return max((len(lane.bytes) for lane in found.lanes), default=0)


CASES = {  # layout, weights, options, chunks at least
    "fsdp": ("fsdp", [*DENSE, *MORE], {"chunk_size": 1}, 2),
    "fsdp, some experts": ("fsdp", EXPERTS, {"beta2": 0.9}, 2),
    "hsdp": ("hsdp:4x16:redundant", DENSE, {"chunk_size": 1, "warmup_step": 1}, 2),
    "hsdp, shared": ("hsdp:4x16:spread", [*DENSE, *EXPERTS], {"beta2": 0.9}, 2),
    "ddp": ("ddp", [*DENSE, *EXPERTS], {"comm_dtype": torch.float16, "chunk_size": 1}, 2),
    "fsdp over tp": ("fsdp+tp:4", [*DENSE, *EXPERTS], {"comm_dtype": torch.float16}, 1),
    "ep": ("ep:4", [*DENSE, *EXPERTS], {}, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_costs_of_a_plan_are_those_of_its_steps(case):
    *arguments, least = CASES[case]
    (chunks,) = run_ranks(step_as_every_rank, 1, *arguments, timeout=300)
    assert chunks >= least
