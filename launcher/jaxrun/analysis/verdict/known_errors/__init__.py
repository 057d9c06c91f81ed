"""Error texts of JAX, hosts and launchers, each with its cause and what to do. One table, split by theme."""
