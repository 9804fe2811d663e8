"""What only some ranks get wrong raises on all of them, in seconds, before anything was written."""

from __future__ import annotations

import copy
import itertools
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from kernel import optimizer
from layouts import (
    EXACT,
    FP32,
    Group,
    Twins,
    Weight,
    assert_same,
    build,
    case,
    local,
    params_of,
    part,
    part_for,
)
from ranks import DEVICE, rank_outcomes, run_ranks


def sharded_group(mesh, names=("a.weight", "b.weight", "c.weight"), **options):
    params = [nn.Parameter(distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)])) for _ in names]
    for param in params:
        param.grad = distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)])
    return {"params": params, "names": list(names), "use_muon": True, **options}


def check_untouched(optim):
    assert not optim.state
    for group in optim.param_groups:
        for param in group["params"]:
            assert torch.equal(param.to_local(), torch.ones_like(param.to_local()))


def step_with_fault(fault):
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    group = sharded_group(mesh)
    odd = dist.get_rank() == 1
    if fault == "options" and odd:
        group["ns_steps"] = 4
    if fault == "order" and odd:
        for key in ("params", "names"):
            group[key] = group[key][::-1]
    if fault == "fewer" and odd:
        for key in ("params", "names"):
            group[key] = group[key][:-1]
    optim = optimizer.Muon([group], lr=0.1)
    if fault == "gradient" and odd:
        optim.param_groups[0]["params"][1].grad = None
    if fault == "validation" and odd:
        optim.param_groups[0]["momentum"] = 2.0
    if fault == "all gradients" and odd:
        optim.zero_grad()
    start = time.monotonic()
    try:
        optim.step()
    finally:
        assert time.monotonic() - start < 10
        check_untouched(optim)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("gradient", "gradients are missing on some ranks only: b.weight on ranks [1]"),
        ("all gradients", "a.weight on ranks [1]; b.weight on ranks [1]"),
        ("options", "ranks 0 and 1 would do different things"),
        ("order", "Rank 0 has 'a.weight: (6, 4)"),
        ("fewer", "Only rank 0 has 'c.weight"),
        ("validation", "momentum must be a number in [0, 1), found 2.0"),
    ],
)
def test_a_fault_on_one_rank_raises_on_every_rank_and_touches_nothing(fault, words):
    for outcome in rank_outcomes(step_with_fault, 3, fault, pg_timeout=20):
        assert outcome.error == "ValueError", outcome
        assert words in outcome.message


def zeros_for_missing():
    mesh = init_device_mesh(DEVICE, (2,))
    optim = optimizer.Muon([sharded_group(mesh, missing_grad="zero")], lr=0.1)
    if dist.get_rank() == 1:
        optim.param_groups[0]["params"][1].grad = None
    optim.step()
    return optim.param_groups[0]["params"][1].full_tensor()


def test_missing_grad_zero_counts_an_absent_gradient_as_zeros():
    first, second = run_ranks(zeros_for_missing, 2)
    assert torch.equal(first, second)
    assert not torch.equal(first, torch.ones(6, 4))


