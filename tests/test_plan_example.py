"""What `examples/plan.py` prints: sizes of published models, and costs that steps really have."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, debug, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from checkout import EXAMPLES
from counters import count
from kernel import optimizer
from ranks import run_ranks

sys.path.append(str(EXAMPLES))

import plan
from planner import averaging, costs, deployment, memory, report, timeline
from planner.architectures import MODELS, Weight, weights_of
from planner.machine import Machine

scheduler = optimizer.async_utils

RANKS = 64
RANKS_PER_HOST = 8
TRIED = (*range(8), *range(8, RANKS, 4), RANKS - 1)  # a host's, and some of all others

# -- models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "billions"),
    [("llama-3-8b", 8.03), ("llama-3-70b", 70.6), ("qwen3-30b-a3b", 30.5), ("kimi-k2", 1030)],
)
def test_models_have_as_many_parameters_as_was_published(model, billions):
    numel = sum(weight.numel for weight in weights_of(MODELS[model]))
    assert numel == pytest.approx(billions * 1e9, rel=0.01)


def config_of(kind: str, *sizes: int, **others: Any) -> dict[str, Any]:
    keys = ["hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"]
    keys += ["intermediate_size", "vocab_size"]
    return {"model_type": kind, **dict(zip(keys, sizes)), **others}


LATENT = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128}
LATENT |= {"qk_rope_head_dim": 64, "v_head_dim": 128}
ROUTED = {"n_routed_experts": 256, "moe_intermediate_size": 2048, "n_shared_experts": 1}


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        (config_of("mistral", 4096, 32, 32, 8, 14336, 32000), 7.24),
        (config_of("qwen2", 3584, 28, 28, 4, 18944, 152064), 7.62),
        (config_of("qwen3", 4096, 36, 32, 8, 12288, 151936, head_dim=128), 8.19),
        (config_of("mixtral", 4096, 32, 32, 8, 14336, 32000, num_local_experts=8), 46.7),
        (
            config_of(
                "deepseek_v3",
                7168,
                61,
                128,
                128,
                18432,
                129280,
                first_k_dense_replace=3,
                **LATENT,
                **ROUTED,
            ),
            671,
        ),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_other_configs_have_as_many_parameters_as_was_published(config, billions):
    numel = sum(weight.numel for weight in weights_of(config))
    assert numel == pytest.approx(billions * 1e9, rel=0.002)


GLM = {"head_dim": 128, "n_routed_experts": 160, "n_shared_experts": 1, "attention_bias": True}
GLM |= {"moe_intermediate_size": 1536, "first_k_dense_replace": 3}


DENSE_CONFIG = {
    "model_type": "new",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 160,
    "vocab_size": 1000,
    "tie_word_embeddings": True,
}


def test_an_unknown_model_with_the_usual_keys_has_shapes():
    weights = weights_of(DENSE_CONFIG, assume_gated=True)
    assert sum(w.numel for w in weights if w.muon) == 2 * (4 * 64 * 64 + 3 * 64 * 160)
    assert sum(w.numel for w in weights if not w.muon) == 1000 * 64 + 5 * 64


def test_experts_replace_the_feed_forward_of_some_layers():
    keys = {"num_local_experts": 6, "first_k_dense_replace": 1}  # Mixtral's, DeepSeek's
    shapes = {w.name: w.shape for w in weights_of({**DENSE_CONFIG, **keys}, True)}
    assert shapes["layers.0.mlp.down_proj.weight"] == (64, 160)
    assert shapes["layers.1.mlp.experts.down_proj"] == (6, 64, 160)
    assert shapes["layers.1.mlp.gate.weight"] == (6, 64)


@pytest.mark.parametrize(
    ("without", "given", "missing"),
    [
        (("hidden_size", "vocab_size"), {}, "hidden_size, vocab_size"),
        (("intermediate_size",), {}, "intermediate_size"),
        ((), {"kv_lora_rank": 16, "v_head_dim": 8}, "qk_nope_head_dim, qk_rope_head_dim"),
    ],
)
def test_missing_keys_are_named(without, given, missing):
    config = {key: value for key, value in DENSE_CONFIG.items() if key not in without}
    with pytest.raises(ValueError, match=rf"'new' lacks {missing},"):
        weights_of({**config, **given}, assume_gated=True)


@pytest.mark.parametrize("kind", ["bert", "gpt_neox", None])
def test_other_architectures_are_refused_unless_told_to_be_decoders(kind):
    config = {**DENSE_CONFIG, "model_type": kind}
    with pytest.raises(ValueError, match=r"known to be a decoder .*; --assume-gated counts it"):
        weights_of(config)
    assert weights_of(config, assume_gated=True)


# -- layouts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("fdsp", "'fdsp' is no layout; there are fsdp,"),
        ("hsdp:3x16", "hsdp:3x16: 3 × 16 is not 64 ranks"),
        ("hsdp:3x*", "hsdp:3x*: 3 does not divide 64 ranks"),
        ("hsdp:*x0", "0 does not divide 64 ranks"),
        ("hsdp:*x*", "hsdp:*x*: only one of R, P may be *"),
        ("ep:5", "5 does not divide 64 ranks"),
        ("fsdp:8+tp:4", r"fsdp:8\+tp:4: 8 × 4 is not 64 ranks"),
    ],
)
def test_wrong_layouts_are_refused(text, problem):
    with pytest.raises(ValueError, match=problem.replace("*", r"\*")):
        deployment.parse_layout(text, 64)


class Block(nn.Module):
    """One weight of each kind, of the names of `of_block`."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 128, bias=False)
        self.down = nn.Linear(128, 64, bias=False)
        self.many, self.few = Stack(72), Stack(10)


