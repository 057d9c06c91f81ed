"""Tells from the files of a run directory how the job went: the verdict again, and who did what when."""

from __future__ import annotations

from pathlib import Path

from jaxrun.errors import UsageError
from jaxrun.records import flights, timeline
from jaxrun.records.rundir import COLLECTION, EVENTS, JOB, LATEST, VERDICT
from jaxrun.verdict import outcome, report
from jaxrun.wording import plural


def explain(path: Path) -> str:
    """The text for the run directory `path`; for a directory of run directories, for the latest of them.

    UsageError if it is neither, or cannot be read.
    """
    path = find(path)
    events = timeline.read(_read(path / EVENTS).splitlines())
    calls = flights.explain(path, events.hosts, in_step=not (path / VERDICT).exists())
    parts = [_verdict(path, events), *([calls] if calls else []), timeline.table(events)]
    if events.skipped:
        parts.append(f"(left out: {plural(events.skipped, 'unreadable line')} of {EVENTS})")
    return "\n\n".join(parts)


def find(path: Path) -> Path:
    """The run directory that `path` means: itself, or the latest in it. UsageError."""
    if not path.is_dir():
        raise UsageError(f"{path} is not a directory. Give the run directory of a job, as {COLLECTION}/{LATEST}.")
    if _is_run_dir(path):
        return path
    latest = path / LATEST
    if _is_run_dir(latest):
        # The link's own name says nothing about which job this is.
        return path / latest.resolve().name if latest.is_symlink() else latest
    jobs = sorted(entry for entry in path.iterdir() if entry.is_dir() and _is_run_dir(entry))
    if jobs:
        return max(jobs, key=lambda job: job.stat().st_mtime)
    raise UsageError(
        f"{path} is not a run directory: it holds none of {JOB}, {EVENTS} and {VERDICT}, and no directory "
        f"that does. Give the run directory of a job, as {COLLECTION}/{LATEST}."
    )


def _is_run_dir(path: Path) -> bool:
    return any((path / name).is_file() for name in (JOB, EVENTS, VERDICT))


def _verdict(path: Path, events: timeline.Timeline) -> str:
    text = _read(path / VERDICT)
    if not text:
        return f"no verdict in {path}: jaxrun itself was killed or is still running\n{timeline.known(events)}"
    try:
        return report.render(outcome.from_json(text), path).lstrip("\n")
    except ValueError as error:
        return f"the verdict in {path / VERDICT} cannot be read: {error}\n{timeline.known(events)}"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}.") from None
