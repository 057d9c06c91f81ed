"""Finds the run directories that jobs have left, and reads their files; a FIFO in the place of one delays nobody."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from jaxrun.analysis.verdict import verdict
from jaxrun.analysis.verdict.verdict import Verdict
from jaxrun.errors import ProtocolError, UsageError
from jaxrun.files.own_files import is_trusted, open_own_directory
from jaxrun.files.regular_files import open_regular
from jaxrun.protocol.codec import from_content
from jaxrun.records.document_base import Document
from jaxrun.records.event_log.event_log import EventLog
from jaxrun.records.rundir.rundir import (
    COLLECTION_DIR,
    EVENTS_FILE,
    JOB_FILE,
    LATEST_LINK,
    OLD_FILE,
    VERDICT_FILE,
    RunDir,
    attempt_directory,
    unusable,
)
from jaxrun.spec.job.program_check import working_directory
from jaxrun.text import format_user


class RecordedLauncher(Struct, frozen=True):
    """The launcher of a job: the host on which it runs, or ran, and the socket at which it answers; empty for none."""

    host: str = ""
    pid: int = 0
    socket: str = ""


class RecordedPlan(Document, frozen=True, kw_only=True, tag="job"):
    """What readers need of job.json (JobFile); missing values are empty."""

    job_id: str = ""
    program: tuple[str, ...] = ()
    processes: int = 0
    tag: str = ""
    requeue_id: str = ""
    launcher: Annotated[RecordedLauncher, Meta(description="empty before a job is started")] = RecordedLauncher()


def read_text(path: Path) -> str:
    """Return the text of a file. Raises OSError."""
    with open(open_regular(path), encoding="utf-8", errors="replace") as file:
        return file.read()


def read_verdict(run_dir: Path) -> Verdict | None:
    """Return how a job ended; None if it runs, its launcher was killed, or the file cannot be understood."""
    with contextlib.suppress(OSError, ValueError):
        return verdict.from_json(read_text(run_dir / VERDICT_FILE))
    return None


def read_job_events(run_dir: Path) -> EventLog:
    """Return the events of the log, read while they are iterated; none if there is no log.

    The iteration raises UsageError where the log cannot be read.
    """
    path = run_dir / EVENTS_FILE
    return EventLog(_lines_of(path), str(path))


def _lines_of(path: Path) -> Iterator[bytes]:
    try:
        with open(open_regular(path), "rb") as file:
            yield from file
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}.") from None


def read_plan(run_dir: Path) -> RecordedPlan:
    """Return what job.json says; nothing if it is not there or cannot be understood."""
    with contextlib.suppress(OSError, ValueError, RecursionError, ProtocolError):
        return from_content(RecordedPlan, json.loads(read_text(run_dir / JOB_FILE)))
    return RecordedPlan()


def has_ended(run_dir: Path) -> bool:
    """Whether the job of this run directory is over: it has a verdict, or its launcher has left none and is gone."""
    launcher = read_plan(run_dir).launcher
    is_gone = launcher.host == os.uname().nodename and not os.path.exists(f"/proc/{launcher.pid}")
    return is_gone or (run_dir / VERDICT_FILE).exists()


def find_run_dir(path: Path | None) -> Path:
    """Return the run directory that `path` means: itself, or the latest in it; by default the latest here.

    Raises UsageError if there is none.
    """
    path = path or find_collection()
    if not path.is_dir():
        raise UsageError(
            f"{path} is not a directory. Give the run directory of a job, as {COLLECTION_DIR}/{LATEST_LINK}."
        )
    if path.name == LATEST_LINK:
        _check_latest(path)
    if is_run_dir(path):
        return path
    latest = path / LATEST_LINK
    _check_latest(latest)
    if is_run_dir(latest):
        # The link's own name says nothing about which job this is.
        return path / latest.resolve().name if latest.is_symlink() else latest
    jobs = sorted(entry for entry in path.iterdir() if entry.is_dir() and is_run_dir(entry))
    if jobs:
        return max(jobs, key=lambda job: job.stat().st_mtime)
    raise UsageError(
        f"{path} is not a run directory: it holds none of {JOB_FILE}, {EVENTS_FILE} and {VERDICT_FILE}, and no "
        f"directory that does. Give the run directory of a job, as {COLLECTION_DIR}/{LATEST_LINK}."
    )


def find_collection() -> Path:
    """Return the collection of run directories in the working directory, or that directory itself if it is one."""
    here = Path(working_directory())
    for path in (Path(COLLECTION_DIR), here):
        if path.is_dir() and (path.name == COLLECTION_DIR or is_run_dir(path)):
            return path
    raise UsageError(
        f"no job has left its run directory here: there is no {COLLECTION_DIR} in {here}. "
        "Name the run directory, or go to where the job was started."
    )


def is_run_dir(path: Path) -> bool:
    """Whether a job has left its files in `path`."""
    return any((path / name).is_file() for name in (JOB_FILE, EVENTS_FILE, VERDICT_FILE))


def _check_latest(latest: Path) -> None:
    """Raise UsageError if a link `latest` does not belong to the owner of its directory."""
    if not latest.is_symlink():
        return
    owner = latest.lstat().st_uid
    if owner != latest.parent.stat().st_uid and not is_trusted(owner):
        raise UsageError(
            f"{latest} belongs to {format_user(owner)}, who can point it anywhere; name the run directory itself"
        )


def find_requeued(request: Path | None, base: Path, requeue_id: str, program: Sequence[str]) -> Path | None:
    """The directory that an earlier launcher of the same job has left: `request`, or in `base`; None for the first.

    One batch script may run several commands, so a directory in `base` is of the same `program`: with the same
    arguments, if there is one, since they may also change from start to start. A job that has ended well does not
    continue.
    """
    candidates = [request] if request is not None else sorted((base / COLLECTION_DIR).glob("*"), reverse=True)
    found = None
    for path in (path for path in candidates if not path.is_symlink()):
        plan = read_plan(path)
        if plan.requeue_id != requeue_id or (request is None and plan.program[:1] != tuple(program[:1])):
            continue
        found = found or path
        if plan.program == tuple(program):  # no other directory need be read
            found = path
            break
    return None if found is not None and has_ended_well(found) else found


def has_ended_well(run_dir: Path) -> bool:
    """Whether the verdict on the job of this run directory is that it has ended with 0."""
    last = read_verdict(run_dir)
    return last is not None and last.exit_code == 0


def continue_job(
    path: Path, claim: Callable[[RunDir], object] = lambda directory: None
) -> tuple[RunDir, int, tuple[Verdict, ...]]:
    """Open the run directory for the job's next attempt, without its last verdict, for that was not the last.

    Returns the number of the attempt, and the verdicts on the earlier ones, too. `claim` is called before anything in
    it is read or changed; its exceptions are raised.
    Raises UsageError if it cannot be written.
    """
    try:
        directory = RunDir(path, open_own_directory(path), events=OLD_FILE)
    except OSError as error:
        raise unusable(path, error) from None
    try:
        claim(directory)
    except BaseException:
        directory.close()
        raise
    last = read_verdict(path)
    attempt = 2
    while attempt_directory(path, attempt).exists():
        attempt += 1
    earlier = (*last.earlier, replace(last, earlier=())) if last else ()
    directory.remove(VERDICT_FILE)
    return directory, attempt, earlier
