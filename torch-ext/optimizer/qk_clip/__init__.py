"""QK-Clip: keeps attention logits bounded, by rescaling query and key projections head by head."""

from .config import grouped_rows, stacked_rows
from .logits import max_qk_logits
from .recorder import QKLogitRecorder
from .scales import reduce_qk_logits

__all__ = [
    "QKLogitRecorder",
    "grouped_rows",
    "max_qk_logits",
    "reduce_qk_logits",
    "stacked_rows",
]
