"""Plain parameters that all ranks hold: under DDP, and in ZeRO-2 without it.

Gradients are small integers, whose sums over ranks are exact in every format and order, so Muon's
matrices are those of one process bit for bit, as on other layouts.
"""

from __future__ import annotations

import copy
import hashlib
import pickle
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import reference as ref
from counters import count
from kernel import optimizer
from layouts import (
    ADAMW_ROUNDING,
    EXACT,
    STEPS,
    VARIANTS,
    Group,
    Twins,
    Weight,
    assert_same,
    backward,
    case,
    local,
    make,
    part_for,
    set_gradients,
    whole,
)
from models import Model
from ranks import DEVICE, rank_outcomes, run_ranks

pytestmark = pytest.mark.usefixtures("traced")

SLOW = pytest.mark.slow
KINDS = ("DDP", "ZeRO-2")


def options_of(kind: str, group: Any = None) -> dict[str, Any]:
    group = dist.group.WORLD if group is None else group
    return {"process_group": group, "grad_reduce": "mean" if kind == "ZeRO-2" else None}


def integers(shape: Any, dtype: torch.dtype, *seed: int) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(hash(seed) % 2**63)
    return torch.randint(-8, 9, tuple(shape), generator=generator).to(dtype)


def give_gradients(twins: Twins, kind: str, step: int, group: Any = None, absent: Any = ()) -> None:
    """To the twin the mean; to ours the mean under DDP, and in ZeRO-2 this rank's own."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    for index, (_, p, q) in enumerate(twins.pairs):
        if index in absent:
            continue
        each = [integers(p.shape, p.dtype, step, index, r) for r in range(ranks)]
        q.grad = sum(each) / ranks
        p.grad = each[rank] if kind == "ZeRO-2" else q.grad.clone()


def assert_replicas_alike(twins: Twins, group: Any = None) -> None:
    """All ranks hold the same bits."""
    digests = [hashlib.sha256() for _ in twins.pairs]
    for digest, (_, p, _) in zip(digests, twins.pairs):
        digest.update(p.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, [digest.hexdigest() for digest in digests], group=group)
    assert all(other == found[0] for other in found)


MATRICES = [
    Group([Weight(shape) for shape in ((16, 24), (20, 8), (3, 12), (1, 8), (8, 30), (24, 12))]),
    Group([Weight((5, 8, 12)), Weight((12, 4, 3))], {"lr": 0.01}),
    Group([Weight((24, 16)), Weight((24, 8))], {"split": [8, 16]}),
    Group([Weight((12, 4, 3, 1)), Weight((8, 2, 2, 3))], {"flatten": True}),
    Group([Weight((16, 12), dtype=torch.bfloat16)], {"momentum_dtype": torch.float32}),
]
CASES = {
    "many": MATRICES,
    "one matrix": [Group([Weight((12, 20))])],
    "fewer rows than ranks": [Group([Weight((1, 12)), Weight((3, 4)), Weight((2, 20))])],
    "nothing in it": [Group([Weight((0, 4)), Weight((4, 0)), Weight((8, 4))]), Group([])],
}


def step_replicated(kind: str, cases: Any) -> None:
    for name, groups, options in cases:
        with case(f"{name}, {options}"):
            ours = {**options, **options_of(kind)}
            twins = Twins.placed(groups, {}, ours, reference=options)
            for step in range(STEPS):
                give_gradients(twins, kind, step)
                twins.ours.step()
                twins.reference.step()
            twins.compare()
            assert_replicas_alike(twins)
            for _, p, _ in twins.pairs:
                momentum = twins.ours.state[p]["momentum_buffer"]
                assert isinstance(momentum, DTensor)
                assert momentum.placements == (Shard(0),)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, *(pytest.param(n, marks=SLOW) for n in (3, 4, 8))])
def test_replicated_matrices_take_the_steps_of_one_process(kind, ranks):
    variants = [options for options in VARIANTS if "use_distributed_muon" not in options]
    variants = variants if ranks in (3, 4) else variants[ranks % 2 :: 2]
    varied = [("many", MATRICES, {**EXACT, **variant}) for variant in variants]
    varied += [(name, groups, {**EXACT, "beta2": 0.9}) for name, groups in CASES.items()]
    run_ranks(step_replicated, ranks, kind, varied)


def train_under_ddp() -> None:
    model = Model()
    twin = copy.deepcopy(model)
    options = {"ns_dtype": torch.float32, "comm_dtype": torch.float32}
    wrapped = DistributedDataParallel(model)
    names = [name for name, _ in model.named_parameters()]
    pairs = list(zip(names, model.parameters(), twin.parameters()))
    ours = make(wrapped, **options, process_group=dist.group.WORLD)
    twins = Twins(ours, make(twin, **options), pairs)
    twins.train_and_compare(lambda step: backward(wrapped, step))
    assert_replicas_alike(twins)


@pytest.mark.parametrize("ranks", [2, 4, pytest.param(8, marks=SLOW)])
def test_a_model_under_ddp(ranks):
    run_ranks(train_under_ddp, ranks)


def train_zero2() -> None:
    """Without a wrapper: the twin's gradients are added up rank by rank, and divided."""
    model = Model()
    twin = copy.deepcopy(model)
    ours = make(model, **EXACT, **options_of("ZeRO-2"))
    reference = make(twin, **EXACT)
    names = [name for name, _ in model.named_parameters()]
    twins = Twins(ours, reference, list(zip(names, model.parameters(), twin.parameters())))
    for step in range(STEPS):
        backward(model, step)
        for _, p, q in twins.pairs:
            every = [torch.empty_like(p) for _ in range(dist.get_world_size())]
            dist.all_gather(every, p.grad)
            q.grad = torch.stack(every).double().mean(0).float()
        ours.step()
        reference.step()
        ours.zero_grad()
    for name, p, q in twins.pairs:
        assert_same(name, p, q, 2e-4)  # the order of sums over ranks is the backend's
    assert_replicas_alike(twins)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_model_in_zero2_without_a_wrapper(ranks):
    run_ranks(train_zero2, ranks)


