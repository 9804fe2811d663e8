"""Optimizer state in host memory between steps, carried to the device and back within them."""

from .backend import Backend
from .carrier import Carrier, Lent
from .device import Use
from .hooks import Hooks
from .offload import CPUOffload
from .windows import Loan, narrow

__all__ = [
    "Backend",
    "CPUOffload",
    "Carrier",
    "Hooks",
    "Lent",
    "Loan",
    "Use",
    "narrow",
]
