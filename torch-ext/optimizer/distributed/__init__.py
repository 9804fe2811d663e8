"""Plans who owns each matrix, moves matrices, lets ranks agree before a step, reads DTensors."""
