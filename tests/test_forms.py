"""Forms of the iteration: the same matrix by fewer FLOPs, restarted where roundings would grow."""

from __future__ import annotations

import functools
import itertools
import math
import random

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import reference as ref
from comparisons import relative_error
from kernel import optimizer

ns = optimizer.newton_schulz
newton_schulz, recipe_for = ns.newton_schulz, ns.recipe_for
FAMILIES = list(ref.FAMILIES)
FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
CPU, CUDA = torch.device("cpu"), torch.device("cuda")  # names: forms need no device
ODD = [(17, 4096), (97, 33), (64, 64), (1, 37), (37, 1), (1, 1), (130, 61)]


def randn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=FP64)


def flops_of_standard_form(rows, cols, triples):
    """FLOPs with whole products: 20·s²l + 10·s³ for five quintic steps."""
    return ns.forms.Form(triples, tuple(range(1, len(triples))), "whole", "").flops(rows, cols)


def form_of(rows, cols, algorithm="auto", dtype=None, device=CPU, family="polar_express", steps=5):
    return recipe_for(family, steps, algorithm, dtype, FP32, device).form(rows, cols)


def with_spectrum(sigmas, cols):
    """A matrix of these singular values."""
    P = torch.linalg.qr(randn(len(sigmas), len(sigmas), seed=1))[0]
    Q = torch.linalg.qr(randn(cols, len(sigmas), seed=2))[0]
    return (P * sigmas) @ Q.mT


def spiked(share, power, s, l):
    """One direction has this share of the squares, the others decay from the second on."""
    sigmas = torch.arange(1, s + 1, dtype=FP64).pow(-power)
    sigmas[0] = math.sqrt(share / (1 - share)) * sigmas[1:].norm()
    return with_spectrum(sigmas, l)