# -- AdamW's parameters ----------------------------------------------------------------------------

SHAPES_OF_ADAMW = [(50, 40), (64,), (), (2000,), (7, 300), (3, 500), (1, 2048), (0, 5)]


def step_with_adamw(kind: str) -> None:
    torch.manual_seed(0)
    shapes = [(16, 24), (9, 8)]
    whole_params = [nn.Parameter(torch.randn(s)) for s in [*shapes, *SHAPES_OF_ADAMW]]
    frozen = nn.Parameter(torch.randn(40, 40), requires_grad=False)
    params = [nn.Parameter(p.detach().clone()) for p in whole_params]

    def groups(all_params):
        muon, adamw = all_params[: len(shapes)], all_params[len(shapes) :]
        return [
            {"params": muon, "use_muon": True},
            {"params": [*adamw, nn.Parameter(frozen.clone(), False)], "use_muon": False},
        ]

    ours = optimizer.Muon(groups(params), lr=0.02, **EXACT, **options_of(kind))
    reference = optimizer.Muon(groups(whole_params), lr=0.02, **EXACT)
    names = [str(tuple(p.shape)) for p in params]
    twins = Twins(ours, reference, list(zip(names, params, whole_params)))
    for step in range(STEPS + 1):
        # Unused on all ranks: a matrix, and one of AdamW's that is divided.
        give_gradients(twins, kind, step, absent=(1, 2) if step == 1 else ())
        ours.step()
        reference.step()
        ours.zero_grad()
        reference.zero_grad()
    for (name, p, q), muon in zip(twins.pairs, [True] * len(shapes) + [False] * 99):
        assert_same(name, p, q, 0.0 if muon else ADAMW_ROUNDING)
        for key, value in reference.state[q].items():
            found = ours.state[p][key]
            assert_same(f"{key} of {name}", whole(found), value, 0.0 if muon else ADAMW_ROUNDING)
    assert_replicas_alike(twins)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 4, pytest.param(8, marks=SLOW)])
def test_adamws_parameters_beside_frozen_and_unused_ones(kind, ranks):
    run_ranks(step_with_adamw, ranks, kind)


def state_bytes(kind: str) -> tuple[int, int]:
    """What this rank holds, and what one process would."""
    torch.manual_seed(0)
    d, vocabulary = 768, 4096
    shapes = [(d, d), (d, d), (4 * d, d), (d, 4 * d)] * 2
    others = [(vocabulary, d), (vocabulary, d), (d,), (d,), (1,)]
    muon, adamw = ([nn.Parameter(torch.zeros(s)) for s in some] for some in (shapes, others))
    groups = [
        {"params": muon, "use_muon": True, "beta2": 0.95},
        {"params": adamw, "use_muon": False},
    ]
    optim = optimizer.Muon(groups, **options_of(kind))
    optim.state_dict()
    held = total = 0
    for state in optim.state.values():
        for value in state.values():
            held += local(value).nbytes
            total += value.nbytes
    return held, total


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_state_in_zero2_is_an_equal_share(ranks):
    for held, total in run_ranks(state_bytes, ranks, "ZeRO-2"):
        assert held <= 1.01 * total / ranks


# -- replicas of shards ---------------------------------------------------------------------------


def step_shards(sizes: tuple[int, ...], dims: tuple[Any, ...], hsdp: str) -> list[Any]:
    """Digests of what this rank holds after some steps in the default formats."""
    names = ("replicas", "shards")
    mesh = init_device_mesh(DEVICE, sizes, mesh_dim_names=names)
    shapes = [(48, 64), (32, 96), (40, 40), (6, 24, 32)]
    groups = [Group([Weight(shape, sizes, dims) for shape in shapes], {"beta2": 0.9})]
    twins = Twins.placed(groups, {sizes: mesh}, {"hsdp": hsdp}, reference={})
    twins.step()
    for name, p, q in twins.pairs:
        assert_same(name, p, q, 0.02)
    held = [
        (name, [p.to_local(), *(value.to_local() for value in twins.ours.state[p].values())])
        for name, p, _ in twins.pairs
    ]
    digests = [
        (name, [hashlib.sha256(t.detach().flatten().numpy().tobytes()).hexdigest() for t in of])
        for name, of in held
    ]
    coordinate = mesh.get_coordinate()
    return [coordinate[dims.index(0)], digests]


