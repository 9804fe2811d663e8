"""`describe` shows which parameters go where and why, known traps, and the code to write."""

from .remedy import Trap
from .report import Description, describe

__all__ = ["Description", "Trap", "describe"]