class Stack(nn.Module):
    def __init__(self, experts: int):
        super().__init__()
        self.experts = nn.Parameter(torch.randn(experts, 64, 32))


OF_BLOCK = {
    "up.weight": Weight("up.weight", (128, 64), "colwise"),
    "down.weight": Weight("down.weight", (64, 128), "rowwise"),
    "many.experts": Weight("many.experts", (72, 64, 32), "colwise"),
    "few.experts": Weight("few.experts", (10, 64, 32), "colwise"),
}


def sharded_by_torch(text: str) -> dict[str, Any]:
    """Where `fully_shard` and `parallelize_module` leave the weights of a block, on rank 13."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=13, world_size=RANKS)
    kind, mesh = (layout := deployment.parse_layout(text, RANKS)).kind, layout.mesh
    block, everyone = Block(), init_device_mesh("cpu", (RANKS,))
    by_rows = {id(block.few.experts)}  # there are less of them than ranks

    def placed(param: nn.Parameter) -> Shard:
        return Shard(1 if id(param) in by_rows else 0)

    if kind in ("fsdp", "hsdp"):
        names = ("replicas", "shards")[2 - len(mesh) :]
        of_all = init_device_mesh("cpu", mesh, mesh_dim_names=names)
        fully_shard(block, mesh=of_all, shard_placement_fn=placed)
    else:
        two = init_device_mesh("cpu", mesh, mesh_dim_names=("outer", "inner"))
        if kind == "ep":
            for stack in (block.many, block.few):
                stack.experts = nn.Parameter(
                    distribute_tensor(stack.experts, two["inner"], [Shard(0)])
                )
                by_rows = {id(block.few.experts)}
                fully_shard(stack, mesh=two["outer"], shard_placement_fn=placed)
            fully_shard(block, mesh=everyone)
        else:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, two["inner"], plan)
            fully_shard(block, mesh=two["outer"])
    sharding_of = optimizer.distributed.dtensors.sharding_of
    return {name: sharding_of(param) for name, param in block.named_parameters()}


@pytest.mark.parametrize("text", ["fsdp", "hsdp:4x16", "fsdp+tp:4", "ep:4"])
def test_weights_lie_as_torch_places_them(text):
    (found,) = run_ranks(placements_of, 1, text)
    for name, (theirs, ours) in found.items():
        if text != "fsdp+tp:4" or "experts" not in name:  # which torch's styles leave alone
            assert theirs == ours, name


def placements_of(text: str) -> dict[str, tuple[str, str]]:
    """By name what torch makes of a weight, and what is planned for it."""
    layout = deployment.parse_layout(text, RANKS)
    return {
        name: (repr(theirs), repr(deployment.sharding_of(optimizer, OF_BLOCK[name], layout)))
        for name, theirs in sharded_by_torch(text).items()
    }


# -- steps, on a fake process group ----------------------------------------------------------------

# Rows that 64, 16 and 4 ranks divide evenly, unevenly, and into empty shards.
DENSE = [
    *[Weight(f"layers.{i}.wide.weight", (128, 64), "colwise") for i in range(3)],
    *[Weight(f"layers.{i}.tall.weight", (100, 36), "colwise") for i in range(6)],
    *[Weight(f"layers.{i}.flat.weight", (30, 48), "rowwise") for i in range(12)],
    *[Weight(f"layers.{i}.router.weight", (7, 33)) for i in range(3)],
]
MORE = [Weight(f"layers.{i}.small.weight", (40, 24)) for i in range(60)]  # than there are ranks
OTHERS = [  # AdamW's: divided among 64 ranks, too small for it, of too few rows
    Weight("embed_tokens.weight", (100, 32), muon=False),
    Weight("norm.weight", (64,), muon=False),
    Weight("lm_head.weight", (20, 64), muon=False),
]
EXPERTS = [
    Weight("layers.0.experts.gate_proj", (72, 24, 16), "colwise"),
    Weight("layers.0.experts.down_proj", (72, 16, 24), "rowwise"),
    Weight("layers.1.experts.gate_proj", (10, 64, 16), "colwise"),
    Weight("layers.1.experts.down_proj", (10, 64, 40), "rowwise"),
]


class Exchanges(TorchDispatchMode):
    """Bytes of every all-to-all and all-gather of a rank, in order, (directions, links).

    Broadcasts of ascending ranks into one buffer are one, of the bytes of all.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.near = np.arange(RANKS) // RANKS_PER_HOST == rank // RANKS_PER_HOST
        self.found: list[np.ndarray] = []
        # The rank that the last one came from, bytes so far, and the buffer.
        self.broadcast: tuple[int, int, torch.UntypedStorage | None] = (-1, 0, None)
        self.broadcast_sent = 0.0  # by this rank, in rings

    def ring(self, group: Any, nbytes: int) -> np.ndarray:
        """What a rank sends on of so many bytes, in rings of which one rank of a host leaves it."""
        ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(group))
        sent = nbytes * (len(ranks) - 1) // len(ranks)
        hosts = len({rank // RANKS_PER_HOST for rank in ranks})
        away = sent * hosts / len(ranks) if hosts > 1 else 0
        return np.array(2 * [[sent - away, away]]).round()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._opname == "alltoall_base_":
            output, input, group, received, sent = args[:5]
            moved = np.zeros((2, RANKS), np.int64)
            ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(group))
            moved[costs.SENT, ranks] = np.array(sent) * input.element_size()
            moved[costs.RECEIVED, ranks] = np.array(received) * output.element_size()
            parts = (moved[:, self.near].sum(1), moved[:, ~self.near].sum(1))
            self.found.append(np.stack(parts, 1))
            if not input.numel():  # a fake group copies what comes from what goes
                output.zero_()
                stand_in = input.new_zeros(len(ranks))
                args = (stand_in, stand_in.clone(), group, [], [], *args[5:])
        if func._opname == "_allgather_base_":
            gathered = self.ring(args[2], args[0].numel() * args[0].element_size())
            if args[0].dtype == torch.float32:  # mean squares, right behind their updates
                gathered = self.found.pop() + gathered
            self.found.append(gathered)
        if func._opname == "broadcast_":
            (tensor,), group, root = args[:3]
            last, nbytes, into = self.broadcast
            storage = tensor.untyped_storage()
            if root > last >= 0 and into is not None and into.data_ptr() == storage.data_ptr():
                self.found.pop()
            else:
                nbytes = 0
            self.broadcast = root, nbytes + tensor.numel() * tensor.element_size(), storage
            self.found.append(self.ring(group, self.broadcast[1]))
            self.broadcast_sent += tensor.numel() * tensor.element_size() * (RANKS - 1) / RANKS
        elif func._opname.startswith(("all", "_all")):
            self.broadcast = (-1, 0, None)
        return func(*args, **(kwargs or {}))


def predicted(lanes: list[costs.LaneCosts], rank: int) -> list[np.ndarray]:
    """(directions, links) of a rank's collectives, in the order of their launch."""
    launched: list[np.ndarray] = []
    order = scheduler.lanes_order([(len(la.bytes), la.in_flight) for la in lanes])
    for do, number, chunk in order:
        lane = lanes[number]
        if do is not scheduler.Do.UPDATE:
            way = costs.GATHER if do is scheduler.Do.GATHER else costs.SCATTER
            launched.append(lane.bytes[chunk, way, :, :, lane.peers.index(rank)])
    return launched


def placed(weight: Weight, layout: deployment.Layout, meshes: dict) -> nn.Parameter:
    if layout.replicated:
        param = nn.Parameter(torch.randn(weight.shape))
        param.grad = torch.randn_like(param)
        return param
    sharding = deployment.sharding_of(optimizer, weight, layout)
    if sharding.mesh_shape not in meshes:
        meshes[sharding.mesh_shape] = init_device_mesh("cpu", sharding.mesh_shape)
    mesh: DeviceMesh = meshes[sharding.mesh_shape]
    placements: list[Any] = []
    for index, split in enumerate(sharding.placements):
        if split is None:
            placements.append(Replicate())
        elif split.strided:
            pieces = sharding.mesh_shape[index + 1]
            placements.append(_StridedShard(split.dim, split_factor=pieces))
        else:
            placements.append(Shard(split.dim))
    whole = torch.randn(weight.shape)
    param = nn.Parameter(distribute_tensor(whole, mesh, placements, src_data_rank=None))
    param.grad = torch.randn_like(param)
    return param


def muon_of(
    layout: deployment.Layout,
    weights: list[Weight],
    params: list[nn.Parameter],
    options: dict[str, Any],
) -> torch.optim.Optimizer:
    groups = []
    for use_muon in (True, False):
        chosen = [(p, w.name) for p, w in zip(params, weights) if w.muon is use_muon]
        if chosen:
            of_group, names = map(list, zip(*chosen))
            groups.append({"params": of_group, "names": names, "use_muon": use_muon})
    wide: dict[str, Any] = {"hsdp": layout.hsdp}
    if layout.replicated:
        wide["process_group"] = dist.group.WORLD
    if layout.kind == "zero2":
        wide["grad_reduce"] = "mean"
    return optimizer.Muon(groups, expert_keys=["experts"], **wide, **options)


def check_padded(found: Any, predicted: Any, parts: int) -> None:
    """What was predicted, and for each part of a peer at most what brings it to 64 bytes."""
    padding = found - np.asarray(predicted)
    assert (padding > -0.5).all() and (padding <= 64 * RANKS * parts).all(), padding


def step_as_many_ranks(text: str, weights: list[Weight], options: dict[str, Any]) -> int:
    """Compares what a step does with what was predicted, rank by rank; returns the chunks."""
    # Several chunks of small matrices.
    optimizer.distributed.limits.CHUNK_BYTES["cpu"] = 1024
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
    for rank in TRIED:
        dist.destroy_process_group()
        debug._clear_sharding_prop_cache()  # it holds meshes, whose groups are gone
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
        meshes: dict[tuple[int, ...], DeviceMesh] = {}
        params = [placed(weight, layout, meshes) for weight in weights]
        optim = muon_of(layout, weights, params, options)
        with FlopCounterMode(display=False) as flops, Exchanges(rank) as exchanges:
            counted = count(optim.step)
        lanes = found.lanes_of(rank)
        assert flops.get_total_flops() == found.flops[rank], rank
        around = averaging.Ring(0, 0)
        if layout.kind == "zero2":
            around = averaging.averages_of(
                optimizer, entries, weights, lanes[0].first_used, lanes[0].in_flight, RANKS
            ).all
        else:
            check_padded(np.asarray(exchanges.found), predicted(lanes, rank), len(weights))
        messages = around.count + sum(len(lane.bytes) + lane.launched.sum() for lane in lanes)
        sent = around.sent + found.bytes[:, costs.SENT, :, rank].sum()
        assert len(counted.messages) == messages, rank
        by_roots = sum(c.sent for c in counted.messages if "broadcast" in c.name)
        counted_sent = counted.sent - by_roots + exchanges.broadcast_sent
        check_padded(counted_sent, sent, len(weights) * messages)
    return max((len(lane.bytes) for lane in found.lanes), default=0)


EVEN = [Weight(f"layers.{i}.weight", (128, 64 + 64 * (i % 2)), "colwise") for i in range(200)]


def costs_on(text: str, weights: list[Weight], ranks: int, **options: Any) -> costs.Costs:
    layout = deployment.parse_layout(text, ranks)
    entries = deployment.entries_of(optimizer, weights, layout, **options)
    return costs.costs_of(optimizer, entries, ranks, RANKS_PER_HOST)


@pytest.mark.parametrize(
    ("text", "local", "expected"),
    [
        ("fsdp", 1 / 64, 4 * 63 / 64),
        ("fsdp+tp:4", 1 / 64, 4 * 63 / 64),
        ("hsdp:4x16:redundant", 1 / 16, 4 * 15 / 16),
        # To one of 64 owners from the 16 of its replica, from there to all of 4 replicas.
        ("hsdp:4x16:spread", 1 / 16, 2 * 15 / 16 / 4 + 2 * 63 / 64),
        ("ddp", 1, 2 * 63 / 64 * (1 + 1 / 64)),
    ],
)
def test_bytes_sent_per_local_element_are_those_of_the_formula(text, local, expected):
    numel = sum(weight.numel for weight in EVEN)
    moved = costs_on(text, EVEN, RANKS).bytes
    assert moved[:, costs.SENT].sum() == moved[:, costs.RECEIVED].sum()
    assert moved[:, costs.SENT].sum() / (RANKS * numel * local) == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "text"),
    [("kimi-k2", "ep:8"), ("qwen3-30b-a3b", "hsdp:4x*"), ("llama-3-70b", "fsdp")],
)
def test_a_thousand_ranks_cost_what_the_plan_of_each_says(model, text):
    layout = deployment.parse_layout(text, 1024)
    entries = deployment.entries_of(optimizer, weights_of(MODELS[model]), layout)
    found = costs.costs_of(optimizer, entries, 1024, RANKS_PER_HOST)
    for rank in (0, 13, 517, 1023):
        plan = optimizer.distributed.plan.Planner(entries, rank).plan()
        chunks = [chunk for lane in plan.lanes for chunk in lane.chunks]
        for way, traffic in enumerate(("gather", "scatter")):
            for direction in ("sent", "received"):
                elements = sum(sum(getattr(getattr(c, traffic), direction)) for c in chunks)
                index = costs.SENT if direction == "sent" else costs.RECEIVED
                padding = 2 * elements - found.bytes[way, index, :, rank].sum()
                assert 0 <= padding <= 0.005 * 2 * elements, (rank, traffic)
        flops = sum(
            len(batch.units) * unit.count * plan.entries[unit.entry].cost(unit.block)
            for lane in (*plan.lanes, *plan.local_lanes)
            for chunk in lane.chunks
            for batch in chunk.batches
            for unit in batch.units[:1]
        )
        assert flops == found.flops[rank], rank


