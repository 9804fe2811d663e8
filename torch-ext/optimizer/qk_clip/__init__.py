"""QK-Clip: keeps attention logits bounded, by rescaling query and key projections head by head."""

from __future__ import annotations

from typing import Any

from .config import grouped_rows, stacked_rows
from .scales import reduce_qk_logits

__all__ = [
    "QKLogitRecorder",
    "grouped_rows",
    "max_qk_logits",
    "reduce_qk_logits",
    "stacked_rows",
]


def __getattr__(name: str) -> Any:
    """Loads what observes the attention of a model when it is first asked for."""
    if name == "QKLogitRecorder":
        from ..extras.qk_logits.recorder import QKLogitRecorder

        return QKLogitRecorder
    if name == "max_qk_logits":
        from ..extras.qk_logits.maxima import max_qk_logits

        return max_qk_logits
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
