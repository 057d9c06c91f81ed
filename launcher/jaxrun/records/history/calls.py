"""The calls of all ranks over time: which rank came last to each, and when the others waited for it. No I/O.

A rank that has entered a call waits until the last rank of its group has entered it, too: inside the call, or, where
the call has been dispatched meanwhile, after it, unless it goes on to another call. What that cost, call_waits.py says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from jaxrun.analysis.lockstep.call_waits import CallEntry, measure_wait
from jaxrun.analysis.lockstep.progress import find_progress
from jaxrun.protocol.flight import Flight, parse_group
from jaxrun.records.history.job_trace import TracedCall
from jaxrun.text import format_ranks

_Entries = dict[int, int]  # rank → index of the call in its list


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
