"""Plain parameters that all ranks hold: under DDP, and in ZeRO-2 without it.

That their steps are those of one device, test_layouts.py shows.
"""

from __future__ import annotations

import copy
import hashlib
import math
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

import reference as ref
from counters import count
from kernel import optimizer
from layouts import (
    EXACT,
    Twins,
    case,
    local,
    params_of,
    part_for,
    set_gradients,
    whole,
)
from ranks import DEVICE, on_ranks, rank_outcomes, run_ranks

KINDS = ("DDP", "ZeRO-2")
on_both = pytest.mark.parametrize("kind", KINDS)


def told(kind: str, group: Any = None) -> dict[str, Any]:
    """What the optimizer is told of its replicas."""
    group = dist.group.WORLD if group is None else group
    return {"process_group": group, "grad_reduce": "mean" if kind == "ZeRO-2" else None}


def muon_of(*shapes: tuple[int, ...], kind: str = "", **options: Any) -> Any:
    """An optimizer of matrices, and of AdamW's vectors, called a, b, c, …"""
    generator = torch.Generator(DEVICE).manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    groups = [
        {"params": [(name, p)], "use_muon": p.ndim == 2} for name, p in zip("abcdefgh", params)
    ]
    return optimizer.Muon(groups, **(told(kind) if kind else {}), **options)


def integers(shape: Any, *seed: int) -> torch.Tensor:
    """Small ones, whose means over ranks are exact in every format and order."""
    generator = torch.Generator(DEVICE).manual_seed(hash(seed) % 2**63)
    return torch.randint(-8, 9, tuple(shape), generator=generator).float()


# -- the same bits on all replicas -----------------------------------------------------------------


def digests_in_default_formats(layout: str) -> tuple[int, list[str]]:
    """Which shard this rank holds, and what it holds after some steps."""
    shapes = [(48, 64), (32, 96), (40, 40), (24, 32), (64,), (9, 8), (300, 8)]
    mesh, shard = init_device_mesh(DEVICE, (2, 2)), 0
    optim = muon_of(*shapes, kind=layout if layout in KINDS else "", beta2=0.9)
    if layout not in KINDS:
        placements = [Replicate(), Shard(0)] if "HSDP" in layout else [Shard(0), Replicate()]
        shard = mesh.get_local_rank(placements.index(Shard(0)))
        optim = muon_of(*shapes, hsdp=layout.split()[-1], beta2=0.9)
        for group in optim.param_groups:
            (p,) = group["params"]
            group["params"] = [nn.Parameter(distribute_tensor(p.detach(), mesh, placements))]
    for step in range(3):
        own = dist.get_rank() if layout == "ZeRO-2" else 0
        set_gradients(params_of(optim), 10 * step + own)
        optim.step()
    held = [local(p) for p in params_of(optim)]
    if layout not in KINDS:
        held += [local(value) for state in optim.state.values() for value in state.values()]
    digests = [hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest() for t in held]
    return shard, digests


@pytest.mark.parametrize(
    "layout", [*KINDS, "HSDP redundant", "HSDP spread", "HSDP auto", "TP spread"]
)
def test_replicas_hold_the_same_bits_in_the_default_formats(layout):
    of_shard: dict[int, list[str]] = {}
    for shard, found in run_ranks(digests_in_default_formats, 4, layout):
        assert of_shard.setdefault(shard, found) == found
    assert len(of_shard) == (1 if layout in KINDS else 2)


# -- layouts beside replicas -----------------------------------------------------------------------


def step_beside_one_process(
    shapes: list[tuple[int, ...]], kind: str, group: Any, dims: tuple[int | None, ...] = ()
) -> None:
    """
    Args:
        dims: of each shape the dimension in which DTensors of all ranks are cut, -1 for replicas.
    """
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    ours = muon_of(*shapes, **EXACT, **told(kind, group))
    reference = muon_of(*shapes, **EXACT)
    for own, dim in zip(ours.param_groups, dims):
        if dim is not None:
            (p,) = own["params"]
            placement = Replicate() if dim < 0 else Shard(dim)
            own["params"] = [nn.Parameter(distribute_tensor(p.detach(), mesh, [placement]))]
    plain = group if isinstance(group, dist.ProcessGroup) else group.get_group()
    ranks, rank = dist.get_world_size(plain), dist.get_rank(plain)
    pairs = list(zip("abcdefgh", params_of(ours), params_of(reference)))
    for step in range(3):
        for index, (_, p, q) in enumerate(pairs):
            each = [integers(q.shape, step, index, r) for r in range(ranks)]
            q.grad = sum(each) / ranks
            p.grad = part_for(p, q.grad)
            if kind == "ZeRO-2" and not isinstance(p, DTensor):
                p.grad = each[rank]
        ours.step()
        reference.step()
    Twins(ours, reference, pairs).compare()


