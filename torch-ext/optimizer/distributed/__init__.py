"""Plans which rank owns each matrix, moves matrices, compares ranks, and reads DTensors."""