def weights_without_memory():
    mesh = init_device_mesh(DEVICE, (2,))
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 6)))
    fully_shard(model[1], mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = torch.ones(2, 4)
    with torch.no_grad():
        model(x)  # leaves the root's own parameters whole, until they are freed after a backward
    for call in (optimizer.get_default_muon_param_groups, optimizer.describe):
        with pytest.raises(ValueError, match=r"0\.weight is whole for a while"):
            call(model)
    named = list(model.named_parameters())
    groups = [
        {"params": [(n, p) for n, p in named if p.ndim == ndim], "use_muon": ndim == 2}
        for ndim in (1, 2)
    ]
    optim = optimizer.Muon(groups, lr=0.1)
    model(x).square().sum().backward()
    optimizer.get_default_muon_param_groups(model)  # by now shards are back
    for _, p in named[:2]:
        assert p.grad is None and p.untyped_storage().size() == 0
    before = [local(p).clone() for _, p in named[2:]]
    optim.step()
    for (name, p), old in zip(named[2:], before, strict=True):
        assert not torch.equal(local(p), old), name
    optim.state_dict()
    messages = []
    for _, freed in named[:2]:
        model(x).square().sum().backward()
        if dist.get_rank() == 1:
            freed.grad = torch.ones(freed.shape)
        before = [local(p).clone() for _, p in named[2:]]
        with pytest.raises(ValueError) as raised:
            optim.step()
        messages.append(str(raised.value))
        assert all(torch.equal(local(p), old) for (_, p), old in zip(named[2:], before))
        freed.grad = None
        optim.step()
        optim.zero_grad()
    return messages


def test_a_weight_without_memory_is_passed_over_or_raises_by_name_on_all_ranks():
    for messages in run_ranks(weights_without_memory, 2, pg_timeout=15):
        for name, message in zip(("0.weight", "0.bias"), messages, strict=True):
            assert f"{name} has a gradient, but its memory was freed" in message


def experts_without_memory():
    idle, *others = params = [nn.Parameter(torch.full((4, 6), float(n))) for n in range(3)]
    optim = optimizer.Muon([{"params": params, "use_muon": True}], lr=0.1, none_grad=False)
    for step in range(4):
        for p in others:
            p.grad = torch.ones(4, 6)
        idle.grad = None if step % 2 else torch.ones(4, 6)
        idle.untyped_storage().resize_(0 if step % 2 else 4 * 6 * 4)
        if step % 2 == 0:
            idle.data.fill_(1.0)
        before = [p.detach().clone() for p in others]
        optim.step()
        assert not any(torch.equal(p, old) for p, old in zip(others, before))
    idle.untyped_storage().resize_(4 * 6 * 4)


@pytest.mark.skipif(DEVICE != "cpu", reason="sizes storages by hand")
def test_an_expert_whose_memory_comes_and_goes_is_trained_while_it_is_there():
    experts_without_memory()


def two_stages():
    rank = dist.get_rank()
    meshes = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("stage", "dp"))
    names = ("a.weight",) if rank < 2 else ("b.weight", "c.weight")
    optim = optimizer.Muon([sharded_group(meshes["dp"], names)], lr=0.1)
    if rank == 3:
        optim.param_groups[0]["params"][0].grad = None
    optim.step()


def test_pipeline_stages_compare_notes_among_themselves_only():
    outcomes = rank_outcomes(two_stages, 4, pg_timeout=20)
    assert [outcome.error for outcome in outcomes] == [None, None, "ValueError", "ValueError"]


def exchanges_of_three_steps(consistency_check):
    mesh = init_device_mesh(DEVICE, (2,))
    group = sharded_group(mesh, none_grad=False)
    optim = optimizer.Muon([group], lr=0.1, consistency_check=consistency_check)
    calls = []
    agreement = optimizer.muon.agreement.Agreement
    original = agreement.check

    def counted(*args):
        calls.append(1)
        return original(*args)

    agreement.check = counted
    for _ in range(3):
        optim.step()
    return len(calls)


@pytest.mark.parametrize(("check", "exchanges"), [("step", 3), ("plan", 1), ("off", 0)])
def test_consistency_check_says_how_often_ranks_compare_notes(check, exchanges):
    assert run_ranks(exchanges_of_three_steps, 2, check) == [exchanges] * 2


def ranks_in_different_numbers_of_groups():
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("stage", "dp"))["dp"]
    if dist.get_rank() in (0, 2):
        dist.new_group([0, 2], use_local_synchronization=True)
    optim = optimizer.Muon([sharded_group(mesh)], lr=0.1)
    optim.step()
    assert not torch.equal(optim.param_groups[0]["params"][0].to_local(), torch.ones(3, 4))


def test_ranks_that_are_in_different_numbers_of_groups_find_each_other():
    run_ranks(ranks_in_different_numbers_of_groups, 4, timeout=60)


def overlapping_meshes():
    groups = []
    for number, ranks in enumerate(([0, 1], [1, 2])):
        mesh = DeviceMesh(DEVICE, ranks)
        if dist.get_rank() in ranks:
            groups.append(sharded_group(mesh, (f"{number}.weight",)))
    optimizer.Muon(groups, lr=0.1).step()


def test_meshes_that_share_a_rank_step_together():
    run_ranks(overlapping_meshes, 3, timeout=60)


def plain_state_into_shards():
    mesh = init_device_mesh(DEVICE, (2,))
    weight = nn.Parameter(torch.ones(6, 4))
    weight.grad = torch.ones(6, 4)
    plain = optimizer.Muon([{"params": [weight], "names": ["a.weight"], "use_muon": True}])
    plain.step()
    optim = optimizer.Muon([sharded_group(mesh, ("a.weight",))])
    with pytest.raises(
        ValueError, match=r"a\.weight in the checkpoint is plain, where it should be"
    ):
        optim.load_state_dict(plain.state_dict())
    check_untouched(optim)


