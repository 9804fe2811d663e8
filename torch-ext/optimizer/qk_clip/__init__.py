"""QK-Clip: keeps attention logits bounded, by rescaling query and key projections head by head."""

from .recorder import QKLogitRecorder

__all__ = ["QKLogitRecorder"]
