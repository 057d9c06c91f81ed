"""The run directory of a job that Slurm has started again (--requeue): found by what job.json says, and continued."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from jaxrun.records.rundir.recorded_files import parse_json, read_text, read_verdict
from jaxrun.records.rundir.rundir import COLLECTION_DIR, JOB_FILE, RunDir, attempt_directory, reopen


def find_requeued(request: Path | None, base: Path, requeue_id: str) -> Path | None:
    """The directory that an earlier launcher of the same job has left: `request`, or in `base`; None for the first."""
    candidates = [request] if request is not None else sorted((base / COLLECTION_DIR).glob("*"), reverse=True)
    return next((path for path in candidates if _id_of(path) == requeue_id), None)


def continue_job(path: Path) -> tuple[RunDir, int]:
    """Open the run directory for the job's next attempt; returns the number of that, too.

    Raises UsageError where it cannot be written.
    """
    last = read_verdict(path)
    attempt = 2
    while attempt_directory(path, attempt).exists():
        attempt += 1
    return reopen(path, (*last.earlier, replace(last, earlier=())) if last else ()), attempt


def _id_of(path: Path) -> str:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if not path.is_symlink():
            return str(parse_json(read_text(path / JOB_FILE)).get("requeue_id", ""))
    return ""
