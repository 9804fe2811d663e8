"""`selfcheck` compares a few steps of a sharded model with those of the unsharded one."""

from .check import Report, selfcheck

__all__ = ["Report", "selfcheck"]
