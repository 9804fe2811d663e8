"""Decides what each parameter of a model is: expert, head, embedding, fused projection, kernel."""
