"""What one rank has, or lacks, for itself makes no other wait; what ranks share must be alike."""

from __future__ import annotations

import copy
import pickle
import random
import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from counters import calls_of
from kernel import optimizer
from layouts import EXACT, params_of, part, part_for, randn
from ranks import rank_outcomes, run_ranks

STEPS = 12


def weight_on(mesh: DeviceMesh, *shape: int, seed: int = 0) -> nn.Parameter:
    return nn.Parameter(part(randn(*shape, seed=seed), mesh, [Shard(0)]))


def muon(params: list[nn.Parameter], **options: Any) -> Any:
    names = [f"{number}.weight" for number in range(len(params))]
    return optimizer.Muon([{"params": params, "names": names, "use_muon": True}], **options)


def give_gradients(params: list[nn.Parameter], step: int) -> None:
    for number, param in enumerate(params):
        grad = randn(*param.shape, seed=1000 * step + number)
        param.grad = part_for(param, grad)


def refused(optim: Any) -> str:
    """What `step` raises, in seconds, having changed nothing."""
    before = [p.detach().clone() for p in params_of(optim)]
    start = time.monotonic()
    with pytest.raises(ValueError) as caught:
        optim.step()
    assert time.monotonic() - start < 10
    assert all(torch.equal(*pair) for pair in zip(before, params_of(optim)))
    return str(caught.value)


# -- gradients that are not there --------------------------------------------------------------


def idle_experts(check):
    """Local experts idle on rank 0 alone, in another way each step, and it looks at its plan."""
    mesh = init_device_mesh("cpu", (2,))
    params = [weight_on(mesh, 6, 4), *(nn.Parameter(randn(4, 6, seed=n)) for n in range(4))]
    optim = muon(params, lr=0.02, consistency_check=check, **EXACT)
    for step in range(STEPS):
        give_gradients(params, step)
        if dist.get_rank() == 0:
            for number in range(4):
                if step >> number & 1:
                    params[1 + number].grad = None
            optim.summary()
        optim.step()
    return [params[0].full_tensor().detach(), *(param.detach() for param in params[1:])]


def test_an_expert_that_idles_on_one_rank_makes_no_other_wait():
    results = {
        check: run_ranks(idle_experts, 2, check, pg_timeout=10) for check in ("step", "plan")
    }
    for rank in range(2):
        for compared, seldom in zip(results["step"][rank], results["plan"][rank]):
            assert torch.equal(compared, seldom)


