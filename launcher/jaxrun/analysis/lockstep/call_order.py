"""Finds out from the ranks' calls around a divergence how they came to differ: the advice depends on it. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from jaxrun.analysis.lockstep.divergence import CallGroup, CallOrder, Divergence
from jaxrun.protocol.flight import DispatchedCall, Flight

Flights = Mapping[int, Flight]  # by rank
_MIN_PROGRAMS = 3  # of a loop over different things; a loop over batches has a full one, and perhaps another at its end


def find_call_order(divergence: Divergence, flights: Flights) -> CallOrder:
    """Judge a divergence by the last calls of the ranks `recorded_by` of its call groups."""
    callers = [group for group in divergence.call_groups if group.absence is None and group.recorded_by in flights]
    if any(_searches_nan(divergence, flights[caller.recorded_by]) for caller in callers):
        return CallOrder.NAN_SEARCH
    expected = [group for group in divergence.call_groups if group.absence is None]
    if len(callers) < min(2, len(expected)) and len({caller.place for caller in expected}) == 1:
        return CallOrder.UNKNOWN if divergence.is_earlier else CallOrder.UNREAD
    if divergence.is_earlier or len(callers) < 2 or len({caller.place for caller in callers}) > 1:
        return CallOrder.UNKNOWN
    known = [_calls_at(divergence.group, caller, flights[caller.recorded_by]) for caller in callers[:2]]
    differing = {calls.get(divergence.number, "") for calls in known}
    if "" in differing:  # read while a rank was on its way into the call
        return CallOrder.UNREAD
    if len(differing) < 2:
        return CallOrder.UNKNOWN
    programs = {program for calls in known for program in calls.values()}
    repeats_one = any(_repeated(calls) & differing for calls in known)
    are_batches = repeats_one and len(programs) < _MIN_PROGRAMS  # a rank repeats one, and there are no further programs
    if all(differing <= set(calls.values()) for calls in known) and not are_batches:
        return CallOrder.REORDERED
    read = [flights[caller.recorded_by].coming_calls for caller in callers[:2]]
    is_whole = all(any((call.group, call.number) == (divergence.group, 1) for call in calls) for calls in read)
    earlier = [{n: program for n, program in calls.items() if n < divergence.number} for calls in known]
    return CallOrder.BATCHES if not is_whole or any(map(_repeated, earlier)) else CallOrder.NO_BATCHES


def _searches_nan(divergence: Divergence, flight: Flight) -> bool:
    """Whether a rank has come to the call of the divergence while it looked for the operation that made a NaN."""
    if flight.nan_search is None:
        return False
    since, until = flight.nan_search
    calls = [call for call in flight.coming_calls if (call.group, call.number) == (divergence.group, divergence.number)]
    times = [call.time if isinstance(call, DispatchedCall) else call.since for call in calls]
    return any(since <= time <= until for time in times)


def _calls_at(group: str, caller: CallGroup, flight: Flight) -> dict[int, str]:
    """Return the rank's calls of a group from the line of this call, oldest first: by number, each call's program.

    A program is named by what is equal for it on all ranks, compiled or not; by "" if that is unknown.
    """
    calls = [call for call in flight.coming_calls if call.group == group and flight.place(call) == caller.place]
    programs = {call.number: flight.program(call) for call in calls}
    return {number: program.code or program.key for number, program in programs.items()}


def _repeated(calls: Mapping[int, str]) -> set[str]:
    """Return the programs that were called twice, one call after the other."""
    return {one for one, next_one in pairwise(calls.values()) if one == next_one}