def test_plain_state_does_not_load_into_a_shard_as_if_it_were_one():
    run_ranks(plain_state_into_shards, 2)


# -- every kind of mesh ------------------------------------------------------------------------


ADAMW = Group([Weight((12, 8), (4,), (0,))], {"use_muon": False})

# Names are layers.GROUP.INDEX.weight, or experts.… where there are more than two dimensions.
LAYOUTS = {
    "FSDP2": [
        Group(
            [Weight((12, 8), (4,), (0,)), Weight((2, 16), (4,), (0,)), Weight((8, 12), (4,), (1,))]
        ),
        Group([Weight((8, 8), (4,), (0,)), Weight((6, 4), (4,), (0,))], {"beta2": 0.9}),
        ADAMW,
    ],
    "TP + FSDP2": [
        Group([Weight((12, 8), (2, 2), (0, 0)), Weight((8, 12), (2, 2), (0, 1))]),
        Group([Weight((8, 8), (2, 2), (0, None)), Weight((6, 4), (2, 2), (None, 0))]),
        ADAMW,
    ],
    "experts": [
        Group([Weight((4, 8, 12), (2, 2), (0, 1)), Weight((2, 4, 8), (2, 2), (0, 2))]),
        Group([Weight((4, 8, 4), (2, 2), (0, 1))], {"beta2": 0.9}),
    ],
    "experts and dense weights": [
        Group([Weight((4, 8, 12), (2, 2), (0, 1)), Weight((12, 8), (4,), (0,))]),
        Group([Weight((4, 4, 8), (4,), (0,)), Weight((4, 8, 4), (2, 2), (0, 0))]),
        ADAMW,
    ],
}


def name_of(layout: str, number: int, index: int) -> str:
    shape = LAYOUTS[layout][number].weights[index].shape
    return f"{'experts' if len(shape) > 2 else 'layers'}.{number}.{index}.weight"


def travels(weight: Weight) -> bool:
    """Whether shards cut its matrices; else they divide whole experts among the ranks."""
    experts = len(weight.shape) - 2
    return any(dim is not None and dim >= experts for dim in weight.dims)


def placed(layout: str) -> Twins:
    weights = [weight for group in LAYOUTS[layout] for weight in group.weights]
    meshes = {shape: init_device_mesh(DEVICE, shape) for shape in {w.mesh for w in weights}}
    return Twins.placed(LAYOUTS[layout], meshes, EXACT)


def give_gradients(twins: Twins, step: int, absent: Sequence[int] = ()) -> None:
    """Random gradients, the same for both twins, but none for those of the numbers ``absent``."""
    generator = torch.Generator(DEVICE).manual_seed(step)
    for number, (_, p, q) in enumerate(twins.pairs):
        grad = torch.randn(q.shape, generator=generator)
        q.grad = None if number in absent else grad
        p.grad = None if number in absent else part_for(p, grad)


def step_both(twins: Twins) -> None:
    twins.ours.step()
    twins.reference.step()


def take_steps(twins: Twins, steps: int) -> None:
    for step in range(steps):
        give_gradients(twins, step)
        step_both(twins)


def local_copy(tensor: Any) -> Any:
    if not isinstance(tensor, torch.Tensor):
        return copy.copy(tensor)
    return local(tensor).clone()


@dataclass
class Before:
    """Everything a step might touch, as it was."""

    params: list[nn.Parameter]
    weights: list[torch.Tensor]
    grads: list[tuple[Any, Any]]
    state: list[dict[str, Any]]

    @classmethod
    def of(cls, optim: torch.optim.Optimizer, params: list[nn.Parameter]) -> Before:
        return cls(
            params,
            [local_copy(p) for p in params],
            [(p.grad, local_copy(p.grad)) for p in params],
            [{k: local_copy(v) for k, v in optim.state.get(p, {}).items()} for p in params],
        )

    def check(self, optim: torch.optim.Optimizer) -> None:
        assert set(optim.state) == {p for p, own in zip(self.params, self.state) if own}
        now = Before.of(optim, self.params)
        for old, new in zip(self.weights, now.weights):
            assert torch.equal(old, new)
        for (old, values), (new, new_values) in zip(self.grads, now.grads):
            assert old is new
            assert values is None or torch.equal(values, new_values)
        for old, new in zip(self.state, now.state):
            assert old.keys() == new.keys()
            assert all(torch.equal(old[key], new[key]) for key in old)


