"""QK-Clip of projections on meshes: the rows that a rank holds get what they get on one device."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from counters import count
from kernel import optimizer
from layouts import EXACT, Group, Twins, Weight, case, whole
from models import Attention
from ranks import on_ranks, rank_outcomes, run_ranks

THRESHOLD = 6.0
HEADS = 4
LOGITS = torch.tensor([3.0, 7.5, 24.0, 600.0])  # one too small, one clipped to a hundredth


class Recorder:
    """Has seen every head's largest logit on one rank only."""

    def __init__(self, logits: torch.Tensor, rank: int, ranks: int):
        seen = torch.arange(len(logits)) % ranks == rank
        self.logits = torch.where(seen, logits, logits.clamp(max=1.0) - rank)

    def take(self):
        return {0: self.logits}


GROUPED = {"head_dim": 6}
LATENT = {"is_mla": True, "qk_nope_head_dim": 3, "qk_rope_head_dim": 2, "v_head_dim": 4}
FUSED = {"head_dim": 4, "row_map": {"wqkv": "(group (q=8 + k=4 + v=4)) dim"}}
STACKED = {"head_dim": 4, "row_map": {"wqkv": "(q=16 + k=8 + v=8) dim"}}

# Names and shapes, of weights, then of biases.
KINDS = {
    "grouped": (GROUPED, {"wq.weight": (24, 16), "wk.weight": (12, 16)}, {"wk.bias": (12,)}),
    "latent": (LATENT, {"wq_b.weight": (20, 16), "wkv_b.weight": (28, 16)}, {"wq_b.bias": (20,)}),
    "fused": (FUSED, {"wqkv.weight": (32, 16)}, {"wqkv.bias": (32,)}),
    "three dimensions": (GROUPED, {"wq": (4, 6, 16), "wk": (2, 6, 16)}, {}),
}


def groups_of(kind: str, mesh, dims, nested=False, dtype=torch.float32, **options) -> list[Group]:
    _, weights, biases = KINDS[kind]
    placed = [Weight(shape, mesh, dims, nested, dtype) for shape in weights.values()]
    names, more = ([f"layers.0.attention.{name}" for name in of] for of in (weights, biases))
    groups = [Group(placed, options, names)]
    if biases and all(dim in (0, None) for dim in dims):
        ones = [Weight(shape, mesh, dims, nested, dtype) for shape in biases.values()]
        groups.append(Group(ones, {"use_muon": False}, more))
    return groups


def step_clipped(ranks: int) -> None:
    """Every kind on every mesh, cut in every way; and whole, in a process group."""
    meshes = {sizes: init_device_mesh("cpu", sizes) for sizes in MESHES[ranks]}
    cases: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (sizes, dims, {})
        for sizes in meshes
        for dims in itertools.product((None, 0, 1), repeat=len(sizes))
    ]
    cases += [((ranks,), (0,), options) for options in VARIANTS]
    cases.append((None, (), {"process_group": dist.group.WORLD}))
    for kind, (config, _, _) in KINDS.items():
        for sizes, dims, more in cases:
            with case(f"{kind} on {sizes}, {dims}, {more}"):
                of_group = {key: more[key] for key in ("split", "dtype") if key in more}
                if "split" in of_group and kind != "fused":
                    continue
                options = {**EXACT, "expert_keys": ["wq", "wk"]}
                options["clip_config"] = {"threshold": THRESHOLD, **config}
                options |= {key: value for key, value in more.items() if key not in of_group}
                reference = {**options, "process_group": None}
                groups = groups_of(kind, sizes, dims, **of_group)
                twins = Twins.placed(groups, meshes, options, reference)
                twins.ours.qk_recorder = Recorder(LOGITS, dist.get_rank(), ranks)
                twins.reference.qk_recorder = Recorder(LOGITS, 0, 1)
                twins.step()
                twins.compare()
                ours, plain = (o.qk_clip_stats() for o in (twins.ours, twins.reference))
                assert ours == plain and ours["total_clipped"] == 9