@on_both
@on_ranks(4)
def test_each_stage_of_a_pipeline_has_its_own_replicas(kind: str) -> None:
    """Each stage of a pipeline has replicas of its own."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("pp", "dp"))
    for group in (mesh["dp"].get_group(), mesh["dp"]):  # both are taken
        shapes = [(16, 24), (12 + 4 * mesh.get_local_rank("pp"), 8), (7,)]
        step_beside_one_process(shapes, kind, group)


@on_both
@on_ranks(2)
def test_replicated_matrices_beside_sharded_ones(kind: str) -> None:
    shapes = [(16, 24), (16, 24), (16, 24), (16, 12), (64,), (40, 32)]
    step_beside_one_process(shapes, kind, dist.group.WORLD, (None, 0, -1, 1, 0, None))
    step_beside_one_process(shapes, kind, dist.group.WORLD, (-1, None, None, 0, None, 0))


# -- means of gradients ----------------------------------------------------------------------------

SHAPES = [
    *((64, 32), (7, 300), (5, 1024), (3, 400), (1, 2000), (129, 15), (0, 5), (6, 0), (2, 2)),
    *((2048,), (1025,), (0,), (10,), (1,), ()),
]


def means_of_odd_gradients(dtype: torch.dtype) -> list[tuple[str, float]]:
    """Names and bytes of the collectives that average."""
    zero2 = import_module(f"{optimizer.__name__}.distributed.zero2")
    zero2.BUCKET_BYTES[DEVICE] = 16 << 10  # few bytes fill several
    warnings.simplefilter("error")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    groups = [
        {"params": [p for p in params if p.ndim == 2], "use_muon": True, "momentum": 0.0},
        {"params": [p for p in params if p.ndim != 2], "use_muon": False},
    ]
    more = {} if dtype.itemsize != 2 else {"adamw_betas": (0.5, 0.9)}
    optim = optimizer.Muon(groups, missing_grad="zero", nesterov=False, **more, **told("ZeRO-2"))
    means = {}
    for number, p in enumerate(params):
        each: list[Any] = [(integers(p.shape, number, r) / 256).to(dtype) for r in range(ranks)]
        if number % 3 == 1 and p.ndim == 2:  # of another order in memory
            each = [g.mT.contiguous().mT for g in each]
        if number % 5 == 4 and p.numel():
            each = [g.flatten()[0].expand(p.shape) for g in each]
        if number % 4 == 3:
            each = [None if r == number % ranks else g for r, g in enumerate(each)]
        present = [g.double() for g in each if g is not None]
        means[p] = sum(present, torch.zeros(p.shape, dtype=torch.float64)) / ranks
        p.grad = each[rank]
    counter = count(optim.step)
    for p, mean in means.items():
        with case(f"{tuple(p.shape)} in {dtype}"):
            state = optim.state[p]
            share = 1.0 if p.ndim == 2 else 1 - optim.param_groups[1]["adamw_betas"][0]
            found = whole(state["momentum_buffer" if p.ndim == 2 else "exp_avg"])
            torch.testing.assert_close(found, (mean * share).to(found.dtype), atol=0, rtol=1e-6)
    averaging = [c for c in counter.messages if "reduce" in c.name]
    return [(c.name, c.sent) for c in averaging]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("ranks", [2, 4])
def test_means_of_gradients_of_any_shape_and_memory_are_exact(ranks, dtype):
    found = run_ranks(means_of_odd_gradients, ranks, dtype)
    assert all(other == found[0] for other in found)  # in one order on all ranks
    assert len(found[0]) > 3
    numel = sum(map(math.prod, SHAPES))
    least = numel * dtype.itemsize * (ranks - 1) / ranks
    assert least < sum(sent for _, sent in found[0]) <= 2 * least


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="gradients have one dtype")
@on_ranks(2)
def test_fp32_gradients_of_bf16_weights_that_take_any_dtype_are_averaged_in_fp32() -> None:
    params = [nn.Parameter(torch.zeros(64, 32, dtype=torch.bfloat16)) for _ in range(3)]
    groups = [{"params": params[:2], "use_muon": True, "momentum": 0.0, "missing_grad": "zero"}]
    groups.append({"params": params[2:], "use_muon": False, "weight_rounding": "exact"})
    optim = optimizer.Muon(groups, **told("ZeRO-2"))
    for number, param in enumerate(params):
        param.grad_dtype = None
        each = [integers((64, 32), number, rank) / 3 for rank in range(2)]
        if number == 1:
            each[1] = None
        param.grad = each[dist.get_rank()]
        param.mean = sum(grad for grad in each if grad is not None) / 2
    optim.step()
    for param in params:
        state = optim.state[param]
        average = state["momentum_buffer"] if "exp_avg" not in state else state["exp_avg"] / 0.1
        assert average.dtype == torch.float32
        torch.testing.assert_close(whole(average), param.mean)


# -- what ranks lack -------------------------------------------------------------------------------


def without_a_gradient(layout: str, use_muon: bool, missing: str, absent: tuple[int, ...]) -> str:
    """What a step raises on a rank where one of two parameters has no gradient on some ranks."""
    mesh = init_device_mesh(DEVICE, (2, 2))
    params = [
        nn.Parameter(torch.randn(64, 32, generator=torch.Generator(DEVICE).manual_seed(0)))
    ] * 1
    params.append(nn.Parameter(params[0].detach().clone()))
    placements = {
        "HSDP": [Replicate(), Shard(0)],
        "replicated DTensors": [Replicate(), Replicate()],
    }
    if layout in placements:
        params = [
            nn.Parameter(distribute_tensor(p.detach(), mesh, placements[layout])) for p in params
        ]
    group = {"params": params, "names": ["a", "b"], "use_muon": use_muon}
    options = told(layout) if layout in KINDS else {}
    optim = optimizer.Muon([group], missing_grad=missing, **EXACT, **options)
    before = [whole(p).detach().clone() for p in params]
    set_gradients(params)
    grad = whole(params[0].grad)
    if dist.get_rank() in absent:
        params[0].grad = None
    try:
        optim.step()
    except ValueError as error:
        assert all(torch.equal(whole(p), b) for p, b in zip(params, before))
        assert not any(optim.state.values())
        return str(error)
    if layout == "ZeRO-2":
        key, share = ("momentum_buffer", 1.0) if use_muon else ("exp_avg", 0.1)
        expected = grad * share * (4 - len(absent)) / 4  # zeros count
        torch.testing.assert_close(whole(optim.state[params[0]][key]), expected)
    return ""


@pytest.mark.parametrize("use_muon", [True, False], ids=["Muon", "AdamW"])
@pytest.mark.parametrize(
    ("layout", "missing", "absent", "raises"),
    [
        ("DDP", "raise", (1,), True),
        ("ZeRO-2", "raise", (1,), True),
        ("HSDP", "raise", (3,), True),
        ("ZeRO-2", "zero", (1,), False),
        # Zeros on one replica only would part it from the others.
        ("DDP", "zero", (1, 3), True),
        ("HSDP", "zero", (2, 3), True),
        ("replicated DTensors", "zero", (1, 3), True),
        ("DDP", "zero", (0, 1, 2, 3), False),
        ("HSDP", "zero", (0, 1, 2, 3), False),
        ("HSDP", "zero", (1, 3), False),  # both replicas of a shard have none
    ],
)
def test_a_gradient_missing_on_some_replicas(layout, missing, absent, raises, use_muon):
    for message in run_ranks(without_a_gradient, 4, layout, use_muon, missing, absent):
        assert bool(message) == raises
        assert not raises or f"a on ranks [{absent[0]}" in message


def first_step(kind: str, what: str) -> None:
    """A first step with something that differs between ranks."""
    rank = dist.get_rank()
    rows = 12 if what == "shapes" and rank else 16
    optim = muon_of((rows, 8), (30,), kind=kind)
    params = params_of(optim)
    if what == "weights" and rank:
        params[0].data.add_(1.0)
    for p in params:
        own = {"gradients": rank, "rounding of gradients": 1e-6 * rank}.get(what, 0.0)
        p.grad = torch.full_like(p, 1.0 + own)
    before = [p.detach().clone() for p in params]
    try:
        optim.step()
    except ValueError:
        assert all(torch.equal(p, b) for p, b in zip(params, before))
        raise


@pytest.mark.parametrize(
    ("what", "kind", "names"),
    [
        *(("weights", kind, "a has other weights on rank 1") for kind in KINDS),
        *(("shapes", kind, "a: (12, 8)") for kind in KINDS),
        ("gradients", "DDP", 'grad_reduce="mean"'),
        ("gradients", "ZeRO-2", ""),  # which it averages
        ("rounding of gradients", "DDP", ""),
    ],
)
def test_ranks_compare_what_they_hold_before_the_first_step(what, kind, names):
    for outcome in rank_outcomes(first_step, 2, kind, what):
        assert outcome.error == ("ValueError" if names else None)
        assert names in outcome.message


def with_other_gradients(kind: str) -> None:
    param = nn.Parameter(torch.zeros(64, 32, dtype=torch.bfloat16))
    optim = optimizer.Muon([{"params": [param], "use_muon": True}], **told(kind))
    for _ in range(2):
        param.grad = torch.ones_like(param)
        optim.step()
    if dist.get_rank() == 1:
        param.grad_dtype = torch.float32
    param.grad = torch.ones_like(param, dtype=param.grad_dtype)
    optim.step()


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="gradients have one dtype")
@on_both
def test_gradients_of_another_dtype_on_another_rank_raise_on_all(kind):
    for outcome in rank_outcomes(with_other_gradients, 2, kind):
        assert outcome.error == "ValueError" and "torch.float32" in outcome.message


# -- process groups --------------------------------------------------------------------------------


@on_ranks(2)
def test_a_group_that_is_none_of_this_ranks_is_refused() -> None:
    groups = [{"params": [nn.Parameter(torch.zeros(4, 4))], "use_muon": True}]
    of_another = dist.new_group([1])
    wrong = [("grad_reduce", {"grad_reduce": "sum", "process_group": dist.group.WORLD})]
    wrong += [("process_group", {"grad_reduce": "mean"})]
    wrong += [("process_group", {"process_group": value}) for value in ("world", 3, [0, 1])]
    if dist.get_rank() == 0:
        wrong.append(("process_group", {"process_group": of_another}))
    for name, options in wrong:
        with pytest.raises(ValueError, match=name):
            optimizer.Muon(groups, **options)
    with pytest.raises(ValueError, match="process_group"):
        optimizer.Muon([{**groups[0], "process_group": None}])


@on_both
@on_ranks(2)
def test_a_destroyed_process_group_is_refused(kind: str) -> None:
    optim = muon_of((8, 4), kind=kind)
    (param,) = params_of(optim)
    param.grad = torch.ones(8, 4)
    optim.step()
    dist.barrier()
    dist.destroy_process_group()
    before = param.detach().clone()
    param.grad = torch.ones(8, 4)
    with pytest.raises(ValueError, match="process_group"):
        optim.step()
    assert torch.equal(param, before)


# -- copies and files ------------------------------------------------------------------------------


@on_both
@on_ranks(2)
def test_copies_and_pickles_go_on_alike(kind: str) -> None:
    ours = muon_of((16, 24), (12, 8), (64,), kind=kind)
    set_gradients(params_of(ours), 0)
    ours.step()
    copied, pickled = copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))
    assert copied.process_group is dist.group.WORLD and pickled.process_group is None
    set_gradients(params_of(pickled), 1)
    with pytest.raises(ValueError, match="process_group"):
        pickled.step()
    pickled.process_group = dist.group.WORLD
    for optim in (ours, copied, pickled):
        set_gradients(params_of(optim), 1)
        optim.step()
    for optim in (copied, pickled):
        for p, q in zip(params_of(optim), params_of(ours)):
            assert torch.equal(p, q)
            assert optim.state[p].keys() == ours.state[q].keys()
            for key, value in ours.state[q].items():
                assert torch.equal(local(optim.state[p][key]), local(value)), key


def load_of_one_rank(kind: str, folder: str) -> None:
    """As trainers do that save on their first rank alone."""
    optim = muon_of((6, 4), (4, 8), (8,), kind=kind)
    params, path = params_of(optim), f"{folder}/{dist.get_rank()}.pt"
    set_gradients(params, 0)
    optim.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        get_optimizer_state_dict(nn.ParameterList(params), optim)
        assert not caught
        torch.save(optim.state_dict(), path)
        optim.state_dict()
    assert [Path(w.filename).name for w in caught] == ["test_replicas.py"]  # once
    optim.load_state_dict(torch.load(path, weights_only=True))  # a file of its own
    set_gradients(params, 1)
    optim.step()
    dist.barrier()
    optim.load_state_dict(torch.load(f"{folder}/0.pt", weights_only=True))
    before = [p.detach().clone() for p in params]
    set_gradients(params, 2)
    try:
        optim.step()
    finally:
        assert all(torch.equal(p, q) for p, q in zip(params, before))


@on_both
def test_what_one_rank_saved_of_divided_state_is_refused_when_all_have_loaded_it(kind, tmp_path):
    for outcome in rank_outcomes(load_of_one_rank, 2, kind, str(tmp_path)):
        assert outcome.error == "ValueError"
        assert "state of a" in outcome.message and "ranks 0 and 1" in outcome.message


@pytest.mark.filterwarnings("ignore")
@on_both
@on_ranks(2)
def test_ranks_whose_rows_of_state_are_alike_by_themselves_step_on(kind: str) -> None:
    """Of a layer whose outputs are summed up, say."""
    optim = muon_of((6, 4), kind=kind)
    (weight,) = params_of(optim)
    for _ in range(2):
        weight.grad = torch.arange(4.0).expand(6, 4).clone()
        optim.step()
        optim.load_state_dict(pickle.loads(pickle.dumps(optim.state_dict())))


class Wrapper:
    """Derives from the optimizer's class and forwards attributes, as Lightning's wrapper does."""

    def __init__(self, optim: torch.optim.Optimizer):
        self.optimizer = optim
        self.__class__ = type("Wrapper", (Wrapper, type(optim)), {})

    def step(self) -> None:
        self.optimizer.step()

    def __getattr__(self, name: str) -> object:
        return getattr(self.optimizer, name)


@pytest.mark.filterwarnings("ignore")
@on_ranks(2)
def test_what_is_set_through_a_wrapper_that_derives_from_the_class_reaches_the_optimizer() -> None:
    optim = muon_of((6, 4))
    wrapper = Wrapper(optim)
    wrapper.process_group = dist.group.WORLD
    assert optim.process_group is dist.group.WORLD
    with wrapper.audit() as audit:
        set_gradients(params_of(optim), 0)
        wrapper.step()
    assert len(audit.report().steps) == 1
    assert wrapper.metrics() == optim.metrics() != {}
    wrapper.turn_on_cpu_offload()
    assert optim.cpu_offload
    saved = copy.deepcopy(wrapper.state_dict())
    saved["param_groups"][0]["lr"] = 0.25
    wrapper.load_state_dict(saved)
    assert optim.param_groups[0]["lr"] == 0.25 and "param_groups" not in vars(wrapper)


# -- presets ---------------------------------------------------------------------------------------


def nanochat_groups() -> list[dict[str, Any]]:
    """Head, embedding, scalars and matrices, with the keys that nanochat gives them."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def params(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
        return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]

    adamw = dict(kind="adamw", betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0)
    muon = dict(kind="muon", lr=0.02, momentum=0.95, ns_steps=5, beta2=0.9, weight_decay=0.2)
    return [
        dict(adamw, params=params((80, 16)), lr=0.004),
        dict(adamw, params=params((80, 16)), lr=0.2),
        dict(adamw, params=params((3,)), lr=0.005),
        dict(muon, params=params(*[(64, 16)] * 3)),
        dict(muon, params=params(*[(16, 64)] * 3)),
    ]


