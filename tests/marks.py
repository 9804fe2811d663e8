"""Marks that depend on the machine."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest


def slow_if_interpreted(test: Callable) -> Callable:
    """Triton's interpreter takes seconds for what a device does in milliseconds."""
    return pytest.mark.slow(test) if os.environ.get("TRITON_INTERPRET") == "1" else test
