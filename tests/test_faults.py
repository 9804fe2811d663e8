"""What only some ranks get wrong raises on all of them, in seconds, before anything was written."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard

from breaking import refused
from kernel import optimizer
from layouts import EXACT, FP32, Group, Twins, Weight, build, case, local, params_of, part, part_for
from ranks import DEVICE, on_ranks

ADAMW = Group([Weight((12, 8), (4,), (0,))], {"use_muon": False})

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
on_every_layout = pytest.mark.parametrize("layout", list(LAYOUTS))


def placed(layout: str, **options: Any) -> Twins:
    return Twins.placed(LAYOUTS[layout], {**EXACT, **options})


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


def train(twins: Twins, *steps: int) -> None:
    for step in steps:
        give_gradients(twins, step)
        step_both(twins)


# -- faults of one rank ----------------------------------------------------------------------------


def keep(optim: Any) -> Callable[[], None]:
    """What puts the groups and their gradients back."""
    groups = [{**group, "params": list(group["params"])} for group in optim.param_groups]
    names, grads = optim.names, [(p, p.grad) for p in params_of(optim)]

    def put_back() -> None:
        for group, saved, of_group in zip(optim.param_groups, groups, names):
            group.update(saved, names=of_group)
        for param, grad in grads:
            param.requires_grad_(True)
            param.grad = grad

    return put_back


def drop_gradients(params: Sequence[nn.Parameter]) -> None:
    for param in params:
        param.grad = None


def reorder(optim: Any, which: slice) -> None:
    """Changes which parameters the first group has, or their order, and names likewise."""
    group, names = optim.param_groups[0], optim.names[0]
    group.update(params=group["params"][which], names=names[which])


def with_gradient_everywhere(optim: Any) -> None:
    p = params_of(optim)[1]
    p.grad = part(torch.ones(p.shape), p.device_mesh, [Replicate()] * p.device_mesh.ndim)


def with_other_shape(optim: Any) -> None:
    p = params_of(optim)[1]
    other = part(torch.ones(*p.shape[:-1], 2 * p.shape[-1]), p.device_mesh, p.placements)
    optim.param_groups[0]["params"][1] = nn.Parameter(other)
    optim.param_groups[0]["params"][1].grad = other


# What one rank does to its optimizer, and words of the error on all of them: the names of the first
# two parameters, the number of that rank.
FAULTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no gradient of the first": (lambda o: drop_gradients(params_of(o)[:1]), "{0} on ranks [{2}]"),
    "no gradient of another": (lambda o: drop_gradients(params_of(o)[1:2]), "{1} on ranks [{2}]"),
    "no gradient at all": (lambda o: drop_gradients(params_of(o)), "{0} on ranks [{2}]"),
    "frozen": (lambda o: params_of(o)[0].requires_grad_(False), "{0} on ranks [{2}]"),
    "order": (lambda o: reorder(o, slice(None, None, -1)), "'{0}: "),
    "fewer parameters": (lambda o: reorder(o, slice(-1)), "has '"),
    "placement of a gradient": (with_gradient_everywhere, "{1} is [Shard"),
    "shape": (with_other_shape, "'{1}: ("),
    "bad momentum": (lambda o: o.param_groups[0].update(momentum=2.0), "momentum must be"),
    "bad steps": (lambda o: o.param_groups[1].update(ns_steps=0), "param_groups[1]: ns_steps"),
    "bad split": (lambda o: o.param_groups[0].update(split=[5]), "{0} has"),
    "other lr": (lambda o: o.param_groups[0].update(lr=0.03), "lr = 0.03"),
    "other ns_steps": (lambda o: o.param_groups[0].update(ns_steps=3), "ns_steps = 3"),
    "other split": (lambda o: o.param_groups[0].update(split=2), "{0}"),
    "other beta2": (lambda o: o.param_groups[0].update(beta2=0.5), "beta2 = 0.5"),
    "other cautious": (lambda o: o.param_groups[0].update(cautious=True), "cautious = True"),
}


@on_every_layout
@on_ranks(4, pg_timeout=20)
def test_no_fault_on_one_rank_of_a_mesh_leaves_a_trace(layout: str) -> None:
    """Each fault on another rank, in the first step or the third; then all go on regardless."""
    for number, (fault, (inject, words)) in enumerate(FAULTS.items()):
        faulty, steps = number % 4, 2 * ((number + list(LAYOUTS).index(layout)) % 2)
        with case(f"{fault} after {steps} steps"):
            twins = placed(layout)
            train(twins, *range(steps))
            give_gradients(twins, steps)
            put_back = keep(twins.ours)
            if dist.get_rank() == faulty:
                inject(twins.ours)
            words = words.format(twins.pairs[0][0], twins.pairs[1][0], faulty)
            refused(twins.ours, re.escape(words), [p for _, p, _ in twins.pairs])
            put_back()
            train(twins, steps, steps + 1)
            twins.compare()


# Options of the whole optimizer.
WIDE = {"chunk_size": 1, "warmup_step": 1, "comm_dtype": torch.bfloat16, "hsdp": "spread"}
WIDE |= {"staging_bytes": 4096, "use_distributed_muon": True}


@on_ranks(4, pg_timeout=20)
def test_an_option_of_the_optimizer_that_one_rank_has_otherwise_raises_on_all() -> None:
    """Optimizers that go on from another's state, on one rank with an option of its own."""
    for number, (key, value) in enumerate(WIDE.items()):
        with case(key):
            twins = placed("TP + FSDP2")
            train(twins, 0, 1)
            give_gradients(twins, 2)
            groups = [
                {**group, "names": names}
                for group, names in zip(twins.ours.param_groups, twins.ours.names)
            ]
            own = {key: value} if dist.get_rank() == number % 4 else {}
            resumed = build(groups, **{**FP32, **own})
            resumed.load_state_dict(twins.ours.state_dict())
            refused(resumed, f"{key} = ")
            step_both(twins)
            twins.compare()


