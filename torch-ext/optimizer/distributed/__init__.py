"""Plans who owns each matrix, moves it, makes ranks agree before a step, and reads DTensors."""
