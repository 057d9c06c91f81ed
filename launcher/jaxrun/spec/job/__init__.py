"""What was asked for (Job) and what will be started (Plan): frozen values, and pure functions from one to the other.

Only `devices.probe_machine`, `program.check_program` and the readers of files look at the machine.
"""