@pytest.mark.slow
@pytest.mark.parametrize("hsdp", ["spread", "redundant", "auto"])
@pytest.mark.parametrize(
    ("sizes", "dims"),
    [((2, 2), (None, 0)), pytest.param((4, 2), (None, 0), marks=SLOW), ((2, 2), (0, None))],
    ids=str,
)
def test_replicas_of_shards_hold_the_same_bits_in_the_default_formats(sizes, dims, hsdp):
    """HSDP, and replicas on a mesh of tensor parallelism."""
    of_shard: dict[int, Any] = {}
    for shard, digests in run_ranks(step_shards, sizes[0] * sizes[1], sizes, dims, hsdp):
        assert of_shard.setdefault(shard, digests) == digests
    assert len(of_shard) == sizes[dims.index(0)]


# -- groups of some ranks, and other layouts beside them -------------------------------------------


def step_on_half_of_the_ranks(kind: str) -> None:
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("pp", "dp"))
    for group in (mesh["dp"].get_group(), mesh["dp"]):  # both are taken
        plain = mesh["dp"].get_group()
        stage = mesh.get_coordinate()[0]
        groups = [Group([Weight((16, 24)), Weight((12 + 4 * stage, 8)), Weight((3, 20))])]
        twins = Twins.placed(groups, {}, {**EXACT, **options_of(kind, group)}, reference=EXACT)
        for step in range(STEPS):
            give_gradients(twins, kind, step, plain)
            twins.ours.step()
            twins.reference.step()
        twins.compare()
        assert_replicas_alike(twins, plain)


@pytest.mark.parametrize("kind", KINDS)
def test_each_stage_of_a_pipeline_has_its_own_replicas(kind):
    run_ranks(step_on_half_of_the_ranks, 4, kind)


def step_beside_dtensors(kind: str) -> None:
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    groups = [Group([Weight((16, 24)), Weight((16, 12), mesh.shape, (0,)), Weight((6, 8, 12))])]
    options = {**EXACT, **options_of("DDP")}
    twins = Twins.placed(groups, {tuple(mesh.shape): mesh}, options, reference=EXACT)
    if kind == "DDP":
        twins.step_and_compare()
        return
    twins.ours = beside_zero2(twins)
    for step in range(STEPS):
        for index, (_, p, q) in enumerate(twins.pairs):
            each = [integers(q.shape, q.dtype, step, index, r) for r in range(mesh.size())]
            q.grad = sum(each) / mesh.size()
            p.grad = each[dist.get_rank()]
            if isinstance(p, DTensor):  # whose gradients FSDP2 has averaged
                p.grad = part_for(p, q.grad)
        twins.ours.step()
        twins.reference.step()
    twins.compare()


def beside_zero2(twins: Twins) -> Any:
    groups = [{"params": [p for _, p, _ in twins.pairs], "use_muon": True}]
    groups[0]["names"] = [name for name, _, _ in twins.pairs]
    return optimizer.Muon(groups, lr=0.02, expert_keys=["experts"], **EXACT, **options_of("ZeRO-2"))


@pytest.mark.parametrize("kind", KINDS)
def test_replicated_matrices_beside_sharded_ones(kind):
    run_ranks(step_beside_dtensors, 4, kind)


def step_beside_replicated_dtensors(order: tuple[int, ...]) -> None:
    """Of one shape, and all on each rank, but only the plain ones divide their momentum."""
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    kinds = [Weight((16, 24)), Weight((16, 24), tuple(mesh.shape), (None,))]
    options = {**EXACT, **options_of("DDP"), "hsdp": "spread"}
    groups = [Group([kinds[number] for number in order])]
    twins = Twins.placed(groups, {tuple(mesh.shape): mesh}, options, reference=EXACT)
    twins.step_and_compare()


@pytest.mark.parametrize("order", [(0, 0, 1, 1), (1, 1, 0, 0)], ids=str)
def test_replicated_matrices_beside_replicated_dtensors(order):
    run_ranks(step_beside_replicated_dtensors, 2, order)


