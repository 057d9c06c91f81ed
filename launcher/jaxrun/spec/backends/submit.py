"""Writes batch scripts, submits them, and follows the job: prints its state and its output as they change.

A scheduler serves a whole cluster, so it is asked at most once a second; the output is read from the job's output
file.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from jaxrun.errors import UnavailableError
from jaxrun.spec.backends.batch_script import BatchPhase, BatchState, Scheduler
from jaxrun.spec.backends.generated_files import write_generated_file
from jaxrun.terminal import print_notice


def write_script(scheduler: Scheduler, path: Path, text: str) -> None:
    """Write a batch script. Raises UsageError rather than overwrite a file that jaxrun has not written."""
    write_generated_file(path, text, option=scheduler.option, kind="batch script", mode=0o700)


def submit(scheduler: Scheduler, text: str, keep_at: Path, environ: Mapping[str, str]) -> tuple[str, str]:
    """Write the script `text` to `keep_at` and submit it; returns the job's number and the command's remarks.

    Raises UnavailableError if the scheduler refuses the job; the script is kept.
    """
    write_script(scheduler, keep_at, text)
    program, script = scheduler.submit[0], shlex.quote(str(keep_at))
    try:
        done = subprocess.run(
            [*scheduler.submit, str(keep_at)],
            env=scheduler.submission_env(text, environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
    except FileNotFoundError:
        raise UnavailableError(
            f"--submit needs {program}, which is not on PATH; the script is kept; where there is {program}, "
            f"type: {program} {script}"
        ) from None
    remarks = done.stderr.strip()
    number = re.match(scheduler.number, done.stdout)
    if done.returncode or number is None:
        reason = remarks or done.stdout.strip() or f"exit status {done.returncode}"
        raise UnavailableError(f"{program} refused the job: {reason}\nthe script is kept: {program} {script}")
    return number[1], remarks


_FIRST_NOTE_S, _NEXT_NOTE_S = 2.0, 10.0  # until the first line about a pending job, and between later ones
_OUTPUT_POLL_S = 0.2
_EARLY_QUERY_S, _QUERY_S = 1.0, 3.0  # between two queries of the controller
_EARLY_PHASE_S = 30.0


def submit_and_follow(scheduler: Scheduler, text: str, keep_at: Path, environ: Mapping[str, str]) -> int:
    """Submit the batch script `text`, which is kept at `keep_at`, and follow the job; returns the job's exit status."""
    number, remarks = submit(scheduler, text, keep_at, environ)
    if remarks:
        print_notice(remarks)
    print_notice(f"submitted job {number} (script: {shlex.quote(str(keep_at))}); Ctrl-C stops following, not the job")
    return JobFollower(scheduler, number, environ, scheduler.output(text, number)).follow()


class JobFollower:
    """Follows one job to its end, or until Ctrl-C."""

    def __init__(self, scheduler: Scheduler, job: str, environ: Mapping[str, str], output: str = "") -> None:
        """`output` is the job's output file, if only its script says it."""
        self._scheduler = scheduler
        self._job = job
        self._environ = environ
        self._output_file = output
        self._last: BatchState | None = None
        self._began = self._answered = time.monotonic()
        self._note_due = self._began + _FIRST_NOTE_S
        self._offset = 0

    def follow(self) -> int:
        query_at = self._began
        try:
            while True:
                now = time.monotonic()
                if now >= query_at:
                    self._report_changes(self._query())
                    query_at = time.monotonic() + (_EARLY_QUERY_S if now - self._began < _EARLY_PHASE_S else _QUERY_S)
                self._copy_output()
                if self._last and self._last.is_over:
                    return self._finish(self._last)
                time.sleep(_OUTPUT_POLL_S)
        except (KeyboardInterrupt, BrokenPipeError):
            self._detach()
            return 0

    def _query(self) -> BatchState | None:
        try:
            return self._scheduler.query(self._job, self._environ)
        except UnavailableError:
            text = f"{self._scheduler.title} has forgotten job {self._job}, so nobody knows how it ended"
            raise UnavailableError(f"{text}{self._output_hint()}") from None

    def _report_changes(self, state: BatchState | None) -> None:
        """Print changes, and from time to time that nothing has changed."""
        now = time.monotonic()
        before, due = self._last, now >= self._note_due
        if state is None:
            if due and now - self._answered > _NEXT_NOTE_S:
                print_notice(f"{self._scheduler.title} does not answer; job {self._job} is not affected")
                self._note_due = now + _NEXT_NOTE_S
            return
        self._answered, self._last = now, state
        if before and state.restarts > before.restarts:
            print_notice(f"{self._scheduler.title} starts job {self._job} again (restart {state.restarts})")
        if state.phase is BatchPhase.PENDING and due:
            print_notice(f"job {self._job} is pending ({state.reason})")
            self._note_due = now + _NEXT_NOTE_S
        elif state.phase is BatchPhase.RUNNING and (before is None or before.phase is not BatchPhase.RUNNING):
            print_notice(f"job {self._job} is running on {state.nodes}{self._output_hint()}")

    def _copy_output(self) -> None:
        """Print what was appended to the job's output file."""
        if not self._output:
            return
        with contextlib.suppress(FileNotFoundError), open(self._output, "rb") as file:
            if os.fstat(file.fileno()).st_size < self._offset:  # the file was started anew
                self._offset = 0
            file.seek(self._offset)
            while chunk := file.read(1 << 16):
                self._offset += len(chunk)
                sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()

    def _finish(self, state: BatchState) -> int:
        time.sleep(_OUTPUT_POLL_S)  # a network file system may show the last lines a little later
        self._copy_output()
        if not state.is_plain:
            print_notice(f"job {self._job} ended as {state.name}{self._output_hint()}")
        return state.exit_status

    def _detach(self) -> None:
        print_notice(f"job {self._job} continues; jaxrun no longer follows it")
        if self._output:
            print_notice(f"to follow it again: tail -f {shlex.quote(self._output)}")
        print_notice(f"to cancel it: {self._scheduler.cancel} {self._job}")

    def _output_hint(self) -> str:
        return f"; output: {self._output}" if self._output else ""

    @property
    def _output(self) -> str:
        """The path of the output file, once the job is known; empty if nobody knows."""
        return self._last.output or self._output_file if self._last else ""
