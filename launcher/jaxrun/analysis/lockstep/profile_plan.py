"""Which calls of running ranks are to be profiled: the same ones on all of them, soon, but after the order has come."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from jaxrun.protocol.flight import Flight, parse_group

_MIN_LEAD = 2  # calls that a rank makes before the profile begins: in the first of them it may be already
_MIN_PERIODS = 2  # that show how many calls a step has


@dataclass(frozen=True, slots=True)
class ProfiledCalls:
    """The calls `first` to `last` of a group, to be profiled on these of its ranks."""

    group: str
    first: int
    last: int
    ranks: tuple[int, ...]


def plan_profile(
    flights: Mapping[int, Flight], ranks: Collection[int], steps: int, lead_s: float
) -> tuple[ProfiledCalls, ...]:
    """Plan a profile of so many steps; each rank is profiled by the calls of its largest group.

    ranks:   those to be profiled; none is planned unless each of them has made a call
    lead_s:  how long the order may take to reach them
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
    """Of how many calls a step of the program consists; 0 if the calls that are known do not repeat themselves."""
    known = max(flights.values(), key=lambda flight: len(flight.calls), default=Flight())
    calls = [(call.program, call.site) for call in known.calls]
    period = calls_per_step(calls)
    return period if len(calls) > period and calls[period:] == calls[:-period] else 0


def calls_per_step(calls: Sequence[tuple[int, int]]) -> int:
    """After how many calls they repeat themselves, the last ones at least twice; 1 if they do not.

    `calls` are program and call site of each.
    """
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
    """The group with most of `size` ranks, and of these the one that has made most calls; empty if there is none."""
    counts = {group: made for group, made in flight.call_counts.items() if made}
    return max(counts, key=lambda group: (len(parse_group(group, size)), counts[group]), default="")


def _rate(times: Sequence[float]) -> float:
    took = times[-1] - times[0] if times else 0.0
    return (len(times) - 1) / took if took > 0 else 0.0
