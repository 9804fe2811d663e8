"""Triton kernels for accelerators; each module imports triton, and is imported where one is run."""

from __future__ import annotations

import functools
import importlib.util

# OffloadDevice types that Triton compiles for; AMD's are "cuda" to torch as well.
DEVICE_TYPES = ("cuda", "xpu")


@functools.cache
def is_used_on(device_type: str) -> bool:
    """Whether kernels are used for tensors there; asks no device."""
    return device_type in DEVICE_TYPES and importlib.util.find_spec("triton") is not None
