"""The commands of jaxrun for sphinx-click, which looks for them in a module."""

from jaxrun.cli.main import _command

jaxrun = _command("")
attach, doctor, top, stacks, logs, stop = map(_command, ("attach", "doctor", "top", "stacks", "logs", "stop"))
profile, debug, explain, list_, clean = map(_command, ("profile", "debug", "explain", "list", "clean"))