def step_nanochat(steps: int) -> None:
    ours = optimizer.DistMuonAdamW(nanochat_groups(), **EXACT)
    reference = optimizer.MuonAdamW(nanochat_groups(), **EXACT)
    pairs = list(zip("abcdefghi", params_of(ours), params_of(reference)))
    for step in range(steps):
        for optim in (ours, reference):
            for group in optim.param_groups:  # as nanochat's loop sets them before every step
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * (1 - step / steps)
                if group["kind"] == "muon":
                    group["momentum"] = 0.85 + 0.1 * min(step / 5, 1)
                    group["weight_decay"] = 0.2 * (1 - step / steps)
        for index, (_, p, q) in enumerate(pairs):
            each = [integers(q.shape, step, index, r) for r in range(dist.get_world_size())]
            p.grad, q.grad = each[dist.get_rank()], sum(each) / len(each)
        ours.step()
        reference.step()
    Twins(ours, reference, pairs).compare()


def test_nanochats_optimizer_on_ranks_takes_the_steps_of_the_one_on_one_device():
    run_ranks(step_nanochat, 2, 6)


def test_dist_muon_adamw_needs_a_process_group():
    with pytest.raises(ValueError, match="init_process_group"):
        optimizer.DistMuonAdamW([{"kind": "adamw", "params": [nn.Parameter(torch.ones(3))]}])


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
        grads: list[Any] = [integers(p.shape, step, index) for index, p in enumerate(params)]
        grads[step % len(grads)] = None  # counts as zeros
        for p, grad in zip(params, grads):
            p.grad = grad
        optim.step()
        source.step(grads)
    return [(p.detach(), W) for p, W in zip(params, source.weights)]


def test_keller_jordans_preset_divides_the_work():
    for found in run_ranks(step_keller_jordan, 2, 5):
        for weight, expected in found:
            torch.testing.assert_close(weight.double(), expected, rtol=0, atol=2e-5)
