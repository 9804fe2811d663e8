"""The reference is right: checked against torch's own optimizers, the SVD and arithmetic
that fits in one line, before anything is checked against the reference."""

from __future__ import annotations

import math

import pytest
import torch

import reference as ref
from comparisons import relative_error

SHAPES = [(24, 24), (40, 16), (16, 40), (48, 12)]
SPECIAL_SHAPES = [(1, 1), (1, 9), (9, 1), (0, 5), (5, 0), (0, 0)]
FAMILIES = list(ref.FAMILIES)


def randn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def random_run(shapes, steps=4):
    """Weights and `steps` lists of gradients, one gradient per weight."""
    weights = [randn(*shape, seed=i) for i, shape in enumerate(shapes)]
    grads = [
        [randn(*shape, seed=100 * t + i) for i, shape in enumerate(shapes)]
        for t in range(1, steps + 1)
    ]
    return weights, grads


def orthogonalize(G, family, steps=5):
    coefficients = ref.coefficients_of(family, steps)
    return ref.newton_schulz(G, coefficients, ref.norm_factor_of(family))


# Orthogonalization


@pytest.mark.parametrize("steps", [1, 3, 5, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_maps_singular_values_by_its_scalar_polynomial(family, steps):
    for shape in SHAPES:
        G = randn(*shape)
        P, sigma, Qt = torch.linalg.svd(G, full_matrices=False)
        size = sigma.norm() * ref.norm_factor_of(family)
        mapped = ref.scalar_map(sigma / size, ref.coefficients_of(family, steps))
        U = orthogonalize(G, family, steps)
        assert relative_error(U, P @ torch.diag(mapped) @ Qt) < 1e-6  # eps is 1e-7


def test_the_first_polynomial_is_the_published_one():
    a, b, c = 3.4445, -4.7750, 2.0315
    G = torch.diag(torch.tensor([3.0, 4.0], dtype=torch.float64))  # norm 5
    expected = torch.diag(torch.tensor([a * x + b * x**3 + c * x**5 for x in (0.6, 0.8)]))
    assert relative_error(orthogonalize(G, "quintic", 1), expected.double()) < 1e-6


def test_five_steps_take_singular_values_above_a_hundredth_into_the_known_bands():
    # A mistyped digit moves a band.
    bands = {
        "quintic": (0.681831, 1.134357),
        "you": (0.977751, 1.031775),
        "polar_express": (0.858873, 1.141127),
        "cans": (0.884374, 1.119835),
        "cubic5": (0.774106, 1.3),
    }
    sigma = torch.logspace(-2, 0, 100_001, dtype=torch.float64)
    for family, (low, high) in bands.items():
        mapped = ref.scalar_map(sigma, ref.coefficients_of(family))
        assert abs(mapped.min().item() - low) < 1e-5
        assert abs(mapped.max().item() - high) < 1e-5


def test_polar_factor_is_orthogonal_and_knows_the_rank():
    for shape in SHAPES:
        Q = ref.polar_factor(randn(*shape))
        small = Q @ Q.T if shape[0] <= shape[1] else Q.T @ Q
        assert torch.allclose(small, torch.eye(min(shape), dtype=torch.float64), atol=1e-12)
    low_rank = randn(20, 3) @ randn(3, 12, seed=1)
    assert abs(ref.polar_factor(low_rank).norm().item() - math.sqrt(3)) < 1e-12
    for shape in SPECIAL_SHAPES:
        assert ref.polar_factor(torch.zeros(shape)).shape == shape
        assert ref.polar_factor(torch.zeros(shape)).abs().sum() == 0


# The other formulas


def test_momentum_styles_by_hand():
    B, G = torch.tensor([8.0]), torch.tensor([4.0])
    assert [x.item() for x in ref.momentum_update(B, G, 0.5, "classical", False)] == [8, 8]
    assert [x.item() for x in ref.momentum_update(B, G, 0.5, "classical", True)] == [8, 8]
    assert [x.item() for x in ref.momentum_update(B, G, 0.75, "classical", True)] == [10, 11.5]
    assert [x.item() for x in ref.momentum_update(B, G, 0.75, "ema", False)] == [7, 7]
    assert [x.item() for x in ref.momentum_update(B, G, 0.75, "ema", True)] == [7, 6.25]


def test_classical_momentum_is_sgds():
    (W,), runs = random_run([(6, 5)])
    for nesterov in (False, True):
        parameter = torch.nn.Parameter(W.clone())
        sgd = torch.optim.SGD([parameter], lr=1.0, momentum=0.9, nesterov=nesterov)
        B = torch.zeros_like(W)
        for (G,) in runs:
            before, parameter.grad = parameter.detach().clone(), G.clone()
            sgd.step()
            B, direction = ref.momentum_update(B, G, 0.9, "classical", nesterov)
            assert torch.allclose(before - parameter, direction, rtol=1e-12, atol=1e-12)


def test_scales_by_hand():
    assert ref.update_scale(16, 64) == ref.update_scale(64, 16) == 0.2 * 8
    assert ref.update_scale(64, 16, "original") == 2
    assert ref.update_scale(64, 16, 0.25) == 2
    assert ref.update_scale(16, 64, "original") == ref.update_scale(16, 64, "none") == 1
    assert ref.update_scale(5, 0, "original") == 1


@pytest.mark.parametrize("beta2", [0.0, 0.5, 0.95])
@pytest.mark.parametrize("shape", [*SHAPES, (1, 9), (9, 1)])
def test_normuon_keeps_the_frobenius_norm_and_follows_from_row_means_alone(shape, beta2):
    V = torch.zeros(max(shape), dtype=torch.float64)
    for seed in range(3):
        U = randn(*shape, seed=seed)
        mean = (U**2).mean(1) if shape[0] >= shape[1] else (U**2).mean(0)
        expected_V = beta2 * V + (1 - beta2) * mean
        V, scaled = ref.normalize_second_moment(V, U, beta2)
        assert V.shape == (max(shape),) and torch.allclose(V, expected_V, rtol=1e-13)
        assert abs(scaled.norm() / U.norm() - 1) < 1e-12
        ratio = V.rsqrt() * (mean.sum() / (mean / V).sum()).sqrt()
        ratio = ratio[:, None] if shape[0] >= shape[1] else ratio
        assert torch.allclose(scaled, U * ratio, rtol=1e-12)


def test_decay_is_decoupled_cautious_and_adjusted_by_hand():
    W, U = torch.tensor([[2.0, -2.0, 2.0]]), torch.tensor([[1.0, 1.0, 0.0]])
    update = dict(lr=0.5, scale=2.0, weight_decay=0.25)
    rows = {
        ("base", False): [2 * 0.875 - 1, -2 * 0.875 - 1, 2 * 0.875],
        ("base", True): [2 * 0.875 - 1, -2 - 1, 2 * 0.875],
        ("adjusted", False): [2 * 0.75 - 1, -2 * 0.75 - 1, 2 * 0.75],
        ("adjusted", True): [2 * 0.75 - 1, -2 - 1, 2 * 0.75],
    }
    for (decay_lr, cautious), expected in rows.items():
        new = ref.update_weight(W, U, cautious=cautious, decay_lr=decay_lr, **update)
        assert new.tolist() == [expected]


@pytest.mark.parametrize("maximize", [False, True])
def test_adamw_is_torchs(maximize):
    weights, runs = random_run([(6, 5), (7,), (2, 3, 4)], steps=20)
    parameters = [torch.nn.Parameter(W.clone()) for W in weights]
    hyper = dict(lr=3e-2, weight_decay=0.2, maximize=maximize)
    adamw = torch.optim.AdamW(parameters, betas=(0.8, 0.97), eps=1e-6, **hyper)
    options = dict(adamw_betas=(0.8, 0.97), adamw_eps=1e-6, **hyper)
    reference = ref.ReferenceAdamW(weights, options)
    for t, grads in enumerate(runs):
        grads[1] = None if t == 3 else grads[1]
        for p, G in zip(parameters, grads):
            p.grad = G
        adamw.step()
        reference.step(grads)
    assert reference.steps == [20, 19, 20]
    for i, p in enumerate(parameters):
        torch.testing.assert_close(reference.weights[i], p.detach(), rtol=1e-12, atol=1e-13)
        for key in ("exp_avg", "exp_avg_sq"):
            actual, expected = getattr(reference, key)[i], adamw.state[p][key]
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


# Matrices of a tensor


def test_matrices_are_views_in_row_major_order():
    def shapes(*shape, **how):
        return [tuple(m.shape) for m in ref.matrices_of(torch.zeros(shape), **how)]

    assert shapes(6, 4) == shapes(6, 4, flatten=True) == shapes(6, 4, expert=True) == [(6, 4)]
    assert shapes(3, 6, 4, expert=True) == [(6, 4)] * 3
    assert shapes(2, 3, 6, 4, expert=True) == [(6, 4)] * 6
    assert shapes(8, 3, 2, 2, flatten=True) == [(8, 12)]
    assert shapes(6, 4, split=[3, 2, 1]) == [(3, 4), (2, 4), (1, 4)]
    assert shapes(6, 4, split=2) == [(2, 4)] * 3
    assert shapes(2, 6, 4, expert=True, split=[4, 2]) == [(4, 4), (2, 4)] * 2
    assert shapes(0, 6, 4, expert=True) == [] and shapes(0, 3, 2, flatten=True) == [(0, 6)]
    tensor = torch.arange(48.0).view(2, 6, 4)
    blocks = ref.matrices_of(tensor, expert=True, split=3)
    assert torch.equal(torch.cat(blocks), tensor.view(12, 4))
    blocks[1].zero_()
    assert tensor[0, 3:].abs().max() == 0 and tensor[1].min() > 0


# The optimizer with options


# The five sources


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
def test_torch_muon_agrees_within_its_bf16_arithmetic(scale, nesterov):
    weights, runs = random_run([(96, 96), (128, 48), (48, 128)], steps=5)
    hyper = dict(lr=0.02, weight_decay=0.05, nesterov=nesterov, adjust_lr_fn=scale)
    parameters = [torch.nn.Parameter(W.clone()) for W in weights]
    muon = torch.optim.Muon(parameters, **hyper)
    reference = ref.TorchMuonReference(weights, **hyper)
    for grads in runs:
        for p, G in zip(parameters, grads):
            p.grad = G
        muon.step()
        reference.step(grads)
    for i, (p, W) in enumerate(zip(parameters, weights)):
        buffer = muon.state[p]["momentum_buffer"]
        torch.testing.assert_close(reference.momentum[i], buffer, rtol=1e-12, atol=1e-14)
        # Measured: at most 0.9 %. Without the decay, or with Nesterov the other way
        # round, it is above 17 %.
        assert relative_error(p.detach() - W, reference.weights[i] - W) < 0.02
