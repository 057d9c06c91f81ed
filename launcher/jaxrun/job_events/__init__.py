"""What happens to a job, as values: events, which the head handles, and its actions. The event log has both."""
