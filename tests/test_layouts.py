"""N steps on any layout with any feature are those of one device, bit for bit in exact mode."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from kernel import optimizer
from layouts import (
    EXACT,
    FP32,
    Group,
    Twins,
    Weight,
    check,
    local,
    part_for,
    whole,
)
from model_layouts import LAYOUTS, Layout, Network, fsdp2, mesh_of
from rank_pool import RankPool
from ranks import DEVICE, on_ranks, run_ranks

HEADS = {"head_dim": 8, "threshold": 1.0}
LOGITS = torch.tensor([3.0, 0.5], device="cpu")  # one is clipped
TINY = 16384  # bytes of slots that hold a few rows


# -- features --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Feature:
    """
    Args:
        options: of both optimizers.
        change: of the model, before it is placed.
        gives: whether a parameter gets a gradient, by its name and the number of the step.
        schedule: of both optimizers, before each step.
        on_ranks: of the optimizer on ranks alone, before each step.
        by_backward: gradients are those of the model's own backward; else random numbers.
        without: layouts whose options this one excludes, by a part of their names.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    change: Callable[[Network], Any] = lambda model: None
    gives: Callable[[str, int], bool] = lambda name, step: not name.startswith("idle")
    schedule: Callable[[Any, int], None] = lambda optim, step: None
    on_ranks: Callable[[Any, int], None] = lambda optim, step: None
    by_backward: bool = False
    without: tuple[str, ...] = ()


def anneal(optim: Any, step: int) -> None:
    for group in optim.param_groups:
        group["lr"] = 0.02 * 0.7**step
        group["weight_decay"] = 0.1 * step
        if group["use_muon"]:
            group["momentum"] = 0.85 + 0.03 * step


def turn_on(optim: Any) -> None:
    how: dict[str, Any] = {"slot_bytes": TINY}
    if DEVICE == "cpu":
        how["backend"] = optimizer.SimulatedHost(delay=2e-5, seed=dist.get_rank())
    optim.turn_on_cpu_offload(**how)


def offload(optim: Any, step: int) -> None:
    if step == 0:
        turn_on(optim)


def toggle(optim: Any, step: int) -> None:
    if step % 2:
        turn_on(optim)
    else:
        optim.turn_off_cpu_offload()


def reload(optim: Any, step: int) -> None:
    if step == 2:
        optim.load_state_dict(copy.deepcopy(optim.state_dict()))


BF16 = {"change": nn.Module.bfloat16}

FEATURES = {
    "defaults": Feature(),
    "by its own backward": Feature(by_backward=True),
    "second moment, cautious": Feature({"beta2": 0.9, "cautious": True, "decay_lr": "adjusted"}),
    "second moment of rows": Feature({"beta2": 0.9, "second_moment_side": "rows"}),
    "ema": Feature({"momentum_style": "ema", "nesterov": False, "adjust_lr": "original"}),
    "one matrix at a time": Feature({"chunk_size": 1, "warmup_step": 0}),
    "a few ahead": Feature({"chunk_size": 2, "warmup_step": 1, "staging_bytes": 1000}),
    "nobody asks": Feature({"consistency_check": "off", "none_grad": False}),
    "on every rank": Feature(
        {"use_distributed_muon": True, "cautious": True}, without=("DDP", "ZeRO-2")
    ),
    "live hyperparameters": Feature(schedule=anneal),
    "a tensor as rate": Feature({"lr": torch.tensor(0.02, device="cpu"), "maximize": True}),
    "short momentum": Feature({"momentum_dtype": torch.bfloat16}),
    "other polynomials": Feature({"ns_coefficients": "quintic", "ns_steps": 3, "adjust_lr": 0.3}),
    "Gram": Feature({"ns_options": {"algorithm": "gram", "equilibrate": True}}),
    "heads": Feature(
        {"split": {"blocks.0.wq": 8, "blocks.1.up": [12, 4, 8], "wk": "(q=2 8) (c + c)"}}
    ),
    "QK-Clip": Feature({"clip_config": HEADS}, without=("PP without matrices",)),
    "absent gradients": Feature(
        gives=lambda name, step: (len(name) + step) % 3 > 0 and not name.startswith("idle")
    ),
    "nothing but AdamW at first": Feature(gives=lambda name, step: step > 1 or "norm" in name),
    "frozen": Feature(change=lambda model: model.blocks[0].requires_grad_(False)),
    "offload": Feature({"beta2": 0.9}, on_ranks=offload),
    "offload, now and then": Feature(on_ranks=toggle),
    "saved and loaded": Feature({"beta2": 0.9}, on_ranks=reload),
    "weights in bf16": Feature({"momentum_dtype": torch.float32}, **BF16),
    "weights in bf16, exact": Feature({"weight_rounding": "exact"}, **BF16),
    "weights in bf16, at random": Feature({"weight_rounding": "stochastic"}, **BF16),
    "weights in fp64": Feature({"comm_dtype": torch.float64}, change=nn.Module.double),
    "weights in fp64, an fp32 wire": Feature({**FP32, "exact": False}, change=nn.Module.double),
    "uneven shards of shards": Feature(
        {"beta2": 0.9}, change=lambda model: model.__init__(even=False)
    ),
}


