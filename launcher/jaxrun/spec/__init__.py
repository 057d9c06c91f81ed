"""What was asked for, and what will be started for it, as values."""
