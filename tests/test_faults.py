"""What only some ranks get wrong raises on all of them, in seconds, before anything was written."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from kernel import optimizer
from ranks import rank_outcomes, run_ranks


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
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
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


def recover():
    mesh = init_device_mesh("cpu", (2,))
    optim = optimizer.Muon([sharded_group(mesh)], lr=0.1)
    param = optim.param_groups[0]["params"][1]
    grad = param.grad
    if dist.get_rank() == 1:
        param.grad = None
    with pytest.raises(ValueError, match=r"b\.weight"):
        optim.step()
    param.grad = grad
    optim.step()
    assert not torch.equal(param.to_local(), torch.ones(3, 4))


def test_after_a_fault_the_next_step_works():
    run_ranks(recover, 2)


def zeros_for_missing():
    mesh = init_device_mesh("cpu", (2,))
    optim = optimizer.Muon([sharded_group(mesh, missing_grad="zero")], lr=0.1)
    if dist.get_rank() == 1:
        optim.param_groups[0]["params"][1].grad = None
    optim.step()
    return optim.param_groups[0]["params"][1].full_tensor()


def test_missing_grad_zero_counts_an_absent_gradient_as_zeros():
    first, second = run_ranks(zeros_for_missing, 2)
    assert torch.equal(first, second)
    assert not torch.equal(first, torch.ones(6, 4))


def absent_everywhere():
    mesh = init_device_mesh("cpu", (2,))
    optim = optimizer.Muon([sharded_group(mesh)], lr=0.1)
    skipped, stepped, _ = optim.param_groups[0]["params"]
    skipped.grad = None
    optim.step()
    assert torch.equal(skipped.to_local(), torch.ones(3, 4))
    assert not torch.equal(stepped.to_local(), torch.ones(3, 4))


def test_a_gradient_absent_on_all_ranks_is_skipped():
    run_ranks(absent_everywhere, 2)


def two_stages():
    rank = dist.get_rank()
    meshes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "dp"))
    names = ("a.weight",) if rank < 2 else ("b.weight", "c.weight")
    optim = optimizer.Muon([sharded_group(meshes["dp"], names)], lr=0.1)
    if rank == 3:
        optim.param_groups[0]["params"][0].grad = None
    optim.step()


def test_pipeline_stages_compare_notes_among_themselves_only():
    outcomes = rank_outcomes(two_stages, 4, pg_timeout=20)
    assert [outcome.error for outcome in outcomes] == [None, None, "ValueError", "ValueError"]


def count_exchanges(consistency_check):
    mesh = init_device_mesh("cpu", (2,))
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
    assert run_ranks(count_exchanges, 2, check) == [exchanges] * 2


def ranks_in_different_numbers_of_groups():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "dp"))["dp"]
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
        mesh = DeviceMesh("cpu", ranks)
        if dist.get_rank() in ranks:
            groups.append(sharded_group(mesh, (f"{number}.weight",)))
    optimizer.Muon(groups, lr=0.1).step()


def test_meshes_that_share_a_rank_step_together():
    run_ranks(overlapping_meshes, 3, timeout=60)


def plain_state_into_shards():
    mesh = init_device_mesh("cpu", (2,))
    weight = nn.Parameter(torch.ones(6, 4))
    weight.grad = torch.ones(6, 4)
    plain = optimizer.Muon([{"params": [weight], "names": ["a.weight"], "use_muon": True}])
    plain.step()
    optim = optimizer.Muon([sharded_group(mesh, ("a.weight",))])
    with pytest.raises(ValueError, match=r"a\.weight in the checkpoint is plain, unlike its"):
        optim.load_state_dict(plain.state_dict())
    check_untouched(optim)


def test_plain_state_does_not_load_into_a_shard_as_if_it_were_one():
    run_ranks(plain_state_into_shards, 2)


def full_state(options):
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Linear(4, 6, bias=False)
    fully_shard(model, mesh=mesh)
    groups = optimizer.muon.get_default_muon_param_groups(model)
    optim = optimizer.Muon(groups, momentum_dtype=torch.float32, ns_dtype=torch.float32)
    model(torch.ones(2, 4)).sum().backward()
    optim.step()
    how = StateDictOptions(**options)
    saved = get_optimizer_state_dict(model, optim, options=how)
    set_optimizer_state_dict(model, optim, saved, options=StateDictOptions(**options))
    assert optim.param_groups[0]["ns_dtype"] is torch.float32


@pytest.mark.parametrize("options", [{}, {"cpu_offload": True}], ids=str)
def test_options_that_are_dtypes_go_through_distributed_state_dicts(options):
    run_ranks(full_state, 2, options)


def full_state_only_saves():
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Linear(4, 6, bias=False)
    fully_shard(model, mesh=mesh)
    groups = optimizer.muon.get_default_muon_param_groups(model)
    optim = optimizer.Muon(groups, momentum_dtype=torch.float32)
    model(torch.ones(2, 4)).sum().backward()
    optim.step()
    how = StateDictOptions(full_state_dict=True, cpu_offload=True)
    saved = get_optimizer_state_dict(model, optim, options=how)
    return saved.get("state", {}).get("weight", {}).get("momentum_buffer")


def test_full_state_dicts_gather_the_momentum():
    first, _ = run_ranks(full_state_only_saves, 2)
    assert first.shape == (6, 4)
