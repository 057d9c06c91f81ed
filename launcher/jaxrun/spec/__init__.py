"""The request for a job, and the plan of what to start for it, as values."""