# -- one device ------------------------------------------------------------------------------------


def groups_of(model: Network, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Groups of other hyperparameters, one with a convolution, one of AdamW's."""
    muon, adamw = optimizer.get_default_muon_param_groups(model, expert_keys=["experts"])
    named = dict(zip(muon["names"], muon["params"]))
    of_adamw = dict(zip(adamw["names"], adamw["params"]))
    groups: list[dict[str, Any]] = [
        {"beta2": 0.8, "lr": 0.01},
        {"momentum_style": "ema", "momentum": 0.8, "weight_decay": 0.01},
        {"flatten": True, "momentum_dtype": torch.bfloat16},
        {"use_muon": False, "lr": 0.003, "adamw_betas": (0.8, 0.9)},
    ]
    members: list[dict[str, nn.Parameter]] = [{}, {}, {}, of_adamw]
    if "conv.weight" in of_adamw:
        members[2]["conv.weight"] = of_adamw.pop("conv.weight")
    for name, param in named.items():
        members["blocks.1" in name][name] = param
    if "use_distributed_muon" in options:
        del groups[0]["beta2"]
    return [
        {"use_muon": True, **group, "params": list(own.values()), "names": list(own)}
        for group, own in zip(groups, members)
    ]


def gradients(twins: Twins, averages: bool, feature: Feature, step: int) -> None:
    """Small integers, whose mean over ranks is exact; a rank's own where the step averages."""
    for index, (name, p, q) in enumerate(twins.pairs):
        p.grad = q.grad = None
        if not q.requires_grad or not feature.gives(name, step):
            continue
        generator = torch.Generator(DEVICE).manual_seed(1000 * step + index)
        of_ranks = torch.randint(-8, 9, (dist.get_world_size(), *q.shape), generator=generator)
        own = averages and not isinstance(p, DTensor)
        q.grad = (of_ranks.double().mean(0) if own else of_ranks[0]).to(q.dtype)
        p.grad = of_ranks[dist.get_rank()].to(q.dtype) if own else part_for(p, q.grad)


def backward(model: nn.Module, twins: Twins, averages: bool, parts: int, step: int) -> None:
    """Runs backward on this rank's part of a batch; the twin gets the mean gradient."""
    ranks = dist.get_world_size()
    tokens = torch.randint(0, 50, (parts, 6), generator=torch.Generator(DEVICE).manual_seed(step))
    own = tokens[dist.get_rank() * parts // ranks]
    for _, p, _ in twins.pairs:
        p.grad = None
    nn.functional.cross_entropy(model(own), own).backward()
    for _, p, q in twins.pairs:
        q.grad = None if p.grad is None else whole(p.grad).clone()
        if averages and q.grad is not None:
            p.grad.copy_((p.grad * 2**12).round() / 2**12)  # or else the sum's order would count
            every = [torch.empty_like(p) for _ in range(ranks)]
            dist.all_gather(every, p.grad)
            q.grad = torch.stack(every).mean(0)


def takes_the_steps_of_one_device(layout: Layout, feature: Feature) -> None:
    model = Network()
    feature.change(model)
    layout.stage(model)
    twin = copy.deepcopy(model)
    told = layout.place(model)
    averages = told.get("grad_reduce") == "mean"
    options = {"lr": 0.02, "expert_keys": ["experts"], **EXACT, **feature.options}
    ours, reference = (
        optimizer.Muon(groups_of(each, options), **{**options, **own})
        for each, own in ((model, told), (twin, {}))
    )
    names = [name for name, _ in model.named_parameters()]
    twins = Twins(ours, reference, list(zip(names, model.parameters(), twin.parameters())))
    called: nn.Module = model
    if feature.by_backward and "process_group" in told and not averages:
        called = DistributedDataParallel(model, find_unused_parameters=True)
    seen = torch.arange(2) % dist.get_world_size() == dist.get_rank()
    every = LOGITS.to(DEVICE)
    some = every if layout.parts is None else every.where(seen, -math.inf)
    logits = dict.fromkeys(range(len(getattr(model, "blocks", ()))), some)
    for step in range(4):
        feature.on_ranks(ours, step)
        if feature.by_backward:
            assert layout.parts is not None
            backward(called, twins, averages, layout.parts, step)
        else:
            gradients(twins, averages, feature, step)
        for optim in (ours, reference):
            feature.schedule(optim, step)
        if "clip_config" in feature.options:
            ours.step(qk_logits=logits)
            reference.step(qk_logits=dict.fromkeys(logits, every))
            assert ours.qk_clip_stats() == reference.qk_clip_stats()
        else:
            ours.step()
            reference.step()
    ours.synchronize_offload()
    twins.compare()


def pair(layout: str, feature: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        takes_the_steps_of_one_device(LAYOUTS[layout], FEATURES[feature])


def pairs() -> list[Any]:
    """Pairs layouts with features; pairs beyond the first two of each are marked slow."""
    all_pairs = [
        (name, other)
        for name, layout in LAYOUTS.items()
        for other, feature in FEATURES.items()
        if not any(part in name for part in feature.without)
        and (DEVICE == "cpu" or "on the CPU" not in name)  # where its twin would be, too
        and not (feature.by_backward and layout.parts is None)
    ]
    # By chance, but as drawn before where a row is added.
    all_pairs.sort(key=lambda names: zlib.crc32(", ".join(names).encode()))
    found = []
    times: dict[str, int] = dict.fromkeys([*LAYOUTS, *FEATURES], 0)
    for names in all_pairs:
        is_quick = min(times[name] for name in names) < 2
        for name in names:
            times[name] += is_quick
        found.append(pytest.param(*names, marks=() if is_quick else pytest.mark.slow))
    return found


@pytest.fixture(scope="module")
def pools() -> Iterator[Callable[..., Any]]:
    """Calls a function on so many ranks, which stay."""
    with contextlib.ExitStack() as stack:
        found: dict[int, RankPool] = {}

        def call(ranks: int, *call: Any) -> Any:
            if ranks not in found:
                found[ranks] = stack.enter_context(RankPool(ranks))
            return found[ranks](*call)

        yield call


@pytest.mark.parametrize(("layout", "feature"), pairs())
def test_any_feature_on_any_layout_takes_the_steps_of_one_device(pools, layout, feature):
    pools(LAYOUTS[layout].ranks, pair, layout, feature)


# -- tensors placed by hand ------------------------------------------------------------------------

MESHES = {
    1: [(1,)],
    2: [(2,), (1, 2)],
    3: [(3,)],
    4: [(4,), (2, 2)],
    8: [(8,), (2, 4), (4, 2), (2, 2, 2)],
}

# Kinds of tensors, with the options of their groups: even, uneven, smaller than ranks are many.
KINDS: dict[str, tuple[list[tuple[int, ...]], dict[str, Any]]] = {
    "matrices": ([(16, 24), (16, 24), (13, 12), (3, 7), (1, 8), (0, 6), (9, 9), (5, 30)], {}),
    "experts": ([(8, 8, 10), (5, 8, 9), (1, 8, 3), (3, 7, 9)], {}),
    "experts stacked twice": ([(2, 4, 8, 10), (3, 2, 5, 4), (1, 5, 7, 3)], {}),
    "convolutions": ([(8, 4, 3, 3), (10, 3, 3, 2), (3, 5, 2, 1)], {"flatten": True}),
    "blocks": ([(20, 16), (20, 10), (20, 3), (5, 20, 8)], {"split": [12, 4, 4]}),
    "heads": ([(12, 10), (20, 6), (16, 10), (1, 20, 8)], {"split": 4}),
}


def placements(ranks: int) -> Iterator[tuple[str, list[Weight], dict[str, Any]]]:
    """Every kind on every mesh, its dimensions cut in every way."""
    for kind, (shapes, options) in KINDS.items():
        least = min(map(len, shapes))
        for mesh in MESHES[ranks]:
            for dims in itertools.product((None, *range(least)), repeat=len(mesh)):
                repeated = len(set(dims) - {None}) < len(dims) - dims.count(None)
                for nested in (False, True) if repeated else (False,):
                    # torch can't gather uneven shards that are strided twice.
                    even = not repeated or nested or len(mesh) < 3
                    placed = [
                        Weight(shape, mesh, dims, nested)
                        for shape in shapes
                        if even or all(size % ranks == 0 for size in shape[:least])
                    ]
                    yield f"{kind} on {mesh}, {dims}, {nested=}", placed, options


@pytest.mark.parametrize(
    "ranks", [1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4, 8))]
)
def test_every_kind_of_tensor_cut_in_every_way(ranks):
    every = itertools.islice(placements(ranks), ranks, None, {2: 3, 8: 6}.get(ranks, 1))
    check(ranks, {name: [Group(placed, own)] for name, placed, own in every if placed})


def test_groups_of_other_hyperparameters_whose_matrices_share_shapes():
    weights = [Weight((16, 24), (4,), (0,)), Weight((10, 24), (4,), (0,)), Weight((16, 24))]
    differences: list[dict[str, Any]] = [
        {},
        {"lr": 0.003, "weight_decay": 0.0},
        {"beta2": 0.8},
        {"momentum_style": "ema", "momentum": 0.5},
        {"ns_steps": 3, "ns_coefficients": "quintic"},
        {"split": {"0.weight": [4, 12], "2.weight": 8}},
        {"maximize": True, "nesterov": False},
        {"use_muon": False},
    ]
    tp, ep = (2, 2), (4, 1)
    dense = [Weight((16, 24), tp, (0, 0)), Weight((9, 8), tp, (0, 1))]
    experts = [Weight((6, 8, 10), ep, (0, 1)), Weight((6, 8, 10), tp, (0, 0))]
    plain = [Weight((16, 24)), Weight((6, 8, 10))]
    half = [Weight(shape, (4,), (0,), dtype=torch.bfloat16) for shape in ((16, 24), (6, 8, 4))]
    cases = {
        "eight groups": [Group(weights, options) for options in differences],
        "empty groups between": [Group([]), Group(weights), Group([], {"lr": 1.0})],
        "several meshes in one": [Group([*dense, *experts, *plain])],
        "a mesh for each": [Group(dense), Group(experts, {"use_muon": False}), Group(plain)],
        "Muon's plain, AdamW's on a mesh": [Group(plain), Group(dense, {"use_muon": False})],
        "dtypes mixed": [Group([*half, *weights, Weight((16, 24), dtype=torch.bfloat16)])],
    }
    check(4, cases, [{}, {"chunk_size": 1, "warmup_step": 0}])


# -- numbers ---------------------------------------------------------------------------------------


def default_formats(bound: float, options: Mapping[str, Any]) -> None:
    """How far weights are from those of an fp32 step, of the distance that this has moved them."""
    mesh = (dist.get_world_size(),)
    shapes = [(16, 24), (24, 16), (16, 16), (9, 8), (40, 40), (6, 8, 12)]
    weights = [Weight(shape, mesh, (dim,)) for shape in shapes for dim in (0, 1)]
    twins = Twins.placed([Group(weights)], options, {**options, **FP32})
    before = [q.detach().clone() for _, _, q in twins.pairs]
    twins.step()
    for (name, p, q), start in zip(twins.pairs, before):
        off, moved = (whole(p) - q).norm(), (q - start).norm()
        assert off <= bound * moved, f"{name}: {off / moved:.4f}"
        momentum = whole(twins.ours.state[p]["momentum_buffer"])
        assert torch.equal(momentum, twins.reference.state[q]["momentum_buffer"])


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [
        # bf16 on the wire: 2^-9 of each element, and what the iteration makes of it where singular
        # values are small. The largest of 110 matrices was 1.4 % from the weights' true movement.
        (torch.float32, 0.03),
        # bf16 in the iteration too, as CPUs with instructions for it have by default: the largest
        # with a shorter side of 8 or more was 2.9 %.
        (torch.bfloat16, 0.06),
    ],
    ids=str,
)
def test_default_formats_stay_within_their_rounding(dtype, bound):
    run_ranks(default_formats, 4, bound, {"ns_dtype": dtype})


