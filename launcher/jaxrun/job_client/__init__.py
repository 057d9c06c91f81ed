"""The clients' end of a running job's socket: finds the job, and sends it requests."""
