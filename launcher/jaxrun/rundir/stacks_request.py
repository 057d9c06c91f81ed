"""Asks a job that runs where its ranks are: the launcher is signalled, and leaves the answer in the run directory."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from jaxrun.diagnosis import stacks
from jaxrun.diagnosis.snapshot import Snapshot
from jaxrun.errors import UnavailableError, UsageError
from jaxrun.protocol.env import STACKS_SIGNAL
from jaxrun.rundir.explain import find_run_dir
from jaxrun.rundir.rundir import COLLECTION_DIR, EVENTS_FILE, JOB_FILE, LATEST_LINK, STACKS_FILE, VERDICT_FILE
from jaxrun.verdict import stack_text

_ANSWER_TIMEOUT_S = 5.0  # seconds; far ranks are given one and a half
_CANNOT_ANSWER = (
    "the launcher of this job cannot be asked that: it is starting or ending, or of another version of jaxrun"
)
_POLL_S = 0.02
_WATCH_INTERVAL_S = 2.0  # seconds between two looks


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A job whose launcher runs on this host."""

    run_dir: Path
    pid: int


def find_running_job(path: Path | None) -> RunningJob:
    """The job of the run directory `path`; of None, the latest here. UsageError where it is over or not to be asked."""
    run_dir = find_run_dir(path or Path(COLLECTION_DIR))
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
    if not _has_open(pid, run_dir / EVENTS_FILE):
        raise UsageError(
            f"the launcher of {run_dir} is gone, and left no verdict; what is known: jaxrun explain {run_dir}"
        )
    return RunningJob(run_dir, pid)


def request_stacks(job: RunningJob, *, full: bool = False, native: bool = False) -> str:
    """Where all ranks are now: in groups; with `full`, all frames of each, with `native`, C frames, too.

    UnavailableError without an answer.
    """
    look = _answer(job, native=native)
    if not look.dumps:
        return "no rank has stacks to show yet"
    frames = stack_text.format_all_frames(look.dumps, look.hosts) if full else ""
    natives = stack_text.format_by_text(look.natives or {}, look.hosts) if native else ""
    return "\n\n".join(filter(None, (stack_text.format_snapshot(look), natives or frames)))


def _answer(job: RunningJob, *, native: bool) -> Snapshot:
    """Signal the launcher, and wait for what it leaves in stacks.json."""
    signum, patience = (
        (stacks.NATIVE_STACKS_SIGNAL, _ANSWER_TIMEOUT_S + stacks.NATIVE_STACKS_TIMEOUT_S)
        if native
        else (STACKS_SIGNAL, _ANSWER_TIMEOUT_S)
    )
    answer = job.run_dir / STACKS_FILE
    earlier = _read(answer)
    before = earlier.time if earlier else 0.0
    if not _handles(job.pid, signum):
        raise UsageError(_CANNOT_ANSWER)
    try:
        os.kill(job.pid, signum)
    except ProcessLookupError:
        raise UsageError(f"the job is over; how it went: jaxrun explain {job.run_dir}") from None
    except PermissionError:
        raise UsageError(f"process {job.pid}, the launcher, is another user's; only its owner may ask it") from None
    deadline = time.monotonic() + patience
    # Somebody else may have asked at the same time, for no C frames.
    while (look := _read(answer)) is None or look.time == before or (native and look.natives is None):
        if time.monotonic() > deadline:
            raise UnavailableError(
                f"the launcher (process {job.pid}) has not answered in {patience:g} s; is it stopped?"
            )
        time.sleep(_POLL_S)
    return look


def watch_stacks(job: RunningJob) -> None:
    """Ask again and again, until the job is over."""
    while _has_open(job.pid, job.run_dir / EVENTS_FILE):
        print(f"{time.strftime('%H:%M:%S')}  {request_stacks(job)}\n", flush=True)
        time.sleep(_WATCH_INTERVAL_S)
    print(f"the job is over; how it went: jaxrun explain {job.run_dir}")


def _read(answer: Path) -> Snapshot | None:
    try:
        return Snapshot.from_json(answer.read_text())
    except (OSError, ValueError):
        return None


def _handles(pid: int, signum: int) -> bool:
    """Whether this process does something at this signal; else a real-time signal would end it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True  # it has gone, or is another's: the signal itself will tell
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is None or bool(int(caught[1], 16) >> (signum - 1) & 1)


def _has_open(pid: int, file: Path) -> bool:
    """Whether this process has the file open: its number alone may be another's by now."""
    try:
        wanted = file.stat()
        return any(_same(f"/proc/{pid}/fd/{fd}", wanted) for fd in os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return False


def _same(path: str, wanted: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(path), wanted)
    except OSError:
        return False
