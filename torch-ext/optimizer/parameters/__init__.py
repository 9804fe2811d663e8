"""Parameter groups: their options, names, checks, and the survey that plans are made from."""
