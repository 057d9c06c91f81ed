"""What a job did over time, as values; no I/O. Times are seconds since the epoch, on the clock of the head's host."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct, field

from jaxrun.analysis.lockstep.call_waits import CallEntry, measure_wait
from jaxrun.analysis.lockstep.progress import find_progress
from jaxrun.analysis.verdict.goodput_text import Goodput, Period
from jaxrun.protocol.flight import Flight, parse_group
from jaxrun.text import format_ranks

_Entries = dict[int, int]  # rank → index of the call in its list


class Span(NamedTuple):
    """A period of time; `detail` describes it in a few words, or is empty."""

    name: str
    start: float
    end: float
    detail: str = ""


class Moment(NamedTuple):
    """A moment; `is_failure`: something that is, or leads to, a failure."""

    time: float
    name: str
    detail: str = ""
    is_failure: bool = False


# A tuple, not a dataclass: there may be some hundred thousand.
class TracedCall(NamedTuple):
    """A cross-process call of one rank.

    number:  the number of the call in its group; 0 if unknown
    entered: 0.0 if unknown
    left:    when it had been dispatched, or the rank ended
    is_over: whether it was dispatched
    waited:  how long the rank waited for others, from `entered` on, in seconds
    last:    the rank that entered the call last; -1 if unknown
    missing: the ranks that never entered it, `rank 3`; empty if there are none
    cost:    for the last rank: seconds that the others waited because of it, on average, as counted for a straggler;
             0 for all others
    """

    group: str
    number: int
    name: str
    place: str
    entered: float
    left: float
    is_over: bool = True
    waited: float = 0.0
    last: int = -1
    missing: str = ""
    cost: float = 0.0


class RankTrace(Struct, frozen=True):
    """What one rank did during one attempt.

    phases:        from the start of its process to its end
    calls:         the last calls in its flight recorder, in order
    calls_made:    the number of all its calls
    compilations:  the stages of its compilations; one may be inside another
    trouble:       why some or all of its calls are unknown; else empty
    awaited:       since when others wait for it in a call that it never entered; None if none do
    status:        of its process, negative for a signal; None if it has not ended, as far as is known
    peak_memory_bytes:  the most memory that it was seen to hold; 0 if unknown
    """

    rank: int
    host: str = ""
    pid: int = 0
    phases: tuple[Span, ...] = ()
    calls: tuple[TracedCall, ...] = ()
    calls_made: int = 0
    compilations: tuple[Span, ...] = ()
    marks: tuple[Moment, ...] = ()
    trouble: str = ""
    awaited: float | None = None
    status: int | None = None
    peak_memory_bytes: int = 0

    @property
    def end(self) -> float:
        """When its last phase ended."""
        return max((span.end for span in self.phases), default=0.0)

    @property
    def absence(self) -> float:
        """Seconds that others waited, until its end, in a call that it never entered."""
        return max(0.0, self.end - self.awaited) if self.awaited is not None else 0.0

    @property
    def cost(self) -> float:
        """Seconds that the others waited for this rank in the known calls."""
        return sum(call.cost for call in self.calls) + self.absence


class AttemptTrace(Struct, frozen=True):
    """One attempt to run the job; `outcome`: how it ended."""

    number: int
    start: float
    end: float
    ranks: Mapping[int, RankTrace] = field(default_factory=dict)
    marks: tuple[Moment, ...] = ()
    outcome: str = ""


class JobTrace(Struct, frozen=True):
    """A job: `report` is the verdict as `explain` shows it, `culprits` the ranks that caused its end.

    fates:        what became of the other ranks, in words; empty if the job went well
    clock_error:  how far the clocks of different hosts may be apart after correction, in seconds; None if unknown, or
                  if there is one host
    goodput, band:  what the time was worth, in all and in each period
    """

    title: str
    attempts: tuple[AttemptTrace, ...]
    headline: str = ""
    report: str = ""
    outcome: str = ""
    culprits: tuple[int, ...] = ()
    fates: Mapping[int, str] = field(default_factory=dict)
    clock_error: float | None = None
    tag: str = ""
    goodput: Goodput = Goodput()
    band: tuple[Period, ...] = ()

    @property
    def start(self) -> float:
        return self.attempts[0].start

    @property
    def end(self) -> float:
        return max(attempt.end for attempt in self.attempts)

    @property
    def by_rank(self) -> dict[int, list[RankTrace]]:
        """The traces of each rank, in each attempt in which it took part."""
        parts: dict[int, list[RankTrace]] = {}
        for attempt in self.attempts:
            for rank, part in attempt.ranks.items():
                parts.setdefault(rank, []).append(part)
        return parts

    @property
    def calls_left_out(self) -> str:
        """`of 9,000 calls of all ranks the last 4,000`; empty if all are known."""
        ranks = [rank for attempt in self.attempts for rank in attempt.ranks.values()]
        kept, made = sum(len(rank.calls) for rank in ranks), sum(rank.calls_made for rank in ranks)
        return f"of {made:,} calls of all ranks the last {kept:,}" if made > kept else ""


def trace_calls(
    flights: Mapping[int, Flight], offsets: Mapping[int, float], ends: Mapping[int, float]
) -> tuple[dict[int, tuple[TracedCall, ...]], dict[int, float]]:
    """Return the calls of each rank, with their waits; and since when others wait for ranks that never came.

    `offsets` are added to the times of a rank; `ends` has the time at which each rank of the job ended.
    """
    calls = {rank: _calls_of(flight, offsets.get(rank, 0.0), ends[rank]) for rank, flight in flights.items()}
    entries: dict[tuple[str, int], _Entries] = {}
    for rank, made in calls.items():
        for index, call in enumerate(made):
            if call.number and call.entered:
                entries.setdefault((call.group, call.number), {})[rank] = index
    awaited: dict[int, float] = {}
    for (group, number), entered in entries.items():
        ranks = parse_group(group, len(ends))
        absent = ranks - entered.keys()
        if not absent and len(ranks) > 1:
            before = entries.get((group, number - 1), {})
            _add_waits(calls, number, entered, before if before.keys() == entered.keys() else None)
        elif absent and absent <= set(find_progress(flights, group, len(ends)).behind(number)):
            _add_missing(calls, entered, ends, format_ranks(absent))
            since = min(calls[rank][index].entered for rank, index in entered.items())
            awaited |= {rank: min(since, awaited.get(rank, since)) for rank in absent}
    return {rank: tuple(made) for rank, made in calls.items()}, awaited


def _calls_of(flight: Flight, offset: float, end: float) -> list[TracedCall]:
    """Return the calls in the order in which they were entered, before other ranks are taken into account."""
    calls = [
        TracedCall(
            group=call.group,
            number=call.number,
            name=flight.program(call).name,
            place=flight.place(call),
            entered=call.entered + offset if call.entered else 0.0,
            left=max(call.time, call.entered) + offset,
        )
        for call in flight.calls
    ]
    pending = flight.pending
    if pending is not None:
        name, place = flight.program(pending).name, flight.place(pending)
        since = pending.since + offset
        calls.append(TracedCall(pending.group, pending.number, name, place, since, max(since, end), is_over=False))
    elif flight.entered and flight.last_call is not None:  # only shows that it has come to its next call
        group, since = flight.last_call.group, flight.entered + offset
        calls.append(TracedCall(group, flight.last_number(group) + 1, "", "", since, max(since, end), is_over=False))
    return sorted(calls, key=lambda call: call.entered or call.left)


def _add_waits(calls: Mapping[int, list[TracedCall]], number: int, entered: _Entries, before: _Entries | None) -> None:
    """Add the waits of a call that all ranks of the group have entered; `before`: the previous call, if known."""
    entries = {rank: _entry(calls[rank], index) for rank, index in entered.items()}
    previous = {rank: _entry(calls[rank], index) for rank, index in before.items()} if before is not None else None
    wait = measure_wait(number, entries, previous, {rank: (rank,) for rank in entered})
    for rank, index in entered.items():
        entry = entries[rank]
        until = wait.came if entry.next_entered >= wait.came else min(wait.came, entry.dispatched)
        cost = wait.waited_s if rank == wait.last_rank else 0.0
        waited = max(0.0, until - entry.entered)
        calls[rank][index] = calls[rank][index]._replace(waited=waited, last=wait.last_rank, cost=cost)


def _entry(made: Sequence[TracedCall], index: int) -> CallEntry:
    call = made[index]
    return CallEntry(call.entered, call.left, _next_entry(made, index), call.place)


def _add_missing(
    calls: Mapping[int, list[TracedCall]], entered: _Entries, ends: Mapping[int, float], missing: str
) -> None:
    """Add the waits of ranks in a call to which others never came: until their end, or until their next call."""
    for rank, index in entered.items():
        call = calls[rank][index]
        until = call.left if _next_entry(calls[rank], index) < math.inf else max(call.left, ends[rank])
        calls[rank][index] = call._replace(waited=until - call.entered, missing=missing)


def _next_entry(calls: Sequence[TracedCall], index: int) -> float:
    """Return when the rank entered its next call, as far as known; infinity if it has not."""
    return next((call.entered or call.left for call in calls[index + 1 : index + 2]), math.inf)
