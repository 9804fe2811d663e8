"""Plain parameters that all ranks hold: under DDP, and in ZeRO-2 without it.

That their steps are those of one device, test_layouts.py shows.
"""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from breaking import refused
from comparisons import assert_equal
from counters import count
from kernel import optimizer
from layouts import (
    EXACT,
    Twins,
    case,
    local,
    params_of,
    part,
    set_gradients,
    whole,
)
from ranks import DEVICE, on_ranks, run_ranks

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


def held_in_default_formats(layout: str) -> tuple[int, list[torch.Tensor]]:
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
    return shard, held


@pytest.mark.parametrize(
    "layout", [*KINDS, "HSDP redundant", "HSDP spread", "HSDP auto", "TP spread"]
)
def test_replicas_hold_the_same_bits_in_the_default_formats(layout):
    of_shard: dict[int, list[torch.Tensor]] = {}
    for shard, found in run_ranks(held_in_default_formats, 4, layout):
        assert_equal(found, of_shard.setdefault(shard, found))
    assert len(of_shard) == (1 if layout in KINDS else 2)


class NaNs(TorchDispatchMode):
    """How many are given to collectives, of which output comes before input."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            given = args[1] if isinstance(args[1], torch.Tensor) else args[0]
            self.count += sum(t.isnan().sum().item() for t in tree_leaves(given))
        return func(*args, **(kwargs or {}))


@on_both
@on_ranks(3)
def test_nothing_travels_that_nobody_wrote(kind: str) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    optim = muon_of((7, 40), (5, 24), (6, 30), (11, 4), (9,), kind=kind, beta2=0.9)
    set_gradients(params_of(optim))
    with NaNs() as found:
        optim.step()
    assert found.count == 0


# -- replicas of some ranks ------------------------------------------------------------------------


@on_both
@on_ranks(4)
def test_each_stage_of_a_pipeline_has_its_own_replicas(kind: str) -> None:
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("pp", "dp"))
    stage, rank = mesh.get_coordinate()
    shapes = [(16, 24), (12 + 4 * stage, 8), (7,)]
    for group in (mesh["dp"].get_group(), mesh["dp"]):  # both are taken
        ours, reference = muon_of(*shapes, **EXACT, **told(kind, group)), muon_of(*shapes, **EXACT)
        pairs = list(zip("abc", params_of(ours), params_of(reference)))
        for step in range(3):
            for index, (_, p, q) in enumerate(pairs):
                each = [integers(q.shape, step, index, other) for other in range(2)]
                q.grad = sum(each) / 2
                p.grad = each[rank] if kind == "ZeRO-2" else q.grad.clone()
            ours.step()
            reference.step()
        Twins(ours, reference, pairs).compare()


# -- means of gradients ----------------------------------------------------------------------------

SHAPES = [
    *((64, 32), (7, 300), (5, 1024), (3, 400), (1, 2000), (129, 15), (0, 5), (6, 0), (2, 2)),
    *((2048,), (1025,), (0,), (10,), (1,), ()),
]
LARGE = [*SHAPES[:10], *[(1_100_001,)] * 3, *SHAPES[10:]]  # of several buckets


def means_of_odd_gradients(shapes: Any, dtype: torch.dtype) -> list[tuple[str, float]]:
    """Names and bytes of the collectives that average."""
    warnings.simplefilter("error")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    groups = [
        {"params": [p for p in params if p.ndim == 2], "use_muon": True, "momentum": 0.0},
        {"params": [p for p in params if p.ndim != 2], "use_muon": False},
    ]
    more = {} if dtype.itemsize != 2 else {"adamw_betas": (0.5, 0.9)}
    optim = optimizer.Muon(groups, missing_grad="zero", nesterov=False, **more, **told("ZeRO-2"))
    means = {}
    for number, p in enumerate(params):
        scale = 2.0**12 if dtype == torch.float16 else 2.0**-8  # so that sums of two overflow
        each: list[Any] = [(scale * integers(p.shape, number, r)).to(dtype) for r in range(ranks)]
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


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
@pytest.mark.parametrize(("ranks", "shapes"), [(2, LARGE), (4, SHAPES)], ids=["2", "4"])
def test_means_of_gradients_of_any_shape_and_memory_are_exact(ranks, shapes, dtype):
    found = run_ranks(means_of_odd_gradients, ranks, shapes, dtype)
    assert all(other == found[0] for other in found)  # in one order on all ranks
    assert len(found[0]) >= (4 if shapes is LARGE else 2)
    least = sum(map(math.prod, shapes)) * dtype.itemsize * (ranks - 1) / ranks
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


@pytest.mark.parametrize("use_muon", [True, False], ids=["Muon", "AdamW"])
@pytest.mark.parametrize(
    ("layout", "missing", "absent", "raises"),
    [
        ("DDP", "raise", (1,), True),
        ("ZeRO-2", "raise", (1,), True),
        ("ZeRO-2", "zero", (1,), False),
        ("DDP", "zero", (1, 3), True),  # zeros on one replica only would part it from the others
        ("DDP", "zero", (0, 1, 2, 3), False),
        ("HSDP", "zero", (0, 1, 2, 3), False),
        ("HSDP", "zero", (1, 3), False),  # both replicas of a shard have none
        *(
            (layout, missing, (2, 3), True)
            for layout in ("HSDP", "replicated")
            for missing in ("raise", "zero")
        ),
    ],
)
@on_ranks(4)
def test_a_gradient_missing_on_some_replicas(
    layout: str, missing: str, absent: tuple[int, ...], raises: bool, use_muon: bool
) -> None:
    params = [nn.Parameter(torch.ones(64, 32)) for _ in range(2)]
    if layout not in KINDS:
        mesh = init_device_mesh(DEVICE, (2, 2))
        placements = [Replicate(), Shard(0) if layout == "HSDP" else Replicate()]
        params = [nn.Parameter(part(p.detach(), mesh, placements)) for p in params]
    group = {"params": params, "names": ["a", "b"], "use_muon": use_muon, "missing_grad": missing}
    optim = optimizer.Muon([group], **EXACT, **(told(layout) if layout in KINDS else {}))
    set_gradients(params)
    grad = whole(params[0].grad)
    if dist.get_rank() in absent:
        params[0].grad = None
    if raises:
        refused(optim, rf"a on ranks \[{absent[0]}")
        return
    optim.step()
    if layout == "ZeRO-2":
        key, share = ("momentum_buffer", 1.0) if use_muon else ("exp_avg", 0.1)
        expected = grad * share * (4 - len(absent)) / 4  # zeros count
        torch.testing.assert_close(whole(optim.state[params[0]][key]), expected)


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        *(("weights", kind, "a has other weights on rank 1") for kind in KINDS),
        *(("shapes", kind, r"a: \(12, 8\)") for kind in KINDS),
        ("gradients", "DDP", 'grad_reduce="mean"'),
        ("gradients", "ZeRO-2", ""),  # which it averages
        ("rounding of gradients", "DDP", ""),
    ],
)
@on_ranks(2)
def test_ranks_compare_what_they_hold_before_the_first_step(
    what: str, kind: str, words: str
) -> None:
    rank = dist.get_rank()
    optim = muon_of((12 if what == "shapes" and rank else 16, 8), (30,), kind=kind)
    if what == "weights" and rank:
        params_of(optim)[0].data.add_(1.0)
    for p in params_of(optim):
        own = {"gradients": rank, "rounding of gradients": 1e-6 * rank}.get(what, 0.0)
        p.grad = torch.full_like(p, 1.0 + own)
    if words:
        refused(optim, words)
    else:
        optim.step()


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="gradients have one dtype")
@on_both
@on_ranks(2)
def test_gradients_of_another_dtype_on_another_rank_raise_on_all(kind: str) -> None:
    param = nn.Parameter(torch.zeros(64, 32, dtype=torch.bfloat16))
    optim = optimizer.Muon([{"params": [param], "use_muon": True}], **told(kind))
    for step in range(3):
        if step == 2 and dist.get_rank() == 1:
            param.grad_dtype = torch.float32
        param.grad = torch.ones_like(param, dtype=param.grad_dtype)
        if step == 2:
            refused(optim, r"torch\.float32")
        else:
            optim.step()


# -- process groups --------------------------------------------------------------------------------


@on_ranks(2)
def test_a_process_group_without_this_rank_is_refused() -> None:
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
    param.grad = torch.ones(8, 4)
    refused(optim, "process_group")


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
    refused(pickled, "process_group")
    pickled.process_group = dist.group.WORLD
    for optim in (ours, copied, pickled):
        set_gradients(params_of(optim), 1)
        optim.step()
    for optim in (copied, pickled):
        assert_equal(list(params_of(optim)), list(params_of(ours)))
        assert_equal(optim.state_dict(), ours.state_dict())


@on_both
@on_ranks(2)
def test_what_one_rank_saved_of_divided_state_is_refused_when_all_have_loaded_it(
    kind: str, tmp_path: Path
) -> None:
    """As trainers do that save on their first rank alone."""
    optim = muon_of((6, 4), (4, 8), (8,), kind=kind)
    params, path = params_of(optim), tmp_path / f"{dist.get_rank()}.pt"
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
    optim.load_state_dict(torch.load(tmp_path / "0.pt", weights_only=True))
    set_gradients(params, 2)
    refused(optim, "state of a .*ranks 0 and 1")


@pytest.mark.filterwarnings("ignore")
@on_both
@on_ranks(2)
def test_ranks_whose_rows_of_state_are_alike_by_themselves_step_on(kind: str) -> None:
    """Gradients of equal rows occur in a layer whose outputs are summed, for example."""
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


def test_dist_muon_adamw_needs_a_process_group():
    with pytest.raises(ValueError, match="init_process_group"):
        optimizer.DistMuonAdamW([{"kind": "adamw", "params": [nn.Parameter(torch.ones(3))]}])
