"""Describes how a job ended: who caused it, what known errors mean, what to do, and the exit code."""
