"""Reads a rank's flight recorder (protocol/flight_file.py) while the rank runs or hangs, or after it has died.

The writer does not wait for readers. So the reader reads the ring first, then the count of records again, and drops
records that may have been overwritten meanwhile. It reads the text last, because the writer writes each line of text
before the record that needs it. Files are read, not mapped: a file that is cut short must not kill the agent. Nothing
is raised, whatever a file contains.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from array import array
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import TypeVar

from msgspec.structs import replace

from jaxrun.analysis.lockstep.pauses import PauseTimes
from jaxrun.analysis.lockstep.repeated_calls import RepeatedCalls
from jaxrun.analysis.lockstep.text_log import TextLog, parse_stages
from jaxrun.errors import ProtocolError
from jaxrun.protocol import flight_file as recorder
from jaxrun.protocol.codec import from_content
from jaxrun.protocol.flight import (
    AnyCall,
    CallTiming,
    CompilationStage,
    DispatchedCall,
    Flight,
    JointWait,
    PendingCall,
    ProgramDetails,
    TimeTotals,
    ToldStep,
)

_BRIEF_CALLS = 16
_TIMED_CALLS = 128
_HISTORY_PROGRAMS = 1024  # includes programs without a call in the ring: some failed to compile
_BRIEF_FRAMES = 3  # of each call's site
_MARK_STRIDES = (16, 256, 2048)
_MARKS_KEPT = 4  # last multiples of each stride that are kept: two ranks at most 2 strides apart share one
_UNSAFE_RECORDS = 8  # records that several threads may be writing at this moment
_NUMBER = (1 << 48) - 1
_LOW = (1 << 32) - 1
_NS_PER_S = 1e9
_USED_WORDS = recorder.JOINT_WORD + len(recorder.JOINT_FUNCTIONS) * recorder.JOINT_FUNCTION_WORDS
_WORD_LIMIT = 1 << 64

_Record = tuple[int, int, int, int, int]
_Value = TypeVar("_Value")


class FlightReader:
    """Reads the recorder behind a file descriptor, which the owner closes."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._log = TextLog()
        self._counts: dict[int, int] = {}
        self._marks: dict[int, dict[int, int]] = {}
        self._counted = 0
        self._pauses = PauseTimes()
        self._repeated = RepeatedCalls()

    def brief(self) -> Flight:
        """Return the state, the last calls, and the times of some earlier ones."""
        return self._flight(_BRIEF_CALLS, _BRIEF_FRAMES, _TIMED_CALLS)

    def position(self) -> Flight:
        """Return the state and the last call: just enough to say how far the rank has come."""
        return replace(self._flight(1, 1, 0), marks={})

    def history(self, calls: int = recorder.RING_RECORDS) -> Flight:
        """Return the state, all calls that the ring still holds (or the last `calls` of them) and the last programs."""
        flight = self._flight(calls, None, 0)
        last = dict(islice(reversed(self._log.programs.items()), _HISTORY_PROGRAMS))
        return replace(flight, programs={**last, **flight.programs}) if flight.level else flight

    def progress_counters(self) -> tuple[int, ...]:
        """Return counters that are equal as long as nothing has happened. This is cheap."""
        header = self._words(0, _USED_WORDS)
        places = (
            recorder.RECORD_COUNT_WORD,
            recorder.PENDING_TAG_WORD,
            recorder.COMPILED_COUNT_WORD,
            recorder.COMPILING_SINCE_WORD,
            recorder.STEP_AT_WORD,
        )
        if len(header) < _USED_WORDS:
            return (0,) * (len(places) + 1)
        return (*(header[place] for place in places), sum(header[recorder.JOINT_WORD :]) % _WORD_LIMIT)

    def program_details(self, program: int) -> ProgramDetails:
        """Return what the lines of text say about this program; empty details if there are no lines."""
        self._read_log()
        places = self._log.program_lines.get(program, ())
        lines = (self._bytes(recorder.TEXT_OFFSET + offset, size) for offset, size in places)
        try:
            content = {name: value for line in lines for name, value in json.loads(line).items()}
            # The lines also hold the program's name, key and code, which belong to the recorder's calls.
            details = {name: content[name] for name in ProgramDetails.__struct_fields__ if name in content}
            return from_content(ProgramDetails, details)
        except (AttributeError, ProtocolError, ValueError, RecursionError):
            return ProgramDetails()

    def raise_orders(self) -> None:
        """Make the rank look for an order that was sent to it."""
        with contextlib.suppress(OSError):
            os.pwrite(
                self._fd, (1).to_bytes(recorder.WORD_BYTES, sys.byteorder), recorder.ORDERS_WORD * recorder.WORD_BYTES
            )

    def compilation_stages(self) -> tuple[CompilationStage, ...]:
        """Return the stages of compilations, in the order in which they ended. This reads the whole text."""
        size = min(next(iter(self._words(recorder.TEXT_SIZE_WORD, 1)), 0), recorder.MAX_TEXT_BYTES)
        return parse_stages(self._bytes(recorder.TEXT_OFFSET, size))

    def _flight(self, calls: int, frames: int | None, timed: int) -> Flight:
        header = self._words(0, _USED_WORDS)
        if len(header) < _USED_WORDS or header[recorder.MAGIC_WORD] != recorder.MAGIC:
            return Flight()
        if header[recorder.FORMAT_WORD] != recorder.FORMAT:
            known = f"this jaxrun reads format {recorder.FORMAT}"
            return Flight(trouble=f"its flight recorder has format {header[recorder.FORMAT_WORD]}, and {known}")
        records = self._records(max(calls, timed))
        self._read_log()
        notes = self._log
        records = [record for record in records if record[3] >> 48 in notes.groups]
        made = [_call(record, notes.groups[record[3] >> 48]) for record in records[-calls:]]
        timings = [_timing(record, notes.groups[record[3] >> 48]) for record in records[-timed:] if timed and record[4]]
        pending, compiled_for = self._pending(header)
        held: list[AnyCall] = [*made, *filter(None, (pending, compiled_for))]
        level, since = header[recorder.LEVEL_WORD], header[recorder.COMPILING_SINCE_WORD]
        programs = {call.program for call in held}
        joint_calls, joint_wait = _joint_functions(header)
        waits = [joint_wait] if joint_wait is not None else []
        standing = header[recorder.STANDING_SITE_WORD], header[recorder.STANDING_AT_WORD] / _NS_PER_S
        sites = _chosen(notes.sites, {call.site for call in (*held, *timings, *waits)})
        entered, last = header[recorder.ENTERED_WORD], max((record[0] for record in records), default=0)
        return Flight(
            level=level if level in recorder.LEVELS else recorder.NOTHING,
            strict=header[recorder.STRICT_WORD] == 1,
            compiling=(notes.compiling, since / _NS_PER_S) if since else None,
            compiling_ranks=notes.compiling_ranks if since else "",
            compiled_for=compiled_for,
            pending=pending,
            calls=tuple(made),
            timings=tuple(timings),
            entered=entered / _NS_PER_S if entered > last else 0.0,
            standing=standing if standing[0] and header[recorder.STANDING_AT_WORD] > last else None,
            nan_search=_nan_search(header),
            marks={notes.groups[group]: marks for group, marks in self._marks.items() if group in notes.groups},
            call_counts={
                ranks: max(self._counts.get(group, 0), notes.calls_before.get(group, 0))
                for group, ranks in notes.groups.items()
            },
            programs=_chosen(notes.programs, programs),
            sites={site: stack[:frames] for site, stack in sites.items()},
            unknown_programs=notes.unknown + len(programs - notes.programs.keys()),
            trouble=notes.trouble,
            joint_calls=joint_calls,
            joint_wait=joint_wait,
            totals=self._totals(),
            told_step=_told_step(header),
            repeating_since=self._repeated.since,
        )

    def _totals(self) -> TimeTotals:
        stages = self._log.stage_times
        pausing = self._pauses.seconds(stages.overlap)
        return TimeTotals(*stages.seconds(), pausing, self._pauses.longest)

    def _records(self, wanted: int) -> list[_Record]:
        """Return at least `wanted` of the last records, if the ring has them, oldest first; new records are counted."""
        made = self._made()
        words = self._words(recorder.HEADER_WORDS, recorder.RING_RECORDS * recorder.RECORD_WORDS)
        first = max(0, self._made() - recorder.RING_RECORDS + _UNSAFE_RECORDS, min(made - wanted, self._counted))
        places = [number % recorder.RING_RECORDS * recorder.RECORD_WORDS for number in range(first, made)]
        records = [_record(words, place) for place in places if place + recorder.RECORD_WORDS <= len(words)]
        self._count(records[max(0, self._counted - first) :])
        self._counted = max(self._counted, made)
        # A record that a thread has not written yet is empty, or still holds an older call, which is true as well.
        return [record for record in records if record[0]]

    def _made(self) -> int:
        return next(iter(self._words(recorder.RECORD_COUNT_WORD, 1)), 0)

    def _count(self, records: Iterable[_Record]) -> None:
        for time, chain, what, tag, entered in records:
            if not time:
                continue
            self._pauses.add(entered / _NS_PER_S, time / _NS_PER_S)
            group, number = tag >> 48, tag & _NUMBER
            self._repeated.add((group, what >> 32), time / _NS_PER_S)
            if number > self._counts.get(group, 0):
                self._counts[group] = number
            if number % _MARK_STRIDES[0] == 0:
                self._marks.setdefault(group, {})[number] = chain
        for group, marks in self._marks.items():
            self._marks[group] = _latest(marks)

    def _pending(self, header: array[int]) -> tuple[PendingCall | None, PendingCall | None]:
        """Return (entered call, call for which a program is being compiled); at least one of them is None."""
        places = (recorder.PENDING_TAG_WORD, recorder.PENDING_SITE_WORD, recorder.PENDING_SINCE_WORD)
        tag, what, since = (header[place] for place in places)
        group, number = tag >> 48, tag & _NUMBER
        if not tag or group not in self._log.groups or number <= self._counts.get(group, 0):
            return None, None
        call = PendingCall(self._log.groups[group], number, what & _LOW, what >> 32, since / _NS_PER_S)
        return (None, call) if header[recorder.PENDING_COMPILES_WORD] else (call, None)

    def _read_log(self) -> None:
        size = min(next(iter(self._words(recorder.TEXT_SIZE_WORD, 1)), 0), recorder.MAX_TEXT_BYTES)
        if size > self._log.end_offset:
            self._log.append(self._bytes(recorder.TEXT_OFFSET + self._log.end_offset, size - self._log.end_offset))

    def _words(self, first: int, count: int) -> array[int]:
        """Return `count` words starting at word `first`, or fewer if the file ends."""
        data = self._bytes(first * recorder.WORD_BYTES, count * recorder.WORD_BYTES)
        words = array("Q")
        words.frombytes(data[: len(data) - len(data) % recorder.WORD_BYTES])
        return words

    def _bytes(self, offset: int, size: int) -> bytes:
        try:
            return os.pread(self._fd, size, offset)
        except OSError:
            return b""  # for example, a file on a server that is gone