def step_beside_tensor_parallelism(kind: str, check: str) -> None:
    """Each column of the mesh is a process group; its rows exchange matrices as well."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
    group, tp = mesh["dp"].get_group(), mesh["tp"]
    torch.manual_seed(0)
    whole_params = [nn.Parameter(torch.randn(s)) for s in [(16, 24), (12, 8), (64, 32), (7,)]]
    params = [nn.Parameter(p.detach().clone()) for p in whole_params]
    params[0] = nn.Parameter(distribute_tensor(params[0].detach(), tp, [Shard(0)]))
    names = [str(tuple(p.shape)) for p in whole_params]

    def make(of: Any, **options: Any) -> Any:
        groups = [{"params": of[:2], "use_muon": True}, {"params": of[2:], "use_muon": False}]
        return optimizer.Muon(groups, lr=0.02, consistency_check=check, **EXACT, **options)

    ours, reference = make(params, **options_of(kind, group)), make(whole_params)
    twins = Twins(ours, reference, list(zip(names, params, whole_params)))
    for step in range(STEPS):
        give_gradients(twins, kind, step, group)
        params[0].grad = part_for(params[0], whole_params[0].grad)
        ours.step()
        reference.step()
    twins.compare()


@pytest.mark.parametrize("check", ["step", "off"])
@pytest.mark.parametrize("kind", KINDS)
def test_replicas_of_each_tensor_parallel_rank(kind, check):
    run_ranks(step_beside_tensor_parallelism, 4, kind, check)


# -- what is wrong ---------------------------------------------------------------------------------


def without_a_gradient_on_rank_1(kind: str, use_muon: bool, missing: str) -> None:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(64, 32)) for _ in range(2)]
    groups = [{"params": params, "names": ["a", "b"], "use_muon": use_muon}]
    optim = optimizer.Muon(groups, missing_grad=missing, **EXACT, **options_of(kind))
    before = [p.detach().clone() for p in params]
    for index, p in enumerate(params):
        if index or dist.get_rank() != 1:
            p.grad = integers(p.shape, p.dtype, index)
    try:
        optim.step()
    except ValueError:
        assert all(torch.equal(p, b) for p, b in zip(params, before))
        assert not any(optim.state.values())
        raise
    mean = 0.75 if kind == "ZeRO-2" else 1.0  # zeros count
    key = "momentum_buffer" if use_muon else "exp_avg"
    expected = integers(params[0].shape, torch.float32, 0) * mean * (1 if use_muon else 0.1)
    if kind == "ZeRO-2":
        assert_same(key, whole(optim.state[params[0]][key]), expected, 1e-6)


@pytest.mark.parametrize("use_muon", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_missing_on_one_replica_raises_on_all(kind, use_muon):
    for outcome in rank_outcomes(without_a_gradient_on_rank_1, 4, kind, use_muon, "raise"):
        assert outcome.error == "ValueError"
        assert "a on ranks [1]" in outcome.message


@pytest.mark.parametrize("use_muon", [True, False])
def test_a_gradient_missing_on_one_replica_counts_as_zeros_if_told_so(use_muon):
    run_ranks(without_a_gradient_on_rank_1, 4, "ZeRO-2", use_muon, "zero")


def absent_under_ddp(on_rank_0: bool) -> None:
    torch.manual_seed(0)
    matrix, other = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))
    groups = [
        {"params": [matrix], "use_muon": True},
        {"params": [other], "names": ["a"], "use_muon": False},
    ]
    optim = optimizer.Muon(groups, missing_grad="zero", **EXACT, **options_of("DDP"))
    matrix.grad = torch.ones(4, 4)
    if on_rank_0 and dist.get_rank() == 0:
        other.grad = torch.ones(4, 4)
    optim.step()


def test_zeros_on_one_replica_only_would_part_adamws_under_ddp():
    run_ranks(absent_under_ddp, 2, False)
    for outcome in rank_outcomes(absent_under_ddp, 2, True):
        assert outcome.error == "ValueError"
        assert "a on ranks [1]" in outcome.message


def absent_in_a_replica(layout: str) -> None:
    """Of a matrix, with ``missing_grad="zero"``, where replicas don't average."""
    mesh = init_device_mesh(DEVICE, (2, 2))
    torch.manual_seed(0)
    weight, options = torch.randn(16, 24), dict(options_of("DDP"), missing_grad="zero")
    if layout != "DDP":
        placements = [Replicate(), Shard(0) if layout == "HSDP" else Replicate()]
        weight = distribute_tensor(weight, mesh, placements)
        options = {"missing_grad": "zero"}
    for absent in ((), (0, 1, 2, 3), (1, 3), (2, 3)):
        param = nn.Parameter(weight.clone())
        optim = optimizer.Muon([{"params": [param], "names": ["a"], "use_muon": True}], **options)
        before = param.detach().clone()
        if dist.get_rank() not in absent:
            param.grad = torch.ones_like(param)
        # Shards without a gradient are zeros; both replicas of them have none.
        if len(absent) % 4 == 0 or (layout == "HSDP" and absent == (1, 3)):
            optim.step()
            continue
        with pytest.raises(ValueError, match=r"a on ranks \[.*grad_reduce"):
            optim.step()
        assert torch.equal(whole(param), whole(before))
        assert not any(optim.state.values())


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["DDP", "HSDP", "replicated DTensors"])
def test_zeros_on_one_replica_only_would_part_replicas(layout):
    run_ranks(absent_in_a_replica, 4, layout)


