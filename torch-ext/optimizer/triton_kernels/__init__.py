"""Triton kernels for accelerators: `is_used_on` decides where they replace torch's operations.

Modules of kernels import triton, and are imported only where a kernel is launched.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from typing import Union

# Device types that Triton compiles for; AMD's are "cuda" to torch as well.
DEVICE_TYPES = ("cuda", "xpu")

_is_given_up = False


def is_used_on(device_type: str) -> bool:
    """Whether kernels are used for tensors on that type of device; asks no device."""
    return device_type in DEVICE_TYPES and not _is_given_up and _has_triton()


def is_given_up() -> bool:
    """Whether this process uses no kernels, since `give_up` was called."""
    return _is_given_up


def give_up(problem: Union[str, Exception]) -> None:
    """Lets torch's operations do the work of the kernels from now on; warns the first time."""
    global _is_given_up
    if not _is_given_up:
        _is_given_up = True
        if isinstance(problem, Exception):
            problem = f"{type(problem).__name__}: {problem}".splitlines()[0]
        warnings.warn(
            f"Triton's kernels are not used, and steps take longer: {problem}. Triton needs a C "
            "compiler (gcc, or another that CC names) and Python's headers (python3-dev) to launch "
            "what it compiles",
            RuntimeWarning,
            stacklevel=2,
        )


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
