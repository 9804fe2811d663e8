"""`newton_schulz`: the float64 reference's numbers, whatever the shape, batch, scale and dtype."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import platform
import subprocess
import sys
import warnings
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import reference as ref
from comparisons import relative_error, through_torch_save
from kernel import optimizer
from layouts import randn

newton_schulz = optimizer.newton_schulz.newton_schulz
FAMILIES = list(ref.FAMILIES)
SCHEDULED = [family for family in FAMILIES if family not in ref.CONSTANT_FAMILIES]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
SHAPES = [(40, 16), (16, 40), (24, 24), (64, 64), (33, 65), (17, 4096)]
RANK_ONE_SHAPES = [(1, 37), (37, 1), (1, 1)]
TRIPLES = [(3.0, -4.0, 2.0), (2.0, -1.5, 0.5), (1.5, -0.5, 0.0)]


def singular_values(U):
    return torch.linalg.svdvals(U.double())


@functools.cache
def orthogonalized(shape, family, steps=5, dtype=torch.float64):
    coefficients = ref.coefficients_of(family, steps)
    if family == "cans" and dtype == torch.bfloat16:
        # Documented in `Polynomials.safety`: without it, roundings above the peak of 1.99 explode.
        s = 1.01
        guarded = [(a / s, b / s**3, c / s**5) for a, b, c in coefficients[:-1]]
        coefficients = [*guarded, coefficients[-1]]
    return ref.newton_schulz(randn(*shape), coefficients, ref.norm_factor_of(family))


def tolerance(dtype, family, shape):
    """How far U may be from the reference, relative to ‖U‖.

    float32: measured at most 2e-5. `cans` on one row or column is the exception, 6e-3 measured:
    the only singular value is exactly 1 and every polynomial has a slope of about 15 where it
    lands, so that five of them turn one rounding of 6e-8 into 1e-2.
    bfloat16: a rounding is 2e-3, which the first polynomials enlarge up to eightfold each on
    small singular values and the quintics' peaks beyond that; measured at most 5e-2, and 1.3e-2
    or less once both sides are in the hundreds. `cans` has the steepest peaks: 0.16 measured where
    it was cut short, and 0.34 on one row or column, as above.
    """
    if family == "cans" and min(shape) == 1:
        return {torch.float64: 1e-10, torch.float32: 1e-2, torch.bfloat16: 0.4}[dtype]
    if family == "cans" and dtype == torch.bfloat16:
        return 0.2
    return {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 8e-2}[dtype]


# The reference's numbers


@pytest.mark.parametrize("steps", [3, 4, 5, 6, 7])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_family_and_count_of_steps_gives_the_references_numbers(dtype, family, steps):
    for shape in SHAPES:
        G = randn(*shape, dtype=torch.promote_types(dtype, torch.float32))
        U = newton_schulz(G, steps, family, dtype=dtype)
        assert U.shape == shape and U.dtype == dtype
        assert relative_error(U, orthogonalized(shape, family, steps, dtype=dtype)) < tolerance(
            dtype, family, shape
        ), shape


@pytest.mark.parametrize("steps", [3, 4, 5, 6, 7])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_row_one_column_and_one_number_give_the_references_numbers(dtype, family, steps):
    for shape in RANK_ONE_SHAPES:
        G = randn(*shape, dtype=torch.promote_types(dtype, torch.float32))
        U = newton_schulz(G, steps, family, dtype=dtype)
        expected = orthogonalized(shape, family, steps, dtype=dtype)
        assert relative_error(U, expected) < tolerance(dtype, family, shape), shape


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_a_large_odd_shape_gives_the_references_numbers(dtype, bound, family):
    shape = (511, 513)
    U = newton_schulz(randn(*shape), 5, family, dtype=dtype)
    assert relative_error(U, orthogonalized(shape, family, dtype=dtype)) < bound


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_defaults_are_five_steps_of_polar_express(dtype):
    G = randn(32, 48)
    assert torch.equal(
        newton_schulz(G, dtype=dtype), newton_schulz(G, 5, "polar_express", dtype=dtype)
    )


@pytest.mark.parametrize("as_lists", [False, True])
def test_an_explicit_list_gives_the_references_numbers(as_lists):
    G = randn(24, 40, dtype=torch.float64)
    given = [list(triple) for triple in TRIPLES] if as_lists else TRIPLES
    assert relative_error(newton_schulz(G, 3, given), ref.newton_schulz(G, TRIPLES)) < 1e-12


def test_an_explicit_list_sets_the_count_of_steps_itself():
    G = randn(24, 40, dtype=torch.float64)
    U = newton_schulz(G, coefficients=TRIPLES)
    assert relative_error(U, ref.newton_schulz(G, TRIPLES)) < 1e-12


@pytest.mark.parametrize("family", SCHEDULED)
def test_more_steps_than_the_schedule_bring_singular_values_closer_to_one(family):
    # Cycling the schedule would start again with a polynomial made for small values.
    G = randn(48, 64, dtype=torch.float64)
    distances = []
    for steps in range(5, 11):
        U = newton_schulz(G, steps, family)
        distances.append((singular_values(U) - 1).abs().max().item())
        assert (U * ref.polar_factor(G)).sum() > 0.7 * min(G.shape)
    assert all(later < earlier or later < 1e-9 for earlier, later in itertools.pairwise(distances))
    assert distances[-1] < 1e-6
    if family != "cubic5":
        assert distances[1] < 0.1 * distances[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_singular_vectors_stay_and_singular_values_approach_one(family):
    for shape in SHAPES[:4]:
        U = newton_schulz(randn(*shape, dtype=torch.float64), 5, family)
        assert (U * ref.polar_factor(randn(*shape))).sum() / min(shape) > 0.85
        assert singular_values(U).max() < 1.31


# Dtypes


@pytest.mark.parametrize("arithmetic", [None, *DTYPES], ids=str)
@pytest.mark.parametrize(
    "given", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_every_floating_dtype_is_accepted(given, arithmetic):
    G = randn(24, 40, dtype=given)
    U = newton_schulz(G, dtype=arithmetic)
    if arithmetic is None:
        arithmetic = optimizer.newton_schulz.default_dtype(given, G.device)
    assert U.dtype == arithmetic
    expected = ref.newton_schulz(G, ref.FAMILIES["polar_express"], norm_factor=1.02)
    # The input is normalized in float32 unless it is wider.
    bound = tolerance(arithmetic, "polar_express", G.shape)
    assert relative_error(U, expected) < (bound if given == torch.float64 else max(1e-5, bound))


def test_float64_keeps_its_precision_by_default():
    assert newton_schulz(randn(8, 6, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_float16_is_never_the_default_arithmetic(dtype):
    assert newton_schulz(randn(8, 6, dtype=dtype)).dtype in (torch.float32, torch.bfloat16)


def test_the_norm_of_bfloat16_input_keeps_float32_digits():
    # 4096 equal numbers: a sum of squares in bfloat16 is off by percents.
    G = torch.ones(64, 64, dtype=torch.bfloat16)
    U = newton_schulz(G, dtype=torch.float32)
    assert relative_error(U, newton_schulz(G.double())) < 1e-3


# Batches and strides


SHAPES_ODD_AND_EVEN = [(40, 16), (16, 40), (24, 24), (17, 33), (128, 96), (1, 37), (37, 1), (1, 1)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_batch_invariant_batches_give_bit_for_bit_what_their_matrices_give_alone(dtype, family):
    exact = functools.partial(newton_schulz, coefficients=family, dtype=dtype, batch_invariant=True)
    for shape in SHAPES_ODD_AND_EVEN:
        G = randn(5, *shape)
        alone = torch.stack([exact(g) for g in G])
        torch.testing.assert_close(exact(G), alone, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(exact(G[1:3]), alone[1:3], rtol=0, atol=0, equal_nan=True)


def test_batch_invariant_products_are_of_one_matrix_each():
    # On one machine a batch may give the bits of its matrices by luck; no library promises it.
    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.overloadpacket in (torch.ops.aten.bmm, torch.ops.aten.baddbmm):
                assert args[-1].shape[0] == 1, function
            return function(*args, **(kwargs or {}))

    with Products():
        newton_schulz(randn(5, 24, 40), dtype=torch.float32, batch_invariant=True)
        with pytest.raises(AssertionError):
            newton_schulz(randn(5, 24, 40), dtype=torch.float32)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_a_batch_gives_about_what_its_matrices_give_alone(dtype, tolerance):
    for shape in SHAPES_ODD_AND_EVEN:
        G = randn(5, *shape)
        together = newton_schulz(G, dtype=dtype)
        alone = torch.stack([newton_schulz(g, dtype=dtype) for g in G])
        assert relative_error(together, alone.double()) < tolerance


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", [(1,), (6,), (2, 3), (2, 1, 3)])
def test_leading_dimensions_are_a_batch(batch, dtype):
    G = randn(*batch, 12, 20)
    U = newton_schulz(G, dtype=dtype)
    assert U.shape == G.shape and U.is_contiguous()
    flat = newton_schulz(G.reshape(-1, 12, 20), dtype=dtype)
    assert torch.equal(U.reshape(-1, 12, 20), flat)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_do_not_matter(dtype):
    stored = randn(6, 20, 24)
    views = {
        "transposed": stored.mT,
        "permuted batch": stored.view(2, 3, 20, 24).transpose(0, 1),
        "every second row": stored[:, ::2],
        "some columns": stored[..., 3:17],
        "expanded": stored[:1].expand(3, -1, -1),
        "columns first": stored.permute(1, 2, 0),
    }
    for name, G in views.items():
        U = newton_schulz(G, dtype=dtype)
        expected = newton_schulz(G.contiguous(), dtype=dtype)
        assert U.shape == G.shape
        # The norm, in float32, may be summed in another order.
        bound = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 8e-2}[dtype]
        assert relative_error(U, expected) < bound, name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_transposed_matrix_gives_the_transposed_factor(dtype):
    G = randn(40, 16, dtype=dtype)
    U, transposed = newton_schulz(G, dtype=dtype), newton_schulz(G.mT, dtype=dtype)
    bound = 1e-12 if dtype == torch.float64 else 1e-5
    assert relative_error(transposed.mT, U) < bound


@pytest.mark.parametrize("given", DTYPES, ids=str)
@pytest.mark.parametrize("arithmetic", DTYPES, ids=str)
def test_the_input_is_never_modified_and_shares_nothing_with_the_output(arithmetic, given):
    unit = torch.eye(6, 9)  # largest magnitude and norm need no division
    for G in (randn(3, 6, 9), randn(9, 6), unit, torch.zeros(4, 4), torch.zeros(0, 4)):
        G = G.to(given)
        before, version = G.clone(), G._version
        U = newton_schulz(G, dtype=arithmetic)
        assert torch.equal(G, before) and G._version == version
        assert G.numel() == 0 or U.untyped_storage().data_ptr() != G.untyped_storage().data_ptr()


def test_no_graph_is_recorded():
    G = randn(6, 9).requires_grad_()
    assert not newton_schulz(G).requires_grad


# Awkward matrices


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_zero_matrices_give_zeros(family, dtype):
    for shape in [(12, 20), (20, 12), (5, 5), (1, 1), (2, 3, 4)]:
        U = newton_schulz(torch.zeros(shape), 5, family, dtype=dtype)
        assert torch.equal(U, torch.zeros(shape, dtype=dtype))


def test_a_zero_matrix_gives_zeros_without_eps_too():
    assert torch.equal(newton_schulz(torch.zeros(4, 6), eps=0.0).float(), torch.zeros(4, 6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(0, 5), (5, 0), (0, 0), (0, 4, 6), (3, 0, 6), (3, 6, 0), (2, 0, 3, 4)]
)
def test_empty_matrices_and_empty_batches_stay_empty(shape, dtype):
    U = newton_schulz(torch.zeros(shape), dtype=dtype)
    assert U.shape == shape and U.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_matrices_of_rank_one_give_finite_bounded_factors(family, dtype):
    # Rounding turns rank one into full rank, and the first polynomials enlarge what it left.
    for seed in range(8):
        G = torch.outer(randn(48, seed=seed), randn(32, seed=100 + seed))
        corner = torch.zeros(12, 20)
        corner[3, 4] = 1.0 + seed
        for matrix in (G, G.mT, corner, torch.ones(16, 24) * (1 + seed)):
            U = newton_schulz(matrix, 5, family, dtype=dtype)
            assert U.isfinite().all()
            assert singular_values(U).max() < 1.5
            assert (U.double() * ref.polar_factor(matrix)).sum() > 0.3


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decaying_and_low_rank_spectra_give_finite_bounded_factors(dtype, family):
    P, Q = torch.linalg.qr(randn(64, 64))[0], torch.linalg.qr(randn(96, 64, seed=1))[0]
    spectra = [10.0 ** -torch.linspace(0, decades, 64) for decades in (1, 3, 6, 12)]
    spectra += [torch.cat([torch.ones(rank), torch.zeros(64 - rank)]) for rank in (2, 8, 32)]
    for sigma in spectra:
        for G in ((P * sigma) @ Q.mT, (Q * sigma) @ P.mT):
            U = newton_schulz(G, 5, family, dtype=dtype)
            assert U.isfinite().all()
            assert singular_values(U).max() < 1.5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_power_of_two_in_front_changes_nothing(dtype):
    for shape in [(24, 40), (40, 24), (1, 9)]:
        for exponent in (-100, -1, 3, 100):
            G = randn(*shape)
            scaled = newton_schulz(G * 2.0**exponent, dtype=dtype)
            assert torch.equal(scaled, newton_schulz(G, dtype=dtype))
        G = randn(*shape, dtype=torch.float16)
        small = newton_schulz(G * 2.0**-4, dtype=dtype)
        assert torch.equal(small, newton_schulz(G, dtype=dtype))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_tiny_and_huge_matrices_give_what_the_unscaled_ones_give(given, family):
    arithmetic = torch.promote_types(given, torch.float32)
    factors = [1e-200, 1e200] if given == torch.float64 else [1e-30, 1e-20, 1e20, 1e30]
    # Multiplying rounds every entry anew: to 4e-3 in bfloat16.
    bound = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 5e-2}[given]
    G = randn(24, 40, dtype=given)
    U = newton_schulz(G, 5, family, dtype=arithmetic)
    for factor in factors:
        scaled = newton_schulz(G * factor, 5, family, dtype=arithmetic)
        assert relative_error(scaled, U) < bound


def test_float16_neither_overflows_nor_underflows():
    G = randn(64, 64, dtype=torch.float16)
    U = newton_schulz(G, dtype=torch.float32)
    for factor in (2.0**-10, 2.0**12):  # squares leave the range of float16
        assert relative_error(newton_schulz(G * factor, dtype=torch.float32), U) < 2e-2


def test_matrices_of_one_batch_are_scaled_each_on_its_own():
    G = randn(4, 12, 20) * torch.tensor([1.0, 1e-30, 1e30, 0.0]).view(4, 1, 1)
    together = newton_schulz(G, dtype=torch.float32)
    assert torch.equal(together, torch.stack([newton_schulz(g, dtype=torch.float32) for g in G]))
    assert together[3].abs().max() == 0 and singular_values(together[1]).min() > 0.5


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inf_and_nan_stay_within_their_own_matrix(dtype, bad):
    for shape in [(12, 20), (20, 12), (9, 9), (1, 7)]:
        G = randn(4, *shape)
        U = newton_schulz(G, dtype=dtype)
        G[1, 0, -1] = bad
        found = newton_schulz(G, dtype=dtype)
        assert found[1].isnan().all()
        assert torch.equal(found[[0, 2, 3]], U[[0, 2, 3]])


# What raises and what warns


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(coefficients="quintik"), "unknown ns_coefficients 'quintik'.*polar_express"),
        (dict(algorithm="fast"), "algorithm must be one of.*'fast'"),
        (dict(steps=5, coefficients=TRIPLES), "lists 3 iterations but ns_steps is 5"),
        (dict(steps=2, coefficients=TRIPLES), "lists 3 iterations but ns_steps is 2"),
        (dict(steps=1, coefficients=[(1.0, 2.0)]), "list of .a, b, c."),
        (dict(coefficients=[]), "list of .a, b, c."),
        (dict(steps=0), "steps must be at least 1, found 0"),
    ],
)
def test_unknown_names_and_wrong_counts_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        newton_schulz(randn(4, 6), **arguments)


@pytest.mark.parametrize(
    "G",
    [
        torch.zeros(5),
        torch.tensor(1.0),
        torch.zeros(4, 6, dtype=torch.int64),
        torch.zeros(4, 6, dtype=torch.complex64),
        torch.zeros(4, 6, dtype=torch.bool),
    ],
    ids=["vector", "scalar", "int", "complex", "bool"],
)
def test_what_is_no_real_matrix_raises(G):
    with pytest.raises(ValueError, match="real matrices"):
        newton_schulz(G)


@pytest.mark.parametrize("steps", [None, 1, 3, 7])
def test_one_triple_is_that_of_every_step(steps):
    G, (a, b, c) = randn(6, 4), TRIPLES[1]
    listed = newton_schulz(G, coefficients=[(a, b, c)] * (steps or 5))
    for triple in (a, b, c), [a, b, c]:
        assert torch.equal(newton_schulz(G, steps, triple), listed)
    group = {"params": [torch.nn.Parameter(G.clone())], "use_muon": True}
    options = {} if steps is None else {"ns_steps": steps}
    for given in ({**group, **options}, {}), (group, options):
        optim = optimizer.Muon([given[0]], ns_coefficients=(a, b, c), **given[1])
        assert optim.param_groups[0]["ns_steps"] == (steps or 5)


def test_one_triple_is_scheduled_saved_and_loaded_like_other_coefficients():
    weights = [torch.nn.Parameter(torch.eye(4)) for _ in range(3)]
    groups = [{"params": [weight], "use_muon": True} for weight in weights]
    triple, steps = (3.0, -3.2, 1.2), {"ns_steps": 3}
    ours = optimizer.Muon([{**groups[0], "ns_coefficients": triple}])
    preset = optimizer.presets.torch_muon([{**groups[1], "ns_coefficients": triple}])
    theirs = optimizer.Muon(**preset)
    for optim in (ours, theirs):
        assert optim.param_groups[0]["ns_steps"] == 5
        assert optim.param_groups[0]["ns_coefficients"] == triple
        optim.param_groups[0].update(steps, lr=0.1)  # a step takes any number of them
    resumed = optimizer.Muon([groups[2]])
    resumed.load_state_dict(through_torch_save(ours.state_dict()))
    assert resumed.param_groups[0]["ns_coefficients"] == triple
    listed = optimizer.Muon(
        [{"params": [torch.nn.Parameter(torch.eye(4))], "use_muon": True}],
        lr=0.1,
        ns_coefficients=[triple] * 3,
    )
    gradient = randn(4, 4)
    for optim in (ours, theirs, resumed, listed):
        (weight,) = optim.param_groups[0]["params"]
        weight.grad = gradient.clone()
        optim.step()
    expected = listed.param_groups[0]["params"][0]
    assert torch.equal(weights[0], expected) and torch.equal(weights[2], expected)
    assert not torch.equal(weights[1], torch.eye(4))


def muon_with(family, steps, use_muon=True):
    group = {"params": [torch.nn.Parameter(randn(4, 6))], "use_muon": use_muon}
    return optimizer.Muon([group], ns_coefficients=family, ns_steps=steps)


SHORTENED = [
    (family, steps)
    for family in FAMILIES
    for steps in range(1, 5)
    if ref.largest_singular_value(family, steps) > 1.5
]


def test_only_polar_express_and_cans_leave_large_singular_values_when_shortened():
    expected = itertools.product(("polar_express", "cans"), range(1, 5))
    assert list(expected) == SHORTENED


@pytest.mark.parametrize("family, steps", SHORTENED)
def test_a_shortened_schedule_that_overshoots_warns_at_construction(family, steps):
    largest = ref.largest_singular_value(family, steps)
    with pytest.warns(UserWarning, match=f"{steps} steps of '{family}'.*{largest:.2f}") as caught:
        muon_with(family, steps)
    assert len(caught) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_schedules_that_do_not_overshoot_do_not_warn(family):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for steps in range(1, 9):
            if (family, steps) not in SHORTENED:
                muon_with(family, steps)
            muon_with(family, steps, use_muon=False)


def test_a_group_with_its_own_shortened_schedule_warns():
    group = {"params": [torch.nn.Parameter(randn(4, 6))], "use_muon": True, "ns_steps": 3}
    with pytest.warns(UserWarning, match="3 steps of 'polar_express'"):
        optimizer.Muon([group])


# The default arithmetic of CPUs

DEFAULT_DTYPE = """
import torch
from kernel import optimizer
print(optimizer.newton_schulz.newton_schulz(torch.ones(4, 4)).dtype)
"""


def default_dtype_in(**environment):
    """Of a fresh process: oneDNN reads its environment once."""
    inherited = {k: v for k, v in os.environ.items() if k != "ONEDNN_MAX_CPU_ISA"}
    given = {**inherited, "PYTHONPATH": str(Path(__file__).parent), **environment}
    run = subprocess.run(
        [sys.executable, "-c", DEFAULT_DTYPE], env=given, capture_output=True, text=True, check=True
    )
    return run.stdout.strip()


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="needs Linux, to tell instructions")
def test_bfloat16_is_the_default_only_on_cpus_with_instructions_for_it():
    words = set(Path("/proc/cpuinfo").read_text().split())
    has_instructions = bool(words & {"avx512_bf16", "amx_bf16", "bf16"})
    assert default_dtype_in() == ("torch.bfloat16" if has_instructions else "torch.float32")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="limits x86's instructions")
def test_float32_is_the_default_where_onednn_may_not_use_those_instructions():
    assert default_dtype_in(ONEDNN_MAX_CPU_ISA="AVX2") == "torch.float32"


# -- cuBLAS ----------------------------------------------------------------------------------------

products = import_module(f"{optimizer.__name__}.newton_schulz.products")


def product_by_split_k(A, B, alpha, beta, C, out, splits=4):
    """What cuBLAS may do with fp16: sums over parts of k in fp16, and alpha afterwards."""
    pieces = zip(A.float().tensor_split(splits, -1), B.float().tensor_split(splits, -2))
    total = sum(torch.bmm(a, b).half() for a, b in pieces)
    return out.copy_(alpha * total.float() + (beta * C.float() if beta else 0.0))


def apply_by_split_k(Q, X, alpha, beta, out):
    left, right = (X, Q) if X.shape[-2] > X.shape[-1] else (Q, X)
    return product_by_split_k(left, right, alpha, beta, X, out)


def one_entry(rows, cols):
    G = torch.full((rows, cols), 1e-6)
    G[1, 2] = 1.0
    return G


@pytest.mark.parametrize(
    "G",
    [
        torch.randn(256, 4096, generator=torch.Generator().manual_seed(0)),
        torch.randn(2048, 128, generator=torch.Generator().manual_seed(1)),
        torch.ones(64, 8192),
        one_entry(256, 2048),
        one_entry(512, 512),
    ],
    ids=["wide", "tall", "rank one", "one entry", "one entry, square"],
)
@pytest.mark.parametrize("algorithm", ["standard", "gram"])
def test_sums_of_a_part_of_k_in_fp16_overflow_nowhere(G, algorithm, monkeypatch):
    gram = functools.partial(products._gram, product_by_split_k)
    ways = products.Products(gram, product_by_split_k, apply_by_split_k)
    monkeypatch.setitem(products.PRODUCTS, "in_fp32", ways)
    found = newton_schulz(G, dtype=torch.float16, algorithm=algorithm).float()
    assert 0.7 < torch.linalg.matrix_norm(found, 2) < 1.3


@pytest.mark.parametrize(
    ("dtype", "name", "allowed", "inside"),
    [
        (torch.float16, "allow_fp16_reduced_precision_reduction", True, False),
        (torch.float16, "allow_fp16_accumulation", True, False),
        (torch.bfloat16, "allow_bf16_reduced_precision_reduction", True, False),
        (torch.float32, "fp32_precision", "tf32", "ieee"),
    ],
)
def test_what_users_allow_cublas_is_not_allowed_within_the_iteration(dtype, name, allowed, inside):
    matmul = torch.backends.cuda.matmul
    before = getattr(matmul, name)
    try:
        setattr(matmul, name, allowed)
        with contextlib.suppress(KeyError), products.full_precision(dtype, "cuda"):
            assert getattr(matmul, name) == inside
            raise KeyError
        assert getattr(matmul, name) == allowed
    finally:
        setattr(matmul, name, before)


# -- families of other counts than five ------------------------------------------------------------

ASCENDING = [
    # Emerging-Optimizers' "aol", which it takes behind the Frobenius norm, in turns.
    (4.0098, -7.0585, 2.4635),
    (3.4585, -5.5479, 2.5959),
    (2.7573, -3.2939, 1.4254),
    (2.7215, -3.0494, 1.3169),
]


def one_large_singular_value():
    """A gradient's momentum in which one direction dominates; and one of rank 1."""
    P, _ = torch.linalg.qr(randn(16, 16).double())
    sigma = torch.full((16,), 1e-3).double()
    sigma[0] = 1.0
    return [P * sigma @ P.T, P[:, :1] @ randn(1, 24, seed=1).double(), randn(16, 40).double()]


@pytest.mark.filterwarnings("ignore:.*leave singular values")
@pytest.mark.parametrize("family", ref.LONGER_AND_SHORTER)
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 20])
def test_no_count_of_iterations_ascends(family, steps):
    for G in one_large_singular_value():
        U = newton_schulz(G, steps, family)
        along = torch.linalg.svdvals(G).gt(1e-6).sum()
        P, _, Qt = torch.linalg.svd(G, full_matrices=False)
        assert ((P.T @ U @ Qt.T).diagonal()[:along] > 0).all()
        assert (G * U).sum() > 0


@pytest.mark.parametrize("steps, which", [(1, 0), (4, 0), (5, 2)])
def test_aol_as_others_have_it_ascends_where_one_direction_dominates_and_in_five_steps(
    steps, which
):
    G = one_large_singular_value()[which]
    triples = (ASCENDING * 2)[:steps]
    assert (G * newton_schulz(G, None, triples)).sum() < 0
