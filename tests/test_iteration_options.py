"""`ns_equilibrate`, `ns_renormalize`, `ns_norm_factor`, `ns_eps_absolute`, `second_moment_side`: on
every layout the steps of one process, at no more traffic, and in every arithmetic the formulas'."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import reference as ref
from comparisons import relative_error, relative_error_of_known
from counters import count
from kernel import optimizer
from layouts import EXACT, Group, Twins, Weight, case, check, part_for, whole
from ranks import DEVICE, run_ranks
from trainings import Case, takes_the_steps_of_one_process

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32

ALL = {
    "ns_equilibrate": True,
    "ns_renormalize": True,
    "ns_norm_factor": 1.01,
    "ns_eps_absolute": 1e-2,
}
VARIANTS = [
    ALL,
    {"ns_equilibrate": True, "beta2": 0.9},
    {"ns_renormalize": True, "chunk_size": 1},
    {**ALL, "use_distributed_muon": True},
    {"beta2": 0.9, "second_moment_side": "rows", "cautious": True},
]


def placed(*of_each):
    return [Weight(*each) for each in of_each]


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_they_take_the_steps_of_one_process_on_shards_and_experts(ranks):
    check(
        ranks,
        {
            "rows": placed(*((shape, (ranks,), (0,)) for shape in ((16, 24), (9, 8), (1, 16)))),
            "columns": placed(*((shape, (ranks,), (1,)) for shape in ((16, 24), (8, 9)))),
            "experts, whole": placed(((4, 8, 12), (ranks,), (0,)), ((6, 12, 8), (ranks,), (0,))),
            "experts, cut": placed(((3, 8, 12), (ranks,), (1,)), ((2, 12, 8), (ranks,), (2,))),
        },
        VARIANTS,
    )


def test_they_take_the_steps_of_one_process_on_two_dimensional_meshes():
    mesh = (2, 2)
    check(
        4,
        {
            "FSDP2 + TP": placed(((16, 24), mesh, (0, 0)), ((16, 24), mesh, (0, 1))),
            "HSDP": placed(((16, 24), mesh, (None, 0)), ((9, 8), mesh, (None, 0))),
            "EP + FSDP2": placed(((4, 8, 12), mesh, (0, 1)), ((4, 12, 8), mesh, (0, 0))),
        },
        [ALL, {**ALL, "hsdp": "spread", "beta2": 0.9, "second_moment_side": "rows"}],
    )


def of_replicas(kind):
    group = Group(placed(((16, 24),), ((40, 9),), ((8, 8),), ((3, 8, 12),)))
    for options in (ALL, {"beta2": 0.9, "second_moment_side": "rows"}):
        steps = [["contiguous"] * 4] * 3
        takes_the_steps_of_one_process(Case([group], options, steps, replicas=kind))


@pytest.mark.parametrize("kind", ["DDP", "ZeRO-2"])
def test_they_take_the_steps_of_one_process_on_replicas(kind):
    run_ranks(of_replicas, 2, kind)


def sends_as_much():
    weights = placed(((16, 24), (2,), (0,)), ((24, 16), (2,), (1,)), ((4, 8, 12), (2,), (1,)))
    meshes = {(2,): init_device_mesh(DEVICE, (2,))}
    sent = []
    for options in ({}, ALL):
        twins = Twins.placed([Group(weights)], meshes, {**EXACT, **options})
        twins.step()
        for _, p, _ in twins.pairs:
            p.grad = part_for(p, torch.ones(p.shape))
        counted = count(twins.ours.step).collectives
        sent.append([(each.name, each.sent) for each in counted])
    assert sent[0] == sent[1]


def test_they_move_no_byte_more():
    run_ranks(sends_as_much, 2)


# -- formats ---------------------------------------------------------------------------------------


def movement(shape, options, sizes):
    """Of the float64 reference's in three steps: the movement of a weight sharded over 4 ranks."""
    told = {"lr": 0.02, **options}
    weight = Weight(shape, (4,), (0,))
    meshes = {(4,): init_device_mesh(DEVICE, (4,))}
    twins = Twins.placed([Group([weight], told)], meshes, sizes, {})
    ((_, p, q),) = twins.pairs
    before = q.detach().clone()
    reference = ref.ReferenceMuon([before], {**told, "weight_decay": 0.1})
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        # Norms of about 1e-4, rows of other magnitudes: each shard has a power of two of its own.
        grad = torch.randn(shape, generator=generator)
        grad *= torch.logspace(-7, -5, shape[0]).view(-1, 1)
        p.grad = part_for(p, grad)
        twins.ours.step()
        reference.step([grad])
    moved = whole(p).detach().double() - before
    return relative_error_of_known(moved, reference.weights[0] - before)