@dataclass
class Saved:
    """The groups and their gradients, to be put back after a fault."""

    groups: list[dict[str, Any]]
    names: list[Any]
    grads: list[tuple[nn.Parameter, Any]]

    @classmethod
    def of(cls, optim: torch.optim.Optimizer) -> Saved:
        groups = [{**group, "params": list(group["params"])} for group in optim.param_groups]
        return cls(groups, optim.names, [(p, p.grad) for p in params_of(optim)])

    def put_back(self, optim: torch.optim.Optimizer) -> None:
        for group, saved, names in zip(optim.param_groups, self.groups, self.names):
            group.update(saved, names=names)
        for param, grad in self.grads:
            param.requires_grad_(True)
            param.grad = grad


Inject = Callable[[torch.optim.Optimizer], None]


def without_gradient(number: int, index: int) -> Inject:
    def inject(optim):
        optim.param_groups[number]["params"][index].grad = None

    return inject


def frozen(number: int, index: int) -> Inject:
    def inject(optim):
        optim.param_groups[number]["params"][index].requires_grad_(False)

    return inject


def without_any_gradient(*numbers: int) -> Inject:
    def inject(optim):
        for number in numbers:
            for param in optim.param_groups[number]["params"]:
                param.grad = None

    return inject


def backwards(number: int) -> Inject:
    def inject(optim):
        names = optim.names[number]
        group = optim.param_groups[number]
        group["params"] = group["params"][::-1]
        group["names"] = names[::-1]

    return inject


def with_option(number: int, key: str, value: Any) -> Inject:
    def inject(optim):
        optim.param_groups[number][key] = value

    return inject


def with_gradient_everywhere(number: int, index: int) -> Inject:
    def inject(optim):
        param = optim.param_groups[number]["params"][index]
        placements = [Replicate()] * param.device_mesh.ndim
        param.grad = part(torch.ones(param.shape), param.device_mesh, placements)

    return inject


def with_other_shape(number: int, index: int) -> Inject:
    def inject(optim):
        param = optim.param_groups[number]["params"][index]
        shape = (*param.shape[:-1], 2 * param.shape[-1])
        other = nn.Parameter(part(torch.ones(shape), param.device_mesh, param.placements))
        other.grad = part(torch.ones(shape), param.device_mesh, param.placements)
        optim.param_groups[number]["params"][index] = other

    return inject


def faults_of(layout: str) -> dict[str, tuple[Inject, str]]:
    """What is done on one rank, and words of the error on all of them."""
    first, last = name_of(layout, 0, 0), name_of(layout, 0, 1)
    missing = "gradients are missing on some ranks only: "
    differ = "would do different things; give all ranks the same parameters and options"
    faults: dict[str, tuple[Inject, str]] = {
        "no gradient of the first": (without_gradient(0, 0), f"{missing}{first} on ranks [RANK]"),
        "no gradient of another": (without_gradient(0, 1), f"{missing}{last} on ranks [RANK]"),
        "frozen": (frozen(0, 0), f"{missing}{first} on ranks [RANK]"),
        "no gradient in a group": (without_any_gradient(0), f"{first} on ranks [RANK]"),
        "no gradient at all": (
            without_any_gradient(*range(len(LAYOUTS[layout]))),
            f"{first} on ranks [RANK]",
        ),
        "order": (backwards(0), f"'{first}: "),
        "placement of a gradient": (with_gradient_everywhere(0, 1), f"{last} is [Shard"),
        "shape": (with_other_shape(0, 1), f"'{last}: ("),
        "bad momentum": (with_option(0, "momentum", 2.0), "momentum must be a number in [0, 1)"),
        "bad steps": (with_option(1, "ns_steps", 0), "param_groups[1]: ns_steps must be an int"),
        "bad split": (with_option(0, "split", [5]), f"{first} has"),
    }
    options = {"lr": 0.03, "ns_steps": 3, "split": 2, "beta2": 0.5, "cautious": True}
    for key, value in options.items():
        faults[f"other {key}"] = (with_option(0, key, value), differ)
    return faults


