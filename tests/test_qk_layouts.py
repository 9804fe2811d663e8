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

from breaking import refused
from counters import count
from kernel import optimizer
from layouts import EXACT, Group, Twins, Weight, case, part, whole
from models import Attention
from ranks import on_ranks, run_ranks

THRESHOLD = 6.0
HEADS = 4
LOGITS = torch.tensor([3.0, 7.5, 24.0, 600.0])  # one too small, one clipped to a hundredth


class Recorder:
    """Has seen every so many heads' largest logit, on each rank those of others."""

    def __init__(self, rank: int, ranks: int):
        seen = torch.arange(HEADS) % ranks == rank
        self.logits = torch.where(seen, LOGITS, LOGITS.clamp(max=1.0) - rank)

    def take(self) -> dict[int, torch.Tensor]:
        return {0: self.logits}


GROUPED = {"head_dim": 6}
LATENT = {"is_mla": True, "qk_nope_head_dim": 3, "qk_rope_head_dim": 2, "v_head_dim": 4}
FUSED = {"head_dim": 4, "row_map": {"wqkv": "(group (q=8 + k=4 + v=4)) dim"}}

# Names and shapes, of weights, then of biases.
KINDS = {
    "grouped": (GROUPED, {"wq.weight": (24, 16), "wk.weight": (12, 16)}, {"wk.bias": (12,)}),
    "latent": (LATENT, {"wq_b.weight": (20, 16), "wkv_b.weight": (28, 16)}, {"wq_b.bias": (20,)}),
    "fused": (FUSED, {"wqkv.weight": (32, 16)}, {"wqkv.bias": (32,)}),
    "three dimensions": (GROUPED, {"wq": (4, 6, 16), "wk": (2, 6, 16)}, {}),
}


def groups_of(kind: str, mesh: Any, dims: tuple[Any, ...], **options: Any) -> list[Group]:
    _, weights, biases = KINDS[kind]
    dtype = options.pop("dtype", torch.float32)

    def group(shapes: dict[str, tuple[int, ...]], **of_group: Any) -> Group:
        placed = [Weight(shape, mesh, dims, dtype=dtype) for shape in shapes.values()]
        return Group(placed, of_group, [f"layers.0.attention.{name}" for name in shapes])

    groups = [group(weights, **options)]
    return [*groups, group(biases, use_muon=False)] if biases and 1 not in dims else groups


MESHES = {2: [(2,)], 3: [(3,)], 4: [(4,), (2, 2)]}
VARIANTS: list[dict[str, Any]] = [
    {"dtype": torch.bfloat16, "momentum_dtype": torch.float32},
]


def step_clipped(ranks: int) -> None:
    """Every kind on every mesh, cut in every way; and whole, in a process group."""
    cuts: list[Any] = [
        (sizes, dims, {})
        for sizes in MESHES[ranks]
        for dims in itertools.product((None, 0, 1), repeat=len(sizes))
    ]
    cuts += [((ranks,), (0,), of_group) for of_group in VARIANTS]
    cuts.append((None, (), {}))
    splits = [((ranks,), (0,), {"split": split}) for split in ([16, 8, 8], 4)]
    for kind, (config, _, _) in KINDS.items():
        for sizes, dims, of_group in cuts + splits if kind == "fused" else cuts:
            with case(f"{kind} on {sizes}, {dims}, {of_group}"):
                options = {**EXACT, "expert_keys": ["wq", "wk"], "chunk_size": 1}
                options["clip_config"] = {"threshold": THRESHOLD, **config}
                told = {} if sizes else {"process_group": dist.group.WORLD}
                groups = groups_of(kind, sizes, dims, **of_group)
                twins = Twins.placed(groups, {**options, **told}, options)
                twins.ours.qk_recorder = Recorder(dist.get_rank(), ranks)
                twins.reference.qk_recorder = Recorder(0, 1)
                twins.step()
                twins.compare()
                ours, plain = (o.qk_clip_stats() for o in (twins.ours, twins.reference))
                assert ours == plain and ours["total_clipped"] == 9


@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def test_rows_columns_strides_and_replicas_are_clipped_as_on_one_device(ranks):
    run_ranks(step_clipped, ranks, ranks)


