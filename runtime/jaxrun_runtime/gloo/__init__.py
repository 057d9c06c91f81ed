"""Opens the connections of Gloo, which JAX's CPU collectives use, for the groups of devices that a program needs."""
