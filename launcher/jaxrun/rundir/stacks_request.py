"""Asks a running job where its ranks are: a signal to its launcher, which writes the answer to the run directory."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from jaxrun.diagnosis.snapshot import Snapshot
from jaxrun.diagnosis.stacks import NATIVE_STACKS_TIMEOUT_S
from jaxrun.errors import UnavailableError, UsageError
from jaxrun.protocol.env import NATIVE_STACKS_SIGNAL, STACKS_SIGNAL
from jaxrun.rundir.jobs import has_open
from jaxrun.rundir.rundir import (
    EVENTS_FILE,
    JOB_FILE,
    LATEST_LINK,
    STACKS_FILE,
    VERDICT_FILE,
    find_run_dir,
)
from jaxrun.verdict import stack_text

_ANSWER_TIMEOUT_S = 5.0  # ranks on other hosts have 1.5 s of it
_CANNOT_ANSWER = (
    "the launcher of this job cannot be asked that: it is starting or ending, or of another version of jaxrun"
)
_POLL_S = 0.02
_WATCH_INTERVAL_S = 2.0


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A job whose launcher runs on this host."""

    run_dir: Path
    pid: int


def find_running_job(path: Path | None) -> RunningJob:
    """The job of the run directory `path`; with None the latest below the working directory.

    Raises UsageError if the job is over or cannot be asked from here.
    """
    run_dir = find_run_dir(path)
    if run_dir.is_symlink() or run_dir.name == LATEST_LINK:
        run_dir = run_dir.resolve()
    if (run_dir / VERDICT_FILE).exists():
        raise UsageError(f"the job of {run_dir} is over; how it went: jaxrun explain {run_dir}")
    try:
        launcher = json.loads((run_dir / JOB_FILE).read_text())["launcher"]
        host, pid = str(launcher["host"]), int(launcher["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UsageError(f"{run_dir} does not say who runs its job; is it of this version of jaxrun?") from None
    here = os.uname().nodename
    if host != here:
        raise UsageError(f"the launcher of this job runs on {host}, not on {here}; type there: jaxrun stacks {run_dir}")
    if not has_open(pid, run_dir / EVENTS_FILE):
        raise UsageError(
            f"the launcher of {run_dir} is gone, and left no verdict; what is known: jaxrun explain {run_dir}"
        )
    return RunningJob(run_dir, pid)


def request_stacks(job: RunningJob, *, full: bool = False, native: bool = False) -> str:
    """Where all ranks are now, in groups; with `full` all frames of each rank, with `native` C frames too.

    Raises UnavailableError if no answer comes.
    """
    snapshot = _take_snapshot(job, native=native)
    if not snapshot.dumps:
        return "no rank has stacks to show yet"
    frames = stack_text.format_all_frames(snapshot.dumps, snapshot.hosts) if full else ""
    natives = stack_text.format_by_text(snapshot.natives or {}, snapshot.hosts) if native else ""
    return "\n\n".join(filter(None, (stack_text.format_snapshot(snapshot), natives or frames)))


def _take_snapshot(job: RunningJob, *, native: bool) -> Snapshot:
    """Signal the launcher, and wait for what it writes to stacks.json."""
    signum = NATIVE_STACKS_SIGNAL if native else STACKS_SIGNAL
    timeout = _ANSWER_TIMEOUT_S + (NATIVE_STACKS_TIMEOUT_S if native else 0.0)
    file = job.run_dir / STACKS_FILE
    earlier = _read(file)
    before = earlier.time if earlier else 0.0
    if not _handles(job.pid, signum):
        raise UsageError(_CANNOT_ANSWER)
    try:
        os.kill(job.pid, signum)
    except ProcessLookupError:
        raise UsageError(f"the job is over; how it went: jaxrun explain {job.run_dir}") from None
    except PermissionError:
        raise UsageError(f"process {job.pid}, the launcher, is another user's; only its owner may ask it") from None
    deadline = time.monotonic() + timeout
    # Another process may have asked at the same time, without C frames.
    while (snapshot := _read(file)) is None or snapshot.time == before or (native and snapshot.natives is None):
        if time.monotonic() > deadline:
            raise UnavailableError(
                f"the launcher (process {job.pid}) has not answered in {timeout:g} s; is it stopped?"
            )
        time.sleep(_POLL_S)
    return snapshot


def watch_stacks(job: RunningJob) -> None:
    """Print where the ranks are every few seconds, until the job is over."""
    while has_open(job.pid, job.run_dir / EVENTS_FILE):
        print(f"{time.strftime('%H:%M:%S')}  {request_stacks(job)}\n", flush=True)
        time.sleep(_WATCH_INTERVAL_S)
    print(f"the job is over; how it went: jaxrun explain {job.run_dir}")


def _read(file: Path) -> Snapshot | None:
    try:
        return Snapshot.from_json(file.read_text())
    except (OSError, ValueError):
        return None


def _handles(pid: int, signum: int) -> bool:
    """Whether the process has a handler for this signal; without one, a real-time signal would kill it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True  # the process has ended, or is another user's: os.kill says which
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is None or bool(int(caught[1], 16) >> (signum - 1) & 1)