@functools.cache
def hard_matrix(kind, s, l):
    if s > l:
        return hard_matrix(kind, l, s).mT
    if kind == "gaussian":
        return randn(s, l)
    if kind == "low rank":
        return randn(s, s // 8) @ randn(s // 8, l, seed=1)
    if kind == "heavy tails":
        return randn(s, l) / randn(s, l, seed=1).abs().pow(2 / 3)
    if kind.startswith("spike"):
        return spiked(float(kind.split()[1]), 1.0, s, l)
    decades = {"condition 1e4": 4.0, "condition 1e8": 8.0}
    if kind in decades:
        return with_spectrum(torch.logspace(0, -decades[kind], s, dtype=FP64), l)
    return with_spectrum(torch.arange(1, s + 1, dtype=FP64).reciprocal(), l)


@functools.cache
def polynomial_of(kind, s, l, family="polar_express"):
    """The same polynomials in float64, of `hard_matrix`."""
    coefficients = ref.coefficients_of(family, 5)
    return ref.newton_schulz(hard_matrix(kind, s, l), coefficients, ref.norm_factor_of(family))


# -- restarts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, most", [(FP16, 64), (BF16, 16), (FP32, 64)])
def test_small_singular_values_grow_by_a_bounded_factor_within_a_segment(dtype, most):
    rng = random.Random(0)
    own = [
        tuple((rng.uniform(1, 9), rng.uniform(-2, 0), rng.uniform(0, 0.5)) for _ in range(steps))
        for steps in (1, 2, 3, 4, 6, 9)
    ]
    named = [(family, steps) for family in FAMILIES for steps in range(1, 9)]
    polynomials = (*named, *((triples, None) for triples in own))
    for (family, steps), side in itertools.product(polynomials, (64, 512)):
        form = form_of(side, 2048, "gram", dtype, family=family, steps=steps)
        for start, stop in form.segments:
            growth = math.prod(a for a, _, _ in form.triples[start:stop])
            assert stop - start == 1 or growth <= most


def test_polynomials_that_diverge_restart_after_every_iteration():
    form = form_of(64, 96, "gram", FP32, family=((9.0, 50.0, 90.0),) * 8, steps=None)
    assert form.restarts == tuple(range(1, 8))


@pytest.mark.parametrize("algorithm", ns.ALGORITHMS)
def test_polynomials_that_make_everything_zero_are_planned_too(algorithm):
    U = newton_schulz(torch.randn(8, 12), coefficients=[(0, 0, 0)] * 2, algorithm=algorithm)
    assert torch.equal(U, torch.zeros_like(U))


# -- the same matrix -------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype, bound", [(FP64, 1e-8), (FP32, 1e-3)])
def test_the_gram_form_gives_the_references_numbers(dtype, bound, family):
    for shape in ODD:
        if family == "cans" and min(shape) == 1 and dtype == FP32:
            continue  # see test_newton_schulz.tolerance: one rounding turns into a hundredth
        G = randn(*shape)
        U = newton_schulz(G.to(dtype), 5, family, algorithm="gram", dtype=dtype)
        coefficients, factor = ref.coefficients_of(family, 5), ref.norm_factor_of(family)
        assert relative_error(U, ref.newton_schulz(G, coefficients, factor)) < bound, shape


@pytest.mark.parametrize("steps", [1, 2, 3, 6, 7, 12])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_the_gram_form_takes_any_number_of_steps(family, steps):
    G = randn(40, 72)
    U = newton_schulz(G, steps, family, algorithm="gram")
    expected = ref.coefficients_of(family, steps)
    assert relative_error(U, ref.newton_schulz(G, expected, ref.norm_factor_of(family))) < 1e-8


@pytest.mark.parametrize("algorithm", ["standard", "gram"])
@pytest.mark.parametrize("shape", [(513, 600), (700, 511), (1024, 512)])
def test_blocks_give_the_references_numbers(shape, algorithm):
    G = randn(*shape)
    assert form_of(*shape, algorithm, FP32).products == (
        "fp32 blocks" if min(shape) >= 512 else "whole"
    )
    coefficients = ref.coefficients_of("polar_express", 5)
    U = newton_schulz(G.float(), algorithm=algorithm, dtype=FP32)
    assert relative_error(U, ref.newton_schulz(G, coefficients, 1.02)) < 1e-4


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("shape", [(512, 520), (1100, 528), (24, 200)])
@pytest.mark.parametrize("algorithm", ["standard", "gram"])
def test_a_batch_gives_bit_for_bit_what_its_matrices_give_alone(algorithm, shape, dtype):
    G = randn(3, *shape).float()
    together = newton_schulz(G, algorithm=algorithm, dtype=dtype)
    alone = torch.stack([newton_schulz(g, algorithm=algorithm, dtype=dtype) for g in G])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("algorithm", ["standard", "gram"])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_the_input_is_never_modified_whatever_its_strides(dtype, algorithm):
    stored = randn(4, 40, 72).float()
    for G in (stored, stored.mT, stored[:, ::2], stored[..., 3:50], stored[:1].expand(3, -1, -1)):
        before, version = G.clone(), G._version
        U = newton_schulz(G, algorithm=algorithm, dtype=dtype)
        assert torch.equal(G, before) and G._version == version
        whole = newton_schulz(G.contiguous(), algorithm=algorithm, dtype=dtype)
        # The norm may be summed in another order, which is a rounding of X.
        assert relative_error(U, whole) < {FP32: 1e-3, BF16: 0.1, FP16: 1e-2}[dtype]


# -- accelerators' arithmetic ----------------------------------------------------------------------


def spectral_norm(U):
    U = U.double()
    return torch.linalg.eigvalsh(U.mT @ U if U.shape[0] > U.shape[1] else U @ U.mT).max().sqrt()


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1024, 512)])
@pytest.mark.parametrize(
    "kind, bound",
    [
        ("gaussian", 0.02),
        ("condition 1e4", 0.02),
        ("condition 1e8", 0.02),
        ("low rank", 0.05),
        ("heavy tails", 0.05),
        ("power law", 0.05),
        ("spike 0.5", 0.05),
        ("spike 0.85", 0.05),
    ],
)
def test_fp16_is_close_to_the_polynomial_on_any_spectrum(kind, bound, shape):
    G, expected = hard_matrix(kind, *shape), polynomial_of(kind, *shape)
    for algorithm in ("standard", "gram"):
        U = newton_schulz(G.float(), algorithm=algorithm, dtype=FP16)
        assert relative_error(U, expected) < bound
        assert spectral_norm(U) < 1.25


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_gram_form_lets_no_singular_value_grow(family, dtype):
    matrices = {kind: hard_matrix(kind, 192, 256) for kind in ("gaussian", "low rank", "power law")}
    # One large singular value, wherever it lies: polynomials have peaks, and diverge beyond.
    for share, power in itertools.product((0.2, 0.5, 0.85), (0.0, 2.0)):
        matrices[f"{share} and a power of {power}"] = spiked(share, power, 192, 256)
    G = torch.stack(list(matrices.values())).float()
    U, standard = (
        newton_schulz(G, 5, family, algorithm=algorithm, dtype=dtype)
        for algorithm in ("gram", "standard")
    )
    for kind, found, expected in zip(matrices, U, standard):
        assert spectral_norm(found) < 1.05 * spectral_norm(expected) + 0.1, kind


