"""Observes attention logits for QK-Clip: their maxima, and a recorder for models in training."""