# -- models as trainers make them ------------------------------------------------------------------


def placed_afterwards(layout: str) -> None:
    """Trainers shard, and put other parameters into groups, when the optimizer is there already."""
    model = Network()
    twin, placed = copy.deepcopy(model), copy.deepcopy(model)
    options = {"lr": 0.02, "beta2": 0.9, "expert_keys": ["experts"], **EXACT}
    ours, reference = (optimizer.Muon(groups_of(m, {}), **options) for m in (model, twin))
    LAYOUTS[layout].place(placed)
    swapped = dict(zip(model.parameters(), placed.parameters()))
    for group in ours.param_groups:
        group["params"] = [swapped[p] for p in group["params"]]
    names = [name for name, _ in placed.named_parameters()]
    twins = Twins(ours, reference, list(zip(names, placed.parameters(), twin.parameters())))
    for step in range(3):
        gradients(twins, False, FEATURES["defaults"], step)
        ours.step()
        reference.step()
    twins.compare()


@pytest.mark.parametrize("layout", ["FSDP2", "FSDP2 + TP", "EP + TP"])
def test_parameters_that_are_swapped_after_construction(pools, layout):
    pools(4, placed_afterwards, f"4 ranks, {layout}")


@on_ranks(2)
def test_wrapped_layers_are_known_by_their_own_names() -> None:
    model = Network()
    twin = copy.deepcopy(model)
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    model.blocks[1].up = torch.compile(model.blocks[1].up, backend="eager")
    fsdp2(model)
    options = {"lr": 0.02, "expert_keys": ["experts"], **EXACT}
    options["split"] = {"blocks.0.wq.weight": 4, "blocks.1.up.weight": [20, 4]}
    ours, reference = (optimizer.Muon(groups_of(m, {}), **options) for m in (model, twin))
    names = [name for name, _ in model.named_parameters()]
    assert {"blocks.0._checkpoint_wrapped_module.wq.weight", "blocks.1.up._orig_mod.weight"} < set(
        names
    )
    twins = Twins(ours, reference, list(zip(names, model.parameters(), twin.parameters())))
    for step in range(3):
        backward(model, twins, False, 2, step)
        ours.step()
        reference.step()
    twins.compare()


