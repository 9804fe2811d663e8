"""QK-Clip: keeps attention logits bounded, by rescaling query and key projections head by head."""
