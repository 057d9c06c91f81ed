"""When each rank did what: the start-up of a job as a table, from its event log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from jaxrun.analysis.diagnosis.straggler import Straggler
from jaxrun.analysis.verdict.straggler_text import format_straggler
from jaxrun.errors import ProtocolError
from jaxrun.protocol.codec import from_content
from jaxrun.records.event_log.event_log import LoggedEvent, parse_line
from jaxrun.text import UNKNOWN_HOST, format_ranks_on_hosts, has_several_hosts, plural

STEPS = ("spawned", "imported", "joined", "proved", "first output", "ended")
_STEP_OF_EVENT = {
    "spawned": "spawned",
    "hello": "imported",
    "proof": "proved",
    "first_output": "first output",
    "exit": "ended",
}
_MAX_FULL_TABLE_RANKS = 16  # a larger job is summarised by step
_SLOWEST_SHOWN = 3
_LATE_S = 0.25  # a rank is marked if it is later than the others' median by this and by _LATE_FRACTION of it
_LATE_FRACTION = 0.25


@dataclass(slots=True)
class Timeline:
    """The start-up of one job.

    steps:     step → rank → seconds since the first event
    statuses:  exit statuses of the ranks that have ended
    last:      the last event, as text
    straggler: the rank or host that holds the others up, as far as it was known
    attempt:   which attempt this is, the last one; earlier: how each before it has ended, as text
    skipped:   number of damaged lines
    """

    steps: dict[str, dict[int, float]] = field(default_factory=lambda: {step: {} for step in STEPS})
    hosts: dict[int, str] = field(default_factory=dict)
    statuses: dict[int, int] = field(default_factory=dict)
    last: str = ""
    straggler: Straggler | None = None
    skipped: int = 0
    attempt: int = 1
    earlier: list[str] = field(default_factory=list)

    @property
    def ranks(self) -> list[int]:
        return sorted({rank for times in self.steps.values() for rank in times})


def parse_events(lines: Iterable[str]) -> Timeline:
    """Build the timeline of the last attempt from the lines of events.jsonl; damaged ones are counted and left out."""
    timeline = Timeline()
    start: float | None = None
    for line in filter(str.strip, lines):
        try:
            event = parse_line(line)
            if event.name == "attempt_started":
                timeline = Timeline(skipped=timeline.skipped, attempt=event.attempt, earlier=timeline.earlier)
                start = None
            start = event.time if start is None else start
            _add(timeline, event, start)
        except (ArithmeticError, KeyError, TypeError, ValueError, ProtocolError):
            timeline.skipped += 1
    return timeline


def format_table(timeline: Timeline) -> str:
    """One row per rank, or for a large job one per step; ranks that are late are marked."""
    ranks = timeline.ranks
    if not ranks:
        return "no rank was started."
    late = {step: _find_late_rank(timeline.steps[step]) for step in STEPS[:-1]}
    rows = _by_rank(timeline, late) if len(ranks) <= _MAX_FULL_TABLE_RANKS else _by_step(timeline)
    what = f"attempt {timeline.attempt}" if timeline.attempt > 1 else "the job"
    lines = [f"start-up, in seconds since {what} was started:", *_aligned(rows)]
    for step, rank in late.items():
        if rank is not None:
            times = timeline.steps[step]
            behind = times[rank] - median(times.values())
            who = format_ranks_on_hosts([rank], timeline.hosts) if rank in timeline.hosts else f"rank {rank}"
            lines.append(f"* slowest: {who}, {step} {behind:.2f} s after the median")
    return "\n".join(lines)


def format_progress(timeline: Timeline) -> str:
    """How far a job without a verdict had come, in a few lines."""
    ranks = timeline.ranks
    counts = ", ".join(f"{len(times)} {step}" for step, times in timeline.steps.items() if times)
    ended = [f"{rank}: status {status}" for rank, status in sorted(timeline.statuses.items()) if status]
    lines = [f"of {plural(len(ranks), 'rank')}: {counts}" if counts else "no rank was started"]
    if ended:
        lines.append(f"ended badly: {'; '.join(f'rank {text}' for text in ended[:8])}")
    if timeline.last:
        lines.append(f"last event: {timeline.last}")
    if timeline.straggler is not None:
        hosts = {rank: timeline.hosts.get(rank, UNKNOWN_HOST) for rank in ranks}
        lines.append(f"{format_straggler(timeline.straggler, hosts)}.")
    return "\n".join(lines)


def _add(timeline: Timeline, event: LoggedEvent, start: float) -> None:
    if event.name == "attempt_ended":
        log = f"   {event.more['log']}" if event.more["log"] else ""
        timeline.earlier.append(f"attempt {event.attempt}: {event.more['headline']}{log}")
    name, rank, at = event.name, event.rank, event.time - start
    joined = float(event.more["at"]) - start if name == "proof" else 0.0
    timeline.last = f"{name}{f' of rank {rank}' if rank is not None else ''} after {at:.2f} s"
    if name == "straggler":
        timeline.straggler = from_content(Straggler, event.more, lenient=True)
    if rank is None:
        return
    if name in _STEP_OF_EVENT:
        timeline.steps[_STEP_OF_EVENT[name]].setdefault(rank, at)
    if name == "proof":
        timeline.steps["joined"].setdefault(rank, joined)
    elif name == "hello":
        timeline.hosts[rank] = str(event.more.get("host", ""))
    elif name == "exit":
        timeline.statuses[rank] = int(event.more["status"])


def _find_late_rank(times: Mapping[int, float]) -> int | None:
    """The slowest rank, if it is well behind the others."""
    if len(times) < 2:
        return None
    slowest = max(times, key=lambda rank: times[rank])
    others = median(time for rank, time in times.items() if rank != slowest)
    return slowest if times[slowest] - others > max(_LATE_S, _LATE_FRACTION * others) else None


def _by_rank(timeline: Timeline, late: Mapping[str, int | None]) -> list[Sequence[str]]:
    with_hosts = has_several_hosts(timeline.hosts)
    rows: list[Sequence[str]] = [["rank", *(["host"] if with_hosts else []), *STEPS]]
    for rank in timeline.ranks:
        cells = []
        for step in STEPS:
            time = timeline.steps[step].get(rank)
            mark = "*" if late.get(step) == rank else ""
            cells.append(f"{mark}{time:.2f}" if time is not None else "-")
        rows.append([str(rank), *([timeline.hosts.get(rank, "-")] if with_hosts else []), *cells])
    return rows


def _by_step(timeline: Timeline) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [["step", "ranks", "first", "median", "last", "slowest ranks"]]
    for step in STEPS:
        times = timeline.steps[step]
        if times:
            slowest = sorted(times, key=lambda rank: (-times[rank], rank))[:_SLOWEST_SHOWN]
            names = ", ".join(f"{rank} ({times[rank]:.2f})" for rank in slowest)
            numbers = (f"{value:.2f}" for value in (min(times.values()), median(times.values()), times[slowest[0]]))
            rows.append([step, str(len(times)), *numbers, names])
    return rows


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
