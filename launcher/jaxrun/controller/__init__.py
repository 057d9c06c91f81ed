"""Runs one job from its first process to its exit code: the head decides, the supervisor carries out."""
