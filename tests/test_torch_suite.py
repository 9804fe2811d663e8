"""What PyTorch's own test/test_optim.py asks of every optimizer, asked of ours, with every option.

That file is not in torch's wheel, but the functions by which it describes an optimizer are
(`torch.testing._internal.common_optimizers`). Names in docstrings are those of torch, without
``test_``. Torch's tests that are not here need GPUs (``forloop_goes_right_direction_multigpu``,
``state_dict_with_cuda_params``, ``fused_cpu_matches_cuda``, ``foreach_large_tensor``,
``fused_large_tensor``), options that do not exist here (``fused_does_not_step_if_foundinf``,
``fused_error_on_params_on_meta``, ``differentiable``), L-BFGS
(``second_order_optims_return_consistent_types``), or replace a function of torch's modules
(``defaults_changed_to_foreach``).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from comparisons import assert_equal
from kernel import as_arguments, optimizer
from layouts import case, set_gradients

pytestmark = [
    pytest.mark.slow,  # seconds for importing torch's suite, and every option for every check
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*step.. found no gradient"),
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.. before .optimizer.step"),
]


@pytest.fixture(scope="module")
def suite() -> Any:
    """Imported late: it takes seconds, which collecting the tests need not."""
    pytest.importorskip("expecttest")
    from torch.testing._internal import common_optimizers

    return common_optimizers


class AdamW(optimizer.Muon):
    """Takes what torch's tests pass, tensors or pairs, all of it in groups for AdamW."""

    muon_ndim: int | None = None

    def __init__(self, params: Any, **options: Any):
        groups: list[dict[str, Any]] = [
            {"params": [], "use_muon": use_muon} for use_muon in (True, False)
        ]
        for param in params:
            tensor = param[1] if isinstance(param, tuple) else param
            groups[tensor.ndim != self.muon_ndim]["params"].append(param)
        super().__init__([group for group in groups if group["params"]], **as_arguments(options))


class Muon(AdamW):
    """The same, with matrices in groups for Muon."""

    muon_ndim = 2


# Every option, each with another value than its default, and some together.
OPTIONS: list[dict[str, Any]] = [
    {}, {"lr": 0.01}, {"lr": torch.tensor(0.001)}, {"momentum": 0.5}, {"nesterov": False},
    {"ns_steps": 7}, {"weight_decay": 0.9}, {"weight_decay": 0}, {"adamw_betas": (0.5, 0.6)},
    {"adamw_eps": 1e-3}, {"none_grad": False}, {"adjust_lr": "original"}, {"adjust_lr": "none"},
    {"momentum_style": "ema"}, {"ns_coefficients": "quintic"},
    {"ns_coefficients": [(2.0, -1.5, 0.5), (1.875, -1.25, 0.375)]}, {"ns_algorithm": "gram"},
    {"ns_dtype": torch.float64}, {"ns_eps": 1e-3}, {"ns_eps_absolute": 1e-3},
    {"ns_norm_factor": 1.1}, {"ns_equilibrate": True}, {"ns_renormalize": True}, {"beta2": 0.9},
    {"beta2": 0.9, "second_moment_side": "rows"}, {"cautious": True}, {"decay_lr": "adjusted"},
    {"beta2": 0.9, "cautious": True, "decay_lr": "adjusted"}, {"momentum_dtype": torch.bfloat16},
    {"missing_grad": "zero"}, {"weight_rounding": "exact"}, {"expert_keys": ["experts"]},
    {"split": 1}, {"flatten": True}, {"maximize": True}, {"maximize": True, "weight_decay": 0.05},
    {"capturable": True}, {"capturable": True, "lr": torch.tensor(0.001)},
    {"chunk_size": 1, "warmup_step": 0, "comm_dtype": torch.float32, "hsdp": "spread"},
    {"consistency_check": "off", "use_distributed_muon": True},
]  # fmt: skip

both = pytest.mark.parametrize("kind", [Muon, AdamW])


def every_option(**others: Any) -> Iterator[dict[str, Any]]:
    """With new tensors each time, and what they are in the traceback of a failure."""
    for options in OPTIONS:
        with case(str(options)):
            yield {**copy.deepcopy(options), **others}


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype | None = None) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]


def backward(optim: Any, weight: Any, bias: Any, x: torch.Tensor) -> torch.Tensor:
    optim.zero_grad()
    loss = (weight.mv(x) + bias).square().sum()
    loss.backward()
    return loss


def test_what_is_wrong_for_every_optimizer_of_torch_is_so_here(suite):
    """errors: ValueError in place of TypeError or warning; some groups only may have names."""
    for given in suite.get_error_inputs_for_all_optims("cpu", torch.float32):
        asked = given.optimizer_error_input
        params: Any = parameters((1, 1)) if asked.params is None else asked.params
        if isinstance(params, list):
            groups = params if isinstance(params[0], dict) else [{"params": params}]
            params = [{**group, "use_muon": True} for group in groups]
        with case(asked.desc):
            if "param groups should be with/without names" in asked.desc:
                assert optimizer.Muon(params).names == [None, ["weight"]]
                continue
            with pytest.raises(ValueError):
                optimizer.Muon(params, **asked.kwargs)


@both
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("scheduled", [True, False])
def test_steps_go_in_the_right_direction(kind, contiguous, scheduled, suite):
    """forloop_goes_right_direction"""
    schedulers = suite.OptimizerInfo(kind, optim_inputs_func=None).scheduler_inputs
    for options in every_option():
        torch.manual_seed(0)
        weight, bias = parameters((10, 5), (10,))
        if not contiguous:
            weight, bias = (nn.Parameter(torch.stack([p, p], -1)[..., 0]) for p in (weight, bias))
        x, optim = torch.randn(5), kind([weight, bias], **options)
        schedules = [make(optim) for makes in schedulers for make in makes if scheduled]
        first = backward(optim, weight, bias, x)
        for _ in range(10):
            loss = optim.step(lambda: backward(optim, weight, bias, x))  # noqa: B023
            for schedule in schedules:
                schedule.step(*((loss,) if isinstance(schedule, ReduceLROnPlateau) else ()))
        last = backward(optim, weight, bias, x)
        assert (last > first) if options.get("maximize") else (last < first)


def test_a_complex_parameter_is_a_pair_of_real_ones():
    """complex"""

    def real(tensor: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(tensor) if tensor.is_complex() else tensor

    for options in every_option():
        given = parameters((10, 5), (10,), dtype=torch.complex64) + parameters((10, 5))
        reals = [nn.Parameter(real(p).detach().clone()) for p in given]
        ours, theirs = AdamW(given, **options), AdamW(reals, **options)
        for _ in range(3):
            for p, q in zip(given, reals):
                p.grad = torch.randn_like(p)
                q.grad = real(p.grad).clone()
            ours.step()
            theirs.step()
            for p, q in zip(given, reals):
                torch.testing.assert_close(real(p), q)


@both
def test_a_step_of_zeros_changes_nothing_without_decay(kind):
    """step_is_noop_for_zero_grads"""
    for options in every_option(weight_decay=0):
        params = parameters((5, 1), (5,))
        before = [p.detach().clone() for p in params]
        set_gradients(params, scale=0.0)
        kind(params, **options).step()
        assert_equal([p.detach() for p in params], before)
