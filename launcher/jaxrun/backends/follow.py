"""Hands a batch script to Slurm and follows the job: its state in words of ours, its output as it grows.

What Slurm answers is parsed by pure functions. Its controller, which serves a whole cluster, is asked at most once a
second, and the output is read from the file that Slurm names.
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
from dataclasses import dataclass
from pathlib import Path

from jaxrun.backends.sbatch import SCRIPT_MARK
from jaxrun.errors import (
    EXIT_PREEMPTED,
    EXIT_SIGNAL_BASE,
    EXIT_TIMEOUT,
    EXIT_UNAVAILABLE,
    UnavailableError,
    UsageError,
)

_UNFINISHED_STATES = {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD",
                      "REQUEUE_FED", "RESIZING", "RESV_DEL_HOLD", "SIGNALING", "SPECIAL_EXIT", "STAGE_OUT",
                      "STOPPED"}  # fmt: skip
# For these ends Slurm's own ExitCode says nothing, or another thing than the user asks for.
_EXIT_STATUS_BY_STATE = {
    "BOOT_FAIL": EXIT_UNAVAILABLE,
    "CANCELLED": EXIT_SIGNAL_BASE + 15,
    "DEADLINE": EXIT_TIMEOUT,
    "NODE_FAIL": EXIT_UNAVAILABLE,
    "OUT_OF_MEMORY": EXIT_SIGNAL_BASE + 9,
    "PREEMPTED": EXIT_PREEMPTED,
    "TIMEOUT": EXIT_TIMEOUT,
}
_ALLOCATION_VARIABLE = re.compile(r"SLURM_(?!CONF$|CLUSTERS$)")
_FIRST_NOTE_S, _NEXT_NOTE_S = 2.0, 10.0  # seconds until it is said that a job still waits, and between two such lines
_OUTPUT_POLL_S = 0.2  # seconds between two looks at the output
_EARLY_QUERY_S, _QUERY_S, _EARLY_PHASE_S = (
    1.0,
    3.0,
    30.0,
)  # seconds between two questions, from `_SOON` after the start on fewer
_QUERY_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class JobState:
    """What `scontrol show job` says. `nodes` is empty until it runs, `output` where it has none."""

    state: str
    reason: str
    nodes: str
    output: str
    restarts: int
    exit_code: int
    exit_signal: int

    @property
    def is_over(self) -> bool:
        return self.state not in _UNFINISHED_STATES

    @property
    def exit_status(self) -> int:
        """What a command that stands for the job ends with."""
        code = EXIT_SIGNAL_BASE + self.exit_signal if self.exit_signal else self.exit_code
        return _EXIT_STATUS_BY_STATE.get(self.state, code)


def parse_job_state(text: str) -> JobState | None:
    """The state in the words of `scontrol show job`; None if it is not there."""
    found = {
        name: value for name, value in re.findall(r"^   .*?\b(JobState|StdOut|NodeList)=(.*)$", text, re.MULTILINE)
    }
    state = re.match(r"(\S+)(?: Reason=(\S+))?", found.get("JobState", ""))
    counts = re.search(r"^   Requeue=.*\bRestarts=(\d+).*\bExitCode=(\d+):(\d+)", text, re.MULTILINE)
    if state is None or counts is None:
        return None
    nodes = found.get("NodeList", "")
    return JobState(
        state=state[1],
        reason=state[2] or "",
        nodes="" if nodes == "(null)" else nodes,
        output=found.get("StdOut", ""),
        restarts=int(counts[1]),
        exit_code=int(counts[2]),
        exit_signal=int(counts[3]),
    )


def submission_env(text: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for sbatch, in which no variable overrides a #SBATCH line of the script `text`.

    Nor does one tell of the allocation that this shell may be in itself: sbatch would hand it on to the job.
    """
    stated = re.findall(r"^#SBATCH --([a-z-]+)", text, re.MULTILINE)
    names = {f"SBATCH_{option.upper().replace('-', '_')}" for option in stated}
    names |= {"SBATCH_ARRAY_INX", "SBATCH_NO_REQUEUE", "SBATCH_WAIT"} | (
        {"SBATCH_TIMELIMIT"} if "time" in stated else set()
    )
    inside = "SLURM_JOB_ID" in environ
    return {
        name: value
        for name, value in environ.items()
        if name not in names and not (inside and _ALLOCATION_VARIABLE.match(name))
    }


def write_script(path: Path, text: str) -> None:
    """Write a batch script; UsageError rather than lose a file that is none of ours."""
    try:
        if path.exists() and SCRIPT_MARK not in path.read_text(errors="replace"):
            raise UsageError(f"--sbatch {path} is a file already, and no batch script of jaxrun's; give another name")
        path.write_text(text, encoding="utf-8", errors="surrogateescape")
        path.chmod(0o755)
    except OSError as error:
        raise UsageError(f"the batch script cannot be written to {path}: {error.strerror}") from None


