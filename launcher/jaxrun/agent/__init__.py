"""Do: start, watch and stop the workers of one host."""
