"""Tells from the files of a run directory how the job went: the verdict again, and who did what when."""

from __future__ import annotations

from pathlib import Path

from jaxrun.errors import UsageError
from jaxrun.rundir import recorders, timeline
from jaxrun.rundir.rundir import COLLECTION_DIR, EVENTS_FILE, JOB_FILE, LATEST_LINK, VERDICT_FILE
from jaxrun.text import plural
from jaxrun.verdict import report, verdict


def explain_run(path: Path) -> str:
    """The text for the run directory `path`; for a directory of run directories, for the latest of them.

    UsageError if it is neither, or cannot be read.
    """
    path = find_run_dir(path)
    events = timeline.parse_events(_read(path / EVENTS_FILE).splitlines())
    calls = recorders.format_recorders(path, events.hosts, in_step=not (path / VERDICT_FILE).exists())
    parts = [_verdict(path, events), *([calls] if calls else []), timeline.format_table(events)]
    if events.skipped:
        parts.append(f"(left out: {plural(events.skipped, 'unreadable line')} of {EVENTS_FILE})")
    return "\n\n".join(parts)


def find_run_dir(path: Path) -> Path:
    """The run directory that `path` means: itself, or the latest in it. UsageError."""
    if not path.is_dir():
        raise UsageError(
            f"{path} is not a directory. Give the run directory of a job, as {COLLECTION_DIR}/{LATEST_LINK}."
        )
    if _is_run_dir(path):
        return path
    latest = path / LATEST_LINK
    if _is_run_dir(latest):
        # The link's own name says nothing about which job this is.
        return path / latest.resolve().name if latest.is_symlink() else latest
    jobs = sorted(entry for entry in path.iterdir() if entry.is_dir() and _is_run_dir(entry))
    if jobs:
        return max(jobs, key=lambda job: job.stat().st_mtime)
    raise UsageError(
        f"{path} is not a run directory: it holds none of {JOB_FILE}, {EVENTS_FILE} and {VERDICT_FILE}, and no "
        f"directory that does. Give the run directory of a job, as {COLLECTION_DIR}/{LATEST_LINK}."
    )


def _is_run_dir(path: Path) -> bool:
    return any((path / name).is_file() for name in (JOB_FILE, EVENTS_FILE, VERDICT_FILE))


def _verdict(path: Path, events: timeline.Timeline) -> str:
    text = _read(path / VERDICT_FILE)
    if not text:
        return f"no verdict in {path}: jaxrun itself was killed or is still running\n{timeline.format_progress(events)}"
    try:
        return report.format_report(verdict.from_json(text), path).lstrip("\n")
    except ValueError as error:
        return f"the verdict in {path / VERDICT_FILE} cannot be read: {error}\n{timeline.format_progress(events)}"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}.") from None
