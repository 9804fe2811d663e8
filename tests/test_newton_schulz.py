"""`newton_schulz`: the reference's numbers, whatever the form, shape, batch, scale and dtype."""

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
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import reference as ref
from comparisons import relative_error
from kernel import optimizer
from layouts import randn

ns = optimizer.newton_schulz
newton_schulz = ns.newton_schulz
FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
CPU, CUDA = torch.device("cpu"), torch.device("cuda")  # names: forms need no device
FAMILIES = [*ref.FAMILIES, *ref.LONGER_AND_SHORTER]
TRIPLES = [(3.0, -4.0, 2.0), (2.0, -1.5, 0.5), (1.5, -0.5, 0.0)]
SHAPES = [(40, 16), (24, 24), (33, 65), (97, 33), (17, 4096), (1, 37), (37, 1), (1, 1)]

DTYPES = pytest.mark.parametrize("dtype", [FP64, FP32, BF16, FP16], ids=str)
FORMS = pytest.mark.parametrize("algorithm", ["standard", "gram"])
EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)

pytestmark = pytest.mark.usefixtures("one_thread")

# How far U may be from the reference, relative to ‖U‖. The first polynomials enlarge roundings
# eightfold each on small singular values. In bf16 the Gram form of small matrices may drift.
TOLERANCE = {FP64: 1e-9, FP32: 1e-4, BF16: 8e-2, FP16: 4e-2}
# On one row or column the only singular value is 1, where `cans` has a slope of 15 five times.
TOLERANCE_OF_CANS = {FP64: 1e-9, FP32: 1e-2, BF16: 0.4, FP16: 0.2}


