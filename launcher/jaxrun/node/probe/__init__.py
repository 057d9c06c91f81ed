"""What an agent finds out about its host and the way to the others, where the job asks for it."""
