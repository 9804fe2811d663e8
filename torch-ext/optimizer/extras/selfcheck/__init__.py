"""`selfcheck` compares a few steps of a sharded model with steps of the unsharded model."""

from .check import Report, selfcheck

__all__ = ["Report", "selfcheck"]
