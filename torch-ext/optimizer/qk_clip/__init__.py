"""QK-Clip: keeps attention logits bounded, by rescaling query and key projections head by head."""

from __future__ import annotations

from typing import Any

__all__ = [
    "QKLogitRecorder",
    "max_qk_logits",
    "reduce_qk_logits",
]


def __getattr__(name: str) -> Any:
    """Loads what clips, and what observes the attention of a model, when it is first asked for."""
    if name == "reduce_qk_logits":
        from .scales import reduce_qk_logits

        return reduce_qk_logits
    if name == "QKLogitRecorder":
        from ..extras.qk_logits.recorder import QKLogitRecorder

        return QKLogitRecorder
    if name == "max_qk_logits":
        from ..extras.qk_logits.maxima import max_qk_logits

        return max_qk_logits
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