@functools.cache
def expected_of(shape, family, steps=5, dtype=FP64):
    coefficients = ref.coefficients_of(family, steps)
    if family == "cans" and dtype.itemsize == 2:  # documented in `Polynomials.safety`
        guarded = [(a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in coefficients[:-1]]
        coefficients = [*guarded, coefficients[-1]]
    return ref.newton_schulz(randn(*shape, dtype=FP64), coefficients, ref.norm_factor_of(family))


def with_spectrum(sigmas, cols):
    """A matrix of these singular values."""
    P = torch.linalg.qr(randn(len(sigmas), len(sigmas), seed=1, dtype=FP64))[0]
    Q = torch.linalg.qr(randn(cols, len(sigmas), seed=2, dtype=FP64))[0]
    return (P * sigmas) @ Q.mT


def spectra(s):
    """From 1 to 10⁻ⁿ; of rank n; a direction that has a share of all squares, the others decaying
    by a power."""
    index = torch.arange(1, s + 1, dtype=FP64)
    yield from (torch.logspace(0, -n, s, dtype=FP64) for n in (1, 2, 4, 8, 12))
    yield from (index.le(n).double() for n in (1, 2, 8, 32))
    for share, power in itertools.product((0.2, 0.5, 0.85, 0.99), (0, 1, 2)):
        sigmas = index.pow(-power)
        sigmas[0] = math.sqrt(share / (1 - share)) * sigmas[1:].norm()
        yield sigmas


def spectral_norms(U):
    return torch.linalg.matrix_norm(U.double(), 2)


# -- the reference's numbers -----------------------------------------------------------------------

# Where five steps take singular values above a hundredth: a mistyped digit moves a band.
BANDS = {"quintic": (0.681831, 1.134357), "you": (0.977751, 1.031775), "cubic5": (0.774106, 1.3)}
BANDS |= {"polar_express": (0.858873, 1.141127), "cans": (0.884374, 1.119835)}


@pytest.mark.parametrize("family", ref.FAMILIES)
def test_the_reference_maps_singular_values_by_its_polynomials_into_the_known_bands(family):
    coefficients, factor = ref.coefficients_of(family), ref.norm_factor_of(family)
    mapped = ref.scalar_map(torch.logspace(-2, 0, 100_001, dtype=FP64), coefficients)
    assert (mapped.min().item(), mapped.max().item()) == pytest.approx(BANDS[family], abs=1e-5)
    for shape in ((24, 24), (40, 16), (16, 40)):
        G = randn(*shape, dtype=FP64)
        P, sigma, Qt = torch.linalg.svd(G, full_matrices=False)
        mapped = ref.scalar_map(sigma / (sigma.norm() * factor), coefficients)
        U = ref.newton_schulz(G, coefficients, factor)
        assert relative_error(U, P @ torch.diag(mapped) @ Qt) < 1e-5  # eps is 1e-7


@DTYPES
@FORMS
@EVERY_FAMILY
def test_every_family_and_count_of_steps_gives_the_references_numbers(family, algorithm, dtype):
    if (algorithm, dtype) == ("gram", BF16):
        pytest.skip("drifts on small matrices, for which nobody takes it by default")
    for shape, steps in itertools.product(SHAPES, (1, 2, 3, 5, 7, 12)):
        G = randn(*shape, dtype=torch.promote_types(dtype, FP32))
        U = newton_schulz(G, steps, family, algorithm=algorithm, dtype=dtype)
        assert U.shape == shape and U.dtype == dtype
        is_steep = family == "cans" and (min(shape) == 1 or dtype.itemsize == 2)
        bound = (TOLERANCE_OF_CANS if is_steep else TOLERANCE)[dtype]
        assert relative_error(U, expected_of(shape, family, steps, dtype)) < bound, (shape, steps)


@FORMS
@pytest.mark.parametrize("shape, dtype, bound", [
    ((511, 513), FP32, 1e-4), ((511, 513), BF16, 5e-2), ((1100, 528), FP32, 1e-4),
    ((1100, 528), BF16, 5e-2), ((1100, 528), FP16, 5e-3), ((513, 600), FP32, 1e-4),
    ((1024, 512), FP32, 1e-4), ((64, 40000), FP16, 7e-3),
], ids=str)  # fmt: skip
def test_large_matrices_give_the_references_numbers_also_in_blocks(shape, dtype, bound, algorithm):
    U = newton_schulz(randn(*shape), algorithm=algorithm, dtype=dtype)
    assert relative_error(U, expected_of(shape, "polar_express")) < bound


ROWS, NORM = {"equilibrated": True}, {"renormalized": True}


@pytest.mark.parametrize("dtype, bound", [(FP64, 1e-9), (FP32, 1e-4), (FP16, 2e-2)], ids=str)
@pytest.mark.parametrize("told", [
    {"eps": 0.1}, {"eps_absolute": 10.0}, {"norm_factor": 1.5}, ROWS,
    {**ROWS, "eps_absolute": 10.0},
    NORM, {**ROWS, **NORM, "norm_factor": 1.01, "eps_absolute": 1e-2},
], ids=str)  # fmt: skip
def test_options_give_the_references_numbers_at_any_scale(told, dtype, bound):
    words = {"equilibrated": "equilibrate", "renormalized": "renormalize"}
    options = {words.get(key, key): value for key, value in told.items()}
    scales = torch.tensor([1.0, 1e-4, 1e3], dtype=FP64).view(3, 1, 1)
    for rows, cols in ((24, 40), (40, 24), (9, 9)):
        G = randn(3, rows, cols, dtype=FP64) * scales * torch.logspace(-7, 1, rows).view(-1, 1)
        G = G.to(torch.promote_types(dtype, FP32))
        for U, matrix in zip(newton_schulz(G, dtype=dtype, **options), G):
            told = {"norm_factor": 1.02, **told}
            expected = ref.newton_schulz(matrix, ref.FAMILIES["polar_express"], **told)
            assert relative_error(U, expected) < bound


@pytest.mark.kernels_ci
@DTYPES
def test_the_defaults_are_five_steps_of_polar_express_and_float64_or_what_the_cpu_is_fast_in(dtype):
    G = randn(32, 48, dtype=dtype)
    U = newton_schulz(G, dtype=FP32)
    assert torch.equal(U, newton_schulz(G, 5, "polar_express", dtype=FP32))
    assert newton_schulz(G).dtype in ([FP64] if dtype == FP64 else [FP32, BF16])
    assert newton_schulz(G).dtype == ns.default_dtype(dtype, CPU)


@DTYPES
def test_the_default_of_accelerators_is_fp16_and_fp32_on_apples(dtype):
    found = [ns.default_dtype(dtype, torch.device(kind)) for kind in ("cuda", "xpu", "mps")]
    assert found == ([FP64] * 3 if dtype == FP64 else [FP16, FP16, FP32])


@pytest.mark.parametrize("steps", [None, 1, 3, 7])
def test_coefficients_may_be_a_list_which_sets_the_count_or_one_triple_of_all_steps(steps):
    G, (a, b, c) = randn(24, 40, dtype=FP64), TRIPLES[1]
    expected = ref.newton_schulz(G, [(a, b, c)] * (steps or 5))
    for triple in ((a, b, c), [a, b, c]):
        assert relative_error(newton_schulz(G, steps, triple), expected) < 1e-12
    for given in (TRIPLES, [list(triple) for triple in TRIPLES]):
        for number in (None, 3):
            U = newton_schulz(G, number, given)
            assert relative_error(U, ref.newton_schulz(G, TRIPLES)) < 1e-12
    group = {"params": [torch.nn.Parameter(G.clone())], "use_muon": True}
    optim = optimizer.Muon(
        [group], ns_coefficients=(a, b, c), **({"ns_steps": steps} if steps else {})
    )
    assert optim.param_groups[0]["ns_steps"] == (steps or 5)


# -- batches, strides, memory ----------------------------------------------------------------------


@pytest.mark.parametrize("family", ["polar_express", "cubic5"])
@pytest.mark.parametrize("dtype", [FP32, FP64], ids=str)
def test_batch_invariant_batches_give_bit_for_bit_what_their_matrices_give_alone(dtype, family):
    exact = functools.partial(newton_schulz, coefficients=family, dtype=dtype, batch_invariant=True)
    for shape in [(40, 16), (16, 40), (17, 33), (128, 96), (1, 37), (37, 1), (1, 1)]:
        G = randn(5, *shape)
        alone = torch.stack([exact(g) for g in G])
        assert torch.equal(exact(G), alone) and torch.equal(exact(G[1:3]), alone[1:3])


def test_batch_invariant_products_are_of_one_matrix_each():
    # On one machine a batch may give the bits of its matrices by luck; no library promises it.
    class Products(TorchDispatchMode):
        sizes: set[int] = set()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.overloadpacket in (torch.ops.aten.bmm, torch.ops.aten.baddbmm):
                self.sizes.add(args[-1].shape[0])
            return function(*args, **(kwargs or {}))

    with Products() as products:
        newton_schulz(randn(5, 24, 40), dtype=FP32, batch_invariant=True)
        assert products.sizes == {1}
        newton_schulz(randn(5, 24, 40), dtype=FP32)
        assert products.sizes == {1, 5}


@FORMS
@pytest.mark.parametrize("dtype, bound", [(FP32, 1e-5), (BF16, 5e-2), (FP16, 1e-2)], ids=str)
def test_a_batch_gives_about_what_its_matrices_give_alone_and_large_ones_the_same_bits(
    dtype, bound, algorithm
):
    how = {"dtype": dtype, "algorithm": algorithm}
    for shape in [(40, 16), (17, 33), (1, 37), (1, 1), (512, 520)]:
        G = randn(3, *shape)
        together = newton_schulz(G, **how)
        alone = torch.stack([newton_schulz(g, **how) for g in G])
        assert relative_error(together, alone) <= (0.0 if min(shape) >= 512 else bound)


@DTYPES
@pytest.mark.parametrize("batch", [(1,), (6,), (2, 3), (2, 1, 3), (0,), (2, 0, 3)])
@pytest.mark.parametrize("shape", [(12, 20), (0, 5), (5, 0), (0, 0)])
def test_leading_dimensions_are_a_batch_and_what_is_empty_stays_empty(shape, batch, dtype):
    G = randn(*batch, *shape)
    U = newton_schulz(G, dtype=dtype)
    assert U.shape == G.shape and U.dtype == dtype and U.is_contiguous()
    flat = newton_schulz(G.reshape(math.prod(batch), *shape), dtype=dtype)
    assert torch.equal(U.reshape(flat.shape), flat)


@FORMS
@DTYPES
def test_strides_do_not_matter_and_the_input_is_left_as_it_is(dtype, algorithm):
    stored = randn(6, 20, 24)
    views = {
        "contiguous": stored,
        "transposed": stored.mT,
        "permuted batch": stored.view(2, 3, 20, 24).transpose(0, 1),
        "every second row": stored[:, ::2],
        "some columns": stored[..., 3:17],
        "expanded": stored[:1].expand(3, -1, -1),
        "columns first": stored.permute(1, 2, 0),
        "needs no division": torch.eye(6, 9),
        "zeros": torch.zeros(4, 4),
        "in the arithmetic's dtype": stored.to(dtype),
    }
    bound = {FP64: 1e-5, FP32: 1e-3, BF16: 0.1, FP16: 1e-2}[dtype]  # norms in another order
    for name, G in views.items():
        before, version = G.clone(), G._version
        for how in ({}, {"equilibrate": True, "renormalize": True}):
            U = newton_schulz(G, algorithm=algorithm, dtype=dtype, **how)
            assert torch.equal(G, before) and G._version == version
            assert U.untyped_storage().data_ptr() != G.untyped_storage().data_ptr()
            whole = newton_schulz(G.contiguous(), algorithm=algorithm, dtype=dtype, **how)
            assert U.shape == G.shape and relative_error(U, whole) < bound, name


@pytest.mark.parametrize("dtype, bound", [(FP64, 1e-12), (FP32, 1e-5)], ids=str)
def test_a_transposed_matrix_gives_the_transposed_factor_and_no_graph_is_recorded(dtype, bound):
    G = randn(40, 16, dtype=dtype).requires_grad_()
    U, transposed = newton_schulz(G, dtype=dtype), newton_schulz(G.mT, dtype=dtype)
    assert relative_error(transposed.mT, U) < bound and not U.requires_grad


# -- awkward matrices ------------------------------------------------------------------------------


@DTYPES
@EVERY_FAMILY
def test_zero_matrices_give_zeros_also_without_eps(family, dtype):
    for shape, eps in itertools.product([(12, 20), (5, 5), (1, 1), (2, 3, 4)], (1e-7, 0.0)):
        U = newton_schulz(torch.zeros(shape), 5, family, dtype=dtype, eps=eps)
        assert torch.equal(U, torch.zeros(shape, dtype=dtype))


@FORMS
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("family, steps", [
    *((family, 5) for family in ref.FAMILIES), ("cans", 8), ("you", 8), ("polar_express", 7),
    ("polar_express", 10), ("quintic", 12), ("cubic5", 10), ("deepseekv4", 10),
    ([(3.4445, -4.7750, 2.0315)] * 6 + [(2.0, -1.5, 0.5)] * 3, None),
    ([(1.5, -0.5, 0.0)] * 12, None),
], ids=str)  # fmt: skip
def test_no_spectrum_makes_a_singular_value_grow(family, steps, dtype, algorithm):
    # Rounding turns low rank into full rank, and the first polynomials enlarge what it left.
    G = torch.stack([with_spectrum(sigmas, 96) for sigmas in spectra(64)]).float()
    U = newton_schulz(G, steps, family, algorithm=algorithm, dtype=dtype)
    assert U.isfinite().all() and spectral_norms(U).max() < 1.6
    assert ((U * G).sum((1, 2)) > 0.5 * G.norm(dim=(1, 2))).all()


@FORMS
@DTYPES
def test_a_power_of_two_in_front_changes_no_bit_and_matrices_of_a_batch_are_scaled_apart(
    dtype, algorithm
):
    how = {"dtype": dtype, "algorithm": algorithm}
    for shape in [(24, 40), (40, 24), (1, 9)]:
        scales = 2.0 ** torch.tensor([0, -100, -1, 3, 100]).view(-1, 1, 1)
        G = randn(5, *shape)
        alone = torch.stack([newton_schulz(g, **how) for g in G])
        scaled = torch.stack([newton_schulz(g, **how) for g in G * scales])
        assert torch.equal(scaled, alone)
        *U, zeros = newton_schulz(torch.cat([G * scales, torch.zeros(1, *shape)]), **how)
        bound = {BF16: 5e-2, FP16: 1e-2}.get(dtype, 1e-5)
        assert relative_error(torch.stack(U), alone) < bound and zeros.abs().max() == 0
    half = randn(24, 40, dtype=FP16)
    for factor in (2.0**-10, 2.0**12):  # squares leave the range of float16
        one, other = newton_schulz(half * factor, **how), newton_schulz(half, **how)
        assert relative_error(one, other) < 2e-2


def test_eps_acts_where_the_largest_magnitude_is_one_and_norms_of_16_bits_keep_digits():
    G = randn(24, 40)
    G /= G.abs().max()
    for dtype, bound in ((FP32, 1e-4), (FP16, 2e-2)):
        one, other = (newton_schulz(of, dtype=dtype, eps=10.0) for of in (G, 1.9 * G))
        assert relative_error(one, other) < bound
    equal = torch.ones(64, 64, dtype=BF16)  # a sum of squares in bf16 is off by percents
    assert relative_error(newton_schulz(equal, dtype=FP32), newton_schulz(equal.double())) < 1e-3
    spike = torch.zeros(64, 40000)
    spike[3, 5] = 7.0
    assert newton_schulz(spike, dtype=FP16).isfinite().all()


@pytest.mark.parametrize("options", [{}, {"equilibrate": True, "renormalize": True}], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@FORMS
@DTYPES
def test_inf_and_nan_stay_within_their_own_matrix(dtype, algorithm, bad, options):
    how = {"dtype": dtype, "algorithm": algorithm, **options}
    for shape in [(20, 12), (9, 9), (1, 7)]:
        G = randn(4, *shape)
        U = newton_schulz(G, **how)
        G[1, 0, -1] = bad
        found = newton_schulz(G, **how)
        assert found[1].isnan().all() and torch.equal(found[[0, 2, 3]], U[[0, 2, 3]])


@pytest.mark.parametrize("dtype", [FP16, FP32, FP64], ids=str)
def test_zero_rows_and_extreme_magnitudes_stay_finite_with_all_options(dtype):
    G = randn(5, 12, 20)
    G[0], G[1, 3:] = 0.0, 0.0
    G[2:4] *= torch.tensor([1e-30, 1e30]).view(2, 1, 1)
    how = {"dtype": dtype, "equilibrate": True, "renormalize": True}
    U = newton_schulz(G, **how, eps_absolute=1e-6)
    assert U.isfinite().all()
    assert (U[0] == 0).all() and (U[1, 3:] == 0).all() and U[2].norm() < 1e-6
    assert relative_error(U[4].norm(), torch.tensor(12**0.5)) < 1e-2
    U = newton_schulz(G, **how)
    assert U.isfinite().all() and (U[0] == 0).all() and U[2].norm() > 3


# -- what raises and what warns --------------------------------------------------------------------


@pytest.mark.parametrize(
    "G, arguments, named",
    [
        (randn(4, 6), {"coefficients": "quintik"}, "ns_coefficients 'quintik'.*polar_express"),
        (randn(4, 6), {"algorithm": "fast"}, "algorithm.*'fast'"),
        (randn(4, 6), {"steps": 5, "coefficients": TRIPLES}, "3 iterations.*ns_steps is 5"),
        (randn(4, 6), {"steps": 2, "coefficients": TRIPLES}, "3 iterations.*ns_steps is 2"),
        (randn(4, 6), {"steps": 1, "coefficients": [(1.0, 2.0)]}, "ns_coefficients"),
        (randn(4, 6), {"coefficients": (1.0, 2.0, math.inf)}, "ns_coefficients"),
        (randn(4, 6), {"coefficients": (1.0, 2.0, 10**400)}, "ns_coefficients"),
        (randn(4, 6), {"coefficients": []}, "ns_coefficients"),
        (randn(4, 6), {"steps": 0}, "steps.* 0"),
        (torch.zeros(5), {}, r"\(5,\)"),
        (torch.tensor(1.0), {}, "matrices"),
        (torch.zeros(4, 6, dtype=torch.int64), {}, "int64"),
        (torch.zeros(4, 6, dtype=torch.complex64), {}, "complex64"),
    ],
    ids=str,
)
def test_unknown_names_wrong_counts_and_what_is_no_real_matrix_raise(G, arguments, named):
    with pytest.raises(ValueError, match=named):
        newton_schulz(G, **arguments)


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize("family", ref.FAMILIES)
@pytest.mark.parametrize("steps", range(1, 9))
def test_only_schedules_cut_so_short_that_they_overshoot_warn_and_say_how_far(family, steps):
    largest = ref.largest_singular_value(family, steps)
    overshoots = family in ("polar_express", "cans") and steps < 5
    for use_muon in (True, False):
        group = {"params": [torch.nn.Parameter(randn(4, 6))], "use_muon": use_muon}
        with warnings.catch_warnings(record=True) as caught:
            optimizer.Muon([{**group, "ns_steps": steps}], ns_coefficients=family)
        assert len(caught) == (overshoots and use_muon) and (largest > 1.5) == overshoots
        assert all(f"{largest:.2f}" in str(warning.message) for warning in caught)


# -- the default arithmetic of CPUs ----------------------------------------------------------------

DEFAULT_DTYPE = "from kernel import optimizer; import torch; print(optimizer.newton_schulz."
DEFAULT_DTYPE += "newton_schulz(torch.ones(4, 4)).dtype)"


@pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="limits x86's instructions"
)
@pytest.mark.parametrize("limit", ["DEFAULT", "AVX2"])
def test_bfloat16_is_the_default_only_where_there_are_instructions_that_onednn_may_use(limit):
    environment = {"ONEDNN_MAX_CPU_ISA": limit, "PYTHONPATH": str(Path(__file__).parent)}
    words = set(Path("/proc/cpuinfo").read_text().split())
    is_fast = limit == "DEFAULT" and words & {"avx512_bf16", "amx_bf16"}
    command = [sys.executable, "-c", DEFAULT_DTYPE]
    printed = subprocess.check_output(command, env=os.environ | environment, text=True)
    assert printed.strip() == ("torch.bfloat16" if is_fast else "torch.float32")


# -- forms -----------------------------------------------------------------------------------------


def form_of(rows, cols, algorithm="auto", dtype=None, device=CPU, family="polar_express", steps=5):
    return ns.recipe_for(family, steps, algorithm, dtype, FP32, device).form(rows, cols)


@pytest.mark.parametrize("rows, cols, dtype, device, is_gram, products", [
    (100, 9000, BF16, CPU, False, "whole"), (512, 4096, BF16, CPU, True, "blocks"),
    (512, 512, BF16, CPU, False, "blocks"), (512, 4096, FP32, CPU, True, "fp32 blocks"),
    (511, 4096, FP32, CPU, False, "whole"), (1024, 1024, FP32, CPU, False, "fp32 blocks"),
    (512, 4096, FP16, CPU, True, "in_fp32"), (512, 4096, FP16, CUDA, True, "tiles"),
    (4096, 14336, None, CUDA, True, "tiles"), (4096, 4096, None, CUDA, False, "tiles"),
    (512, 4096, FP64, CUDA, True, "whole"), (520, 4096, FP16, CUDA, True, "whole"),
    (512, 4096, FP16, torch.device("mps"), True, "whole"),
], ids=str)  # fmt: skip
def test_the_choice_follows_from_shape_dtype_and_device_type(
    rows, cols, dtype, device, is_gram, products
):
    form = form_of(rows, cols, dtype=dtype, device=device)
    assert (form.is_gram, form.products) == (is_gram, products)
    assert form == form_of(cols, rows, dtype=dtype, device=device)
    assert form.why != form_of(rows, cols, "standard", dtype=dtype, device=device).why


def test_restarts_are_the_familys_or_follow_from_how_far_small_singular_values_grow():
    def restarts(family, dtype, side=512, steps=None):
        return form_of(side, 2048, "gram", dtype, family=family, steps=steps).restarts

    assert restarts("polar_express", BF16) == (1, 3) and restarts("polar_express", FP16) == (2, 3)
    assert restarts("polar_express", FP32, side=511) == (2, 4)
    assert restarts([(9.0, 50.0, 90.0)] * 4, FP32) == (1, 2, 3)  # each diverges
    assert restarts([(8.0, -1.0, 0.0)] * 4, FP32) == (2,) == restarts([(4.0, -1, 0)] * 4, BF16)
    assert restarts([(8.01, -1, 0)] * 4, FP32) == (1, 2, 3) == restarts([(4.01, -1, 0)] * 4, BF16)
    assert restarts("quintic", BF16, steps=6) == (2, 4)
    for algorithm in ns.ALGORITHMS:  # polynomials that make everything zero
        U = newton_schulz(torch.ones(8, 12), coefficients=[(0, 0, 0)] * 2, algorithm=algorithm)
        assert torch.equal(U, torch.zeros_like(U))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("algorithm", ns.ALGORITHMS)
@pytest.mark.parametrize("family", ["polar_express", "cubic5"])
def test_flops_are_those_that_torch_counts(family, algorithm, dtype):
    for rows, cols in [(24, 24), (40, 16), (1, 9), (0, 9), (512, 1100), (600, 513)]:
        form = form_of(rows, cols, algorithm, dtype, family=family)
        with FlopCounterMode(display=False) as counter:
            newton_schulz(randn(rows, cols), 5, family, algorithm=algorithm, dtype=dtype)
        assert counter.get_total_flops() == form.flops(rows, cols)


def test_flops_of_the_forms_are_those_of_the_formulas_and_save_what_they_should():
    s, l = 4096, 14336
    gram, standard = (form_of(s, l, name, FP16, CUDA) for name in ("gram", "standard"))
    more = 1 + 128 / s  # halves of symmetric products, and half a tile's width
    assert gram.flops(s, l) == pytest.approx(6 * s * s * l + (3 * s * s * l + 11 * s**3) * more)
    assert standard.flops(s, l) == pytest.approx(10 * s * s * l + (5 * s * s * l + 5 * s**3) * more)
    for s, l in ((512, 2048), (768, 2048), (1024, 4096), (1024, 1024)):
        whole_products = 20 * s * s * l + 10 * s**3
        assert form_of(l, s, dtype=BF16).flops(l, s) <= 0.87 * whole_products


# -- ways to multiply ------------------------------------------------------------------------------


@pytest.fixture
def by_kernels(monkeypatch):
    """Kernels, interpreted."""
    pytest.importorskip("triton")
    if torch.accelerator.is_available():
        pytest.skip("kernels take no tensors of the host here")
    monkeypatch.setattr(optimizer.triton_kernels, "DEVICE_TYPES", ("cpu", "cuda"))


@pytest.mark.parametrize("rows, cols", [(48, 80), (80, 48), (33, 65)])
@pytest.mark.parametrize("name", ns.products.PRODUCTS)
def test_all_ways_to_multiply_agree(name, rows, cols, by_kernels):
    of, n, s = ns.products.PRODUCTS[name], 2, min(rows, cols)
    X = randn(n, rows, cols, dtype=FP16)
    wide = X.mT.double() if rows > cols else X.double()
    A = randn(n, s, s, dtype=FP16) / 16
    A += A.mT.clone()
    left, right = (X, A) if rows > cols else (A, X)
    R, Z = torch.empty_like(A), torch.empty_like(A)
    for found, expected in [
        (of.gram(X, 1 / 64, R), wide @ wide.mT / 64),
        (of.symmetric(A, A, -0.5, 2.0, A, Z), 2 * A - 0.5 * A.double() @ A.double()),
        (of.apply(A, X, 0.5, 2.0, X.clone()), 0.5 * left.double() @ right.double() + 2 * X),
    ]:
        assert (found.double() - expected).abs().max() < 2e-3 * expected.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [(1, 2, 3, 4), (3,), (2,)], ids=str)
