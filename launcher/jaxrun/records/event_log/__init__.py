"""The events of a job, the actions of the head, and the log of both, events.jsonl."""