def step_with_faults(layout: str, steps: int) -> None:
    """Each fault on another rank; then all go on as if nothing had been."""
    for number, (fault, (inject, words)) in enumerate(faults_of(layout).items()):
        with case(f"{fault} after {steps} steps"):
            faulty = number % dist.get_world_size()
            twins = placed(layout)
            take_steps(twins, steps)
            give_gradients(twins, steps)
            saved = Saved.of(twins.ours)
            if dist.get_rank() == faulty:
                inject(twins.ours)
            check_that_all_raise(twins, words.replace("RANK", str(faulty)))
            saved.put_back(twins.ours)
            for step in range(steps, steps + 2):
                give_gradients(twins, step)
                step_both(twins)
            twins.compare()


def check_that_all_raise(twins: Twins, words: str) -> None:
    before = Before.of(twins.ours, [p for _, p, _ in twins.pairs])
    start = time.monotonic()
    with pytest.raises(ValueError, match=re.escape(words)):
        twins.ours.step()
    assert time.monotonic() - start < 10
    before.check(twins.ours)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.slow
def test_no_fault_on_one_rank_of_a_mesh_leaves_a_trace(layout, steps):
    run_ranks(step_with_faults, 4, layout, steps, pg_timeout=20)


def lack_different_gradients(dims: tuple[int | None, ...]) -> None:
    """Every rank lacks one of several matrices of a shape, whose plans are alike but for names."""
    mesh, rank = init_device_mesh(DEVICE, (2, 2)), dist.get_rank()
    groups = [Group([Weight((8, 12), (2, 2), dims)] * 4)]
    twins = Twins.placed(groups, {(2, 2): mesh}, EXACT)
    for step in range(3):
        give_gradients(twins, step)
        saved = Saved.of(twins.ours)
        without_gradient(0, 2 if rank == step + 1 else 1)(twins.ours)
        check_that_all_raise(twins, "layers.0.1.weight on ranks [")
        saved.put_back(twins.ours)
        step_both(twins)
        twins.compare()


@pytest.mark.parametrize("dims", [(0, 0), (None, 0)], ids=str)
def test_ranks_that_lack_different_gradients_of_one_shape_are_told(dims):
    run_ranks(lack_different_gradients, 4, dims, pg_timeout=20)


def resume_with_other_options(layout: str) -> None:
    """An optimizer that goes on from another's checkpoint, on one rank with an option of its own"""
    options = {"chunk_size": 1, "warmup_step": 1, "comm_dtype": torch.bfloat16}
    for number, (key, value) in enumerate(options.items()):
        with case(key):
            faulty = number + 1
            twins = placed(layout)
            take_steps(twins, 2)
            give_gradients(twins, 2)
            groups = [
                {**group, "names": names}
                for group, names in zip(twins.ours.param_groups, twins.ours.names)
            ]
            own = {key: value} if dist.get_rank() == faulty else {}
            resumed = build(groups, **{**FP32, **own})
            resumed.load_state_dict(twins.ours.state_dict())
            before = [
                Before.of(optim, [p for _, p, _ in twins.pairs]) for optim in (twins.ours, resumed)
            ]
            start = time.monotonic()
            with pytest.raises(ValueError, match=f"would do different things.*{key} = "):
                resumed.step()
            assert time.monotonic() - start < 10
            for unchanged, optim in zip(before, (twins.ours, resumed)):
                unchanged.check(optim)
            step_both(twins)
            twins.compare()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["TP + FSDP2", "experts"])
def test_an_option_of_the_optimizer_that_one_rank_has_otherwise_raises_on_all(layout):
    run_ranks(resume_with_other_options, 4, layout, pg_timeout=20)


# -- what is no fault --------------------------------------------------------------------------


def step_without_local_experts(layout: str, number: int, lacking: Sequence[Sequence[int]]) -> None:
    """One parameter has no gradient on some ranks, which hold its experts for themselves."""
    for ranks in lacking:
        for start in (0, 2):
            with case(f"ranks {ranks} after {start} steps"):
                twins = placed(layout)
                take_steps(twins, start)
                name, idle, q = twins.pairs[number]
                weight, state = local_copy(idle), twins.ours.state
                momentum = local_copy(state[idle]["momentum_buffer"]) if start else 0 * weight
                for step in range(start, start + 3):
                    give_gradients(twins, step)
                    if dist.get_rank() in ranks:
                        idle.grad = None
                    step_both(twins)
                if dist.get_rank() in ranks:
                    assert torch.equal(local_copy(idle), weight)
                    assert torch.equal(local_copy(state[idle]["momentum_buffer"]), momentum)
                else:
                    assert_same(name, idle, q, 0.0)
                    assert not torch.equal(local_copy(idle), weight)
                del twins.pairs[number]
                twins.compare()


