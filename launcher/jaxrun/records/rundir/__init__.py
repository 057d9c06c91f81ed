"""The run directory: writes the files that a job leaves, and reads them for `explain` and `stacks`."""
