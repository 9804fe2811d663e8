"""What PyTorch's own test/test_optim.py asks of every optimizer, asked of ours.

That file is not in torch's wheel, but the classes by which it describes an optimizer are
(`torch.testing._internal.common_optimizers`): here are two such descriptions, and the checks in our
own words, each for every option. docs/reliability.md says which of torch's tests these are, and
which don't apply. Names below are those of torch, without ``test_``.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from comparisons import assert_equal
from kernel import as_arguments, optimizer
from layouts import case, set_gradients
from wrong_input import BAD_VALUES

pytestmark = [
    pytest.mark.slow,  # seconds for importing torch's suite, and every option for every check
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*step.. found no gradient"),
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.. before .optimizer.step"),
]


@functools.cache
def suite() -> Any:
    """Imported late: it takes seconds, which collecting the tests need not."""
    pytest.importorskip("expecttest")
    from torch.testing._internal import common_optimizers

    return common_optimizers


class Muon(optimizer.Muon):
    """Takes what torch's tests pass: tensors, pairs, or groups that do not say ``use_muon``."""

    def __init__(self, params: Any, **options: Any):
        super().__init__(list(groups_of(params, lambda p: p.ndim == 2)), **as_arguments(options))


class AdamW(optimizer.Muon):
    """The same, all of it in groups for AdamW."""

    def __init__(self, params: Any, **options: Any):
        super().__init__(list(groups_of(params, lambda p: False)), **as_arguments(options))


def groups_of(params: Any, is_muon: Callable[[torch.Tensor], bool]) -> Iterator[dict[str, Any]]:
    params = list(params)
    for group in params if isinstance(params[0], dict) else [{"params": params}]:
        for use_muon in (True, False):
            chosen = [
                p
                for p in group["params"]
                if is_muon(p[1] if isinstance(p, tuple) else p) is use_muon
            ]
            if chosen:
                yield {**group, "params": chosen, "use_muon": use_muon}


# Every option, each with another value than its default, and some together.
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "non-default lr": {"lr": 0.01},
    "tensor lr": {"lr": torch.tensor(0.001)},
    "momentum": {"momentum": 0.5},
    "nesterov": {"nesterov": False},
    "ns_steps": {"ns_steps": 7},
    "weight_decay": {"weight_decay": 0.9},
    "no weight_decay": {"weight_decay": 0},
    "adamw_betas": {"adamw_betas": (0.5, 0.6)},
    "adamw_eps": {"adamw_eps": 1e-3},
    "none_grad": {"none_grad": False},
    "adjust_lr": {"adjust_lr": "original"},
    "adjust_lr none": {"adjust_lr": "none"},
    "momentum_style": {"momentum_style": "ema"},
    "ns_coefficients": {"ns_coefficients": "quintic"},
    "ns_coefficients as a list": {"ns_coefficients": [(2.0, -1.5, 0.5), (1.875, -1.25, 0.375)]},
    "ns_algorithm": {"ns_algorithm": "gram"},
    "ns_dtype": {"ns_dtype": torch.float64},
    "ns_eps": {"ns_eps": 1e-3},
    "ns_eps_absolute": {"ns_eps_absolute": 1e-3},
    "ns_norm_factor": {"ns_norm_factor": 1.1},
    "ns_equilibrate": {"ns_equilibrate": True},
    "ns_renormalize": {"ns_renormalize": True},
    "beta2": {"beta2": 0.9},
    "second_moment_side": {"beta2": 0.9, "second_moment_side": "rows"},
    "beta2, cautious, decay_lr": {"beta2": 0.9, "cautious": True, "decay_lr": "adjusted"},
    "cautious": {"cautious": True},
    "decay_lr": {"decay_lr": "adjusted"},
    "momentum_dtype": {"momentum_dtype": torch.bfloat16},
    "missing_grad": {"missing_grad": "zero"},
    "weight_rounding": {"weight_rounding": "exact"},
    "expert_keys": {"expert_keys": ["experts"]},
    "split": {"split": 1},
    "flatten": {"flatten": True},
    "maximize": {"maximize": True},
    "maximize, weight_decay": {"maximize": True, "weight_decay": 0.05},
    "capturable": {"capturable": True},
    "capturable, tensor lr": {"capturable": True, "lr": torch.tensor(0.001)},
    "wide": {"chunk_size": 1, "warmup_step": 0, "comm_dtype": torch.float32, "hsdp": "spread"},
    "checks": {"consistency_check": "off", "use_distributed_muon": True},
}


def inputs_func(device: Any, dtype: Any = None) -> list[Any]:
    return [
        suite().OptimizerInput(params=None, kwargs=copy.deepcopy(kwargs), desc=desc)
        for desc, kwargs in OPTIONS.items()
    ]


@functools.cache
def info(kind: type) -> Any:
    return suite().OptimizerInfo(
        kind,
        optim_inputs_func=inputs_func,
        optim_error_inputs_func=error_inputs_func,
        supported_impls=(),
        not_og_supported_flags=("maximize", "capturable", "missing_grad"),
        has_capturable_arg=True,
        supports_complex=kind is AdamW,
    )