def _joint_functions(header: array[int]) -> tuple[dict[str, int], JointWait | None]:
    """Return how often each joint function was called, and the most recent wait in one of them."""
    calls, waits = {}, []
    for place, function in enumerate(recorder.JOINT_FUNCTIONS):
        at = recorder.JOINT_WORD + place * recorder.JOINT_FUNCTION_WORDS
        called, awaited, since, site = header[at : at + recorder.JOINT_FUNCTION_WORDS]
        if called:
            calls[function] = called
        if awaited:
            waits.append(JointWait(function, awaited, since / _NS_PER_S, site))
    return calls, max(waits, key=lambda wait: wait.since, default=None)


def _nan_search(header: array[int]) -> tuple[float, float] | None:
    """Return from when to when the rank's calls belonged to a search for a NaN."""
    since, until = header[recorder.NAN_SEARCH_SINCE_WORD], header[recorder.NAN_SEARCH_UNTIL_WORD]
    return (since / _NS_PER_S, until / _NS_PER_S) if since else None


def _told_step(header: array[int]) -> ToldStep | None:
    if not header[recorder.STEP_WORD]:
        return None
    at, first_at = header[recorder.STEP_AT_WORD] / _NS_PER_S, header[recorder.FIRST_STEP_AT_WORD] / _NS_PER_S
    step, first = header[recorder.STEP_WORD] - 1, header[recorder.FIRST_STEP_WORD] - 1
    return ToldStep(step, header[recorder.STEP_TOTAL_WORD], at, max(0, first), first_at)


def _record(words: array[int], at: int) -> _Record:
    return words[at], words[at + 1], words[at + 2], words[at + 3], words[at + 4]


def _call(record: _Record, group: str) -> DispatchedCall:
    time, chain, what, tag, entered = record
    return DispatchedCall(time / _NS_PER_S, group, tag & _NUMBER, chain, what & _LOW, what >> 32, entered / _NS_PER_S)


def _timing(record: _Record, group: str) -> CallTiming:
    time, _, what, tag, entered = record
    return CallTiming(group, tag & _NUMBER, entered / _NS_PER_S, time / _NS_PER_S, what >> 32)


def _latest(marks: Mapping[int, int]) -> dict[int, int]:
    """Keep only the last marks of each stride."""
    kept: set[int] = set()
    for stride in _MARK_STRIDES:
        kept.update(sorted(number for number in marks if number % stride == 0)[-_MARKS_KEPT:])
    return {number: marks[number] for number in sorted(kept)}


def _chosen(table: Mapping[int, _Value], wanted: Iterable[int]) -> dict[int, _Value]:
    return {number: table[number] for number in sorted(wanted) if number in table}
