"""Which ranks have jaxrun's standard input: --stdin."""

from __future__ import annotations

import os
import stat
from dataclasses import replace

from jaxrun.errors import UsageError
from jaxrun.protocol.names import STDIN_ALL, STDIN_NONE, STDIN_RANK_0
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.plan import LaunchCommand

_STDIN = 0


def resolve_stdin(job: Job, command: LaunchCommand | None) -> Job:
    """Decide `stdin` where it was not given. Raises UsageError if what was given is not possible.

    Over hosts it is the launch `command` that passes the input on. It would take what is typed for a debugger, so that
    by default a terminal is no rank's.
    """
    if command is not None and not command.passes_stdin and job.stdin not in ("", STDIN_RANK_0, STDIN_NONE):
        raise UsageError(
            f"--stdin {job.stdin} is for ranks of one machine and for srun (--backend slurm); "
            f"with {command.title} it is --stdin {STDIN_RANK_0} or {STDIN_NONE}"
        )
    takes_terminal = job.live or command is not None  # from the ranks
    default = STDIN_NONE if takes_terminal and os.isatty(_STDIN) else STDIN_RANK_0
    return replace(job, stdin=job.stdin or default)


def open_stdin(stdin: str, rank: int) -> int:
    """Open what a rank reads, where jaxrun's standard input belongs to `stdin`; returns a descriptor."""
    mode = _mode()
    if mode is None or (stdin or STDIN_RANK_0) not in (STDIN_ALL, str(rank)):
        return os.open(os.devnull, os.O_RDONLY)
    if stdin == STDIN_ALL and stat.S_ISREG(mode):  # from its beginning, whatever other ranks have read
        return os.open(f"/proc/self/fd/{_STDIN}", os.O_RDONLY)
    return os.dup(_STDIN)


def must_be_copied(stdin: str) -> bool:
    """Whether all ranks of this machine are to read a pipe or a terminal, which can be read only once."""
    mode = _mode()
    if stdin != STDIN_ALL or mode is None:
        return False
    return os.isatty(_STDIN) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def explain_no_terminal(stdin: str, *, over_hosts: bool, live: bool = False) -> str:
    """Why nobody can type anything for a debugger, to complete "it cannot be debugged: …"; empty if somebody can."""
    if live:
        return "--live has the terminal"
    if not os.isatty(_STDIN):
        return "jaxrun's standard input is not a terminal"
    if stdin == STDIN_ALL:
        return f"--stdin {STDIN_ALL} gives the terminal to all ranks"
    return f"--stdin {stdin} gives the terminal to rank {stdin}" if over_hosts and stdin != STDIN_NONE else ""


def _mode() -> int | None:
    """The kind of file that standard input is; None if it is closed."""
    try:
        return os.fstat(_STDIN).st_mode
    except OSError:
        return None