@on_ranks(2)
def test_a_bias_whose_rows_ranks_divide_is_scaled_with_its_own_heads() -> None:
    """By AdamW in ZeRO-2, where each rank updates half of it."""
    groups = [Group([Weight((1024, 2))], {}, ["0.wq.weight"])]
    groups.append(Group([Weight((1024,))], {"use_muon": False}, ["0.wq.bias"]))
    options = {**EXACT, "clip_config": {"head_dim": 256, "threshold": THRESHOLD}}
    told = {"process_group": dist.group.WORLD, "grad_reduce": "mean"}
    twins = Twins.placed(groups, {**options, **told}, options)
    twins.ours.qk_recorder = twins.reference.qk_recorder = Recorder(0, 1)
    twins.step_and_compare()


# -- how logits come ---------------------------------------------------------------------------


PAIR = ["layers.0.attention.wq.weight", "layers.0.attention.wk.weight"]
CONFIG = {"head_dim": 6, "threshold": THRESHOLD}


def plain_pair(mesh: DeviceMesh, dims: Sequence[int] = (0,)) -> tuple[list[nn.Parameter], Any]:
    """Makes a query and a key projection of ones, and their optimizer."""
    shapes, placements = [(24, 16), (12, 16)], [Shard(dim) for dim in dims]
    params = [nn.Parameter(part(torch.ones(shape), mesh, placements)) for shape in shapes]
    for p in params:
        p.grad = torch.zeros_like(p)
    group = {"params": params, "names": PAIR, "use_muon": True, "none_grad": False}
    return params, optimizer.Muon([group], lr=0.0, clip_config=CONFIG)


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


@pytest.mark.filterwarnings("ignore:clip_config")
@on_ranks(2)
def test_maxima_of_all_layers_travel_in_one_collective() -> None:
    mesh = init_device_mesh("cpu", (2,))
    names = [f"layers.{layer}.{name}.weight" for layer in range(6) for name in ("wq", "wk")]
    params = [nn.Parameter(part(torch.ones(16, 8), mesh, [Shard(0)])) for _ in names]
    for p in params:
        p.grad = torch.zeros_like(p)
    group = {"params": params, "names": names, "use_muon": True, "none_grad": False}
    optim = optimizer.Muon([group], clip_config={"head_dim": 4})
    optim.step()
    without, with_logits = (
        count(lambda: optim.step(qk_logits=logits)).messages  # noqa: B023
        for logits in (None, {layer: torch.ones(4) for layer in range(6)})
    )
    (added,) = [c for c in with_logits if "allreduce" in c.name.replace("_", "")]
    assert len(with_logits) == len(without) + 1
    assert added.sent == 2 * 4 * (6 * 4) / 2  # fp32


@on_ranks(2)
def test_reducing_by_hand() -> None:
    rank = dist.get_rank()
    logits = {"a": torch.tensor([1.0, rank]), 3: torch.tensor([-rank, torch.inf, 2.0])}
    logits["n"] = torch.tensor([torch.nan if rank == 1 else 5.0]).bfloat16()
    reduced = optimizer.qk_clip.reduce_qk_logits(logits)
    expected = {"a": [1.0, 1.0], 3: [0.0, torch.inf, 2.0], "n": [torch.inf]}
    assert [(key, value.tolist()) for key, value in reduced.items()] == [*expected.items()]
    assert logits["a"].tolist() == [1.0, rank]
    assert optimizer.qk_clip.reduce_qk_logits({}) == {}
    with pytest.raises(ValueError, match=r"layer 2 .*None"):
        optimizer.qk_clip.reduce_qk_logits({2: None})
    other = {key: logits[key] for key in (("a", 3) if rank else (3, "a"))}
    again = optimizer.qk_clip.reduce_qk_logits(other)
    assert again["a"].tolist() == [1.0, 1.0] and list(again) == list(other)


@on_ranks(2)
def test_plain_parameters_that_nobody_knows_to_be_shared() -> None:
    """A layer with a plain bias beside sharded weights, in whatever order; plain layers."""
    mesh = init_device_mesh("cpu", (2,))
    params, _ = plain_pair(mesh)
    bias = nn.Parameter(torch.ones(24))
    bias.grad = torch.zeros(24)
    groups = [
        {"params": [("layers.0.attention.wq.bias", bias)], "use_muon": False},
        {"params": params, "names": PAIR, "use_muon": True},
    ]
    optim = optimizer.Muon(groups, lr=0.0, clip_config=CONFIG)
    optim.step(qk_logits=Recorder(dist.get_rank(), 2).take())
    assert_clipped(params)
    torch.testing.assert_close(bias.detach(), expected_rows()[0])
    whole = [nn.Parameter(torch.ones(p.shape)) for p in params]
    for p in whole:
        p.grad = torch.zeros_like(p)
    group = {"params": whole, "names": PAIR, "use_muon": True}
    optim = optimizer.Muon([group], lr=0.0, clip_config=CONFIG)
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


