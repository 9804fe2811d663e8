"""What `examples/plan.py` prints: sizes of published models, and costs that steps really have."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from checkout import EXAMPLES
from kernel import optimizer
from lone_rank import lone_rank

sys.path.append(str(EXAMPLES))

import plan
from planner import costs, deployment, memory, report, timeline
from planner.architectures import MODELS, Weight, weights_of
from planner.machine import Machine

RANKS = 64
RANKS_PER_HOST = 8

# -- models ----------------------------------------------------------------------------------------

KEYS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
KEYS += ("intermediate_size", "vocab_size")
LATENT = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128}
LATENT |= {"qk_rope_head_dim": 64, "v_head_dim": 128}
ROUTED = {"n_routed_experts": 256, "moe_intermediate_size": 2048, "n_shared_experts": 1}
DEEPSEEK = {**LATENT, **ROUTED, "first_k_dense_replace": 3}
PUBLISHED: list[tuple[str, tuple[int, ...], dict[str, int], float]] = [
    ("llama-3-8b", (), {}, 8.03),
    ("llama-3-70b", (), {}, 70.55),
    ("qwen3-30b-a3b", (), {}, 30.53),
    ("kimi-k2", (), {}, 1026),
    ("mistral", (4096, 32, 32, 8, 14336, 32000), {}, 7.24),
    ("qwen2", (3584, 28, 28, 4, 18944, 152064), {}, 7.62),
    ("qwen3", (4096, 36, 32, 8, 12288, 151936), {"head_dim": 128}, 8.19),
    ("mixtral", (4096, 32, 32, 8, 14336, 32000), {"num_local_experts": 8}, 46.7),
    ("deepseek_v3", (7168, 61, 128, 128, 18432, 129280), DEEPSEEK, 671),
]


@pytest.mark.parametrize(("model", "sizes", "others", "billions"), PUBLISHED)
def test_models_have_as_many_parameters_as_was_published(model, sizes, others, billions):
    config = {"model_type": model, **dict(zip(KEYS, sizes)), **others} if sizes else MODELS[model]
    numel = sum(weight.numel for weight in weights_of(config))
    assert numel == pytest.approx(billions * 1e9, rel=0.002)


DENSE_CONFIG = {
    **{"model_type": "new", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"intermediate_size": 160, "vocab_size": 1000, "tie_word_embeddings": True},
}


def test_an_unknown_model_with_the_usual_keys_has_shapes():
    weights = weights_of(DENSE_CONFIG, assume_gated=True)
    assert sum(w.numel for w in weights if w.muon) == 2 * (4 * 64 * 64 + 3 * 64 * 160)
    assert sum(w.numel for w in weights if not w.muon) == 1000 * 64 + 5 * 64
    experts = {"num_local_experts": 6, "first_k_dense_replace": 1}  # Mixtral's, DeepSeek's
    shapes = {w.name: w.shape for w in weights_of({**DENSE_CONFIG, **experts}, True)}
    assert shapes["layers.0.mlp.down_proj.weight"] == (64, 160)
    assert shapes["layers.1.mlp.experts.down_proj"] == (6, 64, 160)
    assert shapes["layers.1.mlp.gate.weight"] == (6, 64)


@pytest.mark.parametrize(
    ("changes", "assume_gated", "named"),
    [
        ({"hidden_size": None, "vocab_size": None}, True, "hidden_size, vocab_size"),
        ({"intermediate_size": None}, True, "intermediate_size"),
        ({"kv_lora_rank": 16, "v_head_dim": 8}, True, "qk_nope_head_dim, qk_rope_head_dim"),
        ({"model_type": "bert"}, False, "'bert'.*--assume-gated"),
        ({"model_type": "gpt_neox"}, False, "'gpt_neox'.*--assume-gated"),
        ({"model_type": None}, False, "--assume-gated"),
    ],
)
def test_what_a_config_lacks_is_named(changes, assume_gated, named):
    config = {k: v for k, v in {**DENSE_CONFIG, **changes}.items() if v is not None}
    with pytest.raises(ValueError, match=named):
        weights_of(config, assume_gated)
    assert assume_gated or weights_of(config, assume_gated=True)


# -- layouts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["fdsp", "hsdp:3x16", "hsdp:3x*", "hsdp:*x0", "hsdp:*x*", "ep:5"])
def test_wrong_layouts_are_refused(text):
    with pytest.raises(ValueError, match=re.escape(text)):
        deployment.parse_layout(text, 64)


class Block(nn.Module):
    """One weight of each kind, of the names of `OF_BLOCK`."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 128, bias=False)
        self.down = nn.Linear(128, 64, bias=False)
        self.many = nn.ParameterDict({"experts": torch.randn(72, 64, 32)})
        self.few = nn.ParameterDict({"experts": torch.randn(10, 64, 32)})


