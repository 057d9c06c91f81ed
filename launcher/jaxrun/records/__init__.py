"""The run directory: what a job leaves, and how it is told again."""
