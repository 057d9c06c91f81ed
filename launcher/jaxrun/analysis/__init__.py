"""What flight recorders, stacks and exits mean, as values and pure functions; and the words for it."""
