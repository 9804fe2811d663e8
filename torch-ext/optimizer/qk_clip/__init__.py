"""QK-Clip: keeps attention logits bounded, by rescaling query and key projections head by head."""

from .scales import reduce_qk_logits

__all__ = ["reduce_qk_logits"]
