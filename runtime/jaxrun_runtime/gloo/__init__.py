"""JAX's collectives on CPU go through Gloo: which groups of devices a program needs, and their connections."""