MESHES = {2: [(2,)], 3: [(3,)], 4: [(4,), (2, 2)]}
VARIANTS: list[dict[str, Any]] = [
    {"beta2": 0.9, "chunk_size": 1},
    {"momentum_dtype": torch.bfloat16},
    {"dtype": torch.bfloat16, "momentum_dtype": torch.float32},
    {"split": [16, 8, 8]},
    {"split": 4},
]


@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def test_rows_columns_strides_and_replicas_are_clipped_as_on_one_device(ranks):
    run_ranks(step_clipped, ranks, ranks)


# -- how logits come ---------------------------------------------------------------------------


def plain_pair(mesh: DeviceMesh | None, dims=(0,)) -> tuple[list[DTensor], Any]:
    shapes = [("wq", (24, 16)), ("wk", (12, 16))]
    placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
    params = [
        nn.Parameter(DTensor.from_local(torch.ones(shape), mesh, [Replicate()] * mesh.ndim))
        for _, shape in shapes
    ]
    params = [nn.Parameter(p.detach().redistribute(mesh, placements)) for p in params]
    for p in params:
        p.grad = torch.zeros_like(p)
    names = [f"layers.0.attention.{name}.weight" for name, _ in shapes]
    group = {"params": params, "names": names, "use_muon": True, "none_grad": False}
    config = {"head_dim": 6, "threshold": THRESHOLD}
    return params, optimizer.Muon([group], lr=0.0, clip_config=config)


def expected_rows() -> tuple[torch.Tensor, torch.Tensor]:
    root = (THRESHOLD / LOGITS).clamp(max=1.0).sqrt()
    keys = torch.stack([root[:2].min(), root[2:].min()])
    return root.repeat_interleave(6), keys.repeat_interleave(6)


def assert_clipped(params: Sequence[DTensor]) -> None:
    for p, rows in zip(params, expected_rows()):
        torch.testing.assert_close(p.full_tensor(), rows[:, None].expand(p.shape))


@on_ranks(4)
def test_logits_that_are_dtensors() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh.get_coordinate()
    low = torch.full((HEADS,), -5.0)
    own = LOGITS if dp == 1 else low  # one of the data-parallel ranks has seen the largest
    half = own[2 * tp : 2 * tp + 2]
    given = {
        "heads of this rank, on the tensor-parallel mesh": (half, mesh["tp"], [Shard(0)]),
        "and on the whole mesh": (half, mesh, [Partial("max"), Shard(0)]),
        "maxima still to take": (own, mesh["dp"], [Partial("max")]),
        "the same everywhere": (LOGITS, mesh, [Replicate(), Replicate()]),
        "replicas of which one knows": (own, mesh["tp"], [Replicate()]),
    }
    for name, (held, on, placements) in given.items():
        with case(name):
            params, optim = plain_pair(mesh, (0, 0))
            logits = DTensor.from_local(held, on, placements, run_check=False)
            optim.step(qk_logits={0: logits})
            assert_clipped(params)
    _, optim = plain_pair(mesh, (0, 0))
    wrong = DTensor.from_local(LOGITS, mesh["dp"], [Partial("sum")], run_check=False)
    with pytest.raises(ValueError, match="the maximum is needed"):
        optim.step(qk_logits={0: wrong})
    plain = nn.Parameter(torch.ones(24, 16))
    plain.grad = torch.zeros_like(plain)
    group = {"params": [("layers.0.wq.weight", plain)], "use_muon": True}
    optim = optimizer.Muon([group], clip_config={"head_dim": 6})
    shard = DTensor.from_local(half, mesh["tp"], [Shard(0)], run_check=False)
    with pytest.raises(ValueError, match="weights are not shared with ranks"):
        optim.step(qk_logits={0: shard})


