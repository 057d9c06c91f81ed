"""A rank of a gang: connects to the Python process that started the gang, and runs the functions that it sends."""
