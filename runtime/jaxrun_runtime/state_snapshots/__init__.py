"""Snapshots of the program's state in the memory of its hosts, from which the next attempt continues."""
