"""The request (Job) and what to start for it (Plan): frozen values, and pure functions from one to the other.

Only `devices.probe_machine`, `program_check.check_program` and the readers of files look at the machine.
"""
