"""`describe` tells a new user which parameters go where and why, known traps, and what to write."""

from .remedy import Trap
from .report import Description, describe

__all__ = ["Description", "Trap", "describe"]