def spectrum(kind: str, s: int) -> torch.Tensor:
    if kind.startswith("rank"):
        return (torch.arange(s) < int(kind[5:])).double()
    return torch.logspace(0, -int(kind[8:]), s, dtype=FP64)


BY_DEFAULT = [  # "auto" takes the Gram form here
    ("polar_express", 8, BF16, "rank 128", 2048),
    ("polar_express", 10, BF16, "rank 128", 2048),
    ("polar_express", 10, BF16, "decades 6", 2048),
    ("quintic", 9, BF16, "decades 10", 2048),
    ("quintic", 12, FP16, "rank 128", 2048),
    ("quintic", 12, FP16, "rank 1", 2048),
]


@pytest.mark.parametrize("family, steps, dtype, kind, cols", BY_DEFAULT)
def test_more_steps_blow_no_singular_value_up_in_the_form_that_auto_takes(
    family, steps, dtype, kind, cols
):
    G = with_spectrum(spectrum(kind, 512), cols).float()
    assert form_of(512, cols, dtype=dtype, family=family, steps=steps).is_gram
    standard = newton_schulz(G, steps, family, algorithm="standard", dtype=dtype)
    assert spectral_norm(standard) < 1.25
    assert spectral_norm(newton_schulz(G, steps, family, dtype=dtype)) < 1.4


OTHERS = {  # polynomials that restart by the rule: no table has them, or the side is short
    **{f"{family}, 5": (family, 5) for family in FAMILIES},
    "cans, 6": ("cans", 6),
    "cans, 8": ("cans", 8),
    "you, 8": ("you", 8),
    "polar_express, 7": ("polar_express", 7),
    "polar_express, 10": ("polar_express", 10),
    "quintic, 8": ("quintic", 8),
    "quintic, 12": ("quintic", 12),
    "cubic5, 10": ("cubic5", 10),
    "a list": ([(3.4445, -4.7750, 2.0315)] * 6 + [(2.0, -1.5, 0.5)] * 3, None),
    "a cubic": ([(1.5, -0.5, 0.0)] * 12, None),
}


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("name", OTHERS)
def test_other_polynomials_blow_no_singular_value_up_in_the_gram_form(name, dtype):
    coefficients, steps = OTHERS[name]
    kinds = [f"decades {n}" for n in (1, 2, 4, 8, 12)] + [f"rank {n}" for n in (1, 2, 8, 16, 32)]
    G = [with_spectrum(spectrum(kind, 64), 96) for kind in kinds]
    for share, power in itertools.product((0.2, 0.5, 0.85, 0.99), (0.0, 1.0, 2.0)):
        G.append(spiked(share, power, 64, 96))
    G, options = torch.stack(G).float(), {"coefficients": coefficients, "dtype": dtype}
    gram, standard = (
        newton_schulz(G, steps, algorithm=algorithm, **options)
        for algorithm in ("gram", "standard")
    )
    for found, expected in zip(gram, standard):
        assert spectral_norm(found) < 1.05 * spectral_norm(expected) + 0.1


@pytest.mark.parametrize("algorithm", ["standard", "gram"])
def test_fp16_takes_matrices_of_any_scale(algorithm):
    G = randn(4, 24, 40).float() * torch.tensor([1.0, 1e-30, 1e30, 0.0]).view(4, 1, 1)
    U = newton_schulz(G, algorithm=algorithm, dtype=FP16)
    alone = [newton_schulz(g, algorithm=algorithm, dtype=FP16) for g in G]
    assert torch.equal(U, torch.stack(alone))
    assert torch.equal(U[3], torch.zeros(24, 40, dtype=FP16))
    unscaled = randn(4, 24, 40).float()
    whole = newton_schulz(unscaled, algorithm=algorithm, dtype=FP16)
    assert relative_error(U[:3], whole[:3]) < 1e-2


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("algorithm", ["standard", "gram"])
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=str)
def test_inf_and_nan_stay_within_their_own_matrix(dtype, algorithm, bad):
    G = randn(4, 20, 12).float()
    U = newton_schulz(G, algorithm=algorithm, dtype=dtype)
    G[1, 0, -1] = bad
    found = newton_schulz(G, algorithm=algorithm, dtype=dtype)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2, 3]], U[[0, 2, 3]])


