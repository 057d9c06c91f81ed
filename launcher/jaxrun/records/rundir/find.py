"""Finds run directories: the one that a person means, and the collection that it is in."""

from __future__ import annotations

from pathlib import Path

from jaxrun.errors import UsageError
from jaxrun.protocol.own_directory import is_trusted
from jaxrun.records.rundir.rundir import COLLECTION_DIR, EVENTS_FILE, JOB_FILE, LATEST_LINK, VERDICT_FILE
from jaxrun.spec.job.program import working_directory
from jaxrun.text import format_user


def find_run_dir(path: Path | None) -> Path:
    """The run directory that `path` means: itself, or the latest in it; with None the latest of the working directory.

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
    """The collection of run directories in the working directory, or that directory itself where it is one."""
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
    """Raise UsageError where a link `latest` is another user's than that of the directory that it is in."""
    if not latest.is_symlink():
        return
    owner = latest.lstat().st_uid
    if owner != latest.parent.stat().st_uid and not is_trusted(owner):
        raise UsageError(
            f"{latest} belongs to {format_user(owner)}, who may lead it anywhere; name the run directory itself"
        )
