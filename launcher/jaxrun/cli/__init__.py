"""The command line: `main` has the commands, `options` the flags, `make_job` the Job they make, `help` its pages."""
