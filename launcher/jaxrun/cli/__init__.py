"""The command line: `main` has the commands, `click_options` the flags, `make_job` makes the Job, `help` its pages."""
