"""What a job leaves and shows: its output, its events, its run directory, and how they are read again."""