class FailingRecorder:
    def take(self) -> Any:
        raise ValueError("no attention was seen")


GOOD = {0: LOGITS}
# What one rank has instead of these logits or options, and words of the error on both.
ODD: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({"logits": None}, "QK-Clip of layer 0"),
    "too few": ({"logits": {0: LOGITS[:3]}}, "layer 0 "),
    "an unknown layer": ({"logits": {**GOOD, 5: LOGITS}}, "qk_logits has 5"),
    "another threshold": ({"threshold": 5}, "threshold 5"),
    "a recorder that fails": ({"recorder": FailingRecorder()}, "no attention was seen"),
}


@pytest.mark.parametrize("odd", ODD)
@on_ranks(2)
def test_what_one_rank_has_otherwise_raises_on_all_before_anything_moved(odd: str) -> None:
    own, words = ODD[odd]
    own = own if dist.get_rank() == 0 else {}
    params, _ = plain_pair(init_device_mesh("cpu", (2,)))
    group = {"params": params, "names": PAIR, "use_muon": True}
    config = {"head_dim": 6, "threshold": own.get("threshold", THRESHOLD)}
    optim = optimizer.Muon([group], lr=0.0, clip_config=config)
    optim.qk_recorder = own.get("recorder")
    refused(optim, words, qk_logits=None if "recorder" in own else own.get("logits", GOOD))


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


def shard(model: Any, layout: str) -> dict[str, Any]:
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
    if "offloaded" in layout:
        policy["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    of_projections = [layer.wq for layer in model.layers if "of projections" in layout]
    for module in (*of_projections, *model.layers, model):
        fully_shard(module, mesh=mesh["dp"], **policy)
    return {}


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ("FSDP2, checkpointed", 2),
        ("FSDP2 of projections, offloaded, hooked before", 2),
        ("DDP", 2),
        ("TP", 2),
        ("FSDP2 over TP, hooked before", 4),
        ("FSDP2 of projections over TP", 4),
        pytest.param("FSDP2 over TP, checkpointed", 4, marks=pytest.mark.slow),
    ],
)
def test_models_on_ranks_are_clipped_as_one_model_is(layout, ranks):
    run_ranks(train_recorded, ranks, layout)


def train_recorded(layout: str) -> None:
    """Two micro-batches a step, of which each data-parallel rank sees its part."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model, twin = Model(), Model()
    recorders = [optimizer.QKLogitRecorder(m) for m in (model, twin)]
    told = shard(model, layout)
    called: Any = DistributedDataParallel(model) if layout == "DDP" else model
    if "hooked before" not in layout:
        recorders[0] = optimizer.QKLogitRecorder(called)
    if "checkpointed" in layout:
        called = functools.partial(checkpoint, called, use_reentrant=False)
    options = {"lr": 0.02, "clip_config": {"head_dim": 6, "threshold": 4.0}, **EXACT}
    optims = []
    for m, more, recorder in zip((model, twin), (told, {}), recorders):
        groups = optimizer.muon.get_default_muon_param_groups(m)
        optims.append(optimizer.Muon(groups, **options, **more))
        optims[-1].qk_recorder = recorder
    shards, own = (ranks // 2, rank // 2) if "TP" in layout else (ranks, rank)
    for step in range(3):
        for micro in torch.randn(2, 4, 5, 16, generator=torch.Generator().manual_seed(step)):
            called(micro.chunk(shards)[own]).square().mean().backward()
            twin(micro).square().mean().backward()
        for optim in optims:
            optim.step()
            optim.zero_grad()
        ours, plain = (optim.qk_clip_stats() for optim in optims)
        assert plain["clipped"] > 0 and ours["clipped"] == plain["clipped"]
        assert ours["max_logit"] == pytest.approx(plain["max_logit"], rel=1e-5)
    for p, q in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(whole(p), q, rtol=1e-4, atol=1e-5)
