"""Measures for which rank the others waited in each call, and how long: both for the sentence and for the picture.

The measure is computed from the times at which ranks entered a call, without I/O. To compare hosts, an offset in
seconds is added to the times of each rank.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from jaxrun.protocol.flight import CallTiming, Flight, parse_group, strip_directory

Party = tuple[int, ...]  # a rank, or all ranks of a host
_MAX_TIMINGS = 2**16  # timings compared at once: with many ranks, fewer calls


class CallWait(NamedTuple):
    """One call of a group, and how long the others waited for the party that entered it last.

    last_rank:  the rank that entered it last, at the time `came`
    last:       the party of that rank; empty if it was not later than others for reasons of its own
    place:      where the call stands in the program of the group's lowest rank
    period_s:   from the last entry into the call before to the last entry into this one
    late_s:     by how much it came later than the next to last
    waited_s:   how long the others, on average, may have waited for it: they made no other call meanwhile
    blocked_s:  the part of `waited_s` that they certainly waited: they were inside the call
    inherited_s:  how long the others, on average, waited longer than `waited_s`, because it left the call before late
    """

    number: int
    last_rank: int
    came: float
    last: Party
    place: str
    period_s: float
    late_s: float
    waited_s: float
    blocked_s: float
    inherited_s: float = 0.0


class CallEntry(NamedTuple):
    """When a rank entered a call, and when it had been dispatched: until then the rank could do nothing else."""

    entered: float
    dispatched: float
    next_entered: float  # into any call; infinity if not known yet
    place: str


def find_waits(
    flights: Mapping[int, Flight],
    offsets: Mapping[int, float],
    parties: Mapping[int, Party],
    after: Mapping[str, int],
) -> dict[str, list[CallWait]]:
    """Return by group, in order, the calls whose times all its ranks have recorded.

    parties:  each rank's party, for all ranks of the job; groups of one party are left out
    after:    by group, the number of the last call that is already known
    """
    limit = max(16, _MAX_TIMINGS // max(1, len(flights)))
    timed = {rank: _entries(flight, offsets.get(rank, 0.0), limit) for rank, flight in flights.items()}
    found = {}
    for group in sorted({group for entries in timed.values() for group in entries}):
        ranks = sorted(parse_group(group, len(parties)))
        if not ranks or not all(group in timed.get(rank, {}) for rank in ranks):
            continue
        if len({parties[rank] for rank in ranks}) > 1:
            tables = {rank: timed[rank][group] for rank in ranks}
            found[group] = _waits(tables, parties, after.get(group, 0))
    return {group: waits for group, waits in found.items() if waits}


def _entries(flight: Flight, offset: float, limit: int) -> dict[str, dict[int, CallEntry]]:
    """Return a rank's recorded entries by group and number of the call."""
    timings = flight.timings[-limit:]
    times = sorted(timing.entered for timing in timings)
    found: dict[str, dict[int, CallEntry]] = {}
    for timing in timings:
        found.setdefault(timing.group, {})[timing.number] = _entry(flight, timing, times, offset)
    return found


def _entry(flight: Flight, timing: CallTiming, times: Sequence[float], offset: float) -> CallEntry:
    later = bisect_right(times, timing.entered)
    following = times[later] + offset if later < len(times) else float("inf")
    stack = flight.sites.get(timing.site, ())
    place = strip_directory(stack[0]) if stack else ""
    return CallEntry(timing.entered + offset, timing.dispatched + offset, following, place)


def _waits(tables: Mapping[int, Mapping[int, CallEntry]], parties: Mapping[int, Party], known: int) -> list[CallWait]:
    common = sorted(set.intersection(*(set(table) for table in tables.values())))
    waits = []
    for before, number in pairwise(common):
        if number == before + 1 and number > known:
            previous, entries = ({rank: table[n] for rank, table in tables.items()} for n in (before, number))
            waits.append(measure_wait(number, entries, previous, parties))
    return waits


def measure_wait(
    number: int,
    entries: Mapping[int, CallEntry],
    previous: Mapping[int, CallEntry] | None,
    parties: Mapping[int, Party],
) -> CallWait:
    """Measure a call that all its ranks have entered; `previous` is the call before it, None if unknown."""
    last_rank = max(entries, key=lambda rank: entries[rank].entered)
    last, came = parties[last_rank], entries[last_rank].entered
    others = [rank for rank in entries if parties[rank] != last]
    ready = max(entries[rank].entered for rank in others)
    late_s, began = came - ready, came
    if previous is not None:
        # A rank that left the previous call late, for example woken up late, is that much less late on its own account.
        began = max(entry.entered for entry in previous.values())
        own = {rank: entry.entered - max(previous[rank].dispatched, began) for rank, entry in entries.items()}
        own_late_s = max(own[rank] for rank in own if parties[rank] == last) - max(own[rank] for rank in others)
        late_s = min(late_s, own_late_s)
    late_s = max(0.0, late_s)
    waiting = sum(entries[rank].next_entered >= came for rank in others)
    blocked_s = sum(max(0.0, min(late_s, entries[rank].dispatched - ready)) for rank in others)
    return CallWait(
        number=number,
        last_rank=last_rank,
        came=came,
        last=last if late_s > 0.0 else (),
        place=entries[min(entries)].place,
        period_s=max(0.0, came - began),
        late_s=late_s,
        waited_s=late_s * waiting / len(others),
        blocked_s=blocked_s / len(others),
        inherited_s=max(0.0, came - ready - late_s) * waiting / len(others),
    )
