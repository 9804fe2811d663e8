"""Data that a step works on, and notes that ranks compare before it; `pipeline` runs the step."""