def idle_pair():
    """Experts on ranks 0 and 1, and on 2 and 3, beside a dense matrix on all; the former idle."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "ep"))
    params = [weight_on(mesh["ep"], 6, 4, seed=1), weight_on(mesh._flatten("all"), 8, 4)]
    optim = muon(params, lr=0.02, consistency_check="plan", **EXACT)
    for step in range(4):
        give_gradients(params, step)
        if step == 2 and dist.get_rank() < 2:
            params[0].grad = None
        optim.step()
    return params[1].full_tensor().detach()


def test_experts_that_idle_on_some_of_the_ranks_are_no_news_to_the_others():
    first, *others = run_ranks(idle_pair, 4, pg_timeout=10)
    assert all(torch.equal(first, other) for other in others)


def compared_steps():
    """In which steps ranks compare notes, with options that change on all of them."""
    mesh = init_device_mesh("cpu", (2,))
    params = [weight_on(mesh, 6, 4), weight_on(mesh, 4, 6)]
    optim = muon(params, lr=0.02, consistency_check="plan", none_grad=False)
    give_gradients(params, 0)
    counted = []
    for step in range(8):
        if step == 2:
            optim.param_groups[0]["lr"] = 0.01
        if step == 4:
            optim.param_groups[0]["ns_steps"] = 6
        if step == 6:
            optim.param_groups[0]["beta2"] = 0.9
        with torch.profiler.profile() as profile:
            optim.step()
        names = [event.key for event in profile.key_averages()]
        counted.append("Muon.agree" in names)
    return counted


def test_plan_compares_notes_first_and_where_what_all_share_has_changed():
    for counted in run_ranks(compared_steps, 2, pg_timeout=10):
        assert counted == [True, False, False, False, True, False, True, False]


@pytest.mark.parametrize("options", [{}, {"beta2": 0.9}], ids=str)
def test_absent_local_matrices_cost_nothing(options):
    params = [nn.Parameter(randn(8, 16, seed=n)) for n in range(400)]
    optim = muon(params, none_grad=False, **options)
    give_gradients(params, 0)
    grads, draw = [param.grad for param in params], random.Random(0)

    def step() -> int:
        return calls_of(optim.step)[1]

    step(), step()
    full, most = step(), 0
    for _ in range(5):
        absent = set(draw.sample(range(400), 20))
        for number, (param, grad) in enumerate(zip(params, grads)):
            param.grad = None if number in absent else grad
        most = max(most, step())
    assert most <= 1.1 * full, (most, full)


def test_matrices_may_be_frozen_while_they_idle():
    params = [nn.Parameter(randn(4, 6, seed=n)) for n in range(2)]
    optim = muon(params, none_grad=False)
    give_gradients(params, 0)
    optim.step()
    params[1].grad = None
    optim.step()
    params[1].requires_grad_(False)
    del optim.state[params[1]]
    optim.step()


@pytest.mark.parametrize(
    "options",
    [{}, {"beta2": 0.9, "cautious": True}, {"chunk_size": 5}],
    ids=str,
)
@pytest.mark.parametrize("offload", [False, True])
def test_matrices_whose_neighbours_idle_get_the_same_bits(options, offload):
    shapes = [(6, 8)] * 9 + [(8, 6)] * 4 + [(1, 5)] * 3 + [(300, 300)] * 3
    options = {"lr": 0.02, "none_grad": False, **EXACT, **options}
    params = [nn.Parameter(randn(*shape, seed=n)) for n, shape in enumerate(shapes)]
    alone = [nn.Parameter(param.detach().clone()) for param in params]
    optim = muon(params, **options)
    others = [muon([param], **options) for param in alone]
    if offload:
        optim.turn_on_cpu_offload()
    draw = random.Random(1)
    for step in range(5):
        give_gradients(params, step)
        absent = set(draw.sample(range(len(params)), (0, 3, 12, len(params), 3)[step]))
        for number, (param, twin, other) in enumerate(zip(params, alone, others)):
            param.grad = None if number in absent else param.grad
            twin.grad = param.grad
            if number not in absent:
                other.step()
        if len(absent) == len(params):
            with pytest.warns(UserWarning, match="found no gradient"):
                optim.step()
        else:
            optim.step()
    for number, (param, twin) in enumerate(zip(params, alone)):
        assert torch.equal(param, twin), number


# -- optimizers that look alike ----------------------------------------------------------------


def twins_on(mesh):
    return [muon([weight_on(mesh, 6, 4)], lr=0.02) for _ in range(2)]


def steps_out_of_order():
    mesh = init_device_mesh("cpu", (2,))
    pair = twins_on(mesh)
    for optim in pair:
        give_gradients(optim.param_groups[0]["params"], 0)
    return [refused(optim) for optim in (pair if dist.get_rank() == 0 else pair[::-1])]


def test_optimizers_just_alike_that_step_in_another_order_are_told_apart():
    for messages in run_ranks(steps_out_of_order, 2, pg_timeout=10):
        for message in messages:
            assert "ranks 0 and 1 step different optimizers" in message
            assert "in the same order" in message


def what_each_rank_makes_for_itself():
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    if rank == 0:
        kept = [muon([nn.Parameter(torch.ones(2, 2))]) for _ in range(3)]
    else:
        with pytest.raises(ValueError, match="momentum"):
            muon([weight_on(mesh, 6, 4)], momentum=3.0)
    if rank == 0:
        print(muon([weight_on(mesh, 6, 4)]).summary())
        optimizer.describe(nn.Linear(4, 4), process_group=dist.group.WORLD)
    gone = muon([nn.Parameter(torch.ones(6, 4))], lr=0.02)
    gone.param_groups[0]["params"] = [weight_on(mesh, 6, 4)]
    del gone
    swapped = muon([nn.Parameter(torch.ones(6, 4))], lr=0.02)  # for its shards, as trainers do
    pair = twins_on(mesh)
    del pair[0]
    swapped.param_groups[0]["params"] = [weight_on(mesh, 6, 4)]
    made = [*pair, swapped, copy.deepcopy(swapped), pickle.loads(pickle.dumps(pair[0]))]
    for step in range(2):
        for optim in reversed(made):
            give_gradients(optim.param_groups[0]["params"], step)
            optim.step()
        made[1].load_state_dict(made[0].state_dict())
    if rank == 0:
        assert len(kept) == 3
    # What only one of them loads would leave them at different steps.
    if rank == 1:
        made[0].load_state_dict(made[0].state_dict())
    give_gradients(made[0].param_groups[0]["params"], 2)
    return refused(made[0])


def test_what_a_rank_makes_for_itself_shifts_nothing():
    for message in run_ranks(what_each_rank_makes_for_itself, 2, pg_timeout=10):
        assert "ranks 0 and 1 step different optimizers" in message


def one_more_on_one_rank():
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    extra = muon([weight_on(mesh, 6, 4)], lr=0.02) if rank == 0 else None
    optim = muon([weight_on(mesh, 6, 4)], lr=0.02)
    give_gradients(optim.param_groups[0]["params"], 0)
    message = refused(optim)
    del extra
    return message


def test_an_optimizer_that_only_one_rank_made_is_told_on_all():
    for message in run_ranks(one_more_on_one_rank, 2, pg_timeout=10):
        assert "ranks 0 and 1 step different optimizers" in message


# -- options and machines ----------------------------------------------------------------------


def tensor_rates_apart():
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    params = [nn.Parameter(part(torch.ones(6, 4), mesh, [Replicate()]))]
    optim = muon(params, lr=torch.tensor(0.02))
    give_gradients(params, 0)
    optim.step()
    optim.param_groups[0]["lr"].fill_(0.02 + 0.01 * rank)
    give_gradients(params, 1)
    return refused(optim)


def test_a_learning_rate_in_a_tensor_is_compared():
    for message in run_ranks(tensor_rates_apart, 2, pg_timeout=10):
        assert re.search(
            r"Rank 0 has 'lr = tensor\(0.01999.*rank 1 has 'lr = tensor\(0.02999", message
        )


def one_never_compares():
    mesh = init_device_mesh("cpu", (2,))
    params = [weight_on(mesh, 6, 4)]
    optim = muon(params, consistency_check=("off", "step")[dist.get_rank()])
    give_gradients(params, 0)
    optim.step()


def test_who_waits_for_a_rank_that_never_compares_is_told_of_it():
    waiting = rank_outcomes(one_never_compares, 2, pg_timeout=3, timeout=20)[1]
    assert waiting.error == "RuntimeError"
    assert "has consistency_check='off'" in waiting.message


def shards_cut_otherwise():
    mesh = init_device_mesh("cpu", (4, 2))
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    params = [nn.Parameter(part(torch.ones(9, 4), mesh, placements))]
    optim = muon(params)
    give_gradients(params, 0)
    return refused(optim)


def test_uneven_strided_shards_as_distribute_tensor_cuts_them_are_refused_by_all():
    messages = run_ranks(shards_cut_otherwise, 8, pg_timeout=20)
    assert len(set(messages)) <= 3  # of those who see it each its own, and one of all others
    assert all("0.weight is" in m and "as torch.chunk does" in m for m in messages)


def unlike_machines(**options):
    forms = optimizer.newton_schulz.forms
    native = forms._cpu_multiplies_bfloat16()
    if dist.get_rank() == 1:  # one CPU of another kind can't be had from the outside
        forms._cpu_multiplies_bfloat16 = lambda: not native
    mesh = init_device_mesh("cpu", (2,))
    params = [weight_on(mesh, 6, 4)]
    optim = muon(params, lr=0.02, **options)
    give_gradients(params, 0)
    if options:
        optim.step()
        return ""
    return refused(optim)


def test_ranks_on_unlike_machines_agree_on_the_arithmetic_or_raise():
    for message in run_ranks(unlike_machines, 2, pg_timeout=10):
        assert "ns_dtype=None means torch.bfloat16 here" in message
        assert "ns_dtype=None means torch.float32 here" in message
    run_ranks(unlike_machines, 2, ns_dtype=torch.float32, pg_timeout=10)
