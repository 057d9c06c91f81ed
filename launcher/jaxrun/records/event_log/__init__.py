"""The log of a job's events and of the head's actions, events.jsonl."""