def after_the_process_group(kind: str) -> None:
    param = nn.Parameter(torch.ones(8, 4))
    optim = optimizer.Muon([{"params": [param], "use_muon": True}], **options_of(kind))
    param.grad = torch.ones(8, 4)
    optim.step()
    dist.barrier()
    dist.destroy_process_group()
    before = param.detach().clone()
    param.grad = torch.ones(8, 4)
    with pytest.raises(ValueError, match="process_group was destroyed"):
        optim.step()
    assert torch.equal(param, before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_destroyed_process_group_is_refused(kind):
    run_ranks(after_the_process_group, 2, kind)


def test_grad_reduce_needs_a_process_group():
    groups = [{"params": [nn.Parameter(torch.zeros(4, 4))], "use_muon": True}]
    with pytest.raises(ValueError, match="process_group"):
        optimizer.Muon(groups, grad_reduce="mean")
    with pytest.raises(ValueError, match="grad_reduce must be"):
        optimizer.Muon(groups, grad_reduce="sum")
    for group in ("world", 3, [0, 1]):
        with pytest.raises(ValueError, match="process_group must be"):
            optimizer.Muon(groups, process_group=group)
    with pytest.raises(ValueError, match="process_group"):
        optimizer.Muon([{**groups[0], "process_group": None}])


def with_a_group_of_others() -> None:
    others = dist.new_group([1])
    groups = [{"params": [nn.Parameter(torch.zeros(4, 4))], "use_muon": True}]
    if dist.get_rank() == 0:
        with pytest.raises(ValueError, match="process_group must be"):
            optimizer.Muon(groups, process_group=others)


def test_a_process_group_without_this_rank_is_refused():
    run_ranks(with_a_group_of_others, 2)


def without_an_adamw_gradient_on_a_replica(missing: str) -> None:
    mesh = init_device_mesh(DEVICE, (2, 2))
    weight = torch.zeros(8, 4)
    param = nn.Parameter(distribute_tensor(weight, mesh, [Replicate(), Shard(0)]))
    group = {"params": [param], "names": ["a"], "use_muon": False}
    optim = optimizer.Muon([group], missing_grad=missing)
    if dist.get_rank() != 3:
        param.grad = part_for(param, weight + 1)
    optim.step()


@pytest.mark.parametrize("missing", ["raise", "zero"])
def test_adamws_gradient_missing_on_one_replica_of_a_shard_raises_on_all(missing):
    for outcome in rank_outcomes(without_an_adamw_gradient_on_a_replica, 4, missing):
        assert outcome.error == "ValueError"
        assert "a on ranks [3]" in outcome.message


def that_were_not_averaged(kind: str, seed_of_weights: int) -> None:
    torch.manual_seed(seed_of_weights * dist.get_rank())
    params = [nn.Parameter(torch.randn(16, 8)), nn.Parameter(torch.randn(30))]
    groups = [
        {"params": params[:1], "names": ["a"], "use_muon": True},
        {"params": params[1:], "names": ["b"], "use_muon": False},
    ]
    optim = optimizer.Muon(groups, **options_of(kind))
    before = [p.detach().clone() for p in params]
    for p in params:
        p.grad = torch.full_like(p, 1.0 + dist.get_rank())
    try:
        optim.step()
    finally:
        same = [torch.equal(p, b) for p, b in zip(params, before)]
        assert all(same) == (kind == "DDP" or seed_of_weights > 0)


@pytest.mark.parametrize("kind", KINDS)
def test_other_weights_on_a_rank_raise_before_the_first_step(kind):
    for outcome in rank_outcomes(that_were_not_averaged, 2, kind, 1):
        assert outcome.error == "ValueError"
        assert "a has other weights on rank 1" in outcome.message


def whose_sums_were_rounded_otherwise() -> None:
    param = nn.Parameter(torch.ones(16, 8))
    optim = optimizer.Muon([{"params": [param], "use_muon": True}], **options_of("DDP"))
    param.grad = torch.full_like(param, 1.0 + 1e-6 * dist.get_rank())
    optim.step()
    assert not torch.equal(param, torch.ones(16, 8))


def test_averaged_gradients_may_differ_between_ranks_by_rounding():
    run_ranks(whose_sums_were_rounded_otherwise, 2)


def test_gradients_that_nobody_averaged_raise_before_the_first_step():
    for outcome in rank_outcomes(that_were_not_averaged, 2, "DDP", 0):
        assert outcome.error == "ValueError"
        assert 'grad_reduce="mean"' in outcome.message
    run_ranks(that_were_not_averaged, 2, "ZeRO-2", 0)


def with_other_parameters(kind: str) -> None:
    rows = 8 if dist.get_rank() else 12
    groups = [{"params": [nn.Parameter(torch.zeros(rows, 4))], "names": ["a"], "use_muon": True}]
    optim = optimizer.Muon(groups, **options_of(kind))
    groups[0]["params"][0].grad = torch.ones(rows, 4)
    optim.step()


@pytest.mark.parametrize("kind", KINDS)
def test_other_parameters_on_another_rank_raise_on_all(kind):
    for outcome in rank_outcomes(with_other_parameters, 3, kind):
        assert outcome.error == "ValueError"
        assert "would do different things" in outcome.message


def with_other_gradients(kind: str) -> None:
    param = nn.Parameter(torch.zeros(64, 32, dtype=torch.bfloat16))
    optim = optimizer.Muon([{"params": [param], "use_muon": True}], **options_of(kind))
    for _ in range(2):
        param.grad = torch.ones_like(param)
        optim.step()
    if dist.get_rank() == 1:
        param.grad_dtype = torch.float32
    param.grad = torch.ones_like(param, dtype=param.grad_dtype)
    optim.step()


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="gradients have one dtype")
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_another_dtype_on_another_rank_raise_on_all(kind):
    for outcome in rank_outcomes(with_other_gradients, 2, kind):
        assert outcome.error == "ValueError"
        assert "gradients torch.float32" in outcome.message


# -- copies ----------------------------------------------------------------------------------------


def copied_and_pickled(kind: str) -> None:
    groups = [Group([Weight((16, 24)), Weight((12, 8))])]
    twins = Twins.placed(groups, {}, {**EXACT, **options_of(kind)}, reference=EXACT)
    give_gradients(twins, kind, 0)
    twins.ours.step()
    copied = copy.deepcopy(twins.ours)
    assert copied.process_group is dist.group.WORLD
    pickled = pickle.loads(pickle.dumps(twins.ours))
    assert pickled.process_group is None
    pickled.process_group = dist.group.WORLD
    give_gradients(twins, kind, 1)
    for optim in (copied, pickled):
        for p, (_, q, _) in zip(optim.param_groups[0]["params"], twins.pairs):
            p.grad = q.grad.clone()
        optim.step()
    twins.ours.step()
    for optim in (copied, pickled):
        for p, (name, q, _) in zip(optim.param_groups[0]["params"], twins.pairs):
            assert_same(name, p, q, 0.0)
            own, theirs = twins.ours.state[q], optim.state[p]
            assert own.keys() == theirs.keys() and "momentum_buffer" in own
            for key, value in own.items():
                assert torch.equal(value.to_local(), theirs[key].to_local()), key


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_pickles_go_on_alike(kind):
    run_ranks(copied_and_pickled, 2, kind)


