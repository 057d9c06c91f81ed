"""Read the ranks' flight recorders, find where they were out of step, and say it."""
