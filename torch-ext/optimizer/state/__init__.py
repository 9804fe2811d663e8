"""Optimizer state: which tensors a parameter has, how they are created, checked, and loaded."""