@on_ranks(4)
def test_fsdp2_over_a_tensor_parallel_shard_without_columns() -> None:
    torch.manual_seed(0)
    mesh = mesh_of(dp=2, tp=2)
    model = nn.Sequential(nn.Linear(1, 6, bias=False), nn.Linear(6, 4, bias=False))
    twin = copy.deepcopy(model)
    parallelize_module(model, mesh["tp"], {"0": RowwiseParallel(), "1": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    empty = model[0].weight
    assert mesh["tp"].get_local_rank() == 0 or local(empty).shape == (0, 0)  # of (3, 0)
    ours, reference = (
        optimizer.Muon([{"params": list(m.parameters()), "use_muon": True}], beta2=0.9, **EXACT)
        for m in (model, twin)
    )
    for step in range(2):
        for p, q in zip(model.parameters(), twin.parameters()):
            q.grad = torch.randn(q.shape, generator=torch.Generator(DEVICE).manual_seed(step))
            # torch's own backward of an empty shard raises.
            p.grad = part_for(p, q.grad) if local(p).numel() else torch.zeros_like(p)
        ours.step()
        reference.step()
        state_dict = get_optimizer_state_dict(model, ours)
        set_optimizer_state_dict(model, ours, state_dict)
        for p, q in zip(model.parameters(), twin.parameters()):
            expected = local(part_for(p, q.detach()))
            assert torch.equal(local(p).view(expected.shape), expected)
            assert local(ours.state[p]["momentum_buffer"]).shape == local(p).shape
