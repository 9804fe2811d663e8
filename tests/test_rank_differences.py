"""What one rank has, or lacks, for itself makes no other wait; what ranks share must be alike."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from breaking import refused
from counters import calls_of
from kernel import optimizer
from layouts import EXACT, part, randn, set_gradients, whole
from ranks import DEVICE, on_ranks, rank_outcomes

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient:UserWarning")


def weight_on(mesh: DeviceMesh, *shape: int, seed: int = 0) -> nn.Parameter:
    return nn.Parameter(part(randn(*shape, seed=seed), mesh, [Shard(0)]))


def muon(params: list[nn.Parameter], **options: Any) -> Any:
    names = [f"{number}.weight" for number in range(len(params))]
    options = {"lr": 0.02, **options}
    return optimizer.Muon([{"params": params, "names": names, "use_muon": True}], **options)


@on_ranks(3, pg_timeout=10)
def test_ranks_with_different_first_lanes_exchange_what_they_share_in_one_order() -> None:
    """Ranks 1 and 2 share matrices on two wires; rank 1 also shares some with rank 0, earlier."""
    meshes = [DeviceMesh(DEVICE, pair) for pair in ([0, 1], [1, 2])]
    here = [mesh for mesh in meshes if dist.get_rank() in mesh.mesh]
    named, alone = [], []
    for mesh, dtype, seed in itertools.product(here, (torch.float32, torch.float64), range(8)):
        weight, grad = (randn(16, 8 + 8 * (seed % 2), seed=seed + k, dtype=dtype) for k in (0, 8))
        param, twin = nn.Parameter(part(weight, mesh, [Shard(0)])), nn.Parameter(weight)
        param.grad, twin.grad = part(grad, mesh, [Shard(0)]), grad
        named.append((f"{mesh.mesh.tolist()}.{dtype}.{seed}.weight", param))
        alone.append(twin)
    group = {"params": named, "use_muon": True}
    optimizer.Muon([group], lr=0.02, chunk_size=1, **EXACT).step()
    muon(alone, **EXACT).step()
    for (_, param), twin in zip(named, alone):
        assert torch.equal(whole(param.detach()), twin)


# -- gradients that are not there ------------------------------------------------------------------


@pytest.mark.parametrize("check", ["step", "plan"])
@on_ranks(4, pg_timeout=10)
def test_experts_that_idle_on_some_ranks_only_make_no_other_wait(check):
    """A rank's own, and one that pairs share, in another way each step; rank 0 looks at its plan.

    All ranks share a dense matrix. All weights equal those that step alone.
    """
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "ep"))
    params = [weight_on(mesh._flatten("all"), 8, 4), weight_on(mesh["ep"], 6, 4, seed=9)]
    params += [nn.Parameter(randn(4, 6, seed=n)) for n in range(4)]
    optim = muon(params[:1], consistency_check=check, **EXACT)
    optim.add_param_group({"params": params[1:], "use_muon": True})
    twins = [nn.Parameter(whole(p).detach().clone()) for p in params]
    alone = [muon([twin], **EXACT) for twin in twins]
    for step in range(12):
        if step == 6 and rank < 2:  # what a pair has for itself is no news to the others, either
            for each in (optim.param_groups[1], *(its.param_groups[0] for its in alone[1:])):
                each["ns_steps"] = 3
        set_gradients(params, step)
        idle = {2 + n for n in range(4) if (step + rank) >> n & 1 and rank != 3}
        idle |= {1} if step % 3 == 1 and rank < 2 else set()
        for number, (p, twin, its) in enumerate(zip(params, twins, alone)):
            if number in idle:
                p.grad = None
            else:
                twin.grad = whole(p.grad).clone()
                its.step()
        if rank == 0:
            optim.summary()
        optim.step()
    assert all(torch.equal(whole(p), twin) for p, twin in zip(params, twins))


@on_ranks(4, pg_timeout=10)
def test_experts_without_traffic_may_lack_their_gradient_on_one_rank():
    """They are left as they are there, and trained elsewhere."""
    mesh, rank = init_device_mesh("cpu", (2, 2)), dist.get_rank()
    param = nn.Parameter(part(randn(4, 4, 8), mesh, [Shard(0), Shard(0)]))
    group = {"params": [param], "names": ["experts.w"], "use_muon": True}
    optim = optimizer.Muon([group], expert_keys=["experts"])
    for step, idle in enumerate([(0,), (1, 2), (0, 1, 2)]):
        before = param.to_local().clone()
        set_gradients([param], step)
        param.grad = None if rank in idle else param.grad
        optim.step()
        assert torch.equal(param.to_local(), before) == (rank in idle)


@pytest.mark.parametrize(
    ("check", "expected"),
    [
        ("step", [True] * 8),
        # in the first step, and where what all share has changed
        ("plan", [True, False, False, False, True, False, True, False]),
        ("off", [False] * 8),
    ],
)
@on_ranks(2, pg_timeout=10)
def test_consistency_check_says_how_often_ranks_compare_notes(check, expected):
    mesh = init_device_mesh("cpu", (2,))
    params = [weight_on(mesh, 6, 4), weight_on(mesh, 4, 6)]
    optim = muon(params, consistency_check=check, none_grad=False)
    set_gradients(params)
    compared = []
    for step in range(8):
        changes = {2: {"lr": 0.01}, 4: {"ns_steps": 6}, 6: {"beta2": 0.9}}.get(step, {})
        optim.param_groups[0].update(changes)
        with torch.profiler.profile() as profile:
            optim.step()
        compared.append("Muon.agree" in [event.key for event in profile.key_averages()])
    assert compared == expected


@pytest.mark.parametrize("options", [{}, {"beta2": 0.9}], ids=str)
def test_absent_local_matrices_cost_nothing(options):
    params = [nn.Parameter(randn(8, 16, seed=n)) for n in range(400)]
    optim = muon(params, none_grad=False, **options)
    set_gradients(params)
    grads, draw = [param.grad for param in params], random.Random(0)
    *_, full = (calls_of(optim.step)[1] for _ in range(3))
    for _ in range(5):
        absent = set(draw.sample(range(400), 20))
        for number, (param, grad) in enumerate(zip(params, grads)):
            param.grad = None if number in absent else grad
        assert calls_of(optim.step)[1] <= 1.1 * full


def test_matrices_may_be_frozen_while_they_idle():
    params = [nn.Parameter(randn(4, 6, seed=n)) for n in range(2)]
    optim = muon(params, none_grad=False)
    set_gradients(params)
    optim.step()
    params[1].grad = None
    optim.step()
    params[1].requires_grad_(False)
    del optim.state[params[1]]
    optim.step()


@pytest.mark.parametrize(
    "options", [{}, {"beta2": 0.9, "cautious": True}, {"chunk_size": 5}], ids=str
)
def test_matrices_whose_neighbours_idle_get_the_same_bits(options, one_thread):
    shapes = [(6, 8)] * 9 + [(8, 6)] * 4 + [(1, 5)] * 3 + [(90, 90)] * 3
    options = {"none_grad": False, **EXACT, **options}
    params = [nn.Parameter(randn(*shape, seed=n)) for n, shape in enumerate(shapes)]
    alone = [nn.Parameter(param.detach().clone()) for param in params]
    optim, others = muon(params, **options), [muon([param], **options) for param in alone]
    draw = random.Random(1)
    for step, count in enumerate((0, 3, 12, len(params), 3)):
        set_gradients(params, step)
        absent = draw.sample(range(len(params)), count)
        for number, (param, twin, other) in enumerate(zip(params, alone, others)):
            param.grad = None if number in absent else param.grad
            twin.grad = param.grad
            if number not in absent:
                other.step()
        trains_nothing = pytest.warns(UserWarning) if len(params) == count else nullcontext()
        with trains_nothing:
            optim.step()
    assert all(map(torch.equal, params, alone))


# -- optimizers that look alike --------------------------------------------------------------------


def on_pair() -> tuple[DeviceMesh, Any]:
    """A mesh of all ranks, and what makes an optimizer of one matrix on it, with a gradient."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def make() -> Any:
        params = [weight_on(mesh, 6, 4)]
        set_gradients(params)
        return muon(params)

    return mesh, make