def inputs_of(kind: type, **others: Any) -> Iterator[dict[str, Any]]:
    """All options, with new tensors each time."""
    for given in info(kind).optim_inputs_func(device="cpu"):
        kwargs = {**given.kwargs, **others}
        print(given.desc, kwargs)  # pytest shows it where a check fails
        yield kwargs


both = pytest.mark.parametrize("kind", [Muon, AdamW])
named = pytest.mark.parametrize("names", [False, True], ids=["plain", "named"])


def weight_and_bias(contiguous: bool = True) -> tuple[nn.Parameter, nn.Parameter]:
    if contiguous:
        return nn.Parameter(torch.randn(10, 5)), nn.Parameter(torch.randn(10))
    return nn.Parameter(torch.randn(10, 5, 2)[..., 0]), nn.Parameter(torch.randn(10, 2)[..., 0])


def backward(optim: Any, weight: Any, bias: Any, x: torch.Tensor) -> torch.Tensor:
    optim.zero_grad()
    loss = (weight.mv(x) + bias).square().sum()
    loss.backward()
    return loss


def assert_right_direction(kwargs: dict[str, Any], first: torch.Tensor, last: torch.Tensor) -> None:
    assert (last > first) if kwargs.get("maximize") else (last < first)


# The descriptions


# Errors


def error_inputs_func(device: Any, dtype: Any) -> list[Any]:
    matrix, vector = torch.randn(4, 4, dtype=dtype), torch.randn(4, dtype=dtype)

    def error(params: Any, pattern: str, at_step: bool = False, **kwargs: Any) -> Any:
        return suite().ErrorOptimizerInput(
            suite().OptimizerInput(params=params, kwargs=kwargs, desc=pattern),
            error_on=suite().OptimizerErrorEnum(int(at_step)),
            error_type=ValueError,
            error_regex=pattern,
        )

    sparse = nn.Parameter(torch.randn(4, 4))
    sparse.grad = torch.eye(4).to_sparse()
    good = [{"params": [nn.Parameter(matrix)], "use_muon": True}]
    return [
        *(error(good, key, **{key: values[0]}) for key, values in BAD_VALUES.items()),
        error([matrix], "use_muon"),
        error([{"params": [matrix]}], "use_muon"),
        error([{"params": [vector], "use_muon": True}], r"\(4,\)"),
        error([{"params": [matrix.to(torch.complex64)], "use_muon": True}], "complex64"),
        error([{"params": [sparse], "use_muon": True}], "sparse", at_step=True),
        error([{"params": [sparse], "use_muon": False}], "sparse", at_step=True),
    ]


def test_what_is_wrong_raises_when_torchs_tests_want_it():
    """errors"""
    for given in error_inputs_func("cpu", torch.float32):
        params, kwargs = given.optimizer_error_input.params, given.optimizer_error_input.kwargs
        with case(given.error_regex):
            if given.error_on is suite().OptimizerErrorEnum.CONSTRUCTION_ERROR:
                with pytest.raises(given.error_type, match=given.error_regex):
                    optimizer.Muon(params, **as_arguments(kwargs))
            else:
                optim = optimizer.Muon(params, **as_arguments(kwargs))
                with pytest.raises(given.error_type, match=given.error_regex):
                    optim.step()


def test_what_is_wrong_for_every_optimizer_of_torch_is_so_here():
    """errors, of get_error_inputs_for_all_optims

    Where torch raises TypeError or warns this raises ValueError; names in some groups only are
    allowed.
    """
    for given in suite().get_error_inputs_for_all_optims("cpu", torch.float32):
        asked = given.optimizer_error_input
        params: Any = asked.params
        if params is None:
            params = [nn.Parameter(torch.randn(1, 1))]
        if isinstance(params, list):
            groups = params if isinstance(params[0], dict) else [{"params": params}]
            params = [{**group, "use_muon": True} for group in groups]
        with case(asked.desc):
            if "param groups should be with/without names" in asked.desc:
                assert optimizer.Muon(params).names == [None, ["weight"]]
                continue
            with pytest.raises(ValueError):
                optimizer.Muon(params, **asked.kwargs)


# The update


@both
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("scheduled", [True, False])
def test_steps_go_in_the_right_direction(kind, contiguous, scheduled):
    """forloop_goes_right_direction"""
    for kwargs in inputs_of(kind):
        torch.manual_seed(0)
        weight, bias = weight_and_bias(contiguous)
        x = torch.randn(5)
        optim = kind([weight, bias], **kwargs)
        schedules = [
            make(optim) for makes in info(kind).scheduler_inputs for make in makes if scheduled
        ]
        first = backward(optim, weight, bias, x)
        for _ in range(10):
            loss = optim.step(lambda: backward(optim, weight, bias, x))  # noqa: B023
            for schedule in schedules:
                each = (loss,) if isinstance(schedule, ReduceLROnPlateau) else ()
                schedule.step(*each)
        assert_right_direction(kwargs, first, backward(optim, weight, bias, x))


