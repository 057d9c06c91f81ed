"""The files and the output of a job: its run directory, its events, and reading them again."""
