"""A job as Chrome trace events, which Perfetto opens: a process for each rank, with tracks for what it did.

    the job       attempts, and what happened to all
        rank 3 (h1)   phases · calls · compilations
                      a call that waited for others has its wait inside, or around it if it was dispatched earlier

Times are microseconds since the job's start: since the epoch they would lose their nanoseconds in a float.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from jaxrun.records.history.job_trace import AttemptTrace, JobTrace, Moment, RankTrace, Span, TracedCall

Event = dict[str, Any]
_JOB = 0  # the process of the job; a rank's is rank + 1
_PHASES, _CALLS, _COMPILATIONS = 1, 100, 200  # tracks; those with several lanes use the numbers that follow, too
_US_PER_S = 1e6
_MIN_WAIT_S = 1e-6
_BATCH = 1000  # events that are encoded at once
_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)


def write_chrome_trace(trace: JobTrace, file: Path) -> int:
    """Write the trace, packed if the name ends in .gz; returns the number of events. Raises OSError."""
    count = 0
    about = {"job": trace.title, "verdict": trace.headline, "start": trace.start}
    with gzip.open(file, "wb") if file.suffix == ".gz" else file.open("wb") as out:
        out.write(b'{"displayTimeUnit": "ms", "otherData": %b, "traceEvents": [\n' % _encode(about))
        events = chrome_events(trace)
        while batch := list(islice(events, _BATCH)):
            out.write(b",\n" * (count > 0) + _encode(batch)[1:-1])
            count += len(batch)
        out.write(b"\n]}\n")
    return count


def chrome_events(trace: JobTrace) -> Iterator[Event]:
    """Yield the events of the trace; the events of one track are in order."""
    writer = _Writer(trace.start)
    yield from writer.process(_JOB, f"the job: {trace.title}", 0, "")
    yield from writer.lanes(_JOB, _PHASES, "attempts", [_attempt_span(attempt) for attempt in trace.attempts])
    for attempt in trace.attempts:
        yield from writer.marks(_JOB, _PHASES, attempt.marks)
    for _, parts in sorted(trace.by_rank.items()):
        yield from _rank_events(writer, parts)


def _rank_events(writer: _Writer, attempts: Sequence[RankTrace]) -> Iterator[Event]:
    last = attempts[-1]
    process = last.rank + 1
    name = f"rank {last.rank}" + (f" ({last.host})" if last.host else "")
    yield from writer.process(process, name, last.rank + 1, f"pid {last.pid}" if last.pid else "")
    yield from writer.lanes(process, _PHASES, "phases", [span for part in attempts for span in part.phases])
    for part in attempts:
        awaited = [Moment(part.awaited, "others wait for it, to their end")] if part.awaited is not None else []
        yield from writer.marks(process, _PHASES, (*part.marks, *awaited))
    yield from writer.calls(process, [call for part in attempts for call in part.calls])
    compilations = [span for part in attempts for span in part.compilations]
    yield from writer.lanes(process, _COMPILATIONS, "compilations", compilations)


def _attempt_span(attempt: AttemptTrace) -> Span:
    return Span(f"attempt {attempt.number}", attempt.start, attempt.end, attempt.outcome)


class _Writer:
    """Makes events; their times count from `start`."""

    def __init__(self, start: float) -> None:
        self._start = start

    def process(self, process: int, name: str, order: int, label: str) -> Iterator[Event]:
        yield _meta("process_name", process, name=name)
        yield _meta("process_sort_index", process, sort_index=order)
        if label:
            yield _meta("process_labels", process, labels=label)

    def marks(self, process: int, track: int, marks: Iterable[Moment]) -> Iterator[Event]:
        for mark in marks:
            event = {"ph": "i", "s": "p" if process else "g", "name": mark.name, "cat": "mark"}
            args = {"detail": mark.detail} if mark.detail else {}
            yield {**event, "ts": self._us(mark.time), "pid": process, "tid": track, "args": args}

    def lanes(self, process: int, track: int, name: str, spans: Iterable[Span]) -> Iterator[Event]:
        """Yield the events of spans, on as many tracks as are needed so that spans are nested or disjoint on each."""
        for lane, part in enumerate(_assign_lanes([(span.start, span.end, span) for span in spans])):
            yield from self._track(process, track + lane, name, lane)
            for span in part:
                args = {"detail": span.detail} if span.detail else {}
                yield self._slice(process, track + lane, span.name, name, span.start, span.end, args)

    def calls(self, process: int, calls: Sequence[TracedCall]) -> Iterator[Event]:
        for lane, part in enumerate(
            _assign_lanes([(_begin(call), _finish(call), call) for call in calls], nested=False)
        ):
            yield from self._track(process, _CALLS + lane, "calls", lane)
            for call in part:
                yield from self._call(process, _CALLS + lane, call)

    def _call(self, process: int, track: int, call: TracedCall) -> Iterator[Event]:
        begin = _begin(call)
        args: dict[str, Any] = {"call": call.number, "ranks": call.group, "at": call.place}
        if call.missing:
            args["never entered by"] = call.missing
        elif call.last >= 0:
            args |= {"last rank": call.last, "waited ms": call.waited * 1e3, "others waited ms": call.cost * 1e3}
        name = call.name or f"call #{call.number}"
        args |= {} if call.is_over else {"never came back": True}
        slices = [self._slice(process, track, name, "call", begin, call.left, args)]
        if call.waited > _MIN_WAIT_S:
            whom = call.missing or f"rank {call.last}"
            wait = self._slice(process, track, f"waits for {whom}", "wait", begin, begin + call.waited, {})
            slices.insert(0 if wait["dur"] > slices[0]["dur"] else 1, wait)
        yield from slices

    def _track(self, process: int, track: int, name: str, lane: int) -> Iterator[Event]:
        yield {**_meta("thread_name", process, name=f"{name} ({lane + 1})" if lane else name), "tid": track}
        yield {**_meta("thread_sort_index", process, sort_index=track), "tid": track}

    def _slice(
        self, process: int, track: int, name: str, category: str, begin: float, end: float, args: dict[str, Any]
    ) -> Event:
        ts = self._us(begin)
        times = {"ts": ts, "dur": round(self._us(end) - ts, 3)}
        return {"ph": "X", "name": name, "cat": category, **times, "pid": process, "tid": track, "args": args}

    def _us(self, time: float) -> float:
        """Return a time in microseconds, rounded to whole nanoseconds."""
        return round(max(0.0, time - self._start) * _US_PER_S, 3)


def _begin(call: TracedCall) -> float:
    """Return when the call was entered or, if that is unknown, dispatched."""
    return call.entered or call.left


def _finish(call: TracedCall) -> float:
    """Return when the call had been dispatched and waited for nobody any more."""
    return max(call.left, _begin(call) + call.waited)


def _assign_lanes(timed: Iterable[tuple[float, float, Any]], *, nested: bool = True) -> list[list[Any]]:
    """Lay things with start and end into lanes: in each, one begins after another has ended, or lies within it."""
    lanes: list[list[Any]] = []
    open_ends: list[list[float]] = []  # of each lane, the ends of what lies around the present moment, outermost first
    for start, end, thing in sorted(timed, key=lambda item: (item[0], -item[1])):
        for ends in open_ends:
            while ends and ends[-1] <= start:
                ends.pop()
        free = [lane for lane, ends in enumerate(open_ends) if not ends or (nested and end <= ends[-1])]
        if not free:
            lanes.append([])
            open_ends.append([])
        lane = free[0] if free else len(lanes) - 1
        lanes[lane].append(thing)
        open_ends[lane].append(end)
    return lanes


def _encode(value: Event | list[Event]) -> bytes:
    return _ENCODER.encode(value).encode("utf-8", "backslashreplace")


def _meta(kind: str, process: int, **args: object) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "args": args}
