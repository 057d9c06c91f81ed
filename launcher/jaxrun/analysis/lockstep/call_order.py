"""Finds out from the ranks' calls around a divergence how they came to differ: the advice depends on it. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from jaxrun.analysis.lockstep.divergence import CallGroup, CallOrder, Divergence
from jaxrun.protocol.flight import AnyCall, DispatchedCall, Flight, ProgramInfo

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
    if len(differing) < 2 or "" in differing:
        return CallOrder.UNKNOWN
    if all(differing <= set(calls.values()) for calls in known) and not _are_batches(differing, known):
        return CallOrder.REORDERED
    earlier = [{n: program for n, program in calls.items() if n < divergence.number} for calls in known]
    is_whole = all(_holds_all_calls(divergence.group, flights[caller.recorded_by]) for caller in callers[:2])
    return CallOrder.BATCHES if not is_whole or any(map(_repeated, earlier)) else CallOrder.NO_BATCHES


def _searches_nan(divergence: Divergence, flight: Flight) -> bool:
    if flight.nan_search is None:
        return False
    since, until = flight.nan_search
    times = (_time(call) for call in flight.coming_calls if _is(call, divergence))
    return any(since <= time <= until for time in times)


def _is(call: AnyCall, divergence: Divergence) -> bool:
    return (call.group, call.number) == (divergence.group, divergence.number)


def _time(call: AnyCall) -> float:
    return call.time if isinstance(call, DispatchedCall) else call.since


def _calls_at(group: str, caller: CallGroup, flight: Flight) -> dict[int, str]:
    """Return the rank's calls of a group from the line of this call, oldest first: by number, each call's program."""
    calls = (call for call in flight.coming_calls if call.group == group and flight.place(call) == caller.place)
    return {call.number: _identity(flight.program(call)) for call in calls}


def _identity(program: ProgramInfo) -> str:
    """Return what is equal on all ranks for the same program, compiled or not; empty if unknown."""
    return program.code or program.key


def _are_batches(differing: set[str], known: Sequence[Mapping[int, str]]) -> bool:
    """Whether a rank repeats one of these calls, as a loop over batches does, and there are no further calls."""
    programs = {program for calls in known for program in calls.values()}
    return any(_repeated(calls) & differing for calls in known) and len(programs) < _MIN_PROGRAMS


def _repeated(calls: Mapping[int, str]) -> set[str]:
    """Return the programs that were called twice, one call after the other."""
    return {one for one, next_one in pairwise(calls.values()) if one == next_one}


def _holds_all_calls(group: str, flight: Flight) -> bool:
    return any(call.group == group and call.number == 1 for call in flight.coming_calls)
