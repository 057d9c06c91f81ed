"""The command line: `main` has the commands, `options` the flags and the Job they make, `help` the pages of help.

`spare` is a launcher that has been started ahead of its command line.
"""