@pytest.mark.parametrize("shape", [(64, 96), (96, 64)])
@pytest.mark.parametrize("given", [FP16, FP64])
def test_kernels_take_the_iteration_where_its_stand_in_takes_it(
    given, shape, restarts, by_kernels, monkeypatch
):
    """fp64 weights with ns_dtype=torch.float16 are among what "cuda" runs so."""
    triples, G = ns.resolve("polar_express", 5).triples, randn(2, *shape, dtype=given)
    for products in ("tiles", "in_fp32"):
        form = ns.forms.Form(triples, restarts, products, "")
        monkeypatch.setattr(ns.Recipe, "form", lambda *sizes, form=form: form)
        for one, matrix in zip(newton_schulz(G, dtype=FP16), G):
            expected = ref.newton_schulz(matrix, ref.FAMILIES["polar_express"], 1.02)
            assert relative_error(one, expected) < 2e-2


def split_k(A, B, alpha, beta, C, out):
    """What cuBLAS may do with fp16: sums over parts of k in fp16, and alpha afterwards."""
    pieces = zip(A.float().tensor_split(4, -1), B.float().tensor_split(4, -2))
    total = sum(torch.bmm(a, b).half() for a, b in pieces)
    return out.copy_(alpha * total.float() + (beta * C.float() if beta else 0.0))


