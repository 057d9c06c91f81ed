"""Brings the processes of a job together and decides how it ends: state machines without I/O."""
