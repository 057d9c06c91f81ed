"""Which rank has jaxrun's standard input: --stdin."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace

from jaxrun.errors import UsageError
from jaxrun.protocol.settings import STDIN_NONE, STDIN_RANK_0
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
    if (stdin or STDIN_RANK_0) == str(rank):
        with contextlib.suppress(OSError):  # it is closed
            return os.dup(_STDIN)
    return os.open(os.devnull, os.O_RDONLY)


def explain_no_terminal(stdin: str, *, over_hosts: bool, live: bool = False) -> str:
    """Why nobody can type anything for a debugger, to complete "it cannot be debugged: …"; empty if somebody can."""
    if live:
        return "--live has the terminal"
    if not os.isatty(_STDIN):
        return "jaxrun's standard input is not a terminal"
    return f"--stdin {stdin} gives the terminal to rank {stdin}" if over_hosts and stdin != STDIN_NONE else ""
