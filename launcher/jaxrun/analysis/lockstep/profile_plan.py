"""Plans which calls of running ranks to profile: soon, the same on all ranks, and after the order has reached them."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence

from msgspec import Struct

from jaxrun.protocol.flight import Flight, parse_group

_MIN_LEAD = 2  # calls that a rank makes before its profile begins; it may already be in the first of them
_MIN_PERIODS = 2  # repetitions that show how many calls a step has


class ProfiledCalls(Struct, frozen=True):
    """The calls `first` to `last` of a group, which the ranks `ranks` of the group profile."""

    group: str
    first: int
    last: int
    ranks: tuple[int, ...]


def plan_profile(
    flights: Mapping[int, Flight], ranks: Collection[int], steps: int, lead_s: float
) -> tuple[ProfiledCalls, ...]:
    """Plan a profile of `steps` steps; each rank is profiled by the calls of its largest group.

    ranks:   the ranks to profile; nothing is planned until each of them has made a call
    lead_s:  how long the order may take to reach them, in seconds
    """
    by_group: dict[str, list[int]] = {}
    size = max((*ranks, *flights), default=0) + 1
    for rank in ranks:
        group = _main_group(flights.get(rank, Flight()), size)
        if not group:
            return ()
        by_group.setdefault(group, []).append(rank)
    return tuple(_plan_group(group, members, flights, steps, lead_s) for group, members in sorted(by_group.items()))


def steps_in(flights: Mapping[int, Flight]) -> int:
    """Return the number of calls in one step of the program; 0 if the known calls do not repeat themselves."""
    known = max(flights.values(), key=lambda flight: len(flight.calls), default=Flight())
    return step_length([(call.program, call.site) for call in known.calls])


def step_length(calls: Sequence[Hashable]) -> int:
    """Return the number of calls after which all these calls repeat themselves; 0 if they do not.

    `calls` has the program and the call site of each call.
    """
    period = calls_per_step(calls)
    return period if len(calls) > period and calls[period:] == calls[:-period] else 0


def calls_per_step(calls: Sequence[Hashable]) -> int:
    """Return the number of calls after which they repeat themselves, at least twice at the end; 1 if they do not."""
    for period in range(1, len(calls) // _MIN_PERIODS + 1):
        if all(one == other for one, other in zip(calls, calls[period:], strict=False)):
            return period
    return 1


def _plan_group(
    group: str, ranks: Sequence[int], flights: Mapping[int, Flight], steps: int, lead_s: float
) -> ProfiledCalls:
    furthest = max(ranks, key=lambda rank: flights[rank].last_number(group))
    calls = flights[furthest].calls_of(group)
    lead = max(_MIN_LEAD, math.ceil(_rate([call.time for call in calls]) * lead_s))
    first = flights[furthest].last_number(group) + lead + 1
    count = steps * calls_per_step([(call.program, call.site) for call in calls])
    return ProfiledCalls(group, first, first + count - 1, tuple(ranks))


def _main_group(flight: Flight, size: int) -> str:
    """The group with most of `size` ranks, and among equals the one with most calls; empty if there is no group."""
    counts = {group: made for group, made in flight.call_counts.items() if made}
    return max(counts, key=lambda group: (len(parse_group(group, size)), counts[group]), default="")


def _rate(times: Sequence[float]) -> float:
    took = times[-1] - times[0] if times else 0.0
    return (len(times) - 1) / took if took > 0 else 0.0
