"""Follows a job that was handed to Slurm: prints its state when that changes, and its output as it grows.

Slurm's controller, which serves a whole cluster, is asked at most once a second; the output is read from the file that
Slurm names.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from jaxrun.errors import UnavailableError
from jaxrun.spec.backends.slurm_job_state import JobState, query_job_state
from jaxrun.spec.backends.submit import submit
from jaxrun.terminal import print_notice

_FIRST_NOTE_S, _NEXT_NOTE_S = 2.0, 10.0  # until the first line about a job that waits, and between two of them
_OUTPUT_POLL_S = 0.2
_EARLY_QUERY_S, _QUERY_S = 1.0, 3.0  # between two queries of the controller, early and later
_EARLY_PHASE_S = 30.0


def submit_and_follow(text: str, keep_at: Path, environ: Mapping[str, str]) -> int:
    """Hand the batch script `text`, which is kept at `keep_at`, to Slurm; returns the exit status of the job."""
    number, remarks = submit(text, keep_at, environ)
    if remarks:
        print_notice(remarks)
    print_notice(f"submitted job {number} (script: {shlex.quote(str(keep_at))}); Ctrl-C stops following, not the job")
    return JobFollower(number, environ).follow()


class JobFollower:
    """Follows one job to its end, or until Ctrl-C."""

    def __init__(self, job: str, environ: Mapping[str, str]) -> None:
        self._job = job
        self._environ = environ
        self._last: JobState | None = None
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

    def _query(self) -> JobState | None:
        try:
            return query_job_state(self._job, self._environ)
        except UnavailableError:
            raise UnavailableError(
                f"Slurm has forgotten job {self._job}, so how it ended is not known{self._output_hint()}"
            ) from None

    def _report_changes(self, state: JobState | None) -> None:
        """Print what has changed, and from time to time that nothing has."""
        now = time.monotonic()
        before, due = self._last, now >= self._note_due
        if state is None:
            if due and now - self._answered > _NEXT_NOTE_S:
                print_notice(f"Slurm does not answer; job {self._job} is not affected")
                self._note_due = now + _NEXT_NOTE_S
            return
        self._answered, self._last = now, state
        if before and state.restarts > before.restarts:
            print_notice(f"job {self._job} is to start again (restart {state.restarts})")
        if state.state == "PENDING" and due:
            print_notice(f"job {self._job} is pending ({state.reason})")
            self._note_due = now + _NEXT_NOTE_S
        elif state.state == "RUNNING" and (before is None or before.state != "RUNNING"):
            print_notice(f"job {self._job} runs on {state.nodes}; output: {state.output}")

    def _copy_output(self) -> None:
        """Print what has been added to the job's output file."""
        if self._last is None or not self._last.output:
            return
        with contextlib.suppress(FileNotFoundError), open(self._last.output, "rb") as file:
            if os.fstat(file.fileno()).st_size < self._offset:  # the file was begun anew
                self._offset = 0
            file.seek(self._offset)
            while chunk := file.read(1 << 16):
                self._offset += len(chunk)
                sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()

    def _finish(self, state: JobState) -> int:
        time.sleep(_OUTPUT_POLL_S)  # a network file system may show the last lines a little later
        self._copy_output()
        if state.state not in ("COMPLETED", "FAILED"):
            print_notice(f"job {self._job} ended as {state.state}{self._output_hint()}")
        return state.exit_status

    def _detach(self) -> None:
        print_notice(f"job {self._job} goes on without being followed")
        if self._last and self._last.output:
            print_notice(f"to follow it again: tail -f {shlex.quote(self._last.output)}")
        print_notice(f"to cancel it: scancel {self._job}")

    def _output_hint(self) -> str:
        return f"; output: {self._last.output}" if self._last and self._last.output else ""
