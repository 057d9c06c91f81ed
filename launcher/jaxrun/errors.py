"""Every error that jaxrun raises on purpose, with the exit code that it ends in.

    JaxrunError               an expected failure: one clear message, no traceback
    ├── UsageError       2    the request cannot be carried out as it was typed
    │   └── ModuleMissingError   -m names a module that is not installed
    ├── NotUniformError  65   the processes are not the job that was asked for
    ├── UnavailableError 69   something that the job needs is missing or could not start
    ├── NoPlaceError     73   the job runs already, and takes in no process that comes now
    └── ProtocolError    70   a peer broke the contract; a bug of ours, or someone else's program on our socket

Anything else that escapes is a bug and keeps its traceback, save where the machine has run out of something. A message
says what was wrong, which value was received, and what to do next.
"""

from __future__ import annotations

import contextlib
import errno

_NOT_INSTALLED = ("ModuleNotFoundError:", "ImportError:")
EXIT_USAGE = 2
EXIT_NOT_UNIFORM = 65
EXIT_UNAVAILABLE = 69
EXIT_SOFTWARE = 70
EXIT_NO_PLACE = 73
EXIT_PREEMPTED = 75
EXIT_TIMEOUT = 124
EXIT_SIGNAL_BASE = 128


class JaxrunError(Exception):
    """An expected failure; `exit_code` is what the command ends with.

    >>> try:
    ...     jaxrun.run("nosuch.py")
    ... except jaxrun.JaxrunError as error:
    ...     print(error.exit_code)
    2
    """

    exit_code = 1


class UsageError(JaxrunError):
    """The request cannot be carried out as it was typed.

    >>> jaxrun.run("hello.py", max_restart=2)
    Traceback (most recent call last):
    jaxrun.errors.UsageError: there is no option --max-restart; did you mean --max-restarts?
    """

    exit_code = EXIT_USAGE


class ModuleMissingError(UsageError):
    """-m names a module that was not found, or one of a package that was not found; `module` is its whole name."""

    def __init__(self, text: str, module: str) -> None:
        super().__init__(text)
        self.module = module


class NotUniformError(JaxrunError):
    exit_code = EXIT_NOT_UNIFORM


class UnavailableError(JaxrunError):
    exit_code = EXIT_UNAVAILABLE


class NoPlaceError(JaxrunError):
    exit_code = EXIT_NO_PLACE


class ProtocolError(JaxrunError):
    exit_code = EXIT_SOFTWARE


def add_note(error: BaseException, text: str) -> None:
    """Add a note to an exception, unless its class refuses attributes: the exception matters more than the note."""
    with contextlib.suppress(BaseException):  # its class may even raise a sys.exit there
        error.add_note(text)


_PROCESSES = "raise the limit (ulimit -u, or the container's), or start fewer with -n"
_DISK = "make room, or let the job leave its files elsewhere: --run-dir DIR, or --no-run-dir"
_SHORTAGES = {
    errno.EMFILE: "raise the limit: ulimit -n 65536",
    errno.ENFILE: "the whole machine has reached its limit; see /proc/sys/fs/file-nr",
    errno.EAGAIN: _PROCESSES,
    errno.ENOMEM: "start fewer processes with -n, or free memory",
    errno.ENOSPC: _DISK,
    errno.EDQUOT: _DISK,
    errno.EROFS: _DISK,
}
_NO_THREAD = "can't start new thread"  # how Python words it, as a RuntimeError


def describe_shortage(error: Exception) -> str:
    """Describe the resource that this machine has run out of, and what to do; empty for an error of another kind."""
    if isinstance(error, RuntimeError) and _NO_THREAD in str(error):
        return f"no more threads can be started here; {_PROCESSES}; where memory is limited (ulimit -v), raise that"
    if not isinstance(error, OSError) or error.errno not in _SHORTAGES:
        return ""
    what = "No more processes can be started" if error.errno == errno.EAGAIN else error.strerror
    where = f" ({error.filename})" if error.filename else ""
    return f"the job cannot be run here: {what}{where}; {_SHORTAGES[error.errno]}"


def describe_failed_import(reason: str, python: str) -> str:
    """Describe why an interpreter could not import jax; `reason` is the exception, "ValueError: …"."""
    text = f"jax could not be imported: {reason}"
    return f"{text}\nis it installed for {python}?" if reason.startswith(_NOT_INSTALLED) else text
