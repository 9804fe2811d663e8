"""First help for a new user: which parameters go where and why, known traps, the code to write."""

from .report import Description, describe
from .trap import Trap

__all__ = ["Description", "Trap", "describe"]
