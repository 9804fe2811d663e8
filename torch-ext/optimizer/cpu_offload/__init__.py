"""Optimizer state in host memory between steps, carried to the device and back within them."""

from .carrier import Carrier, Lent
from .hooks import Hooks
from .methods import Offloadable
from .offload import CPUOffload
from .visits import Use
from .windows import Loan, Share, narrow

__all__ = [
    "CPUOffload",
    "Carrier",
    "Hooks",
    "Lent",
    "Loan",
    "Offloadable",
    "Share",
    "Use",
    "narrow",
]
