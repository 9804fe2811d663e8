"""Triton kernels for accelerators: `is_used_on` decides where they replace torch's operations.

Modules of kernels import triton, and are imported only where a kernel is launched.
"""

from __future__ import annotations

import functools
import importlib.util

# Device types that Triton compiles for; AMD's are "cuda" to torch as well.
DEVICE_TYPES = ("cuda", "xpu")


@functools.cache
def is_used_on(device_type: str) -> bool:
    """Whether kernels are used for tensors on that type of device; asks no device."""
    return device_type in DEVICE_TYPES and importlib.util.find_spec("triton") is not None