def collectives_of_many_layers() -> tuple[int, float]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    named = []
    for layer in range(6):
        for name in ("wq", "wk"):
            p = nn.Parameter(DTensor.from_local(torch.randn(8, 8), mesh, [Shard(0)]))
            p.grad = torch.zeros_like(p)
            named.append((f"layers.{layer}.{name}.weight", p))
    group = {"params": named, "use_muon": True, "none_grad": False}
    counts = []
    for logits in (None, {layer: torch.ones(4) for layer in range(6)}):
        optim = optimizer.Muon([dict(group)], clip_config={"head_dim": 4})
        optim.set_qk_logits(logits)
        optim.step()
        optim.set_qk_logits(logits)
        counts.append(count(optim.step))
    added = [c for c in counts[1].messages if "allreduce" in c.name.replace("_", "")]
    assert len(counts[1].messages) == len(counts[0].messages) + 1
    return len(added), added[0].sent


@pytest.mark.filterwarnings("ignore:clip_config")
def test_maxima_of_all_layers_travel_in_one_collective():
    ranks = 2
    per_rank = 2 * 4 * (6 * 4) * (ranks - 1) / ranks  # fp32
    assert run_ranks(collectives_of_many_layers, ranks) == [(1, per_rank)] * ranks


@on_ranks(2)
def test_reducing_by_hand() -> None:
    rank = dist.get_rank()
    logits = {"a": torch.tensor([1.0, rank]), 3: torch.tensor([-rank, torch.inf, 2.0])}
    logits["n"] = torch.tensor([torch.nan if rank == 1 else 5.0]).bfloat16()
    reduced = optimizer.qk_clip.reduce_qk_logits(logits)
    assert {key: value.tolist() for key, value in reduced.items()} == {
        "a": [1.0, 1.0],
        3: [0.0, torch.inf, 2.0],
        "n": [torch.inf],
    }
    assert logits["a"].tolist() == [1.0, rank]
    assert list(reduced) == list(logits)
    assert optimizer.qk_clip.reduce_qk_logits({}) == {}
    with pytest.raises(ValueError, match="layer 2 must be a plain tensor of all heads, found None"):
        optimizer.qk_clip.reduce_qk_logits({2: None})
    other = (
        {key: logits[key] for key in ("a", 3)} if rank else {key: logits[key] for key in (3, "a")}
    )
    again = optimizer.qk_clip.reduce_qk_logits(other)
    assert again["a"].tolist() == [1.0, 1.0] and list(again) == list(other)


@on_ranks(2)
def test_plain_parameters_that_nobody_knows_to_be_shared() -> None:
    """A layer with a plain bias beside sharded weights, in whatever order; plain layers."""
    mesh = init_device_mesh("cpu", (2,))
    params, _ = plain_pair(mesh)
    bias = nn.Parameter(torch.ones(24))
    bias.grad = torch.zeros(24)
    names = ["layers.0.attention.wq.weight", "layers.0.attention.wk.weight"]
    groups = [
        {"params": [("layers.0.attention.wq.bias", bias)], "use_muon": False},
        {"params": params, "names": names, "use_muon": True},
    ]
    config = {"head_dim": 6, "threshold": THRESHOLD}
    optim = optimizer.Muon(groups, lr=0.0, clip_config=config)
    optim.step(qk_logits=Recorder(LOGITS, dist.get_rank(), 2).take())
    assert_clipped(params)
    torch.testing.assert_close(bias.detach(), expected_rows()[0])
    whole = [nn.Parameter(torch.ones(p.shape)) for p in params]
    for p in whole:
        p.grad = torch.zeros_like(p)
    group = {"params": whole, "names": names, "use_muon": True}
    optim = optimizer.Muon([group], lr=0.0, clip_config=config)
    reduced = optimizer.qk_clip.reduce_qk_logits({0: LOGITS})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optim.step(qk_logits=reduced)
    for p in whole:
        p.grad = torch.zeros_like(p)
    with pytest.warns(UserWarning, match="other ranks hold them too, as under DDP"):
        optim.step(qk_logits={0: LOGITS})


@on_ranks(3)
def test_a_rank_outside_of_the_mesh() -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    params, optim = plain_pair(mesh)
    optim.step(qk_logits={0: LOGITS})
    if dist.get_rank() < 2:
        assert_clipped(params)


# -- ranks that disagree -----------------------------------------------------------------------


