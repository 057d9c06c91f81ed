"""Reads the ranks' flight recorders, finds where the ranks were out of step, and describes it."""
