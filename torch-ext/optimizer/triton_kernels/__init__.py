"""Triton kernels for accelerators: `is_used_on` decides where they replace torch's operations.

Modules of kernels import triton, and are imported only where a kernel is launched.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import warnings
from collections.abc import Iterator
from typing import Union

# Device types that Triton compiles for; AMD's are "cuda" to torch as well.
DEVICE_TYPES = ("cuda", "xpu")

_is_off = False


def is_used_on(device_type: str) -> bool:
    """Whether kernels are used for tensors on that type of device; asks no device."""
    return device_type in DEVICE_TYPES and not _is_off and _has_triton()


@contextlib.contextmanager
def off(value: bool) -> Iterator[None]:
    """Lets torch's operations do the work of the kernels, where ``value`` is True."""
    global _is_off
    before, _is_off = _is_off, value
    try:
        yield
    finally:
        _is_off = before


def warn_of_doing_without(problem: Union[str, Exception]) -> None:
    """Warns that torch's operations do the work of kernels, and why."""
    if isinstance(problem, Exception):
        problem = f"{type(problem).__name__}: {problem}".splitlines()[0]
    warnings.warn(
        f"Triton's kernels are not used, which takes longer: {problem}. Triton needs a C compiler "
        "(gcc, or another that CC names) and Python's headers (python3-dev) to launch what it "
        "compiles",
        RuntimeWarning,
        stacklevel=2,
    )


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
