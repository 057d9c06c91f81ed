"""Prints whether this rank is a fork of the process that imported jax, or a fresh interpreter."""

import sys

import jax

# A fresh interpreter has the program on its command line; a fork has the fork server's command line.
kind = "forked" if "jaxrun_runtime.forkserver" in " ".join(sys.orig_argv) else "fresh"
print(f"rank {jax.process_index()} {kind}", flush=True)