CASES = {  # layout, weights, options, chunks at least
    "fsdp": ("fsdp", [*DENSE, *MORE], {"chunk_size": 1}, 2),
    "fsdp, some experts": ("fsdp", EXPERTS, {"beta2": 0.9}, 1),
    "hsdp": ("hsdp:4x16:redundant", DENSE, {"chunk_size": 1, "warmup_step": 1}, 2),
    "hsdp, shared": ("hsdp:4x16:spread", [*DENSE, *EXPERTS], {"beta2": 0.9}, 2),
    "ddp": ("ddp", [*DENSE, *EXPERTS], {"comm_dtype": torch.float32, "chunk_size": 1}, 2),
    "zero2": ("zero2", [*DENSE, *EXPERTS, *OTHERS], {"chunk_size": 1}, 2),
    "fsdp over tp": ("fsdp+tp:4", [*DENSE, *EXPERTS], {"comm_dtype": torch.float32}, 1),
    "ep": ("ep:4", [*DENSE, *EXPERTS], {}, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_costs_of_a_plan_are_those_of_its_steps(case):
    *arguments, least = CASES[case]
    (chunks,) = run_ranks(step_as_many_ranks, 1, *arguments, timeout=300)
    assert chunks >= least


# -- times, and what is printed --------------------------------------------------------------------


def machine(**given: Any) -> Machine:
    speeds = {"flops": 1e12, "host_bytes": 1e11, "network_bytes": 1e10, "latency": 0.0}
    return Machine(**{**speeds, "ranks_per_host": RANKS_PER_HOST, **given})


def simulated(found: costs.Costs, **given: Any) -> timeline.Timeline:
    return timeline.simulate(scheduler, found, machine(**given))


def test_a_step_takes_at_least_its_arithmetic_and_at_least_its_traffic():
    found = costs_on("fsdp", weights_of(MODELS["llama-3-8b"]), RANKS)
    away = found.bytes[:, costs.SENT, costs.NETWORK].max()
    step = simulated(found)
    assert step.seconds > max(found.makespan / 1e12, away / 1e10)
    without_traffic = simulated(found, host_bytes=1e30, network_bytes=1e30)
    assert without_traffic.seconds == pytest.approx(found.makespan / 1e12)
    assert simulated(found, latency=1.0).seconds > step.seconds + 1


def test_chunks_in_flight_hide_traffic_under_arithmetic():
    found = costs_on("hsdp:8x8:redundant", weights_of(MODELS["llama-3-8b"]), RANKS)
    (one, *_) = found.lanes
    assert one.in_flight > 2
    alone = dataclasses.replace(found, lanes=(dataclasses.replace(one, in_flight=1),))
    shown = [
        step.seconds - found.makespan / 1e12
        for step in (simulated(found, host_bytes=1e9), simulated(alone, host_bytes=1e9))
    ]
    assert 3 * shown[0] < shown[1]


def reports_of(model: str, ranks: int, *layouts: str) -> dict[str, report.Report]:
    args = plan.parse_args([])
    weights = weights_of(MODELS[model])
    parsed = [deployment.parse_layout(text, ranks) for text in layouts]
    return {at.text: plan.report_of(optimizer, weights, at, ranks, args) for at in parsed}


def test_zero2_differs_from_ddp_in_what_averages_send_and_in_memory():
    found = reports_of("llama-3-8b", 8, "ddp", "zero2")
    ddp, zero2 = (found[text].rows() for text in ("ddp", "zero2"))
    assert ddp["bytes sent per local element"] == zero2["bytes sent per local element"] == "1.97"
    assert ddp["gradients averaged in backward, GB"] == "28.1"
    assert zero2["gradients averaged in backward, GB"] == "in the step"
    assert "of which averages and AdamW's rows, GB" in ddp
    total = sum(weight.numel for weight in weights_of(MODELS["llama-3-8b"]))
    muon = sum(weight.numel for weight in weights_of(MODELS["llama-3-8b"]) if weight.muon)
    assert found["ddp"].held.max() == 2 * total + muon / 8 + 2 * (total - muon)
    assert found["zero2"].held.max() == 2 * total + muon / 8 + 2 * (total - muon) / 8


@pytest.mark.parametrize(
    ("text", "held", "backward"),  # of an element, by how often a rank holds it
    [
        ("fsdp", 1 / 8, 7 / 8),
        ("hsdp:2x4", 1 / 4, 3 / 4 + 2 * 1 / 2 / 4),
        ("fsdp+tp:4", 1 / 8, 1 / 2 / 4),
        ("ep:4", 1 / 8, 1 / 2 / 4),
    ],
)
def test_memory_and_averages_follow_from_the_layout(text, held, backward):
    shape, parallel = ((8, 64, 64), None) if text == "ep:4" else ((64, 64), "colwise")
    weights = [Weight("a", shape, parallel), Weight("b", shape, parallel, muon=False)]
    layout = deployment.parse_layout(text, 8)
    entries = deployment.entries_of(optimizer, weights, layout)
    numel = weights[0].numel
    found = memory.elements_of_all(optimizer, entries, weights, layout, 8)
    assert found.tolist() == [(3 + 4) * numel * held] * 8
    sent = memory.averaged_in_backward(optimizer, weights, layout)
    assert sent == pytest.approx(2 * numel * backward)


def test_experts_are_left_out_of_models_without_them(capsys):
    args = plan.parse_args(["--ranks", "8", "--layout", "ep:8", "--layout", "fsdp"])
    models = plan.models_of(args)
    left = plan.tables_of(args, models)
    assert [layout.text for layout in left["llama-3-8b", 8]] == ["fsdp"]
    told = "llama-3-8b has no routed experts: ep:8 is left out\n"
    assert capsys.readouterr().err == told
    args.layout.remove("fsdp")
    with pytest.raises(SystemExit) as stopped:
        plan.tables_of(args, models)
    assert stopped.value.code == 1
    assert capsys.readouterr().err == told


@pytest.mark.slow
def test_the_script_prints_layouts_side_by_side_and_draws_them(tmp_path):
    picture, config = tmp_path / "plan.png", tmp_path / "mine" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps(DENSE_CONFIG))
    command = [sys.executable, EXAMPLES / "plan.py", "--config", config, "--assume-gated"]
    command += ["--ranks", "16"]
    command += ["--layout", "fsdp", "--layout", "hsdp:*x8:spread", "--owners", "--png", picture]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert report.LEGEND in done.stdout
    for text in ("mine on 16 ranks", "fsdp", "hsdp:2x8:spread", "step, ms", "layers.*.mlp.up_proj"):
        assert text in done.stdout
    assert picture.stat().st_size > 10_000
    table = [*command[:5], "--ranks", "8", "--ranks", "16", "--layout", "ddp", "--markdown"]
    done = subprocess.run(table, capture_output=True, text=True, timeout=120, check=True)
    assert [line.count("|") for line in done.stdout.splitlines()] == [15] * 4
    wrong = subprocess.run(
        [*command, "--layout", "ep"], capture_output=True, text=True, check=False
    )
    assert wrong.returncode == 1
    assert "plan.py: 'ep' is no layout" in wrong.stderr