def test_a_complex_parameter_is_a_pair_of_real_ones():
    """complex"""
    for kwargs in inputs_of(AdamW):
        torch.manual_seed(0)
        complex_params = [
            torch.randn(shape, dtype=dtype, requires_grad=True)
            for shape, dtype in (
                ((10, 5), torch.complex64),
                ((10,), torch.complex64),
                ((10, 5), torch.float32),
            )
        ]
        real_params = [
            (torch.view_as_real(p) if p.is_complex() else p).detach().clone().requires_grad_()
            for p in complex_params
        ]
        ours, reals = AdamW(complex_params, **kwargs), AdamW(real_params, **kwargs)
        for _ in range(3):
            for p, q in zip(complex_params, real_params):
                p.grad = torch.randn_like(p)
                q.grad = (torch.view_as_real(p.grad) if p.is_complex() else p.grad).clone()
            ours.step()
            reals.step()
            for p, q in zip(complex_params, real_params):
                torch.testing.assert_close(torch.view_as_real(p) if p.is_complex() else p, q)


def rosenbrock(xy: torch.Tensor) -> torch.Tensor:
    x, y = xy.flatten()
    return (1 - x) ** 2 + 100 * (y - x**2) ** 2


@both
@pytest.mark.parametrize("maximize", [False, True])
def test_the_valley_of_rosenbrock_is_descended(kind, maximize):
    """rosenbrock_sparse, with gradients that are dense: sparse ones are refused"""
    start = torch.tensor([[1.5, 1.5]])
    p = nn.Parameter(start.clone())
    optim = kind([p], lr=1e-3, weight_decay=0, maximize=maximize)
    for step in range(200):
        optim.zero_grad()
        rosenbrock(p).backward()
        p.grad[0, step % 2] = 0  # one coordinate after the other
        optim.step()
    assert bool(rosenbrock(p) > rosenbrock(start)) is maximize


@both
def test_dtypes_may_be_mixed(kind):
    """mixed_device_dtype, on one device"""
    for kwargs in inputs_of(kind):
        dtypes = [torch.float64, torch.float32, torch.bfloat16]
        if "weight_rounding" not in kwargs:  # which refuses it
            dtypes.append(torch.float16)
        torch.manual_seed(0)
        params = [nn.Parameter(torch.rand(2, 3, dtype=dtype)) for dtype in dtypes]
        twins = [nn.Parameter(p.detach().clone()) for p in params]
        together, alone = kind(params, **kwargs), [kind([p], **kwargs) for p in twins]
        for _ in range(3):
            for p, q in zip(params, twins):
                p.grad = torch.rand_like(p)
                q.grad = p.grad.clone()
            for optim in (together, *alone):
                optim.step()
        assert [p.dtype for p in params] == dtypes
        for p, q in zip(params, twins):
            eps = torch.finfo(p.dtype).eps
            torch.testing.assert_close(p, q, rtol=5 * eps, atol=5 * eps)


@both
def test_a_step_of_zeros_changes_nothing_without_decay(kind):
    """step_is_noop_for_zero_grads"""
    for kwargs in inputs_of(kind, weight_decay=0):
        params = [nn.Parameter(torch.randn(5, 1)), nn.Parameter(torch.randn(5))]
        before = [p.detach().clone() for p in params]
        for p in params:
            p.grad = torch.zeros_like(p)
        kind(params, **kwargs).step()
        torch.testing.assert_close([p.detach() for p in params], before, rtol=0, atol=0)


# State dicts


def steps(optim: Any, params: list[nn.Parameter], count: int = 3, seed: int = 0) -> None:
    for step in range(count):
        set_gradients(params, count * seed + step)
        optim.step()


def new_params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(2))]


def with_names(params: list[nn.Parameter], names: bool) -> list[Any]:
    return [(f"name{index}", p) for index, p in enumerate(params)] if names else params


@both
@pytest.mark.parametrize("other_names", [False, True], ids=["from plain", "from named"])
@named
def test_training_goes_on_alike_from_a_state_dict(kind, names, other_names):
    """state_dict_deterministic, can_load_from_to_named_state_dict

    Names are the optimizer's own: no state dict has them, and none brings any.
    """
    for kwargs in inputs_of(kind):
        params = new_params()
        optim = kind(with_names(params, other_names), **kwargs)
        steps(optim, params)
        others = [nn.Parameter(p.detach().clone()) for p in params]
        other = kind(with_names(others, names), **kwargs)
        saved = copy.deepcopy(optim.state_dict())
        other.load_state_dict(saved)
        assert_equal(saved, optim.state_dict())  # as it was
        steps(optim, params, seed=1)
        steps(other, others, seed=1)
        torch.testing.assert_close(params, others, rtol=0, atol=0)
        assert_equal(optim.state_dict(), other.state_dict())
        known = [name for group in other.names for name in group or ()]
        assert known == (["name0", "name1"] if names else [])


# Hooks
