"""The scale of gradients changes no step of Muon's: loss scales and `clip_grad_norm_` are free."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kernel import as_arguments, optimizer
from layouts import params_of

presets = optimizer.presets

SHAPES = [(24, 24), (128, 48), (48, 128), (1, 32)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# With these no gradient and no momentum leaves the normal numbers of its dtype.
EXPONENTS = dict.fromkeys(DTYPES, (0, -100, 5)) | {torch.float16: (8, 6, 12)}
OPTIONS = {
    "defaults": {},
    "nanochat's": {
        **{"momentum_style": "ema", "beta2": 0.95, "cautious": True},
        **{"decay_lr": "adjusted", "adjust_lr": "original"},
    },
    "bf16 momentum": {"momentum_dtype": torch.bfloat16},
    "gram": {"ns_algorithm": "gram", "nesterov": False},
}


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def movement(optim: torch.optim.Optimizer, factor: float) -> list[torch.Tensor]:
    """Returns each parameter's change over three steps with gradients times a factor."""
    params = params_of(optim)
    before = [p.detach().clone() for p in params]
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype) * factor
        optim.step()
    return [p.detach() - old for p, old in zip(params, before)]


def muon(params: list[nn.Parameter], **options) -> torch.optim.Optimizer:
    return optimizer.Muon([{"params": params, "use_muon": True}], lr=0.05, **as_arguments(options))


def assert_same_bits(found: list[torch.Tensor], expected: list[torch.Tensor], what: object) -> None:
    assert all(U.isfinite().all() and U.any() for U in expected)
    assert all(map(torch.equal, found, expected)), what


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_times_a_power_of_two_take_the_same_steps_to_the_bit(dtype, options):
    for ns_dtype in (None, torch.float16):
        options = {**options, "ns_dtype": ns_dtype}
        first, *exponents = EXPONENTS[dtype]
        expected = movement(muon(parameters(dtype), **options), 2.0**first)
        for exponent in exponents:
            found = movement(muon(parameters(dtype), **options), 2.0**exponent)
            assert_same_bits(found, expected, (ns_dtype, exponent))


# The others add an eps to the norm itself, as their sources do.
@pytest.mark.parametrize("preset", [presets.torch_muon, presets.emerging_optimizers])
def test_presets_without_an_absolute_eps_do_not_look_at_the_scale_of_gradients_either(preset):
    expected = movement(optimizer.Muon(**preset(parameters())), 1.0)
    for exponent in (-100, -26, 5, 100):
        found = movement(optimizer.Muon(**preset(parameters())), 2.0**exponent)
        assert_same_bits(found, expected, exponent)
