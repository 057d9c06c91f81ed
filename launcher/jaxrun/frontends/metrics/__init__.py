"""--metrics: a process beside the launcher that serves what a running job is, as Prometheus reads it."""
