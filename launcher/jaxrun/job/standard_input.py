"""Which ranks have jaxrun's standard input: --stdin."""

from __future__ import annotations

import os
import stat
from dataclasses import replace

from jaxrun.errors import UsageError
from jaxrun.job.job import Job
from jaxrun.protocol.names import STDIN_ALL, STDIN_NONE, STDIN_RANK_0

_STDIN = 0


def resolve_stdin(job: Job, *, over_hosts: bool) -> Job:
    """Decide `stdin` where it was not given. Raises UsageError if what was given is not possible.

    Over hosts mpirun and srun pass the input on to rank 0. They would take what is typed for a debugger, so that by
    default a terminal is no rank's.
    """
    if over_hosts and job.stdin not in ("", STDIN_RANK_0, STDIN_NONE):
        raise UsageError(
            f"--stdin {job.stdin} is for ranks of one machine; over hosts it is --stdin {STDIN_RANK_0} or {STDIN_NONE}"
        )
    if job.stdin == STDIN_ALL and not _is_file():
        raise UsageError(
            f"--stdin {STDIN_ALL} needs a file, which each rank can read by itself: "
            f"jaxrun --stdin {STDIN_ALL} … < answers.txt; a terminal and a pipe can be read only once"
        )
    default = STDIN_NONE if over_hosts and os.isatty(_STDIN) else STDIN_RANK_0
    return replace(job, stdin=job.stdin or default)


def open_stdin(stdin: str, rank: int) -> int:
    """Open what a rank reads, where jaxrun's standard input belongs to `stdin`; returns a descriptor."""
    if stdin == STDIN_ALL:
        return os.open(f"/proc/self/fd/{_STDIN}", os.O_RDONLY)
    if (stdin or STDIN_RANK_0) == str(rank) and _mode() is not None:
        return os.dup(_STDIN)
    return os.open(os.devnull, os.O_RDONLY)


def explain_no_terminal(stdin: str, *, over_hosts: bool) -> str:
    """Why nobody can type anything for a debugger, to complete "it cannot be debugged: …"; empty if somebody can."""
    if not os.isatty(_STDIN):
        return "jaxrun's standard input is not a terminal"
    return "--stdin 0 gives the terminal to rank 0" if over_hosts and stdin != STDIN_NONE else ""


def _is_file() -> bool:
    mode = _mode()
    return mode is not None and stat.S_ISREG(mode)


def _mode() -> int | None:
    """The kind of file that standard input is; None if it is closed."""
    try:
        return os.fstat(_STDIN).st_mode
    except OSError:
        return None