@pytest.mark.slow
def test_experts_without_traffic_may_lack_their_gradient_on_one_rank():
    lacking = [(0,), (3,), (1, 2), (0, 1, 2)]
    run_ranks(step_without_local_experts, 4, "experts and dense weights", 2, lacking)
    run_ranks(step_without_local_experts, 4, "experts and dense weights", 3, lacking)


@pytest.mark.parametrize(("layout", "number"), [("experts", 0), ("experts", 2)])
def test_experts_may_lack_their_gradient_on_all_ranks_that_exchange_them(layout, number):
    run_ranks(step_without_local_experts, 4, layout, number, [(0, 1), (2, 3)])


def step_without(layout: str, frozen: bool) -> None:
    """Every parameter in turn, and every group, has no gradient, or is frozen, on all ranks."""
    ends = [0]
    for group in LAYOUTS[layout]:
        ends.append(ends[-1] + len(group.weights))
    everything = range(ends[-1])
    of_groups = [range(start, stop) for start, stop in itertools.pairwise(ends)]
    for absent in [*([number] for number in everything), *of_groups, everything]:
        with case(f"without {list(absent)}"):
            twins = placed(layout)
            take_steps(twins, 1)
            for number in absent if frozen else ():
                for param in twins.pairs[number][1:]:
                    param.requires_grad_(False)
            before = [local_copy(p) for _, p, _ in twins.pairs]
            for step in (1, 2):
                give_gradients(twins, step, () if frozen else absent)
                step_both(twins)
            twins.compare()
            for number, (_, p, _) in enumerate(twins.pairs):
                same = number in absent or not p.to_local().numel()
                assert torch.equal(local_copy(p), before[number]) == same


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("frozen", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "layout", [pytest.param("FSDP2", marks=pytest.mark.slow), "experts and dense weights"]
)
def test_what_lacks_a_gradient_or_is_frozen_on_all_ranks_is_skipped(layout, frozen):
    run_ranks(step_without, 4, layout, frozen)


def step_with_nan(layout: str) -> None:
    for number in range(len(placed(layout).pairs)):
        with case(f"NaN in parameter {number}"):
            twins = placed(layout)
            take_steps(twins, 1)
            give_gradients(twins, 1)
            _, p, q = twins.pairs[number]
            q.grad.view(-1)[-1] = float("nan")
            p.grad = part_for(p, q.grad)
            step_both(twins)
            expected = part_for(p, q.detach()).to_local().isnan()
            assert torch.equal(p.to_local().isnan(), expected)
            del twins.pairs[number]
            give_gradients(twins, 2)
            step_both(twins)
            twins.compare()


@pytest.mark.parametrize(
    "layout",
    [
        "TP + FSDP2",
        *(pytest.param(key, marks=pytest.mark.slow) for key in LAYOUTS if key != "TP + FSDP2"),
    ],
)
def test_a_nan_on_one_rank_is_no_fault_and_stays_in_its_matrix(layout):
    run_ranks(step_with_nan, 4, layout)


# -- changing gradients ------------------------------------------------------------------------


def step_with_changing_gradients(layout: str, faulty_steps: Sequence[int]) -> None:
    """Twelve steps, each with gradients of other parameters; more subsets than plans are kept."""
    twins, draw = placed(layout), random.Random(0)
    twins.ours.param_groups[1]["none_grad"] = False
    weights = [(w, group) for group in LAYOUTS[layout] for w in group.weights]
    travelling = [n for n, (w, group) in enumerate(weights) if travels(w) and group is not ADAMW]
    kept = {p for group in twins.ours.param_groups[1:] for p in group["params"]}
    for step in range(12):
        with case(f"step {step}"):
            absent = draw.sample(range(len(twins.pairs)), draw.randint(0, len(twins.pairs) - 1))
            give_gradients(twins, step, absent)
            present = [number for number in travelling if number not in absent]
            if step in faulty_steps and present:
                name, param, _ = twins.pairs[draw.choice(present)]
                grad, faulty = param.grad, step % dist.get_world_size()
                if dist.get_rank() == faulty:
                    param.grad = None
                words = f"gradients are missing on some ranks only: {name} on ranks [{faulty}]"
                check_that_all_raise(twins, words)
                param.grad = grad
            grads = [(p, p.grad, local_copy(p.grad)) for _, p, _ in twins.pairs]
            step_both(twins)
            twins.compare()
            for p, grad, values in grads:
                assert p.grad is (grad if p in kept else None)
                assert grad is None or torch.equal(local_copy(grad), values)


