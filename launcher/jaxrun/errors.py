"""Every error that jaxrun raises on purpose, with the exit code that it ends in.

    JaxrunError               an expected failure: one clear message, no traceback
    ├── UsageError       2    the request cannot be carried out as it was typed
    ├── NotUniformError  65   the processes are not the job that was asked for
    ├── UnavailableError 69   something that the job needs is missing or could not start
    └── ProtocolError    70   a peer broke the contract; a bug of ours, or somebody else's program on our socket

Anything else that escapes is a bug and keeps its traceback. A message says what was wrong, which value was
received, and what to do next.
"""

from __future__ import annotations

EXIT_USAGE = 2
EXIT_NOT_UNIFORM = 65
EXIT_UNAVAILABLE = 69
EXIT_SOFTWARE = 70
EXIT_PREEMPTED = 75
EXIT_TIMEOUT = 124
EXIT_SIGNAL_BASE = 128


class JaxrunError(Exception):
    """An expected failure; `exit_code` is what the command ends with."""

    exit_code = 1


class UsageError(JaxrunError):
    exit_code = EXIT_USAGE


class NotUniformError(JaxrunError):
    exit_code = EXIT_NOT_UNIFORM


class UnavailableError(JaxrunError):
    exit_code = EXIT_UNAVAILABLE


class ProtocolError(JaxrunError):
    exit_code = EXIT_SOFTWARE
