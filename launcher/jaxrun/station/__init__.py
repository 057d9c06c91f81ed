"""The head's side of a job whose agents are on other hosts."""
