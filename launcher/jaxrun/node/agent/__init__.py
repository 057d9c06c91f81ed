"""Starts, watches and stops the workers of one host; spawn.py is where processes are started."""
