"""Keeps optimizer state in host memory between steps, and copies it to the device within them."""

from .backend import Backend
from .placement import CPUOffload
from .ring import Fetch, Load, Ring

__all__ = ["Backend", "CPUOffload", "Fetch", "Load", "Ring"]