def step_with(what: str) -> None:
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    params, optim = plain_pair(mesh)
    good = {0: LOGITS}
    logits = {
        "none on one rank": good if rank else None,
        "too few on one rank": good if rank else {0: LOGITS[:3]},
        "an unknown layer on one rank": good if rank else {**good, 5: LOGITS},
    }.get(what, good)
    if what == "another threshold on one rank":
        names = optim.names
        groups = [{**g, "names": n} for g, n in zip(optim.param_groups, names)]
        optim = optimizer.Muon(groups, lr=0.0, clip_config={"head_dim": 6, "threshold": 5 + rank})
    if what == "a recorder that fails on one rank" and rank == 0:
        optim.qk_recorder = FailingRecorder()
        logits = None
    try:
        optim.step(qk_logits=logits)
    finally:
        assert all((p.to_local() == 1).all() for p in params) and not optim.state


class FailingRecorder:
    def take(self):
        raise ValueError("no attention was seen")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("none on one rank", "QK-Clip of layer 0"),
        ("too few on one rank", "layer 0 "),
        ("an unknown layer on one rank", "qk_logits has 5"),
        ("another threshold on one rank", "threshold 5"),
        ("a recorder that fails on one rank", "no attention was seen"),
    ],
)
def test_all_ranks_raise_before_anything_moved(what, message):
    for outcome in rank_outcomes(step_with, 2, what):
        assert outcome.error == "ValueError"
        assert message in outcome.message


# -- models whose logits are recorded ------------------------------------------------------------


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Attention(16, 4, 2, 6) for _ in range(2))
        for param in self.parameters():
            param.data.mul_(2.0)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def shard(model: nn.Module, layout: str) -> dict[str, Any]:
    """Shards it; what its optimizer has to be told."""
    if layout == "DDP":
        return {"process_group": dist.group.WORLD}
    tp = 2 if "TP" in layout else 1
    mesh = init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
    if tp > 1:
        plan = {name: ColwiseParallel() for name in ("wq", "wk", "wv")}
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], {**plan, "wo": RowwiseParallel()})
    policy: dict[str, Any] = {}
    if layout == "offloaded":
        policy["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"], **policy)
    fully_shard(model, mesh=mesh["dp"], **policy)
    return {}


def train_recorded(layout: str, checkpointed: bool) -> None:
    """Two micro-batches a step, of which each data-parallel rank sees its part."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model, twin = Model(), Model()
    options = {"lr": 0.02, "clip_config": {"head_dim": 6, "threshold": 4.0}, **EXACT}
    told = shard(model, layout)
    if layout == "DDP":
        model = DistributedDataParallel(model)
    optims = []
    for m, more in ((model, told), (twin, {})):
        groups = optimizer.muon.get_default_muon_param_groups(m)
        optims.append(optimizer.Muon(groups, **options, **more))
        optims[-1].qk_recorder = optimizer.QKLogitRecorder(m)
    parts, part = (ranks // 2, rank // 2) if "TP" in layout else (ranks, rank)
    for step in range(3):
        x = torch.randn(2, 4, 5, 16, generator=torch.Generator().manual_seed(step))
        for micro in x:
            own = micro.chunk(parts)[part]
            forward = functools.partial(checkpoint, use_reentrant=False) if checkpointed else call
            forward(model, own).square().mean().backward()
            twin(micro).square().mean().backward()
        for optim in optims:
            optim.step()
            optim.zero_grad()
        ours, plain = (optim.qk_clip_stats() for optim in optims)
        assert plain["clipped"] > 0 and ours["clipped"] == plain["clipped"]
        assert ours["max_logit"] == pytest.approx(plain["max_logit"], rel=1e-5)
    for p, q in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(whole(p), q, rtol=1e-4, atol=1e-5)


def call(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [("FSDP2", 2), ("offloaded", 2), ("DDP", 2), ("TP", 2), ("FSDP2 over TP", 4)],
)
def test_models_on_ranks_are_clipped_as_one_model_is(layout, ranks):
    run_ranks(train_recorded, ranks, layout, checkpointed=layout == "FSDP2")
