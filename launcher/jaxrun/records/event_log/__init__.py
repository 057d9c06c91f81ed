"""The events of a job, what the head wants done about them, and the log of both, events.jsonl."""
