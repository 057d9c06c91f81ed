"""Jobs that somebody else started: the processes are there, and each becomes the agent of one worker."""
