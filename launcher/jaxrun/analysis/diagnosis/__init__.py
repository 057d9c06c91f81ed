"""What happened to each worker, as values: how it ended, whose failure came first, where it is; what hosts lack."""
