"""jaxrun.run: runs a program as a job, from Python, and returns how it ended.

The job's launcher is a child process, `python -m jaxrun WORDS`, and not a thread of the caller's process. The launcher
needs a process of its own: it handles all signals, adopts orphans as a subreaper, waits for any child, and forks
workers before a thread exists. None of that is possible inside somebody's notebook, and a crash in one would take the
other along. As the command line checks and runs what is asked for, both mean the same by construction.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from jaxrun.analysis.verdict.verdict import Verdict, from_json
from jaxrun.analysis.verdict.verdict_text import headline_of
from jaxrun.errors import JaxrunError, NotUniformError, ProtocolError, UnavailableError, UsageError
from jaxrun.frontends.gang.ipython import find_shell
from jaxrun.frontends.gang.notebook_display import show_user_frames
from jaxrun.frontends.jobs.command_words import Program, make_words
from jaxrun.frontends.jobs.job_handle import Job
from jaxrun.frontends.jobs.launcher import (
    Launcher,
    LineSplitter,
    Show,
    can_forward_interrupts,
    forwarded_signals,
)
from jaxrun.text import format_seconds

_ERRORS = {kind.exit_code: kind for kind in (UsageError, NotUniformError, UnavailableError, ProtocolError)}


class Result(Struct, frozen=True):
    """How a job ended that `run` has run.

    exit_code:  as the command line's: 0 if all went well
    verdict:    how it ended and why, the content of verdict.json; None if jaxrun itself was killed, or ran no job
    run_dir:    the run directory; None if there is none

    >>> result = jaxrun.run("hello.py", processes=2, only_rank="1", on_line=print, quiet=True)
    [1] hello
    >>> result.ok, result.exit_code, result.verdict.outcome
    (True, 0, 'ok')
    """

    exit_code: int
    verdict: Verdict | None = None
    run_dir: Path | None = None

    @property
    def ok(self) -> bool:
        """Whether all went well."""
        return self.exit_code == 0

    @property
    def headline(self) -> str:
        """What happened, in one sentence; empty if that is not known."""
        return headline_of(self.verdict) if self.verdict is not None else ""

    @property
    def seconds(self) -> float | None:
        """How long the job took; None if that is not known."""
        return self.verdict.seconds if self.verdict is not None else None

    @property
    def job(self) -> Job:
        """The job, whose files say more. Raises UsageError without a run directory."""
        if self.run_dir is None:
            raise UsageError("this job has left no run directory")
        return Job(self.run_dir)

    def __repr__(self) -> str:
        how = self.verdict.outcome if self.verdict is not None else "ok" if self.ok else "failed"
        took = f" after {format_seconds(self.seconds)}" if self.seconds is not None else ""
        where = f", {os.path.relpath(self.run_dir)}" if self.run_dir is not None else ""
        return f"<Result: {how}, exit {self.exit_code}{took}{where}>"


def run(
    program: Program,
    *,
    processes: int | None = None,
    devices_per_process: int | None = None,
    platform: str | None = None,
    hosts: int | str | None = None,
    host: str | Sequence[str] | None = None,
    backend: str | None = None,
    env: Mapping[str, str | None] | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    tag: str | None = None,
    timeout: float | str | None = None,
    stall_timeout: float | str | None = None,
    max_restarts: int | None = None,
    on_line: Callable[[str], object] | None = None,
    **options: Any,
) -> Result:
    """Run a program as a job, wait until it has ended, and return how; the same as `jaxrun OPTIONS PROGRAM ARGS`.

    program:  the program and its arguments: a list, or a text that is split as in a shell. ["-m", "mypackage.train"]
              runs a module
    env:      variables to set in every process; None as a value passes yours on
    on_line:  is called with each line that the screen would show, instead; print and a list's append will do
    options:  all other options of `jaxrun --help-all` by their names, with underscores: lockstep="strict",
              only_rank=[0, 3], mpi_args=["--bind-to none"]; True for options without a value: no_fork=True

    Defaults come from pyproject.toml and JAXRUN_ variables, as for the command line. The ranks' standard input is
    empty; stdin="0" gives rank 0 this process's, if that is a file or a pipe.

    A job that fails is no error here: look at the result. Raises UsageError, or another JaxrunError, with the command
    line's words if no job can start; KeyboardInterrupt after Ctrl-C, once the job has ended: the first Ctrl-C
    interrupts the ranks, as at the command line, and the second kills them. SIGTERM and SIGHUP end the job as they end
    the command, then your process, if it does not handle them.

    Several threads may run jobs at once. In a thread, which cannot handle signals, Ctrl-C of the terminal reaches the
    job itself. No job outlives this process, even if that is killed.

    >>> shown = []
    >>> for rate in (0.1, 0.2):
    ...     result = jaxrun.run(["hello.py", "--lr", rate], processes=2, tag=f"lr={rate}", on_line=shown.append)
    ...     print(result.ok, result.job.tag, [line.text for line in result.job.lines()])
    True lr=0.1 ['hello', 'hello']
    True lr=0.2 ['hello', 'hello']
    """
    named = {
        "processes": processes,
        "devices_per_process": devices_per_process,
        "platform": platform,
        "hosts": hosts,
        "host": host,
        "backend": backend,
        "env": env,
        "run_dir": run_dir,
        "tag": tag,
        "timeout": timeout,
        "stall_timeout": stall_timeout,
        "max_restarts": max_restarts,
    }
    lines = LineSplitter(on_line) if on_line is not None else None
    try:
        words = make_words(program, named | options)
        result = _run(words, _choose_screen() if lines is None else [lines])
    except (JaxrunError, KeyboardInterrupt) as error:
        if (shell := find_shell()) is not None:
            show_user_frames(shell, error)
        raise
    if lines is not None:
        lines.flush()
    return result


def _run(words: Sequence[str], show: Sequence[Show]) -> Result:
    """Run the job; at its end the signals that have come take effect."""
    started: list[Launcher] = []
    received: list[int] = []
    waiting = deque[int]()  # signals that the launcher has not been sent yet

    def forward(signum: int) -> None:
        waiting.append(signum)
        send_waiting()

    def send_waiting() -> None:
        with contextlib.suppress(IndexError):  # another signal has come meanwhile, and its handler has sent this one
            while started and waiting:
                started[0].send_signal(waiting.popleft())

    own_session = can_forward_interrupts()
    try:
        with forwarded_signals(forward) as received:
            launcher = Launcher(words, show, own_session=own_session)
            started.append(launcher)
            send_waiting()  # what came before it was started
            try:
                return _result(launcher, launcher.wait())
            finally:
                started.clear()
                launcher.close()
    finally:
        for signum in dict.fromkeys(received):
            signal.raise_signal(signum)


def _result(launcher: Launcher, exit_code: int) -> Result:
    """Return how the job ended. Raises the launcher's error if there was no job."""
    link = launcher.link
    if link.not_started is not None:
        error = _ERRORS.get(link.not_started.exit_code, JaxrunError)
        raise error(link.not_started.error)
    if link.began is None:
        return Result(exit_code)
    run_dir = Path(link.began.run_dir) if link.began.run_dir else None
    return Result(exit_code, from_json(link.verdict) if link.verdict else None, run_dir)


def _choose_screen() -> Sequence[Show]:
    """Return what shows the text of stdout and stderr; empty if the launcher can print where this process does.

    In a notebook, or under pytest, sys.stdout is not the stdout of the process.
    """
    is_plain = sys.stdout is sys.__stdout__ and sys.stderr is sys.__stderr__
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    if is_plain and sys.stdout is not None and sys.stderr is not None:
        return ()
    return tuple(_printer(name) for name in ("stdout", "stderr"))


def _printer(name: str) -> Show:
    """Return a function that writes to sys.stdout or sys.stderr, whatever that is at the time."""

    def show(text: str) -> None:
        stream = getattr(sys, name)
        if stream is not None:
            stream.write(text)
            stream.flush()

    return show