OF_BLOCK = {
    "up.weight": Weight("up.weight", (128, 64), "colwise"),
    "down.weight": Weight("down.weight", (64, 128), "rowwise"),
    "many.experts": Weight("many.experts", (72, 64, 32), "colwise"),
    "few.experts": Weight("few.experts", (10, 64, 32), "colwise"),
}


@pytest.mark.parametrize("text", ["fsdp", "hsdp:4x16", "fsdp+tp:4", "ep:4"])
@lone_rank(13, RANKS)
def test_weights_lie_as_torch_places_them(text):
    layout = deployment.parse_layout(text, RANKS)
    block, kind, names = Block(), layout.kind, ("outer", "inner")[2 - len(layout.mesh) :]
    mesh = init_device_mesh("cpu", layout.mesh, mesh_dim_names=names)

    def placed(param: nn.Parameter, dim: int | None = None) -> Shard:
        return Shard(int(len(param) == 10) if dim is None else dim)  # of fewer than ranks

    if kind == "ep":
        for stack in (block.many, block.few):
            local = distribute_tensor(stack["experts"], mesh["inner"], [Shard(0)])
            stack["experts"] = nn.Parameter(local)
            where = functools.partial(placed, dim=int(stack is block.few))
            fully_shard(stack, mesh=mesh["outer"], shard_placement_fn=where)
        fully_shard(block, mesh=init_device_mesh("cpu", (RANKS,)))
    elif kind in ("fsdp", "hsdp"):
        fully_shard(block, mesh=mesh, shard_placement_fn=placed)
    else:
        styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["inner"], styles)
        fully_shard(block, mesh=mesh["outer"])
    for name, param in block.named_parameters():
        if kind == "fsdp+tp" and "experts" in name:  # which torch's styles leave alone
            continue
        planned = deployment.sharding_of(optimizer, OF_BLOCK[name], layout)
        dims = [each and (each.dim, each.strided) for each in planned.placements]
        theirs = [
            None if p.is_replicate() else (p.dim, isinstance(p, _StridedShard))
            for p in param.placements
        ]
        assert (planned.mesh_shape, dims) == (param.device_mesh.shape, theirs), name


# -- steps, on a fake process group ----------------------------------------------------------------

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
    Weight("layers.1.experts.gate_proj", (10, 64, 16), "colwise"),
    Weight("layers.1.experts.down_proj", (10, 64, 40), "rowwise"),
]


def check_plans(entries: list[Any], options: dict[str, Any]) -> int:
    """Compares the plan of each rank with what was predicted; returns the most chunks of a lane."""
    found = costs.costs_of(optimizer, entries, RANKS, RANKS_PER_HOST, **options)
    differences = []  # bytes that ranks send and receive beyond what was predicted
    for rank in range(RANKS):
        plan = optimizer.distributed.plan.Planner(entries, rank, **options).plan()
        chunks = [chunk for lane in plan.lanes for chunk in lane.chunks]
        batches = [batch for lane in plan.all_lanes for c in lane.chunks for batch in c.batches]
        assert sum(map(plan.flops, batches)) == found.flops[rank], rank
        assert len(chunks) == sum(len(lane.bytes) for lane in found.lanes_of(rank)), rank
        moved = np.zeros(2)
        for lane in plan.lanes:
            size = lane.wire.itemsize
            for traffic in (way for chunk in lane.chunks for way in (chunk.gather, chunk.scatter)):
                moved += size * sum(traffic.sent), size * sum(traffic.received)
        differences.append(moved - found.bytes[:, :, :, rank].sum(axis=(0, 2)))
    # Parts of a peer are padded to 64 bytes; rings share what owners send to all.
    total = np.sum(differences, axis=0)
    assert (total >= 0).all() and (total <= 64 * 2 * RANKS**2 * len(entries)).all(), total
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
    if text == "fsdp":  # 56 of the 63 others are on other hosts
        away = moved[:, costs.SENT, costs.NETWORK].sum() / moved[:, costs.SENT].sum()
        assert away == pytest.approx(56 / 63, rel=0.01)
    assert moved[:, costs.SENT].sum() / (RANKS * numel * local) == pytest.approx(expected)


