"""Explains from the files of a run directory how its job went: the verdict, and when each rank did what."""

from __future__ import annotations

from pathlib import Path

from jaxrun.analysis.verdict import report, verdict
from jaxrun.errors import UsageError
from jaxrun.records.history import timeline
from jaxrun.records.rundir import recorders
from jaxrun.records.rundir.find import find_run_dir
from jaxrun.records.rundir.recorded_files import read_text
from jaxrun.records.rundir.rundir import EVENTS_FILE, VERDICT_FILE, attempt_directory
from jaxrun.terminal import A_FILE, TerminalFormat
from jaxrun.text import plural


def explain_run(path: Path | None, terminal: TerminalFormat = A_FILE) -> str:
    """The text for the run directory `path`, to be shown on `terminal`; of several run directories, or for None, of
    the latest.

    Raises UsageError if it is neither, or cannot be read.
    """
    path = find_run_dir(path)
    events = timeline.parse_events(_read(path / EVENTS_FILE).splitlines())
    logs = attempt_directory(path, events.attempt)
    calls = recorders.format_recorders(logs, events.hosts, divergences=not (path / VERDICT_FILE).exists())
    earlier = "\n".join(["earlier attempts:", *events.earlier]) if events.earlier else ""
    parts = [earlier, _format_verdict(path, events, terminal), calls, timeline.format_table(events)]
    if events.skipped:
        parts.append(f"(left out: {plural(events.skipped, 'unreadable line')} of {EVENTS_FILE})")
    return "\n\n".join(filter(None, parts))


def _format_verdict(path: Path, events: timeline.Timeline, terminal: TerminalFormat) -> str:
    text = _read(path / VERDICT_FILE)
    if not text:
        why = "jaxrun is still running, was killed, or could not write (a full disk): these records are incomplete"
        return f"no verdict in {path}: {why}\n{timeline.format_progress(events)}"
    try:
        return report.format_report(verdict.from_json(text), path, terminal).lstrip("\n")
    except ValueError as error:
        return f"the verdict in {path / VERDICT_FILE} cannot be read: {error}\n{timeline.format_progress(events)}"


def _read(path: Path) -> str:
    try:
        return read_text(path)
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}.") from None
