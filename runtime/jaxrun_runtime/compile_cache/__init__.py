"""Keeps compiled programs for the next attempt and the next job (--compile-cache): JAX's cache on disk, for all ranks.

JAX alone lets only rank 0 write, and on CPU only rank 0 hits, as its keys differ from rank to rank there.
"""
