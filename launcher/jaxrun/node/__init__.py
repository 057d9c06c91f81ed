"""The processes on each host: agents and their guards, the fork server, and the channel to the head."""
