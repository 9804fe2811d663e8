"""Optimizer state in host memory between steps, carried to the device and back within them."""

from .backend import Backend
from .device import Use
from .hooks import Hooks
from .offload import CPUOffload
from .prefetcher import Fetched, Prefetcher
from .windows import Fetch, narrow

__all__ = [
    "Backend",
    "CPUOffload",
    "Prefetcher",
    "Hooks",
    "Fetched",
    "Fetch",
    "Use",
    "narrow",
]