DIFFERENT = "ranks 0 and 1 step different optimizers"


@on_ranks(2, pg_timeout=10)
def test_an_optimizer_that_one_rank_alone_has_made_raises() -> None:
    _, make = on_pair()
    extra = make() if dist.get_rank() == 0 else None
    refused(make(), DIFFERENT)
    del extra


@on_ranks(2, pg_timeout=10)
def test_optimizers_that_ranks_make_for_themselves_stop_no_step_that_ranks_share() -> None:
    """Such of what only one has, that failed, that went, and that were swapped."""
    rank, (mesh, make) = dist.get_rank(), on_pair()
    kept = []
    if rank == 0:
        kept += [muon([nn.Parameter(torch.ones(2, 2))]) for _ in range(3)]
        make().summary()
        optimizer.describe(nn.Linear(4, 4), process_group=dist.group.WORLD)
    else:
        with pytest.raises(ValueError, match="momentum"):
            muon([weight_on(mesh, 6, 4)], momentum=3.0)
    gone, swapped = (muon([nn.Parameter(torch.ones(6, 4))]) for _ in range(2))
    gone.param_groups[0]["params"] = [weight_on(mesh, 6, 4)]
    del gone
    pair = [make(), make()]
    del pair[0]
    swapped.param_groups[0]["params"] = [weight_on(mesh, 6, 4)]  # for shards, as trainers do
    made = [*pair, swapped, copy.deepcopy(swapped), pickle.loads(pickle.dumps(pair[0]))]
    for step in range(2):
        for optim in reversed(made):
            set_gradients(optim.param_groups[0]["params"], step)
            optim.step()
        made[1].load_state_dict(made[0].state_dict())
    assert len(kept) == 3 * (rank == 0)
    if rank == 1:  # what only one of them loads would leave them at different steps
        made[0].load_state_dict(made[0].state_dict())
    set_gradients(made[0].param_groups[0]["params"])
    refused(made[0], DIFFERENT)