@on_ranks(4, pg_timeout=20)
def test_ranks_that_lack_different_gradients_of_one_shape_are_told() -> None:
    """Each rank lacks another of several equal matrices, whose plans differ only in names."""
    rank = dist.get_rank()
    for dims, names in (((0, 0), "abcd"), ((None, 0), ["a", "same", "same", "b"])):
        weights = [Weight((8, 12), (2, 2), dims)] * 4
        twins = Twins.placed([Group(weights, names=list(names))], EXACT)
        for step in range(3):
            give_gradients(twins, step)
            put_back = keep(twins.ours)
            drop_gradients([params_of(twins.ours)[2 if rank == step else 1]])
            refused(twins.ours, rf"{names[1]} on ranks \[")
            put_back()
            step_both(twins)
            twins.compare()


@pytest.mark.filterwarnings("ignore")
@on_ranks(4, pg_timeout=20)
def test_pipeline_stages_compare_notes_among_themselves_only():
    rank = dist.get_rank()
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("stage", "dp"))["dp"]
    params = [nn.Parameter(part(torch.ones(6, 4), mesh, [Shard(0)])) for _ in range(1 + rank // 2)]
    for param in params:
        param.grad = None if rank == 3 else torch.ones_like(param)
    optim = optimizer.Muon([{"params": params, "use_muon": True}], lr=0.1)
    optim.step() if rank < 2 else refused(optim, r"\[3\]")


# -- weights without memory ------------------------------------------------------------------------


@on_ranks(2, pg_timeout=15)
def test_a_weight_without_memory_is_passed_over_or_raises_by_name_on_all_ranks() -> None:
    """FSDP2's root leaves its own parameters whole after a forward, and frees them later."""
    mesh = init_device_mesh(DEVICE, (2,))
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 6)))
    fully_shard(model[1], mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = torch.ones(2, 4)
    with torch.no_grad():
        model(x)
    for call in (optimizer.get_default_muon_param_groups, optimizer.describe):
        with pytest.raises(ValueError, match=r"0\.weight is unsharded"):
            call(model)
    named = list(model.named_parameters())
    freed, kept = named[:2], [p for _, p in named[2:]]
    groups = [
        {"params": [(n, p) for n, p in named if p.ndim == ndim], "use_muon": ndim == 2}
        for ndim in (1, 2)
    ]
    optim = optimizer.Muon(groups, lr=0.1)
    for name, param in [("", None), *freed]:
        model(x).square().sum().backward()
        optimizer.get_default_muon_param_groups(model)  # by now shards are back
        assert all(p.grad is None and p.untyped_storage().size() == 0 for _, p in freed)
        if param is not None:
            if dist.get_rank() == 1:
                param.grad = torch.ones(param.shape)
            refused(optim, f"{name} has a gradient", kept)
            param.grad = None
        before = [local(p).clone() for p in kept]
        optim.step()
        assert not any(torch.equal(local(p), old) for p, old in zip(kept, before))
        optim.state_dict()
        optim.zero_grad()


@pytest.mark.skipif(DEVICE != "cpu", reason="sizes storages by hand")
def test_an_expert_whose_memory_comes_and_goes_is_trained_while_it_is_there():
    params = [nn.Parameter(torch.full((4, 6), float(n))) for n in range(3)]
    optim = optimizer.Muon([{"params": params, "use_muon": True}], lr=0.1, none_grad=False)
    for step in range(4):
        present = params[step % 2 :]  # the first every other time
        params[0].untyped_storage().resize_(0 if step % 2 else 4 * 6 * 4)
        if step % 2 == 0:
            params[0].data.fill_(1.0)
        for p in params:
            p.grad = torch.ones(4, 6) if any(p is other for other in present) else None
        before = [p.detach().clone() for p in present]
        optim.step()
        assert not any(torch.equal(p, old) for p, old in zip(present, before))
    params[0].untyped_storage().resize_(4 * 6 * 4)


# -- NaN, and gradients of others in each step -----------------------------------------------------


@on_every_layout
@pytest.mark.parametrize(("value", "exact"), [("nan", True), ("inf", True), ("inf", False)])
@on_ranks(4)
def test_a_nan_or_inf_on_one_rank_is_no_fault_and_stays_in_its_matrix(layout, value, exact):
    for number in range(len(placed(layout).pairs)):
        with case(f"{value} in parameter {number}"):
            twins = placed(layout, exact=exact)
            train(twins, 0)
            give_gradients(twins, 1)
            _, p, q = twins.pairs[number]
            q.grad.view(-1)[-1] = float(value)
            p.grad = part_for(p, q.grad)
            step_both(twins)
            assert torch.equal(local(p).isfinite(), local(part_for(p, q.detach())).isfinite())
            del twins.pairs[number]
            train(twins, 2)
            twins.compare(0.0 if exact else 0.01)


@on_every_layout
@on_ranks(4)
def test_gradients_of_changing_parameters_step_as_in_one_process(layout):
    """Twelve steps, each with gradients of others; more subsets than plans are kept."""
    twins, draw = placed(layout), random.Random(0)
    twins.ours.param_groups[1]["none_grad"] = False
    kept = {p for group in twins.ours.param_groups[1:] for p in group["params"]}
    for step in range(12):
        with case(f"step {step}"):
            numbers = range(len(twins.pairs))
            give_gradients(twins, step, draw.sample(numbers, draw.randrange(len(numbers))))
            grads = [(p, p.grad, copy.deepcopy(p.grad)) for _, p, _ in twins.pairs]
            step_both(twins)
            twins.compare()
            for p, grad, values in grads:
                assert p.grad is (grad if p in kept else None)
                assert grad is None or torch.equal(local(grad), local(values))