def without_its_group(kind: str) -> None:
    groups = [Group([Weight((16, 24))])]
    twins = Twins.placed(groups, {}, {**EXACT, **options_of(kind)}, reference=EXACT)
    give_gradients(twins, kind, 0)
    twins.ours.step()
    pickled = pickle.loads(pickle.dumps(twins.ours))
    (param,) = pickled.param_groups[0]["params"]
    param.grad = torch.ones_like(param)
    pickled.step()


@pytest.mark.parametrize("kind", KINDS)
def test_an_unpickled_optimizer_asks_for_its_process_group(kind):
    for outcome in rank_outcomes(without_its_group, 2, kind):
        assert outcome.error == "ValueError"
        assert "process_group" in outcome.message


def load_of_one_process(kind: str) -> None:
    """What torch.save wrote on one process: every rank reads all of it, and keeps its rows."""
    groups = [Group([Weight((16, 24)), Weight((3, 8))], {"beta2": 0.9})]
    first = Twins.placed(groups, {}, EXACT)
    twins = Twins.placed(groups, {}, {**EXACT, **options_of(kind)}, reference=EXACT)
    for _, p, q in first.pairs:
        p.grad = q.grad = integers(p.shape, p.dtype, 7)
    first.step_and_compare()
    twins.ours.load_state_dict(copy.deepcopy(first.reference.state_dict()))
    twins.reference.load_state_dict(first.reference.state_dict())
    give_gradients(twins, kind, 0)
    twins.ours.step()
    twins.reference.step()
    twins.compare()


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_state_dict_is_divided_when_it_is_loaded(kind):
    run_ranks(load_of_one_process, 4, kind)


# -- nanochat --------------------------------------------------------------------------------------


class Chat(nn.Module):
    """Embedding, blocks, head and scalars, in the groups that nanochat makes of them."""

    def __init__(self, d: int = 16, vocabulary: int = 80, layers: int = 3):
        super().__init__()
        torch.manual_seed(0)
        self.wte = nn.Embedding(vocabulary, d)
        self.up = nn.ModuleList(nn.Linear(d, 4 * d, bias=False) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(4 * d, d, bias=False) for _ in range(layers))
        self.gain = nn.Parameter(torch.ones(layers))
        self.lm_head = nn.Linear(d, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens)
        for gain, up, down in zip(self.gain, self.up, self.down):
            x = x + gain * down(up(nn.functional.rms_norm(x, x.shape[-1:])).relu().square())
        logits = self.lm_head(nn.functional.rms_norm(x, x.shape[-1:]))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def param_groups(self) -> list[dict[str, Any]]:
        adamw = dict(kind="adamw", betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0)
        muon = dict(kind="muon", lr=0.02, momentum=0.95, ns_steps=5, beta2=0.9, weight_decay=0.2)
        matrices = [*self.up.parameters(), *self.down.parameters()]
        return [
            dict(adamw, params=list(self.lm_head.parameters()), lr=0.004),
            dict(adamw, params=list(self.wte.parameters()), lr=0.2),
            dict(adamw, params=[self.gain], lr=0.005),
            *(
                dict(muon, params=[p for p in matrices if p.shape == shape])
                for shape in sorted({p.shape for p in matrices})
            ),
        ]


