"""QK-Clip: keeps attention logits bounded, by rescaling query and key projections head by head."""

from .logits import max_qk_logits

__all__ = ["max_qk_logits"]
