"""Keeps optimizer state in host memory between steps, and copies it to the device within them."""

from .backend import Backend
from .offload import CPUOffload
from .prefetcher import Prefetcher
from .windows import Fetch

__all__ = ["Backend", "CPUOffload", "Fetch", "Prefetcher"]
