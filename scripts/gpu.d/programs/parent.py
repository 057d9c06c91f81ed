"""Prints whether this rank is a fork of the process that imports jax, or a fresh interpreter of its own."""

import sys

import jax

# A fresh interpreter has got the program on its command line, and a fork what the fork server was started with.
kind = "forked" if "jaxrun_runtime.forkserver" in " ".join(sys.orig_argv) else "fresh"
print(f"rank {jax.process_index()} {kind}", flush=True)