SMALL = {
    "absolute eps": {"ns_eps_absolute": 1e-5},
    "rows": {"ns_equilibrate": True},
    "rows, absolute eps": {"ns_equilibrate": True, "ns_eps_absolute": 1e-5},
    "all": {**ALL, "ns_eps_absolute": 1e-5, "momentum_style": "ema"},
}


def moves_as_the_formulas(formats, bound):
    for name, options in SMALL.items():
        for shape in ((32, 48), (48, 20)):
            with case(f"{name}, {shape}"):
                assert movement(shape, options, formats) < bound


FORMATS = pytest.mark.parametrize(
    ("arithmetic", "wire", "bound"),
    [
        (FP16, BF16, 0.1),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((FP16, FP32, 0.02), (BF16, BF16, 0.1), (FP32, BF16, 0.1))
        ),
    ],
    ids=str,
)


@pytest.mark.slow
@FORMATS
def test_small_gradients_move_weights_as_the_formulas_say_in_every_format(arithmetic, wire, bound):
    run_ranks(moves_as_the_formulas, 4, {"ns_dtype": arithmetic, "comm_dtype": wire}, bound)


# -- awkward matrices ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FP16, FP32, torch.float64], ids=str)
def test_zero_rows_and_extreme_magnitudes_stay_finite(dtype):
    generator = torch.Generator().manual_seed(0)
    G = torch.randn(5, 12, 20, generator=generator)
    G[0] = 0.0
    G[1, 3:] = 0.0
    G[2] *= 1e-30
    G[3] *= 1e30
    how = {"dtype": dtype, "equilibrate": True, "renormalize": True}
    U = optimizer.newton_schulz.newton_schulz(G, **how, eps_absolute=1e-6)
    assert U.isfinite().all()
    assert (U[0] == 0).all() and (U[1, 3:] == 0).all() and U[2].norm() < 1e-6
    assert relative_error(U[4].norm(), torch.tensor(12**0.5)) < 1e-2
    U = optimizer.newton_schulz.newton_schulz(G, **how)
    assert U.isfinite().all() and (U[0] == 0).all() and U[2].norm() > 3
    G[4, 0, 0] = torch.inf
    assert not optimizer.newton_schulz.newton_schulz(G, **how)[4].isfinite().any()


def test_rows_of_norms_under_1e_6_stay_smaller_than_others():
    G = torch.eye(4, dtype=torch.float64) * torch.tensor([1.0, 1e-3, 1e-6, 1e-9]).double()
    expected = torch.tensor([1.0, 1.0, 1.0, 1e-3]).double()
    U = optimizer.newton_schulz.newton_schulz(G, 1, [(1.0, 0.0, 0.0)], equilibrate=True)
    torch.testing.assert_close(U.diagonal(), expected / expected.norm(), rtol=1e-6, atol=0)


def test_they_change_nothing_of_an_input_that_is_not_overwritten():
    G = torch.randn(2, 8, 12, generator=torch.Generator().manual_seed(0))
    before = G.clone()
    optimizer.newton_schulz.newton_schulz(G.mT, equilibrate=True, renormalize=True)
    assert torch.equal(G, before)


def test_they_may_change_between_steps():
    params = [nn.Parameter(torch.randn(12, 20, generator=torch.Generator().manual_seed(0)))]
    initial = params[0].detach().clone()
    reference = ref.ReferenceMuon(params, {"lr": 0.05})
    optim = optimizer.Muon([{"params": params, "use_muon": True}], lr=0.05, **EXACT)
    for step, change in enumerate([{}, {"ns_equilibrate": True}, ALL, {"ns_norm_factor": None}]):
        optim.param_groups[0].update(change)
        reference.options[0].update(change)
        G = torch.randn(12, 20, generator=torch.Generator().manual_seed(step))
        params[0].grad = G.clone()
        optim.step()
        reference.step([G])
    moved = params[0].detach() - initial
    assert relative_error(moved, reference.weights[0] - initial) < 1e-4
