"""Bring the job together and decide how it ends: state machines without I/O."""
