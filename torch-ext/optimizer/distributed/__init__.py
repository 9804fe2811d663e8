"""ExpectedState, plans, and the bridge from DTensors to both."""
