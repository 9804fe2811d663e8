"""Observes attention logits for QK-Clip: their maxima, and a recorder for a model in training."""
