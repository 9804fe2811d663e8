"""Optimizer state in host memory between steps, carried to the device and back within them."""

from .carrier import Carrier, Portion
from .offload import CPUOffload
from .windows import Loan, Share, narrow

__all__ = ["CPUOffload", "Carrier", "Loan", "Portion", "Share", "narrow"]
