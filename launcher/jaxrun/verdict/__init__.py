"""Weigh how the workers ended, and say it."""
