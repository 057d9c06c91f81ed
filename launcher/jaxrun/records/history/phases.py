"""What the event log says of each attempt and rank: phases from start to end, and what happened meanwhile. No I/O."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrun.records.event_log.event_log import LoggedEvent
from jaxrun.records.history.job_trace import Moment, Span
from jaxrun.text import format_ranks, format_signal

_ODD = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)  # what odd values in a log end in
_MAX_S = 1e11  # some thousand years
_MAX_RANKS = 2**17
_MIN_OUTPUT_S = 0.001  # so that it can be seen


@dataclass(slots=True)
class RankLog:
    """What the log says of one rank; `at` has the first time of each event by name.

    offset, clock_error: what is to be added to times of its own clock, and how wrong that may be, in seconds
    """

    host: str = ""
    pid: int = 0
    status: int | None = None
    offset: float = 0.0
    clock_error: float = 0.0
    joined: float | None = None
    at: dict[str, float] = field(default_factory=dict)
    marks: list[Moment] = field(default_factory=list)
    output: list[Span] = field(default_factory=list)
    profiles: list[Span] = field(default_factory=list)

    @property
    def end(self) -> float | None:
        """When it ended, or said that it would."""
        return next((self.at[name] for name in ("exit", "lost", "done", "failed") if name in self.at), None)


@dataclass(slots=True)
class AttemptLog:
    """What the log says of one attempt."""

    number: int
    start: float
    end: float
    outcome: str = ""
    ranks: dict[int, RankLog] = field(default_factory=dict)
    marks: list[Moment] = field(default_factory=list)
    stopped: set[int] = field(default_factory=set)  # ranks that jaxrun has killed

    @property
    def run_at(self) -> float | None:
        """When the program started: once all ranks had reported their devices."""
        times = [rank.at.get("proof") for rank in self.ranks.values()]
        known = [time for time in times if time is not None]
        return max(known) if known and len(known) == len(times) else None


def split_attempts(events: Sequence[LoggedEvent]) -> list[AttemptLog]:
    """Sort the events by attempt and rank; those that are not understood are left out."""
    attempts: dict[int, AttemptLog] = {}
    # The clocks first, of which the last word counts for all that is said of a rank.
    for event in sorted(events, key=lambda event: event.name != "clock"):
        with contextlib.suppress(*_ODD):
            time, number, rank = _seconds(event.time), event.attempt, event.rank
            log = attempts.setdefault(number, AttemptLog(number, time, time))
            log.start, log.end = min(log.start, time), max(log.end, time)
            if rank is None:
                _add(log, event)
            elif 0 <= rank < _MAX_RANKS:
                _add_to_rank(log.ranks.setdefault(rank, RankLog()), event, rank in log.stopped)
    return [attempts[number] for number in sorted(attempts)]


def rank_phases(log: RankLog, attempt: AttemptLog) -> tuple[Span, ...]:
    """The phases of a rank that follow each other, to the attempt's end where it has not ended, and profiles within."""
    steps: Sequence[tuple[str, float | None]] = (
        ("before its process", attempt.start),
        ("start Python and import jax", log.at.get("spawned")),
        ("meet the other ranks, join", log.at.get("hello")),
        ("find the devices", log.joined),
        ("wait for the other ranks", log.at.get("proof")),
        ("program", attempt.run_at if "proof" in log.at else None),
        ("end", log.at.get("failed", log.at.get("done"))),
    )
    known = [(name, time) for name, time in steps if time is not None]
    ends = [*(time for _, time in known[1:]), log.end or attempt.end]
    phases = [Span(name, start, stop) for (name, start), stop in zip(known, ends, strict=True) if start < stop]
    return (*phases, *log.profiles)


def _add(log: AttemptLog, event: LoggedEvent) -> None:
    more = event.more
    match event.name:
        case "attempt_started":
            log.marks.append(Moment(event.time, f"attempt {event.attempt}", str(more.get("reason", ""))))
        case "attempt_ended":
            log.outcome = str(more["headline"])
        case "unavailable":
            log.marks.append(Moment(event.time, "cannot be started", str(more["text"]), is_failure=True))
        case "signal":
            log.marks.append(Moment(event.time, f"{format_signal(int(more['signal']))} to jaxrun"))
        case "stop":
            signum, ranks = int(more["signal"]), set(map(int, more["ranks"]))
            log.stopped |= ranks if signum == signal.SIGKILL else set()
            log.marks.append(Moment(event.time, f"{format_signal(signum)} to {format_ranks(ranks)}"))
        case "stall_notice":
            log.marks.append(Moment(event.time, f"no progress for {_seconds(more['idle']):.0f} s"))
        case "chaos":
            what = f"--chaos: {more['fault']} {format_ranks(map(int, more['ranks']))}"
            log.marks.append(Moment(event.time, what, is_failure=True))
        case "stop_requested":
            log.marks.append(Moment(event.time, "asked to stop", str(more["reason"])))


def _add_to_rank(rank: RankLog, event: LoggedEvent, stopped: bool) -> None:
    name, more = event.name, event.more
    if name == "clock":
        rank.offset, rank.clock_error = _seconds(more["offset"]), _seconds(more.get("error", 0.0))
        return
    rank.at.setdefault(name, event.time)
    told = name == "exit" and (stopped or "failed" in rank.at)
    mark = None if told else _mark_of(name, event.time, more)
    rank.marks += [mark] if mark is not None else []
    match name:
        case "spawned":
            rank.pid = int(more["pid"])
        case "hello":
            rank.host = str(more["host"])
            # Its hello may be heard before what has forked it says so.
            rank.at["spawned"] = min(_seconds(more["started"]), rank.at.get("spawned", event.time))
        case "proof":
            rank.joined = _seconds(more["at"])
        case "exit":
            rank.status = int(more["status"])
            for start, stop, count in more.get("output", ()):
                rank.output.append(_output(_seconds(start) + rank.offset, _seconds(stop) + rank.offset, int(count)))
        case "profiled" if more["started"]:
            start, stop = _seconds(more["started"]) + rank.offset, _seconds(more["sent"]) + rank.offset
            rank.profiles.append(Span("JAX profile", start, stop, str(more["file"] or more["error"])))


def _mark_of(name: str, time: float, more: Mapping[str, Any]) -> Moment | None:
    match name:
        case "failed":
            return Moment(time, str(more["error"]), str(more["message"]), is_failure=True)
        case "exit" if int(more["status"]):
            status = int(more["status"])
            how = f"killed by {format_signal(-status)}" if status < 0 else f"exit status {status}"
            return Moment(time, how, is_failure=True)
        case "lost":
            return Moment(time, "lost", str(more["text"]), is_failure=True)
        case "thread_failed":
            return Moment(time, f"thread {more['thread']} died", str(more["error"]))
        case "saved":
            return Moment(time, f"saved step {more['step']}")
    return None


def _seconds(value: Any) -> float:
    """Raises ValueError where it is no time, nor a difference of times."""
    seconds = float(value)
    if not abs(seconds) <= _MAX_S:
        raise ValueError(f"no time: {value!r:.40}")
    return seconds


def _output(start: float, end: float, count: int) -> Span:
    return Span("output", start, max(end, start + _MIN_OUTPUT_S), f"{count:,} bytes")
