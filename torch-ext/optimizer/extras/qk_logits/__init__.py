"""Records the attention logits of a model that trains, for QK-Clip."""
