"""What rides along on a 16-bit wire: parts scaled to the range of fp16, and numbers in fp32."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from kernel import optimizer
from layouts import make, part_for, whole
from layouts import part as part_of
from ranks import run_ranks

wire = optimizer.distributed.wire
INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def scaled_down(
    parts: list[torch.Tensor], dtype: torch.dtype = torch.float32
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Scaled parts in a dtype, and their exponents; the given ones stay."""
    outputs = [torch.empty_like(part, dtype=dtype) for part in parts]
    largest = torch.stack([part.abs().max() for part in parts])
    exponents = wire.scale_down([part.clone() for part in parts], outputs, largest)
    return outputs, exponents


def over_the_wire(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Scaled, sent in fp16 with their exponents, and scaled back; the given ones stay."""
    sent, exponents = scaled_down(parts, torch.float16)
    return scaled_up(sent, exponents.half())


def scaled_up(parts: list[torch.Tensor], exponents: torch.Tensor) -> list[torch.Tensor]:
    return [part.float() * 2.0**power for part, power in zip(parts, exponents.tolist())]


@pytest.mark.kernels_ci
def test_scaling_down_and_up_is_exact_in_fp32():
    parts = [torch.randn(5, 7) * 2.0**power for power in range(-95, 120, 5)]
    scaled = scaled_up(*scaled_down(parts))
    assert all(torch.equal(found, part) for found, part in zip(scaled, parts))


def test_powers_of_two_arrive_as_they_are():
    for power in range(-120, 127):
        (found,) = over_the_wire([torch.tensor([2.0**power, -(2.0 ** (power - 6)), 0.0])])
        assert found.tolist() == [2.0**power, -(2.0 ** (power - 6)), 0.0]


def test_the_largest_magnitude_of_a_part_comes_to_lie_in_one_octave():
    parts = [torch.randn(20) * 10.0**power for power in range(-30, 38, 4)]
    for part in scaled_down(parts)[0]:
        assert 2.0**12 <= part.abs().max() < 2.0**13


@pytest.mark.parametrize("magnitude", [1e-30, 1e-7, 1.0, 1e4, 1e30])
def test_what_is_a_millionth_of_the_largest_keeps_the_precision_of_fp16(magnitude):
    parts = [torch.randn(1000) * torch.exp2(-20 * torch.rand(1000)) for _ in range(4)]
    parts = [part * (magnitude / part.abs().max()) for part in parts]
    for found, part in zip(over_the_wire(parts), parts):
        resolved = part.abs() >= 2.0**-20 * part.abs().max()
        error = (found - part).abs() / part.abs()
        assert resolved.sum() > 800
        assert error[resolved].max() <= 2.0**-11


def test_every_part_has_a_scale_of_its_own():
    parts = [torch.randn(6, 4) * scale for scale in (1e-30, 1e30, 1e-7, 0.0)]
    for found, part in zip(over_the_wire(parts), parts):
        torch.testing.assert_close(found, part, rtol=2.0**-11, atol=0.0)


def test_zeros_stay_zeros():
    (found,) = over_the_wire([torch.zeros(3, 4)])
    assert torch.equal(found, torch.zeros(3, 4))


def test_what_is_smaller_than_any_factor_reaches_stays_finite():
    tiny = torch.tensor([1.2e-38, 1e-40, 0.0])
    (scaled,), exponents = scaled_down([tiny])
    assert torch.isfinite(scaled).all() and torch.isfinite(exponents).all()
    (scaled,) = scaled_up([scaled], exponents)
    assert torch.isfinite(scaled).all()
    assert (scaled - tiny).abs().max() <= 1e-38


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_inf_and_nan_go_as_they_are_and_leave_other_parts_alone(bad):
    part = torch.randn(8)
    broken = part.clone()
    broken[3] = bad
    found = over_the_wire([broken, part])
    expected = torch.tensor(bad)
    assert torch.equal(found[0][3], expected) or (math.isnan(bad) and found[0][3].isnan())
    torch.testing.assert_close(found[1], part, rtol=2.0**-11, atol=1e-7)


def test_exponents_are_whole_numbers_that_fp16_and_bf16_hold():
    powers = torch.arange(-140, 128, dtype=torch.float64)
    _, exponents = scaled_down([torch.exp2(power).float().view(1) for power in powers])
    assert exponents.dtype == torch.float32 and exponents.shape == powers.shape
    assert torch.equal(exponents, exponents.round())
    assert torch.equal(exponents.half().float(), exponents)
    assert torch.equal(exponents.bfloat16().float(), exponents)


def parts_of_two_matrices(scales: list[tuple[float, float]]) -> list[torch.Tensor]:
    """(2, 3, 5) each, of two matrices of very different size."""
    return [torch.randn(2, 3, 5) * torch.tensor(of).view(2, 1, 1) for of in scales]


def sent_in_fp16(parts: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Parts of n matrices each, and their exponents, (parts, n)."""
    sent, exponents = scaled_down([matrix for part in parts for matrix in part], torch.float16)
    n = len(parts[0])
    together = [torch.stack(sent[at : at + n]) for at in range(0, len(sent), n)]
    return together, exponents.view(len(parts), n)


def test_parts_of_a_matrix_come_to_one_scale_without_rounding():
    parts = parts_of_two_matrices([(1.0, 1e20), (1e-3, 1e20), (3e2, 1e18), (0.0, 1e19)])
    sent, exponents = sent_in_fp16(parts)
    aligned = [part.clone() for part in sent]
    wire.unify_scales([part[:, None] for part in aligned], exponents.half()[..., None])
    for part, before, powers in zip(aligned, sent, exponents - exponents.amax(dim=0)):
        assert part.dtype == torch.float16
        exact = before.double() * torch.exp2(powers.double()).view(2, 1, 1)
        assert (part.double() - exact).abs().max() <= 2.0**-25  # half of fp16's least magnitude
    together, given = (torch.cat([p.double().flatten(1) for p in of], 1) for of in (aligned, parts))
    for found, of_matrix in zip(together, given):
        found, of_matrix = found / found.norm(), of_matrix / of_matrix.norm()
        assert (found - of_matrix).norm() < 2.0**-11


@pytest.mark.parametrize("bad", [INF, NAN])
def test_alignment_leaves_what_is_not_finite_and_other_matrices_alone(bad):
    expected = parts_of_two_matrices([(1.0, 1.0), (1e-4, 1e-4)])
    expected[1][0, 0, 0] = bad
    aligned, exponents = sent_in_fp16(expected)
    wire.unify_scales([part[:, None] for part in aligned], exponents[..., None])
    assert not aligned[1][0, 0, 0].isfinite()
    second = torch.stack([part[1] for part in aligned]).float()
    ratio = second / torch.stack([part[1] for part in expected])
    assert (ratio / ratio.flatten()[0] - 1).abs().max() < 2.0**-9


# -- a shard of zeros -----------------------------------------------------------------------------


def update_with_a_zero_shard(scale: float, sent_in: torch.dtype | None) -> torch.Tensor:
    """What a step adds to a matrix of which one rank's half has no gradient."""
    mesh = init_device_mesh("cpu", (2,))
    grad = scale * torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    grad[8:] = 0
    p = nn.Parameter(part_of(torch.zeros(16, 8), mesh, [Shard(0)]))
    p.grad = part_of(grad, mesh, [Shard(0)])
    options = {
        "ns_dtype": torch.float16,
        "comm_dtype": sent_in,
        "adjust_lr": "none",
        "weight_decay": 0.0,
    }
    optimizer.Muon([{"params": [p], "use_muon": True}], lr=1.0, **options).step()
    return p.full_tensor().detach()


@pytest.mark.parametrize("scale", [1e-10, 1e-20])
def test_a_shard_of_zeros_does_not_take_small_gradients_of_other_ranks_away(scale):
    (found, _), (expected, _) = (
        run_ranks(update_with_a_zero_shard, 2, scale, sent_in) for sent_in in (None, torch.float32)
    )
    # A scale of 1 is 0.005 apart.
    assert (found - expected).norm() < 0.02 * expected.norm()


def test_parts_of_zeros_set_no_scale():
    parts = [torch.full((1, 4, 4), 1e-10), torch.zeros(1, 4, 4)]
    sent = [torch.empty(1, 4, 4, dtype=torch.float16) for _ in parts]
    largest = torch.stack([p.abs().max() for p in parts])
    exponents = wire.scale_down(parts, sent, largest).view(2, 1, 1)
    wire.unify_scales([part[:, None] for part in sent], exponents)
    assert sent[0].abs().min() > 0 and (sent[1] == 0).all()


# -- numbers ---------------------------------------------------------------------------------------

FLOATING = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_any_bits_of_a_number_in_fp32_travel_in_16_bits_as_numbers(dtype):
    # Halves of such fp32 would be NaN patterns of the wire's dtype.
    numbers = torch.arange(1, 4000, dtype=torch.float32) / 3e3
    halves = numbers.view(dtype)
    buffer = torch.zeros(4 * len(numbers), dtype=dtype)
    wire.write_numbers(numbers, buffer)
    assert halves.isnan().any() and buffer.isfinite().all()
    assert torch.equal(wire.read_numbers(buffer, 0, len(numbers)), numbers)


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_numbers_are_written_flat_from_any_layout(dtype):
    numbers = torch.randn(4, 3).t()
    assert not numbers.is_contiguous()
    buffer = torch.zeros(5 + slots(dtype) * 12, dtype=dtype)
    wire.write_numbers(numbers, buffer[5:])
    assert torch.equal(wire.read_numbers(buffer, 5, 12), numbers.flatten().to(torch.float32))


def test_numbers_that_were_made_in_fp64_keep_fp32_on_a_16_bit_wire():
    numbers = torch.rand(10, dtype=torch.float64)
    buffer = torch.zeros(41, dtype=torch.bfloat16)
    wire.write_numbers(numbers, buffer[1:])
    assert torch.equal(wire.read_numbers(buffer, 1, 10), numbers.float())


def test_no_numbers_take_no_place():
    buffer = torch.ones(3, dtype=torch.bfloat16)
    wire.write_numbers(torch.zeros(0), buffer[3:3])
    assert wire.read_numbers(buffer, 3, 0).shape == (0,)
    assert buffer.tolist() == [1.0, 1.0, 1.0]


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


def test_gradients_of_any_scale_keep_their_direction_on_an_fp16_wire():
    for of_rank in run_ranks(distances_from_fp32, 4, torch.float16):
        assert 0 < max(of_rank) <= 2e-3, of_rank


def test_exponents_survive_where_a_batch_is_longer_than_a_run():
    shapes = [(64, 128)] * 48 + [(32, 64)] * 4  # 28 of the former on two ranks: 458 kB
    for of_rank in run_ranks(distances_from_fp32, 2, torch.float16, shapes, chunk_size=28):
        assert 0 < max(of_rank) <= 2e-3, of_rank


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


@pytest.mark.parametrize("wire_dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_an_inf_that_propagates_stops_no_rank_and_spoils_no_other_matrix(wire_dtype):
    expected = [True, False, True, True, True]
    options = {"beta2": 0.9} if wire_dtype == torch.float16 else {}
    assert run_ranks(step_with_inf, 4, wire_dtype, options, pg_timeout=20) == 4 * [expected]
