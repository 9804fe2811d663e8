"""Optimizer state in host memory between steps, carried to the device and back within them."""
