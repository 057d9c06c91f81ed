"""What a job did over time, as values; no I/O. Times are seconds since the epoch, on the clock of the head's host."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxrun.analysis.lockstep.call_waits import CallEntry, measure_wait
from jaxrun.analysis.lockstep.progress import find_progress
from jaxrun.protocol.flight import Flight, parse_group
from jaxrun.text import format_ranks

_Entries = dict[int, int]  # rank → index of the call in its list


class Span(NamedTuple):
    """Something that took a while; `detail` says more in a few words, or is empty."""

    name: str
    start: float
    end: float
    detail: str = ""


class Moment(NamedTuple):
    """Something that happened at one moment; `is_failure`: it is, or leads to, a failure."""

    time: float
    name: str
    detail: str = ""
    is_failure: bool = False


# A tuple, not a dataclass: there may be some hundred thousand.
class TracedCall(NamedTuple):
    """A cross-process call of one rank.

    number:  of the call among those of its group; 0 where that is not known
    entered: 0.0 where that is not known
    left:    when it had been dispatched, or the rank ended
    is_over: whether it was dispatched
    waited:  for how long, from `entered` on, the rank waited for others
    last:    the rank that entered the call last; -1 where that is not known
    missing: the ranks that never entered it, `rank 3`; empty without any
    cost:    of the last rank: for how many seconds the others waited because of it, on average, as the sentence about a
             straggler counts; of all others 0
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


@dataclass(frozen=True, slots=True)
class RankTrace:
    """What one rank did during one attempt.

    phases:        from the start of its process to its end
    calls:         the last ones that its flight recorder holds, in their order
    calls_made:    how many it has made in all
    compilations:  the stages of its compilations; one may lie within another
    trouble:       why its calls are not, or not all, known; else empty
    awaited:       since when others wait for it in a call that it never entered; None if none do
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

    @property
    def end(self) -> float:
        """When its last phase ended."""
        return max((span.end for span in self.phases), default=0.0)

    @property
    def absence(self) -> float:
        """For how many seconds others waited, to its end, in a call that it never entered."""
        return max(0.0, self.end - self.awaited) if self.awaited is not None else 0.0

    @property
    def cost(self) -> float:
        """For how many seconds the others waited for this rank in the calls that are known."""
        return sum(call.cost for call in self.calls) + self.absence


@dataclass(frozen=True, slots=True)
class AttemptTrace:
    """One attempt to run the job; `outcome`: how it ended."""

    number: int
    start: float
    end: float
    ranks: Mapping[int, RankTrace] = field(default_factory=dict)
    marks: tuple[Moment, ...] = ()
    outcome: str = ""


@dataclass(frozen=True, slots=True)
class JobTrace:
    """A job: `report` is the verdict as `explain` shows it, `culprits` the ranks that caused its end.

    clock_error:  by how much the times of different hosts may be wrong to each other, in seconds; None if that is
                  not known, or there is one host
    """

    title: str
    attempts: tuple[AttemptTrace, ...]
    headline: str = ""
    report: str = ""
    outcome: str = ""
    culprits: tuple[int, ...] = ()
    clock_error: float | None = None

    @property
    def start(self) -> float:
        return self.attempts[0].start

    @property
    def end(self) -> float:
        return max(attempt.end for attempt in self.attempts)

    @property
    def by_rank(self) -> dict[int, list[RankTrace]]:
        """What each rank did, in each attempt that it took part in."""
        parts: dict[int, list[RankTrace]] = {}
        for attempt in self.attempts:
            for rank, part in attempt.ranks.items():
                parts.setdefault(rank, []).append(part)
        return parts

    @property
    def calls_left_out(self) -> str:
        """`of 9,000 calls of all ranks the last 4,000`; empty where all are known."""
        ranks = [rank for attempt in self.attempts for rank in attempt.ranks.values()]
        kept, made = sum(len(rank.calls) for rank in ranks), sum(rank.calls_made for rank in ranks)
        return f"of {made:,} calls of all ranks the last {kept:,}" if made > kept else ""


def trace_calls(
    flights: Mapping[int, Flight], offsets: Mapping[int, float], ends: Mapping[int, float]
) -> tuple[dict[int, tuple[TracedCall, ...]], dict[int, float]]:
    """Return the calls of each rank, with what they waited for; and since when others wait for ranks that never came.

    `offsets` are added to the times of a rank; `ends` says when each rank of the job ended.
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
    """The calls in the order in which they were entered, before anything is known of other ranks."""
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
    elif flight.entered and flight.last_call is not None:  # it says nothing but that it has come to its next call
        group, since = flight.last_call.group, flight.entered + offset
        calls.append(TracedCall(group, flight.last_number(group) + 1, "", "", since, max(since, end), is_over=False))
    return sorted(calls, key=lambda call: call.entered or call.left)


def _add_waits(calls: Mapping[int, list[TracedCall]], number: int, entered: _Entries, before: _Entries | None) -> None:
    """All ranks of the group have entered this call; `before` is the call before it, if that is known of all."""
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
    """These ranks have entered a call to which others never came: they wait to their end, or go on to another call."""
    for rank, index in entered.items():
        call = calls[rank][index]
        until = call.left if _next_entry(calls[rank], index) < math.inf else max(call.left, ends[rank])
        calls[rank][index] = call._replace(waited=until - call.entered, missing=missing)


def _next_entry(calls: Sequence[TracedCall], index: int) -> float:
    """When the rank entered its next call, as far as is known; infinity if it has not."""
    return next((call.entered or call.left for call in calls[index + 1 : index + 2]), math.inf)
