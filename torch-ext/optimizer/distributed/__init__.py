"""Plans of who owns and sends which matrix, their traffic, what ranks agree on, and DTensors."""
