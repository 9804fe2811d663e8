"""Keeps optimizer state in host memory between steps, and copies it to the device within them."""

from .backend import Backend
from .device import Destination
from .hooks import Hooks
from .offload import CPUOffload
from .prefetcher import Prefetcher
from .windows import Fetch, narrow

__all__ = ["Backend", "CPUOffload", "Destination", "Fetch", "Hooks", "Prefetcher", "narrow"]
