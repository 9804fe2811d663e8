"""QK-Clip: keeps attention logits bounded, by rescaling query and key projections head by head."""

from .clip import reduce_qk_logits
from .config import grouped_rows, stacked_rows

__all__ = ["grouped_rows", "reduce_qk_logits", "stacked_rows"]
