"""What a step sends in each dtype of the wire."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from layouts import make, part_for, whole
from ranks import run_ranks

INF = float("inf")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


SHAPES = [(24, 16), (16, 24), (32, 32), (40, 12), (16, 16)]
SCALES = [1e-7, 1e4, 1.0, 1e-7, 1e4]


class Matrices(nn.Module):
    """Matrices side by side, sharded by FSDP2."""

    def __init__(self, shapes=SHAPES):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(i, o, bias=False) for o, i in shapes)
        fully_shard(self)


def with_well_conditioned_gradients(model: nn.Module) -> None:
    """Singular values of 1 to 2, times the scale: the polar factor amplifies no rounding."""
    generator = torch.Generator().manual_seed(1)
    for p, scale in zip(model.parameters(), itertools.cycle(SCALES)):
        G = torch.randn(p.shape, generator=generator)
        U, S, Vh = torch.linalg.svd(G, full_matrices=False)
        p.grad = part_for(p, scale * (U * torch.linspace(1, 2, len(S))) @ Vh)


def step_with(wire_dtype: torch.dtype, shapes=SHAPES, **options) -> list[torch.Tensor]:
    """What a step adds to the weights."""
    model = Matrices(shapes)
    before = [whole(p).detach().clone() for p in model.parameters()]
    with_well_conditioned_gradients(model)
    exact = {"ns_dtype": torch.float32, "weight_decay": 0.0}
    make(model, comm_dtype=wire_dtype, **exact, **options).step()
    return [whole(p).detach() - w for p, w in zip(model.parameters(), before)]


def distances_from_fp32(wire_dtype: torch.dtype, *shapes, **options) -> list[float]:
    pairs = zip(step_with(wire_dtype, *shapes, **options), step_with(torch.float32, *shapes))
    return [float((a - b).norm() / b.norm()) for a, b in pairs]


def test_gradients_of_any_scale_keep_their_direction():
    for of_rank in run_ranks(distances_from_fp32, 4, torch.bfloat16):
        assert 0 < max(of_rank) <= 1e-2, of_rank


def step_with_inf(wire_dtype: torch.dtype, options: dict) -> list[bool]:
    """Which weights are finite after a step, and another, with an Inf on one rank alone."""
    model = Matrices()
    optim = make(model, comm_dtype=wire_dtype, **options)
    for _ in range(2):
        with_well_conditioned_gradients(model)
        if dist.get_rank() == 2:
            model.layers[1].weight.grad.to_local()[0, 0] = INF
        optim.step()
    return [bool(whole(p).isfinite().all()) for p in model.parameters()]


@pytest.mark.parametrize("wire_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_an_inf_that_propagates_stops_no_rank_and_spoils_no_other_matrix(wire_dtype):
    expected = [True, False, True, True, True]
    options = {"beta2": 0.9} if wire_dtype == torch.bfloat16 else {}
    assert run_ranks(step_with_inf, 4, wire_dtype, options, pg_timeout=20) == 4 * [expected]