@pytest.mark.parametrize("faulty_steps", [(), (0, 3, 4, 8, 11)], ids=["no-faults", "faults"])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_gradients_of_changing_parameters_step_as_in_one_process(layout, faulty_steps):
    run_ranks(step_with_changing_gradients, 4, layout, faulty_steps)


# -- what would tear replicas and halves apart -----------------------------------------------------


def one_of_two_matrices(same_name):
    """Each rank lacks the gradient that the other has."""
    mesh = init_device_mesh(DEVICE, (2,))
    names = ("a.weight", "a.weight" if same_name else "b.weight")
    groups = [sharded_group(mesh, (name,)) for name in names]
    optim = optimizer.Muon(groups, lr=0.1)
    optim.param_groups[dist.get_rank()]["params"][0].grad = None
    try:
        optim.step()
    finally:
        check_untouched(optim)


@pytest.mark.parametrize("same_name", [False, True])
def test_halves_of_two_matrices_are_not_taken_for_one(same_name):
    for outcome in rank_outcomes(one_of_two_matrices, 2, same_name, pg_timeout=20):
        assert outcome.error == "ValueError", outcome
        assert "a.weight on ranks [0]" in outcome.message


def replica_without_gradient(placements):
    mesh = init_device_mesh(DEVICE, (2, 2))
    params = [nn.Parameter(distribute_tensor(torch.ones(6, 4), mesh, placements))]
    params[0].grad = distribute_tensor(torch.ones(6, 4), mesh, placements)
    if dist.get_rank() >= 2:
        params[0].grad = None
    optim = optimizer.Muon([{"params": params, "names": ["a.weight"], "use_muon": True}])
    try:
        optim.step()
    finally:
        check_untouched(optim)


@pytest.mark.parametrize("placements", [[Replicate(), Shard(0)], [Replicate(), Replicate()]])
def test_a_replica_without_a_gradient_raises_on_all(placements):
    for outcome in rank_outcomes(replica_without_gradient, 4, placements, pg_timeout=20):
        assert outcome.error == "ValueError", outcome
        assert "a.weight on ranks [2, 3]" in outcome.message


def shards_of_other_sizes():
    mesh = init_device_mesh(DEVICE, (2,))
    rows = (1, 3)[dist.get_rank()]
    weight = DTensor.from_local(
        torch.ones(rows, 4), mesh, [Shard(0)], run_check=False, shape=(4, 4), stride=(4, 1)
    )
    weight = nn.Parameter(weight)
    weight.grad = torch.ones_like(weight)
    optimizer.Muon([{"params": [weight], "names": ["a.weight"], "use_muon": True}]).step()


def test_shards_that_torch_would_have_cut_otherwise_are_refused():
    for outcome in rank_outcomes(shards_of_other_sizes, 2):
        assert outcome.error == "ValueError"
        assert "a.weight is [Shard(dim=0)]" in outcome.message
        assert "as torch.chunk does" in outcome.message


def world_made_anew():
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    for number in range(8):
        mesh = init_device_mesh(DEVICE, (2, 2))  # of five ranks: needs a group of its own
        if rank < 4:
            weight = nn.Parameter(
                DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0), Shard(1)], run_check=False)
            )
            weight.grad = torch.ones_like(weight)
            optimizer.Muon([{"params": [weight], "use_muon": True}]).step()
        dist.destroy_process_group()
        prefixed = dist.PrefixStore(f"world {number}", store)
        dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=size)


@pytest.mark.slow
@pytest.mark.skipif(DEVICE != "cpu", reason="makes gloo's groups only")
def test_groups_go_with_the_process_group_they_were_made_in():
    run_ranks(world_made_anew, 5, timeout=100)