CASES: dict[str, tuple[str, list[Weight], dict[str, Any], int]] = {  # chunks at least
    "fsdp": ("fsdp", [*DENSE, *MORE], {"chunk_size": 1}, 2),
    "fsdp, experts": ("fsdp", EXPERTS, {}, 1),
    "hsdp": ("hsdp:4x16:redundant", DENSE, {"chunk_size": 1, "warmup_step": 1}, 2),
    "hsdp, shared": ("hsdp:4x16:spread", [*DENSE, *EXPERTS], {"staging_bytes": 1024}, 2),
    "ddp": ("ddp", [*DENSE, *EXPERTS], {"chunk_size": 1}, 2),
    "fsdp over tp": ("fsdp+tp:4", [*DENSE, *EXPERTS], {"staging_bytes": 1024}, 1),
    "ep": ("ep:4", [*DENSE, *EXPERTS], {}, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_the_costs_of_a_layout_are_those_of_the_plans_of_its_ranks(case):
    text, weights, options, least = CASES[case]
    layout = deployment.parse_layout(text, RANKS)
    about = {"dtype": torch.float32, "device_type": "cpu", "wire": torch.bfloat16}
    entries = deployment.entries_of(optimizer, weights, layout, **about)
    assert check_plans(entries, options) >= least


# -- times, and what is printed --------------------------------------------------------------------


def simulated(found: costs.Costs, **given: Any) -> timeline.Timeline:
    speeds = {"flops": 1e12, "host_bytes": 1e11, "network_bytes": 1e10, "latency": 0.0}
    machine = Machine(**{**speeds, "ranks_per_host": RANKS_PER_HOST, **given})
    return timeline.simulate(optimizer.async_utils, found, machine)


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
    hidden, shown = (simulated(each, host_bytes=1e9).seconds for each in (found, alone))
    arithmetic = found.makespan / 1e12
    assert 3 * (hidden - arithmetic) < shown - arithmetic


def test_zero2_differs_from_ddp_in_what_averages_send_and_in_memory():
    args, weights = plan.parse_args([]), weights_of(MODELS["llama-3-8b"])
    layouts = [deployment.parse_layout(text, 8) for text in ("ddp", "zero2")]
    reports = [plan.report_of(optimizer, weights, layout, 8, args) for layout in layouts]
    ddp, zero2 = (each.rows() for each in reports)
    assert ddp["bytes sent per local element"] == zero2["bytes sent per local element"] == "1.97"
    assert ddp["gradients averaged in backward, GB"] == "28.1"
    assert zero2["gradients averaged in backward, GB"] == "in the step"
    assert "of which averages and AdamW's rows, GB" in ddp
    total = sum(weight.numel for weight in weights)
    muon = sum(weight.numel for weight in weights if weight.muon)
    held = [2 * total + muon / 8 + 2 * (total - muon) / shares for shares in (1, 8)]
    assert [each.held.max() for each in reports] == held


@pytest.mark.parametrize(
    ("text", "held", "backward"),  # of an element, by how often a rank holds it
    [
        ("fsdp", 1 / 8, 7 / 8),
        ("hsdp:2x4", 1 / 4, 1),
        ("fsdp+tp:4", 1 / 8, 1 / 8),
        ("ep:4", 1 / 8, 1 / 8),
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


@pytest.mark.slow
def test_the_script_prints_layouts_side_by_side_and_draws_them(tmp_path):
    picture, results = tmp_path / "plan.png", tmp_path / "planner.md"
    config = tmp_path / "mine" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps(DENSE_CONFIG))

    def run(*options: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, EXAMPLES / "plan.py", "--config", config, "--assume-gated"]
        return subprocess.run([*command, *map(str, options)], capture_output=True, text=True)

    layouts = ["--layout", "fsdp", "--layout", "hsdp:*x8:spread"]
    printed = run("--ranks", 16, *layouts, "--owners", "--png", picture).stdout
    texts = ("mine on 16 ranks", "fsdp", "hsdp:2x8:spread", "layers.*.mlp.up_proj", report.LEGEND)
    assert all(text in printed for text in texts)
    for theme in ("light", "dark"):
        assert picture.with_stem(f"plan-{theme}").stat().st_size > 10_000
    options = ("--ranks", 8, "--ranks", 16, "--layout", "ddp", "--markdown")
    printed = run(*options).stdout
    assert [line.count("|") for line in printed.splitlines()] == [15] * 4
    run(*options, "--results", results)
    assert "python examples/plan.py --config" in results.read_text()
    assert results.read_text().endswith(printed)
    wrong = run("--layout", "ep")
    assert wrong.returncode == 1 and "'ep'" in wrong.stderr
    without_experts = run("--layout", "ep:8", "--layout", "ddp", "--markdown")
    assert "ep:8" in without_experts.stderr and "`ddp`" in without_experts.stdout
