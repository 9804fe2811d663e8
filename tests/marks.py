"""Marks for tests of kernels."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

# Every dtype is tested; a kernel's code for 16 bits is what the quick subset shows.
one_dtype_is_quick = pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        pytest.param(torch.float16, marks=pytest.mark.kernels_ci),
    ],
    ids=str,
)


def slow_if_interpreted(test: Callable) -> Callable:
    """Triton's interpreter takes seconds for what a device does in milliseconds."""
    return pytest.mark.slow(test) if os.environ.get("TRITON_INTERPRET") == "1" else test
