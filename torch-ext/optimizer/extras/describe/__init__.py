"""First help for a new user: which parameters go where and why, known traps, the code to write."""

from .remedy import Trap
from .report import Description, describe

__all__ = ["Description", "Trap", "describe"]
