"""Finds the ranks that wait in a joint function of jaxrun, such as `snapshot`, and the ranks that are missing there."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec import Struct

from jaxrun.protocol.flight import Flight
from jaxrun.protocol.flight_file import SHOULD_STOP
from jaxrun.text import group_alike


class MissingRanks(Struct, frozen=True):
    """Ranks that wait at the same place in a joint function, and the ranks that they wait for.

    since:  when the first of them began to wait, in seconds since the epoch on its host's clock
    """

    function: str
    place: str
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    since: float

    def missing_of(self, finished: Collection[int]) -> tuple[int, ...]:
        """The missing ranks that have finished, so they will never make the call."""
        # Ranks that have finished need not take part in the agreement on when to stop.
        return () if self.function == SHOULD_STOP else tuple(rank for rank in self.missing if rank in finished)


def find_missing_ranks(flights: Mapping[int, Flight]) -> tuple[MissingRanks, ...]:
    """Return who waits for whom in joint functions; a rank without a flight is not counted as waiting."""
    found = {}
    known: dict[tuple[str, int], tuple[int, ...]] = {}  # many ranks wait for the same ones
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
    """Return the ranks that have not made the joint call in which the rank of `flight` waits, if it waits in one."""
    wait = flight.joint_wait
    if wait is None:
        return ()
    return tuple(
        rank for rank, other in sorted(flights.items()) if other.joint_calls.get(wait.function, 0) < wait.number
    )


def _since(flight: Flight) -> float:
    return flight.joint_wait.since if flight.joint_wait is not None else 0.0