def test_entries_of_large_matrices_stay_within_the_range_of_fp16():
    # Divided by their norm they would be 1e-4, where fp16 has few digits left.
    G = randn(64, 40000)
    expected = ref.newton_schulz(G, ref.coefficients_of("polar_express", 5), 1.02)
    assert relative_error(newton_schulz(G.float(), dtype=FP16), expected) < 5e-3
    spike = torch.zeros(64, 40000)
    spike[3, 5] = 7.0
    assert newton_schulz(spike, dtype=FP16).isfinite().all()


# -- the choice ------------------------------------------------------------------------------------


@pytest.mark.kernels_ci
def test_the_choice_looks_at_shape_dtype_and_device_type_alone():
    for rows, cols in ((512, 4096), (4096, 512), (1024, 1024), (100, 9000)):
        for dtype, device in itertools.product((BF16, FP16, FP32), (CPU, CUDA)):
            form = form_of(rows, cols, dtype=dtype, device=device)
            assert form == form_of(cols, rows, dtype=dtype, device=device)
    assert not form_of(100, 9000).is_gram  # too small
    assert form_of(512, 4096, dtype=BF16).is_gram
    assert not form_of(512, 512, dtype=BF16).is_gram  # nothing to gain
    assert form_of(4096, 14336, device=CUDA) == form_of(4096, 14336, dtype=FP16, device=CUDA)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("algorithm", ns.ALGORITHMS)
@pytest.mark.parametrize(
    "family", ["polar_express", pytest.param("cubic5", marks=pytest.mark.slow)]
)
def test_flops_are_those_that_torch_counts(family, algorithm, dtype):
    for rows, cols in [(24, 24), (40, 16), (1, 9), (512, 1100), (600, 513)]:
        form = form_of(rows, cols, algorithm, dtype, family=family)
        with FlopCounterMode(display=False) as counter:
            newton_schulz(randn(rows, cols).float(), 5, family, algorithm=algorithm, dtype=dtype)
        assert counter.get_total_flops() == form.flops(rows, cols)


def test_flops_of_the_forms_are_those_of_the_formulas():
    s, l = 4096, 14336
    gram = form_of(s, l, "gram", FP16, CUDA)
    standard = form_of(s, l, "standard", FP16, CUDA)
    assert gram.restarts == (2, 3) and gram.products == "tiles"
    # Halves of symmetric products, and half a tile's width more.
    more = 1 + 128 / s
    assert gram.flops(s, l) == pytest.approx(6 * s * s * l + (3 * s * s * l + 11 * s**3) * more)
    assert standard.flops(s, l) == pytest.approx(10 * s * s * l + (5 * s * s * l + 5 * s**3) * more)
    plain = flops_of_standard_form(s, l, ns.resolve("quintic", 5).triples)
    assert plain == 20 * s * s * l + 10 * s**3
    assert plain / gram.flops(s, l) > 1.85


def test_on_cpus_halves_and_the_gram_form_save_an_eighth_of_the_flops_and_more():
    triples = ns.resolve("polar_express", 5).triples
    # At 512 × 512 halves are as slow as the whole.
    for rows, cols in ((512, 2048), (2048, 512), (768, 2048), (1024, 4096), (1024, 1024)):
        with FlopCounterMode(display=False) as counter:
            newton_schulz(randn(rows, cols).float(), dtype=BF16)
        assert counter.get_total_flops() <= 0.87 * flops_of_standard_form(rows, cols, triples)


# -- ways to multiply ------------------------------------------------------------------------------


def products_by_tiles(monkeypatch):
    """Kernels, interpreted where there is no accelerator."""
    pytest.importorskip("triton")
    monkeypatch.setattr(ns.iteration.triton_kernels, "is_used_on", lambda device_type: True)
    return ns.products.PRODUCTS["tiles"]


