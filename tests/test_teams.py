"""Several owners of a matrix: each orthogonalizes a slice, and a step is that of one process.

In float64 the only difference is the order of sums. In fp32 and 16 bits slices have the errors of
whole matrices, beside the float64 reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from comparisons import relative_error, relative_error_of_known
from kernel import optimizer
from layouts import DEVICE, STEPS, Group, Twins, Weight, case, part_for, whole
from ranks import rank_outcomes, run_ranks
from reference import (
    ReferenceMuon,
    coefficients_of,
    newton_schulz,
    norm_factor_of,
)

FP64 = torch.float64
ROUNDING = 1e-12  # of sums in another order, in float64

Case = tuple[Sequence[Weight], Mapping[str, Any], Mapping[str, Any]]  # options of group, settings


def meshes_of(weights: Sequence[Weight]) -> dict[tuple[int, ...], Any]:
    shapes = dict.fromkeys(weight.mesh for weight in weights if weight.mesh is not None)
    return {shape: init_device_mesh(DEVICE, shape) for shape in shapes}


def step_in_teams(cases: Mapping[str, Case]) -> None:
    meshes = meshes_of([weight for weights, _, _ in cases.values() for weight in weights])
    for name, (weights, of_group, settings) in cases.items():
        with case(name):
            settings = dict(settings)
            kind, offload = settings.pop("replicas", None), settings.pop("offload", False)
            if kind is not None:
                reduced = "mean" if kind == "ZeRO-2" else None
                settings.update(process_group=dist.group.WORLD, grad_reduce=reduced)
            twins = Twins.placed([Group(weights, of_group)], meshes, settings, {})
            if offload:
                backend = optimizer.SimulatedHost(delay=2e-5, seed=dist.get_rank())
                twins.ours.turn_on_cpu_offload(backend=backend)
            twins.step()
            if offload:
                twins.ours.turn_off_cpu_offload()
            for label, p, q in twins.pairs:
                ours, expected = p.detach(), part_for(p, q.detach())
                if isinstance(ours, DTensor):
                    ours, expected = ours.to_local(), expected.to_local()
                torch.testing.assert_close(ours, expected, rtol=0, atol=ROUNDING, msg=label)
            owners = [len(row["owners"]) for row in twins.ours.summary().rows]
            assert max(owners) % settings["owners_per_matrix"] == 0


def wide(shape: tuple[int, ...], *mesh: Any) -> Weight:
    return Weight(shape, *mesh, dtype=FP64)


@pytest.mark.parametrize(
    ("ranks", "members"),
    [(2, 2), (4, 2), *(pytest.param(*n, marks=pytest.mark.slow) for n in ((4, 4), (8, 4), (8, 8)))],
)
def test_matrices_of_all_shapes_under_fsdp2(ranks, members):
    def shards(*shapes: tuple[int, ...], dim: int = 0) -> list[Weight]:
        return [wide(shape, (ranks,), (dim,)) for shape in shapes]

    cases = {
        "wide, tall, square": shards((16, 24), (40, 8), (16, 16), (64, 256), (256, 64)),
        "uneven shards and slices": shards((10, 13), (9, 8), (13, 9), (33, 70), (70, 33)),
        "empty shards": shards((ranks - 1, 16), (ranks + 1, 16)),
        "a longer side too short for slices": shards((1, 3), (3, 2), (2, 5), (16, 24)),
        "columns": shards((12, 16), (24, 17), (3, 10, 8), dim=1),
        "experts": shards((3, 16, 24), (2, 40, 8), dim=1),
    }
    settings = {"owners_per_matrix": members}
    run_ranks(step_in_teams, ranks, {name: (ws, {}, settings) for name, ws in cases.items()})


TEAMS = {"owners_per_matrix": 2}
LINE = [wide((16, 24), (4,), (0,)), wide((40, 9), (4,), (0,)), wide((3, 8, 24), (4,), (1,))]
PLAIN = [wide((16, 24)), wide((40, 9)), wide((6, 30))]
SQUARE: dict[str, Case] = {
    "FSDP2 over TP": (
        [
            wide((16, 24), (2, 2), (0, 0)),
            wide((16, 24), (2, 2), (0, 1)),
            wide((24, 9), (2, 2), (0, 0)),
        ],
        {},
        TEAMS,
    ),
    "HSDP": (
        [wide((16, 24), (2, 2), (None, 0)), wide((9, 40), (2, 2), (None, 0))],
        {},
        {**TEAMS, "hsdp": "redundant"},
    ),
    "HSDP, spread": (
        [wide((16, 24), (2, 2), (None, 0)), wide((9, 40), (2, 2), (None, 0))],
        {},
        {"owners_per_matrix": 4, "hsdp": "spread"},
    ),
    "several meshes": (
        [*LINE, wide((16, 24), (2, 2), (0, 1)), wide((16, 24), (2, 2), (None, 1))],
        {},
        TEAMS,
    ),
    "experts on two dimensions": ([wide((4, 12, 20), (2, 2), (0, 1))], {}, TEAMS),
    "heads and blocks": (
        [wide((24, 20), (4,), (0,)), wide((24, 7), (4,), (1,))],
        {"split": {"layers.0.0": 6, "layers.0.1": [16, 8]}},
        TEAMS,
    ),
    "axes of columns": (
        [wide((10, 24), (4,), (0,))],
        {"split": "10 (2 (q=4 + k=8))"},
        TEAMS,
    ),
    "convolutions": ([wide((6, 10, 3, 3), (4,), (0,))], {"flatten": True}, TEAMS),
    "one matrix in a chunk": (LINE, {}, {**TEAMS, "chunk_size": 1, "warmup_step": 1}),
    "other options": (
        LINE,
        {
            "ns_norm": "schatten4",
            "ns_algorithm": "standard",
            "momentum_style": "ema",
            "cautious": True,
        },
        {"owners_per_matrix": 4},
    ),
    "state in host memory": (LINE, {}, {**TEAMS, "offload": True}),
    "DDP": (PLAIN, {}, {**TEAMS, "replicas": "DDP"}),
    "ZeRO-2": (PLAIN, {}, {**TEAMS, "replicas": "ZeRO-2"}),
}


@pytest.mark.slow
def test_all_other_layouts_and_what_else_a_step_does():
    run_ranks(step_in_teams, 4, SQUARE)


def test_teams_within_replicas_of_tensor_parallel_shards():
    shapes = ((16, 24), (40, 9))
    weights = [wide(shape, (2, 2, 2), (None, 0, dim)) for shape in shapes for dim in (0, 1)]
    cases = {
        choice: (weights, {}, {"owners_per_matrix": 4, "hsdp": choice})
        for choice in ("redundant", "spread")
    }
    run_ranks(step_in_teams, 8, cases)


# -- formats ---------------------------------------------------------------------------------------


def errors(members: int, shape: tuple[int, int], options: Mapping[str, Any]) -> float:
    """Of the movement of a weight in three steps, beside the float64 reference."""
    meshes = meshes_of([Weight(shape, (4,), (0,))])
    twins = Twins.placed(
        [Group([Weight(shape, (4,), (0,))])], meshes, {**options, "owners_per_matrix": members}, {}
    )
    ((_, p, q),) = twins.pairs
    before = q.detach().clone()
    reference = ReferenceMuon([before], {"lr": 0.02, "weight_decay": 0.1})
    generator = torch.Generator(DEVICE).manual_seed(1)
    for step in range(STEPS):
        # Slices of other magnitudes: each would be scaled by another power of two.
        scales = torch.logspace(-3, 3, max(shape)).view(-1, 1)[:, [0] * min(shape)]
        scales = scales if shape[0] > shape[1] else scales.mT
        grad = torch.randn(shape, generator=generator) * scales * 10.0**-step
        p.grad = part_for(p, grad)
        twins.ours.step()
        reference.step([grad])
    moved = whole(p).detach().double() - before
    return relative_error_of_known(moved, reference.weights[0] - before)


def compare_errors(shapes: Sequence[tuple[int, int]], options: Mapping[str, Any], bound: float):
    for shape in shapes:
        with case(f"{shape}, {options}"):
            whole_error, *others = (errors(members, shape, options) for members in (1, 2, 4))
            assert max(others) <= bound, others
            assert max(others) <= 1.5 * whole_error + 1e-5, (whole_error, others)


FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arithmetic", "wire", "bound"),
    [
        (FP16, FP16, 0.02),
        (FP32, BF16, 0.1),
        pytest.param(BF16, BF16, 0.2, marks=pytest.mark.slow),
        pytest.param(FP32, FP16, 0.02, marks=pytest.mark.slow),
        pytest.param(BF16, FP32, 0.2, marks=pytest.mark.slow),
        pytest.param(FP16, FP32, 0.02, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_slices_have_the_errors_of_whole_matrices(arithmetic, wire, bound):
    options = {"ns_dtype": arithmetic, "comm_dtype": wire, "ns_algorithm": "gram"}
    run_ranks(compare_errors, 4, [(48, 96), (96, 40), (32, 600)], options, bound)


@pytest.mark.slow
def test_symmetric_products_by_blocks_are_summed_over_a_team():
    """From a shorter side of 512 on, where CPUs have padding between the rows of blocks."""
    options = {"ns_dtype": FP32, "comm_dtype": BF16}
    run_ranks(compare_errors, 4, [(512, 528)], options, 0.1)


@pytest.mark.parametrize("shape", [(2, 64, 96), (2, 96, 64)])
def test_kernels_normalize_and_multiply_slices_of_either_side(shape, monkeypatch):
    """A team of one, by interpreted kernels; one of its matrices is zero."""
    pytest.importorskip("triton")
    ns = optimizer.newton_schulz
    device = torch.device("cuda")  # a name: its recipe
    recipe = ns.recipe_for("polar_express", None, "auto", "frobenius", FP16, FP32, device)
    G = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 1e-5
    G[1] = 0.0
    alone = ns.Team(*shape[1:], add=lambda R: None, gather=lambda numbers: numbers.unsqueeze(0))
    monkeypatch.setattr(ns.iteration.triton_kernels, "is_used_on", lambda device_type: True)
    scratch = optimizer.scratch.Scratch()
    U = ns.iteration.orthogonalize(
        G.clone(), recipe, ns.iteration.Eps(1e-7), True, scratch, alone
    ).double()
    factor = norm_factor_of("polar_express")
    expected = newton_schulz(G[0], coefficients_of("polar_express"), norm_factor=factor)
    assert relative_error(U[0], expected) < 0.005
    assert (U[1] == 0).all()


# -- what is refused -------------------------------------------------------------------------------


def refused(of_group: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    weights = [Weight((16, 24), (2,), (0,))]
    Twins.placed([Group(weights, of_group)], meshes_of(weights), settings, {})


@pytest.mark.parametrize(
    ("of_group", "settings", "says"),
    [
        ({"ns_dtype": FP32}, {"comm_dtype": FP32}, "ask for exact steps"),
        ({"beta2": 0.9}, {}, "the second moment takes all of it"),
        ({"ns_equilibrate": True}, {}, "ns_equilibrate=True takes norms of all of it"),
        ({"ns_renormalize": True}, {}, "ns_renormalize=True takes norms of all of it"),
        ({}, {"use_distributed_muon": True}, "has every rank orthogonalize all of each matrix"),
        ({}, {"owners_per_matrix": 0}, "owners_per_matrix must be an int > 0 or 'auto', found 0"),
    ],
)
def test_what_slices_do_not_do_is_refused_on_every_rank(of_group, settings, says):
    for outcome in rank_outcomes(refused, 2, of_group, {**TEAMS, **settings}):
        assert outcome.error == "ValueError"
        assert says in outcome.message


def changed_later() -> None:
    weights = [Weight((16, 24), (2,), (0,))]
    twins = Twins.placed([Group(weights)], meshes_of(weights), TEAMS, {})
    twins.ours.param_groups[0]["beta2"] = 0.9
    before = whole(twins.pairs[0][1]).clone()
    try:
        twins.step()
    finally:
        assert torch.equal(whole(twins.pairs[0][1]), before)


def test_a_second_moment_turned_on_later_is_refused_before_anything_moved():
    for outcome in rank_outcomes(changed_later, 2):
        assert outcome.error == "ValueError"
        assert "the second moment takes all of it" in outcome.message


def other_teams_on_each_rank() -> None:
    weights = [Weight((16, 24), (4,), (0,))]
    settings = {"owners_per_matrix": 2 if dist.get_rank() < 3 else 4}
    Twins.placed([Group(weights)], meshes_of(weights), settings, {}).step()


def test_ranks_that_would_make_other_teams_raise_together():
    for outcome in rank_outcomes(other_teams_on_each_rank, 4):
        assert outcome.error == "ValueError"
        assert "owners_per_matrix" in outcome.message
