"""What a step works on, and what ranks compare before it; `pipeline` runs the step."""