@pytest.mark.parametrize("rows, cols", [(48, 80), (80, 48), (33, 65)])
def test_all_ways_to_multiply_agree(rows, cols, monkeypatch):
    s, n = min(rows, cols), 2
    X = torch.randn(n, rows, cols).half()
    G = (X.mT @ X if rows > cols else X @ X.mT).double() / 64
    out, applied = torch.empty(n, s, s, dtype=FP16), torch.empty_like(X)
    tiles = products_by_tiles(monkeypatch)
    for name, of in {**ns.products.PRODUCTS, "tiles": tiles}.items():
        if torch.accelerator.is_available() and name != "tiles":
            continue  # those of CPUs have been compared with these there
        R = of.gram(X, 1 / 64, out).double()
        assert (R - G).abs().max() < 2e-3 * G.abs().max(), name
        A = (G / 64).half()
        Z = of.symmetric(A, A, -0.5, 2.0, A, torch.empty_like(A)).double()
        expected = 2.0 * A.double() - 0.5 * A.double() @ A.double()
        assert (Z - expected).abs().max() < 2e-3 * expected.abs().max(), name
        Y = of.apply(A, X, 0.5, 2.0, applied).double()
        left, right = (X, A) if rows > cols else (A, X)
        expected = 0.5 * left.double() @ right.double() + 2.0 * X.double()
        assert (Y - expected).abs().max() < 2e-3 * expected.abs().max(), name


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [(1, 2, 3, 4), (3,), (2,)], ids=str)
@pytest.mark.parametrize("shape", [(64, 96), (96, 64)])
def test_kernels_take_the_iteration_where_its_stand_in_takes_it(shape, restarts, monkeypatch):
    products_by_tiles(monkeypatch)
    triples = ns.resolve("polar_express", 5).triples
    G, found = randn(2, *shape).half(), []
    for products in ("tiles", "in_fp32"):
        form = ns.forms.Form(triples, restarts, products, "")
        monkeypatch.setattr(ns.Recipe, "form", lambda *sizes, form=form: form)
        found.append(newton_schulz(G, dtype=FP16))
    assert relative_error(*found) < 1e-2
    for one, matrix in zip(found[0], G):
        coefficients = ref.coefficients_of("polar_express", 5)
        assert relative_error(one, ref.newton_schulz(matrix, coefficients, 1.02)) < 2e-2


@pytest.mark.parametrize("overwrite", [False, True])
def test_kernels_bring_matrices_to_the_range_of_fp16_as_torch_does(overwrite, monkeypatch):
    scales = torch.tensor([1.0, 1e-30, 3e30, 0.0, 1e-3]).view(-1, 1, 1)
    G = randn(5, 24, 40).float() * scales
    G[4, 2, 3] = math.nan
    expected = newton_schulz(G, dtype=FP16)
    products_by_tiles(monkeypatch)
    scratch = optimizer.scratch.Scratch() if overwrite else None
    found = newton_schulz(G.clone(), dtype=FP16, scratch=scratch)
    for one, other in zip(found[:4], expected[:4]):
        assert torch.equal(one, other) or relative_error(one, other) < 1e-2
    assert found[4].isnan().all()


@pytest.mark.parametrize("algorithm", ["standard", "gram"])
def test_kernels_take_matrices_in_fp64_to_fp16(algorithm, monkeypatch):
    """What "cuda" runs for fp64 weights with ns_dtype=torch.float16, from a shorter side of 512."""
    pytest.importorskip("triton")
    monkeypatch.setattr(ns.iteration.triton_kernels, "is_used_on", lambda device_type: True)
    triples = ns.resolve("polar_express", 5).triples
    restarts = (3,) if algorithm == "gram" else (1, 2, 3, 4)
    form = ns.forms.Form(triples, restarts, "tiles", "")
    monkeypatch.setattr(ns.Recipe, "form", lambda *sizes: form)
    G = torch.randn(1, 32, 48, dtype=FP64)
    assert newton_schulz(G, dtype=FP16).isfinite().all()


def test_eps_acts_alike_on_a_matrix_of_any_scale_in_fp16():
    """It is added where the largest magnitude is 1, not somewhere in [1, 2)."""
    G = torch.randn(24, 40)
    G /= G.abs().max()
    for dtype, bound in ((FP32, 1e-4), (FP16, 2e-2)):
        one, other = (newton_schulz(of, dtype=dtype, eps=10.0).float() for of in (G, 1.9 * G))
        assert (one - other).norm() < bound * one.norm(), dtype
