"""Triton kernels for accelerators: `is_used_on` decides where they replace torch's operations.

The modules of this package import triton. Import them only where a kernel is launched.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import warnings
from collections.abc import Iterator
from contextvars import ContextVar

# Device types that Triton compiles for; torch calls AMD's GPUs "cuda", too.
DEVICE_TYPES = ("cuda", "xpu")

NEEDS = (
    "Triton needs a C compiler (gcc, or another that CC names) and Python's headers (python3-dev) "
    "to launch what it compiles, and a version that fits this torch"
)

_is_enabled = ContextVar("_is_enabled", default=True)


def is_used_on(device_type: str) -> bool:
    """Returns True if kernels are used on that type of device; doesn't query a device."""
    return device_type in DEVICE_TYPES and _is_enabled.get() and is_installed()


@contextlib.contextmanager
def enabled(value: bool) -> Iterator[None]:
    """A context that turns kernels on or off for this thread; off, torch's operations run."""
    token = _is_enabled.set(value)
    try:
        yield
    finally:
        _is_enabled.reset(token)


@functools.cache
def is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def warn_of_doing_without(problem: str) -> None:
    """Warns that torch's operations replace kernels, and why."""
    warnings.warn(
        f"Triton's kernels are not used, which takes longer: {problem}",
        RuntimeWarning,
        stacklevel=2,
    )


def first_line_of(error: Exception) -> str:
    """Returns an error's class and first line only, since compilers' messages can be pages long."""
    return f"{type(error).__name__}: {error}".splitlines()[0]