def load_of_one_rank(kind: str, folder: str) -> None:
    """As trainers do that save on their first rank alone."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in ((6, 4), (4, 8), (8,))]
    groups = [
        {"params": params[:2], "names": ["a", "b"], "use_muon": True},
        {"params": params[2:], "names": ["c"], "use_muon": False},
    ]
    optim = optimizer.Muon(groups, **options_of(kind))

    def step(seed: int) -> None:
        set_gradients(params, seed)
        optim.step()

    step(0)
    path = f"{folder}/{dist.get_rank()}.pt"
    torch.save(optim.state_dict(), path)
    optim.load_state_dict(torch.load(path, weights_only=True))  # a file of its own
    step(1)
    dist.barrier()
    optim.load_state_dict(torch.load(f"{folder}/0.pt", weights_only=True))
    before = [p.detach().clone() for p in params]
    try:
        step(2)
    finally:
        assert all(torch.equal(p, q) for p, q in zip(params, before))


@pytest.mark.parametrize("kind", KINDS)
def test_what_one_rank_saved_of_divided_state_is_refused_when_all_have_loaded_it(kind, tmp_path):
    for outcome in rank_outcomes(load_of_one_rank, 2, kind, str(tmp_path)):
        assert outcome.error == "ValueError"
        assert "state of a is that of the same rows on ranks 0 and 1" in outcome.message


def warnings_of_saving(kind: str, folder: str) -> None:
    params = [nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.ones(8))]
    groups = [{"params": params[:1], "use_muon": True}, {"params": params[1:], "use_muon": False}]
    optim = optimizer.Muon(groups, **options_of(kind))
    set_gradients(params, 0)
    optim.step()
    model = nn.ParameterList(params)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        get_optimizer_state_dict(model, optim)
        assert not caught
        for _ in range(2):
            optim.state_dict()
    (warning,) = caught
    assert "torch.save on rank 0" in str(warning.message)
    assert Path(warning.filename).name == "test_replicas.py"


@pytest.mark.parametrize("kind", KINDS)
def test_state_that_one_rank_alone_would_save_in_vain_is_warned_of_once(kind, tmp_path):
    run_ranks(warnings_of_saving, 2, kind, str(tmp_path))


class Wrapper:
    """Derives from the optimizer's class and forwards attributes, as Lightning's wrapper does."""

    def __init__(self, optim: torch.optim.Optimizer):
        self.optimizer = optim
        self.__class__ = type("Wrapper", (Wrapper, type(optim)), {})

    def step(self) -> None:
        self.optimizer.step()

    def __getattr__(self, name: str) -> object:
        return getattr(self.optimizer, name)


def reach_through_a_wrapper() -> None:
    param = nn.Parameter(torch.ones(6, 4))
    optim = optimizer.Muon([{"params": [param], "use_muon": True, "names": ["a"]}])
    wrapper = Wrapper(optim)
    wrapper.process_group = dist.group.WORLD
    assert optim.process_group is dist.group.WORLD
    with wrapper.audit() as audit:
        set_gradients([param], 0)
        wrapper.step()
    assert len(audit.report().steps) == 1
    assert wrapper.metrics() == optim.metrics() != {}
    wrapper.turn_on_cpu_offload()
    assert optim.cpu_offload
    saved = copy.deepcopy(wrapper.state_dict())
    saved["param_groups"][0]["lr"] = 0.25
    wrapper.load_state_dict(saved)
    assert optim.param_groups[0]["lr"] == 0.25 and "param_groups" not in vars(wrapper)


def test_what_is_set_through_a_wrapper_that_derives_from_the_class_reaches_the_optimizer():
    run_ranks(reach_through_a_wrapper, 2)


def load_of_rows_that_are_alike(kind: str, folder: str) -> None:
    """Of a layer whose outputs are summed up, say."""
    weight = nn.Parameter(torch.randn(6, 4, generator=torch.Generator(DEVICE).manual_seed(0)))
    optim = optimizer.Muon([{"params": [weight], "use_muon": True}], **options_of(kind))
    for _ in range(2):
        weight.grad = torch.arange(4.0).expand(6, 4).clone()
        optim.step()
        torch.save(optim.state_dict(), f"{folder}/{dist.get_rank()}.pt")
        saved = torch.load(f"{folder}/{dist.get_rank()}.pt", weights_only=True)
        optim.load_state_dict(saved)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_whose_rows_of_state_are_alike_by_themselves_step_on(kind, tmp_path):
    run_ranks(load_of_rows_that_are_alike, 2, kind, str(tmp_path))


def schedule(optim: torch.optim.Optimizer, step: int, steps: int) -> None:
    """Live hyperparameters, as nanochat's loop sets them before every step."""
    for group in optim.param_groups:
        group.setdefault("initial_lr", group["lr"])
        group["lr"] = group["initial_lr"] * (1 - step / steps)
        if group["kind"] == "muon":
            group["momentum"] = 0.85 + 0.1 * min(step / 5, 1)
            group["weight_decay"] = 0.2 * (1 - step / steps)