def gram_by_split_k(X, alpha, out):
    left, right = (X.mT, X) if X.shape[-2] > X.shape[-1] else (X, X.mT)
    return split_k(left, right, alpha, 0.0, out, out)


def apply_by_split_k(Q, X, alpha, beta, out):
    left, right = (X, Q) if X.shape[-2] > X.shape[-1] else (Q, X)
    return split_k(left, right, alpha, beta, X, out)


@FORMS
@pytest.mark.parametrize("shape", [(256, 4096), (2048, 128), (64, 8192), (512, 512)])
def test_sums_of_a_part_of_k_in_fp16_overflow_nowhere(shape, algorithm, monkeypatch):
    ways = ns.products.Products(gram_by_split_k, split_k, apply_by_split_k)
    monkeypatch.setitem(ns.products.PRODUCTS, "in_fp32", ways)
    for G in (randn(*shape), torch.ones(shape), torch.full(shape, 1e-6)):
        G[1, 2] = 1.0
        found = newton_schulz(G, dtype=FP16, algorithm=algorithm)
        assert 0.7 < spectral_norms(found) < 1.3


@pytest.mark.parametrize("dtype, name, allowed, inside", [
    (FP16, "allow_fp16_reduced_precision_reduction", True, False),
    (FP16, "allow_fp16_accumulation", True, False),
    (BF16, "allow_bf16_reduced_precision_reduction", True, False),
    (FP32, "fp32_precision", "tf32", "ieee"),
])  # fmt: skip
def test_what_users_allow_cublas_is_not_allowed_within_the_iteration(dtype, name, allowed, inside):
    matmul = torch.backends.cuda.matmul
    before = getattr(matmul, name)
    try:
        setattr(matmul, name, allowed)
        with contextlib.suppress(KeyError), ns.products.full_precision(dtype, "cuda"):
            assert getattr(matmul, name) == inside
            raise KeyError
        assert getattr(matmul, name) == allowed
    finally:
        setattr(matmul, name, before)


def test_a_precision_that_is_inherited_is_inherited_again_after_the_iteration():
    with torch.backends.flags(fp32_precision="tf32"):
        with ns.products.full_precision(FP32, "cuda"):
            pass
        with torch.backends.flags(fp32_precision="ieee"):
            assert torch.backends.cuda.matmul.fp32_precision == "ieee"
