"""Gangs in notebooks: %gang and %%gang, and the display of the ranks' output, progress and errors."""