def nanochat_loop(steps: int) -> tuple[list[float], float]:
    """Losses of the ranks' own model, and how far its weights are from those of one process."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model = Chat()
    twin = copy.deepcopy(model)
    optim = optimizer.DistMuonAdamW(model.param_groups(), **EXACT)
    reference = optimizer.MuonAdamW(twin.param_groups(), **EXACT)
    losses = []
    for step in range(steps):
        generator = torch.Generator(DEVICE).manual_seed(step)
        text = torch.randint(0, 80, (ranks, 4, 1), generator=generator) * 3 ** torch.arange(9) % 80
        batches = [(rows[:, :-1], rows[:, 1:]) for rows in text]
        loss = model(*batches[rank])
        loss.backward()
        for batch in batches:  # one process sees all of them
            (twin(*batch) / ranks).backward()
        for each in (optim, reference):
            schedule(each, step, steps)
            each.step()
            each.zero_grad(set_to_none=True)
        dist.all_reduce(loss.detach_())
        losses.append(loss.item() / ranks)
    pairs = zip(model.parameters(), twin.parameters())
    return losses, max((p - q).abs().max().item() for p, q in pairs)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_nanochat_loop_trains_as_on_one_process(ranks):
    found = run_ranks(nanochat_loop, ranks, 20)
    losses, _ = found[0]
    assert all(other == losses for other, _ in found)
    assert losses[-1] < 0.9 * losses[0]
    # AdamW's fused kernel rounds by position, and the last bits grow from step to step.
    assert max(distance for _, distance in found) < 1e-3


def test_dist_muon_adamw_needs_a_process_group():
    with pytest.raises(ValueError, match="init_process_group"):
        optimizer.DistMuonAdamW(Chat().param_groups())


def step_keller_jordan(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Weights under averaged gradients, and those of the source's formulas."""
    torch.manual_seed(0)
    shapes = [(16, 24), (20, 8), (12, 12), (8, 3, 3, 3), (7, 9)]
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    source = ref.KellerJordanReference(params, lr=0.02, weight_decay=0.1)
    given = optimizer.presets.keller_jordan(
        params, lr=0.02, weight_decay=0.1, process_group=dist.group.WORLD
    )
    optim = optimizer.Muon(**given, **EXACT)
    for step in range(steps):
        grads = [integers(p.shape, p.dtype, step, index) for index, p in enumerate(params)]
        grads[step % len(grads)] = None  # counts as zeros
        for p, grad in zip(params, grads):
            p.grad = grad
        optim.step()
        source.step(grads)
    return [(p.detach(), W) for p, W in zip(params, source.weights)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_keller_jordans_preset_divides_the_work(ranks):
    for found in run_ranks(step_keller_jordan, ranks, 5):
        for weight, expected in found:
            torch.testing.assert_close(weight.double(), expected, rtol=0, atol=2e-5)


# -- costs -----------------------------------------------------------------------------------------


def summary_and_bytes(kind: str) -> tuple[Any, float]:
    params = [nn.Parameter(torch.zeros(s)) for s in [(96, 64)] * 8 + [(30, 20), (12, 4, 8)]]
    others = [nn.Parameter(torch.zeros(s)) for s in [(50, 40), (64,), (1000, 16)]]
    frozen = nn.Parameter(torch.zeros(400, 40), requires_grad=False)
    names = [f"experts.{index}" for index in range(len(params))]
    groups = [
        {"params": params, "names": names, "use_muon": True, "beta2": 0.9},
        {"params": [*others, frozen], "use_muon": False},
    ]
    optim = optimizer.Muon(groups, expert_keys=["experts"], **options_of(kind))
    for _ in range(2):  # before the first step ranks compare what they hold
        for p in (*params, *others):
            p.grad = torch.ones_like(p)
        sent = count(optim.step).sent
    summary = optim.summary()
    assert all(len(line) <= 100 for line in str(summary).splitlines())
    return summary, sent


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_summaries_tell_what_replicas_send(kind, ranks):
    found = run_ranks(summary_and_bytes, ranks, kind)
    for summary, sent in found:
        assert summary.totals["sent_bytes"] == pytest.approx(sent, abs=2)
        assert summary.rows[0]["placement"] == f"on each of {ranks} ranks"
        assert [row["bytes"] for row in summary.rows] == [row["bytes"] for row in found[0][0].rows]
    if kind == "ZeRO-2":  # all-gathers of updates pad a little, which no parameter answers for
        moved = sum(row["bytes"] for row in found[0][0].rows)
        assert moved == pytest.approx(sum(sent for _, sent in found), rel=0.1)


def bytes_per_element(kind: str) -> float:
    """What this rank sends in a step of Muon's matrices."""
    params = [nn.Parameter(torch.zeros(96, 64 + 32 * (i % 2))) for i in range(24)]
    optim = optimizer.Muon([{"params": params, "use_muon": True}], **options_of(kind))
    for _ in range(2):
        for p in params:
            p.grad = torch.ones_like(p)
        counter = count(optim.step)
    return counter.sent / sum(p.numel() for p in params)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_the_wire_is_two_bytes_an_element_and_a_share_of_two(kind, ranks):
    sent = run_ranks(bytes_per_element, ranks, kind)
    gradients = 4 * (ranks - 1) / ranks if kind == "ZeRO-2" else 0  # fp32, reduce-scattered
    assert sum(sent) / ranks <= 2 + 2 / ranks + gradients
    least = 2 * (ranks - 1) / ranks * (1 + 1 / ranks)
    assert abs(sum(sent) / ranks - least - gradients) < 0.01


def memory_of(kind: str, dtype: torch.dtype, options: dict[str, Any]) -> tuple[int, float]:
    """The most that a step holds beside what was there, and what it may."""
    d, ranks = 256, dist.get_world_size()
    shapes = 4 * ([(d, d)] * 4 + [(4 * d, d), (4 * d, d), (d, 4 * d)])
    options = {**options, "staging_bytes": 1 << 16}
    if kind == "spread":
        mesh = init_device_mesh(DEVICE, (2, ranks // 2))
        whole_params = [torch.zeros(shape, dtype=dtype) for shape in shapes]
        placements = [Replicate(), Shard(0)]
        params = [nn.Parameter(distribute_tensor(p, mesh, placements)) for p in whole_params]
        options["hsdp"] = kind
    else:
        params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
        options |= options_of(kind)
    options["ns_dtype"] = dtype  # CPUs without instructions for bf16 would take fp32
    optim = optimizer.Muon([{"params": params, "use_muon": True, "none_grad": False}], **options)
    for p in params:
        p.grad = torch.ones_like(p)
    optim.step()
    peak = count(optim.step).peak_bytes
    largest = max(p.numel() * p.element_size() for p in params)
    in_flight = 6 * 2 * largest  # of each chunk what a rank sends, and the matrix that it gathers
    updates = 2 * max(48 << 16, 2 * 2 * largest)  # of two chunks, for all ranks or two replicas
    shards = sum(p.numel() for p in params) * 4 / ranks  # of mean gradients
    gradients = (shards + 3 * BUCKET_BYTES) * (kind == "ZeRO-2")
    return peak, in_flight + updates + 4 * largest + gradients


BUCKET_BYTES = import_module(f"{optimizer.__name__}.distributed.zero2").BUCKET_BYTES["cpu"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"beta2": 0.9}, {"chunk_size": 1}], ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("kind", [*KINDS, "spread"])
def test_memory_is_bounded_by_chunks_and_the_largest_matrix(kind, dtype, options):
    for peak, bound in run_ranks(memory_of, 4, kind, dtype, options):
        assert peak <= bound
