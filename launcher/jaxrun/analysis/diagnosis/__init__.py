"""Values that describe each worker: how it ended, whose failure came first, where it is; and what hosts lack."""
