"""Gangs in notebooks: %gang and %%gang. How a notebook shows what the ranks print is in gang/notebook_display.py."""
