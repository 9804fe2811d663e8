"""Comparisons of what the package computes with what is expected of it."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def assert_equal(actual: Any, expected: Any, path: str = "", strides: bool = False) -> None:
    """Equal through dicts, in the order of their keys, lists and tuples; NaN equals NaN.

    Tensors have the same numbers, dtype, device and layout, and, if ``strides``, the same strides;
    DTensors the same placements and the same numbers on this rank.
    """
    assert isinstance(actual, Tensor) == isinstance(expected, Tensor), path
    if isinstance(actual, DTensor):
        assert actual.placements == expected.placements and actual.shape == expected.shape, path
        assert actual.stride() == expected.stride() or not strides, path
        assert_equal(actual.to_local(), expected.to_local(), path, strides)
    elif isinstance(actual, Tensor):
        torch.testing.assert_close(
            actual,
            expected,
            rtol=0,
            atol=0,
            equal_nan=True,
            check_stride=strides and actual.layout == torch.strided,
            msg=lambda text: f"{path}: {text}",
        )
    elif isinstance(actual, dict):
        assert list(actual) == list(expected), path
        for key, value in actual.items():
            assert_equal(value, expected[key], f"{path}/{key}", strides)
    elif isinstance(actual, (list, tuple)):
        assert len(actual) == len(expected), path
        for index, (value, other) in enumerate(zip(actual, expected)):
            assert_equal(value, other, f"{path}/{index}", strides)
    else:
        assert actual == expected, path


def assert_same_training(model: nn.Module, optim: Any, other: nn.Module, twin: Any) -> None:
    """The same weights, and the same state and hyperparameters of the optimizers."""
    assert_equal(list(model.parameters()), list(other.parameters()))
    assert_equal(optim.state_dict(), twin.state_dict())


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """‖actual − expected‖_F over ‖expected‖_F."""
    actual, expected = actual.double(), expected.double()
    return (actual - expected).norm().item() / max(expected.norm().item(), 1e-300)


def relative_error_of_known(actual: Tensor, expected: Tensor) -> float:
    """`relative_error` of the elements whose expected value is no NaN, see `reference.decays`."""
    known = ~expected.isnan()
    assert known.float().mean() > 0.95
    return relative_error(actual[known], expected[known])


def through_torch_save(value: Any, weights_only: bool = True) -> Any:
    """What `torch.load` makes of the file in which `torch.save` has put a value."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)
