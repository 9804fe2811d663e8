"""What rides along on a 16-bit wire: numbers in fp32; and what a step sends in each dtype."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from kernel import optimizer
from layouts import make, part_for, whole
from ranks import run_ranks

wire = optimizer.distributed.wire
INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


# -- numbers ---------------------------------------------------------------------------------------

FLOATING = [torch.bfloat16, torch.float32, torch.float64]


def slots(dtype: torch.dtype) -> int:
    return 4 if dtype.itemsize == 2 else 1


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("start", [0, 1, 2, 5, 7])
def test_numbers_come_out_as_they_went_in(dtype, start):
    numbers = torch.cat([torch.randn(50) * 10.0**power for power in (-38, -20, 0, 20, 37)])
    numbers = torch.cat([numbers, torch.tensor([0.0, -0.0, INF, -INF, 1e-45])])
    if dtype == torch.float64:
        numbers = torch.cat([numbers.double(), torch.randn(9, dtype=dtype) * 1e300])
    used = slots(dtype) * len(numbers)
    buffer = torch.full((start + used + 3,), 7.0, dtype=dtype)
    wire.write_numbers(numbers, buffer[start : start + used])
    found = wire.read_numbers(buffer, start, len(numbers))
    assert torch.equal(found, numbers)
    assert torch.equal(found.signbit(), numbers.signbit())
    untouched = torch.cat([buffer[:start], buffer[start + used :]])
    assert untouched.tolist() == [7.0] * (start + 3)


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_nan_comes_out_as_nan_and_travels_in_16_bits_as_numbers(dtype):
    numbers = torch.tensor([1.0, NAN, -NAN, 2.0])
    buffer = torch.zeros(1 + slots(dtype) * 4, dtype=dtype)
    wire.write_numbers(numbers, buffer[1:])
    assert dtype.itemsize > 2 or buffer.isfinite().all()  # NCCL may be told to abort at NaN
    found = wire.read_numbers(buffer, 1, 4)
    assert found.isnan().tolist() == [False, True, True, False]
    assert found[[0, 3]].tolist() == [1.0, 2.0]


def test_any_bits_of_a_number_in_fp32_travel_in_16_bits_as_numbers():
    # Halves of such fp32 would be NaN patterns of the wire's dtype.
    dtype = torch.bfloat16
    numbers = torch.arange(1, 4000, dtype=torch.float32) / 3e3
    halves = numbers.view(dtype)
    buffer = torch.zeros(4 * len(numbers), dtype=dtype)
    wire.write_numbers(numbers, buffer)
    assert halves.isnan().any() and buffer.isfinite().all()
    assert torch.equal(wire.read_numbers(buffer, 0, len(numbers)), numbers)


# -- a step ----------------------------------------------------------------------------------------

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
