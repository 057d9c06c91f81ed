"""Writes batch scripts, submits them to Slurm, and follows the job: prints its state and its output as they change.

Slurm's controller serves a whole cluster, so it is asked at most once a second; the output is read from the job's
output file.
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
from jaxrun.spec.backends.generated_files import write_generated_file
from jaxrun.spec.backends.slurm_job import JobState, query_job_state
from jaxrun.terminal import print_notice

_ALLOCATION_VARIABLE = re.compile(r"SLURM_(?!CONF$|CLUSTERS$)")


def submission_env(text: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for sbatch, without variables that would override a #SBATCH line of the script `text`.

    The variables of an allocation around this shell are left out, too, because sbatch would pass them to the job.
    """
    stated = re.findall(r"^#SBATCH --([a-z-]+)", text, re.MULTILINE)
    names = {f"SBATCH_{option.upper().replace('-', '_')}" for option in stated}
    names |= {"SBATCH_ARRAY_INX", "SBATCH_NO_REQUEUE", "SBATCH_WAIT"}
    if "time" in stated:
        names.add("SBATCH_TIMELIMIT")
    inside = "SLURM_JOB_ID" in environ
    return {
        name: value
        for name, value in environ.items()
        if name not in names and not (inside and _ALLOCATION_VARIABLE.match(name))
    }


def write_script(path: Path, text: str) -> None:
    """Write a batch script. Raises UsageError rather than overwrite a file that jaxrun has not written."""
    write_generated_file(path, text, option="--sbatch", kind="batch script", mode=0o700)


def submit(text: str, keep_at: Path, environ: Mapping[str, str]) -> tuple[str, str]:
    """Write the script `text` to `keep_at` and submit it; returns the job's number and what sbatch remarked.

    Raises UnavailableError if Slurm refuses the job; the script is kept.
    """
    write_script(keep_at, text)
    script = shlex.quote(str(keep_at))
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(keep_at)],
            env=submission_env(text, environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
    except FileNotFoundError:
        raise UnavailableError(
            f"--submit needs sbatch, which is not on PATH; the script is kept; where there is sbatch, "
            f"type: sbatch {script}"
        ) from None
    remarks = done.stderr.strip()
    number = re.match(r"[0-9]+", done.stdout)
    if done.returncode or number is None:
        reason = remarks or done.stdout.strip() or f"exit status {done.returncode}"
        raise UnavailableError(f"sbatch refused the job: {reason}\nthe script is kept: sbatch {script}")
    return number[0], remarks


_FIRST_NOTE_S, _NEXT_NOTE_S = 2.0, 10.0  # until the first line about a pending job, and between later ones
_OUTPUT_POLL_S = 0.2
_EARLY_QUERY_S, _QUERY_S = 1.0, 3.0  # between two queries of the controller
_EARLY_PHASE_S = 30.0


def submit_and_follow(text: str, keep_at: Path, environ: Mapping[str, str]) -> int:
    """Submit the batch script `text`, which is kept at `keep_at`, and follow the job; returns the job's exit status."""
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
                f"Slurm has forgotten job {self._job}, so nobody knows how it ended{self._output_hint()}"
            ) from None

    def _report_changes(self, state: JobState | None) -> None:
        """Print changes, and from time to time that nothing has changed."""
        now = time.monotonic()
        before, due = self._last, now >= self._note_due
        if state is None:
            if due and now - self._answered > _NEXT_NOTE_S:
                print_notice(f"Slurm does not answer; job {self._job} is not affected")
                self._note_due = now + _NEXT_NOTE_S
            return
        self._answered, self._last = now, state
        if before and state.restarts > before.restarts:
            print_notice(f"Slurm starts job {self._job} again (restart {state.restarts})")
        if state.state == "PENDING" and due:
            print_notice(f"job {self._job} is pending ({state.reason})")
            self._note_due = now + _NEXT_NOTE_S
        elif state.state == "RUNNING" and (before is None or before.state != "RUNNING"):
            print_notice(f"job {self._job} is running on {state.nodes}; output: {state.output}")

    def _copy_output(self) -> None:
        """Print what was appended to the job's output file."""
        if self._last is None or not self._last.output:
            return
        with contextlib.suppress(FileNotFoundError), open(self._last.output, "rb") as file:
            if os.fstat(file.fileno()).st_size < self._offset:  # the file was started anew
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
        print_notice(f"job {self._job} continues; jaxrun no longer follows it")
        if self._last and self._last.output:
            print_notice(f"to follow it again: tail -f {shlex.quote(self._last.output)}")
        print_notice(f"to cancel it: scancel {self._job}")

    def _output_hint(self) -> str:
        return f"; output: {self._last.output}" if self._last and self._last.output else ""
