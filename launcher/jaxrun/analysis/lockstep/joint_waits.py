"""Which ranks wait in a joint function of jaxrun, such as `snapshot`, and for which ranks, which have not called it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from jaxrun.protocol.flight import Flight
from jaxrun.protocol.flight_file import SHOULD_STOP
from jaxrun.text import group_alike


@dataclass(frozen=True, slots=True)
class MissingRanks:
    """Ranks that wait at the same place of a joint function, and the ranks without which they cannot go on.

    since:  when the first of them began to wait, in seconds since the epoch on the clock of its host
    """

    function: str
    place: str
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    since: float

    def missing_of(self, finished: Collection[int]) -> tuple[int, ...]:
        """The missing ranks that have finished, and so will never make the call."""
        # Those that have finished need not agree on when to stop.
        return () if self.function == SHOULD_STOP else tuple(rank for rank in self.missing if rank in finished)


def find_missing_ranks(flights: Mapping[int, Flight]) -> tuple[MissingRanks, ...]:
    """Return who waits in joint functions for whom; ranks without a flight are not known to miss any."""
    found = {}
    known: dict[tuple[str, int], tuple[int, ...]] = {}  # many ranks wait for the same
    for rank, flight in flights.items():
        wait = flight.joint_wait
        if wait is None:
            continue
        if (wait.function, wait.number) not in known:
            known[wait.function, wait.number] = find_missing(flight, flights)
        if missing := known[wait.function, wait.number]:
            found[rank] = (wait.function, flight.place(wait), missing)
    return tuple(
        MissingRanks(function, place, ranks, missing, min(_since(flights[rank]) for rank in ranks))
        for (function, place, missing), ranks in group_alike(found)
    )


def find_missing(flight: Flight, flights: Mapping[int, Flight]) -> tuple[int, ...]:
    """The ranks that have not made the joint call which the rank of `flight` waits for all to make; none if it waits
    for nothing.
    """
    wait = flight.joint_wait
    if wait is None:
        return ()
    return tuple(
        rank for rank, other in sorted(flights.items()) if other.joint_calls.get(wait.function, 0) < wait.number
    )


def _since(flight: Flight) -> float:
    return flight.joint_wait.since if flight.joint_wait is not None else 0.0
