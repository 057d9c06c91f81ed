"""What happened to each worker, as values: how it ended, whose failure came first, where its stacks show it to be."""