@on_ranks(4, timeout=60)
def test_ranks_that_are_in_different_numbers_of_groups_find_each_other() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "dp"))["dp"]
    if dist.get_rank() in (0, 2):
        dist.new_group([0, 2], use_local_synchronization=True)
    param = weight_on(mesh, 6, 4)
    set_gradients([param])
    before = param.to_local().clone()
    muon([param]).step()
    assert not torch.equal(param.to_local(), before)


# -- options and machines --------------------------------------------------------------------------


@on_ranks(2, pg_timeout=10)
def test_a_learning_rate_in_a_tensor_is_compared() -> None:
    params = [nn.Parameter(part(torch.ones(6, 4), on_pair()[0], [Replicate()]))]
    optim = muon(params, lr=torch.tensor(0.02))
    set_gradients(params)
    optim.step()
    optim.param_groups[0]["lr"].fill_(0.02 + 0.01 * dist.get_rank())
    set_gradients(params, 1)
    refused(optim, r"lr = tensor\(0\.01999.*lr = tensor\(0\.02999")


@pytest.mark.parametrize(("key", "value"), [
    ("lr", 0.5), ("weight_decay", 0.5), ("adamw_betas", (0.5, 0.5)), ("adamw_eps", 1e-3)
])  # fmt: skip
@on_ranks(2, pg_timeout=10)
def test_options_of_adamws_groups_are_compared(key, value):
    params = [weight_on(on_pair()[0], 6)]
    optim = optimizer.Muon([{"params": params, "use_muon": False}])
    if dist.get_rank() == 1:
        optim.param_groups[0][key] = value
    set_gradients(params)
    refused(optim, f"{key} = ")


@on_ranks(2, pg_timeout=10)
def test_state_that_streams_on_one_rank_only_is_told() -> None:
    params = [weight_on(on_pair()[0], 6, 4)]
    optim = muon(params)
    if dist.get_rank() == 1:
        optim.turn_on_cpu_offload(backend=optimizer.SimulatedHost())
    set_gradients(params)
    refused(optim, "turn_on_cpu_offload")


def one_never_compares() -> None:
    params = [weight_on(on_pair()[0], 6, 4)]
    optim = muon(params, consistency_check=("off", "step")[dist.get_rank()])
    set_gradients(params)
    optim.step()


def test_who_waits_for_a_rank_that_never_compares_is_told_of_it():
    waiting = rank_outcomes(one_never_compares, 2, pg_timeout=3, timeout=20)[1]
    assert waiting.error == "RuntimeError"
    assert "consistency_check='off'" in waiting.message


@on_ranks(2, pg_timeout=10)
def test_ranks_on_unlike_machines_agree_on_the_arithmetic_or_raise() -> None:
    torch.cpu._is_avx2_supported = lambda: False  # not x86, where oneDNN says what it multiplies
    torch.ops.mkldnn._is_mkldnn_bf16_supported = lambda: dist.get_rank() == 1
    params = [weight_on(on_pair()[0], 6, 4)]
    set_gradients(params)
    told = refused(muon(params), "ns_dtype")
    assert re.search("torch.bfloat16.*torch.float32|torch.float32.*torch.bfloat16", told)
    muon(params, ns_dtype=torch.float32).step()
