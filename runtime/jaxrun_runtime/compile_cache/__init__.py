"""Keeps compiled programs for the next attempt and the next job (--compile-cache): JAX's cache on disk, for all ranks.

With JAX alone, only rank 0 writes. On CPU also only rank 0 finds programs, because the keys differ from rank to rank.
"""
