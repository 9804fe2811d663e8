"""Optimizers to be given wrong input, and wrong values of every option of a group."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import nn

from comparisons import assert_equal
from kernel import optimizer
from layouts import params_of, set_gradients

NAN, INF = float("nan"), float("inf")

TOO_LARGE = 10**400  # for any float
BAD_NUMBERS = [NAN, INF, -INF, -1.0, True, None, "0.1", 1j, [0.1], Fraction(1, 2), TOO_LARGE]
BAD_FRACTIONS = [*BAD_NUMBERS, 1.0, 1.5]
BAD_BOOLS = [1, 0, "yes", 0.5]
BAD_NAMES = ["unheard of", "", True, 1, ["none"], np.ones(2)]
BAD_DTYPES = ["bfloat16", torch.int8, torch.complex64, torch.bool, 32, True, np.ones(2)]
BAD_FAMILIES = [
    *("newton", "", None, 5, [], (3.4445, -4.7750), (3.4445, NAN, 2.0315), (3.4, -4.7, TOO_LARGE)),
    *([bad] * 5 for bad in (None, (1.0, 2.0), (1.0, 2.0, 3.0, 4.0), ("a", "b", "c"))),
    *([bad] * 5 for bad in ((NAN, 0.0, 0.0), (2.0, -INF, 0.5))),
]
BAD_VALUES: dict[str, list[Any]] = {
    "lr": [*BAD_NUMBERS, torch.ones(2), torch.ones(0), torch.tensor(1j)],
    "momentum": BAD_FRACTIONS,
    "nesterov": [*BAD_BOOLS, None],
    "ns_steps": [0, -1, 5.0, True, None, "5", NAN, 1001, TOO_LARGE],
    "weight_decay": BAD_NUMBERS,
    "adamw_betas": [0.9, (0.9,), (0.9, 0.95, 0.99), None, "ab", (0.9, None)]
    + [(0.9, bad) for bad in (1.0, -0.1, NAN, True)]
    + [(bad, 0.9) for bad in (1.0, -0.1, NAN, True)],
    "adamw_eps": BAD_NUMBERS,
    "none_grad": [*BAD_BOOLS, None],
    "adjust_lr": [*BAD_NUMBERS, 0.0, "unheard of", "", ["none"], np.ones(2)],
    "momentum_style": [*BAD_NAMES, None],
    "ns_coefficients": BAD_FAMILIES,
    "ns_algorithm": [*BAD_NAMES, None],
    "ns_dtype": BAD_DTYPES,
    "ns_eps": BAD_NUMBERS,
    "ns_eps_absolute": [bad for bad in BAD_NUMBERS if bad is not None],
    "ns_norm_factor": [0.0, *(bad for bad in BAD_NUMBERS if bad is not None)],
    "ns_equilibrate": [*BAD_BOOLS, None],
    "ns_renormalize": [*BAD_BOOLS, None],
    "beta2": [bad for bad in BAD_FRACTIONS if bad is not None],
    "second_moment_side": [*BAD_NAMES, None],
    "cautious": [*BAD_BOOLS, None],
    "decay_lr": [*BAD_NAMES, None],
    "momentum_dtype": BAD_DTYPES,
    "weight_rounding": [*BAD_NAMES, None],
    "missing_grad": [*BAD_NAMES, None],
    "expert_keys": ["experts", [1], ["experts", None], 3, True],
    "split": [0, -1, True, 2.0, NAN, [], [2, -2], [4, 0], [2, True], [2.0, 2.0], [[2], [2]]]
    + ["qkv", {"w1": 0}, {"w1": []}, {"w1": "2"}, {1: 2}, {"w1": {"weight": 2}}],
    "flatten": [*BAD_BOOLS, None],
    "maximize": [*BAD_BOOLS, None],
    "capturable": [*BAD_BOOLS, None],
}


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, dtype=dtype))


def muon_group(*params: Any, **options: Any) -> dict[str, Any]:
    return {"params": list(params), "use_muon": True, **options}


def adamw_group(*params: Any, **options: Any) -> dict[str, Any]:
    return {"params": list(params), "use_muon": False, **options}


def good_groups() -> list[dict[str, Any]]:
    """Both kinds of groups, and each kind after the other."""
    first, second = ["layers.0.w1.weight", "layers.0.w2.weight"], ["norm.weight", "embed.weight"]
    return [
        muon_group(parameter(4, 6), parameter(5, 5), names=first),
        adamw_group(parameter(7), parameter(3, 2), names=second),
        muon_group(parameter(6, 4), names=["layers.1.w1.weight"]),
        adamw_group(parameter(2), names=["head.bias"]),
    ]


def trained(steps: int, **options: Any) -> Any:
    """An optimizer after some steps, with gradients for the next one."""
    optim = optimizer.Muon(good_groups(), **options)
    for step in range(steps):
        set_gradients(params_of(optim), seed=step)
        optim.step()
    set_gradients(params_of(optim), seed=steps)
    return optim


def assert_steps_like(optim: Any, twin: Any) -> None:
    """Both take one more step from the same gradients, to the same bits."""
    before = [p.detach().clone() for p in params_of(optim)]
    for each in (optim, twin):
        set_gradients(params_of(each), seed=99)
        each.step()
    for p, other, old in zip(params_of(optim), params_of(twin), before):
        assert torch.equal(p, other) and not torch.equal(p, old)
        assert_equal(dict(optim.state[p]), dict(twin.state[other]))
