"""Decides what each parameter of a model is: matrix, expert, head, embedding, fused projection."""
