"""The terminal that jaxrun was started from: who reads what is typed there (--stdin, debuggers).

head/debugger_turns.py decides which rank's debugger has it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from jaxrun.protocol.settings import STDIN_NONE, STDIN_RANK_0
from jaxrun.spec.job.combinations import check_stdin_over_hosts

if TYPE_CHECKING:
    from jaxrun.node.channel.event_loop import EventLoop
    from jaxrun.records.output.output import Output
    from jaxrun.spec.job.job import Job
    from jaxrun.spec.job.plan import LaunchCommand, Plan

_STDIN = 0
_READ_BYTES = 4096


def resolve_stdin(job: Job, command: LaunchCommand | None) -> Job:
    """Decide `stdin` where it was not given. Raises UsageError if what was given is not possible.

    Over hosts it is the launch `command` that passes the input on. It would take what is typed for a debugger, so that
    by default a terminal is no rank's.
    """
    if command is not None and not command.passes_stdin:
        check_stdin_over_hosts(job, command.title)
    takes_terminal = job.live or command is not None  # from the ranks
    default = STDIN_NONE if takes_terminal and os.isatty(_STDIN) else STDIN_RANK_0
    return replace(job, stdin=job.stdin or default)


def find_prompting_rank(job: Job) -> int | None:
    """Return the rank for which somebody may type; None if no rank reads our standard input, or it is no input."""
    try:
        kind = os.fstat(_STDIN).st_mode
        has_input = os.isatty(_STDIN) or stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind)
    except OSError:  # it is closed
        return None
    return int(job.stdin) if has_input and job.stdin.isdigit() else None


def why_no_terminal(plan: Plan) -> str:
    """Why nobody can type anything for a debugger, to complete "it cannot be debugged: …"; empty if someone can."""
    stdin = plan.job.stdin
    if plan.job.live:
        return "--live has the terminal"
    if not os.isatty(_STDIN):
        return "jaxrun's standard input is not a terminal"
    takes_it = plan.launch_command is not None and stdin != STDIN_NONE
    return f"--stdin {stdin} gives the terminal to rank {stdin}" if takes_it else ""


class Terminal:
    """Reads single lines, when they are wanted, so that others can read from the terminal in between."""

    def __init__(self, output: Output, loop: EventLoop, order: int, on_line: Callable[[str], None]) -> None:
        """`on_line` is called in `loop` with each line that was asked for; empty at the end of the input."""
        self._output = output
        self._partial = b""
        self._loop, self._order, self._on_line = loop, order, on_line

    def show(self, text: str) -> None:
        self._output.show_debugger(text)

    def read_line(self) -> None:
        if not self._loop.has_reader(_STDIN):
            self._loop.add_reader(_STDIN, self._order, self._on_readable)

    def stop_reading(self) -> None:
        """Leave what is typed to whoever reads next."""
        self._loop.remove_reader(_STDIN)

    def _on_readable(self) -> None:
        try:
            data = os.read(_STDIN, _READ_BYTES)
        except OSError:  # the terminal has been closed
            data = b""
        self._partial += data
        if data and not data.endswith(b"\n"):  # Ctrl-D within a line; the rest comes later
            return
        self._loop.remove_reader(_STDIN)
        line, self._partial = self._partial.decode(errors="replace"), b""
        self._output.end_debugger_line()
        self._on_line(line)