def submit(text: str, keep_at: Path, environ: Mapping[str, str]) -> int:
    """Write the script `text` to `keep_at`, hand it to Slurm and follow the job; returns what the command ends with."""
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
            f"--submit needs sbatch, which is not on PATH; the script is kept, for a machine that has: sbatch {script}"
        ) from None
    words = done.stderr.strip()
    number = re.match(r"[0-9]+", done.stdout)
    if done.returncode or number is None:
        said = words or done.stdout.strip() or f"exit status {done.returncode}"
        raise UnavailableError(f"sbatch refused the job: {said}\nthe script is kept: sbatch {script}")
    if words:
        _print_note(words)
    _print_note(f"submitted job {number[0]} (script: {script}); Ctrl-C stops following, not the job")
    return JobFollower(number[0], environ).follow()


class JobFollower:
    """Follows one job to its end, or until Ctrl-C."""

    def __init__(self, job: str, environ: Mapping[str, str]) -> None:
        self._job = job
        self._environ = environ
        self._last: JobState | None = None
        self._began = self._answered = time.monotonic()
        self._word_due = self._began + _FIRST_NOTE_S
        self._offset = 0

    def follow(self) -> int:
        ask_at = self._began
        try:
            while True:
                now = time.monotonic()
                if now >= ask_at:
                    self._report_changes(self._query())
                    ask_at = time.monotonic() + (_EARLY_QUERY_S if now - self._began < _EARLY_PHASE_S else _QUERY_S)
                self._copy_output()
                if self._last and self._last.is_over:
                    return self._finish(self._last)
                time.sleep(_OUTPUT_POLL_S)
        except (KeyboardInterrupt, BrokenPipeError):
            self._detach()
            return 0

    def _query(self) -> JobState | None:
        command = ["scontrol", "show", "job", self._job]
        with contextlib.suppress(subprocess.TimeoutExpired, FileNotFoundError):
            done = subprocess.run(
                command,
                env=dict(self._environ),
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_QUERY_TIMEOUT_S,
            )
            if "Invalid job id" in done.stderr:
                raise UnavailableError(
                    f"Slurm has forgotten job {self._job}, so how it ended is not known{self._output_hint()}"
                )
            return parse_job_state(done.stdout) if done.returncode == 0 else None
        return None

    def _report_changes(self, state: JobState | None) -> None:
        """Say what has changed, and from time to time that nothing has."""
        now = time.monotonic()
        before, due = self._last, now >= self._word_due
        if state is None:
            if due and now - self._answered > _NEXT_NOTE_S:
                _print_note(f"Slurm does not answer; job {self._job} is not affected")
                self._word_due = now + _NEXT_NOTE_S
            return
        self._answered, self._last = now, state
        if before and state.restarts > before.restarts:
            _print_note(f"job {self._job} is to start again (restart {state.restarts})")
        if state.state == "PENDING" and due:
            _print_note(f"job {self._job} is pending ({state.reason})")
            self._word_due = now + _NEXT_NOTE_S
        elif state.state == "RUNNING" and (before is None or before.state != "RUNNING"):
            _print_note(f"job {self._job} runs on {state.nodes}; output: {state.output}")

    def _copy_output(self) -> None:
        """Pass on what has been added to the output."""
        if self._last is None or not self._last.output:
            return
        with contextlib.suppress(FileNotFoundError), open(self._last.output, "rb") as file:
            if os.fstat(file.fileno()).st_size < self._offset:  # begun anew
                self._offset = 0
            file.seek(self._offset)
            while chunk := file.read(1 << 16):
                self._offset += len(chunk)
                sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()

    def _finish(self, state: JobState) -> int:
        time.sleep(_OUTPUT_POLL_S)  # a file system of a network may show the last lines a little later
        self._copy_output()
        if state.state not in ("COMPLETED", "FAILED"):
            _print_note(f"job {self._job} ended as {state.state}{self._output_hint()}")
        return state.exit_status

    def _detach(self) -> None:
        _print_note(f"job {self._job} goes on without being followed")
        if self._last and self._last.output:
            _print_note(f"to follow it again: tail -f {shlex.quote(self._last.output)}")
        _print_note(f"to cancel it: scancel {self._job}")

    def _output_hint(self) -> str:
        return f"; output: {self._last.output}" if self._last and self._last.output else ""


def _print_note(text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        print(f"jaxrun: {text}", file=sys.stderr, flush=True)
