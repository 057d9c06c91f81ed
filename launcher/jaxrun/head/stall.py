"""Does the job make no progress at all any more?

It does as long as any rank writes something, makes a cross-process call or uses CPU time: so a long compilation or long
work on a host is no stall, and ranks that wait for each other, or for what never comes, are one. Waiting for a GPU may
cost CPU time, too: that of a rank which stands in the same place in JAX, and compiles nothing, does not count.
"""

from __future__ import annotations

from jaxrun.contract.flight import NOTHING
from jaxrun.head.early_exit import IDLE
from jaxrun.head.events import StacksTaken
from jaxrun.lockstep.flight import Flight
from jaxrun.verdict import stacks

_LOOKS = 4  # in the time that is the limit


class Stall:
    """Remembers when the job last gave a sign of life. Times are seconds since the epoch."""

    def __init__(self, limit: float, now: float) -> None:
        self.limit = limit
        self.every = limit / _LOOKS
        self.warned = False
        self._alive = now
        self._before: tuple[float, StacksTaken] | None = None

    def look(self, taken: StacksTaken, now: float) -> float:
        """Seconds without any sign of life."""
        if self._before is None or self._moved(*self._before, taken, now):
            self._alive = now if self._before else self._alive
            self.warned = False
        self._before = (now, taken)
        return now - self._alive

    def _moved(self, then: float, before: StacksTaken, taken: StacksTaken, now: float) -> bool:
        if before.cpu.keys() != taken.cpu.keys() or dict(before.written) != dict(taken.written):
            return True
        enough = IDLE * (now - then)
        worked = [rank for rank, seconds in taken.cpu.items() if seconds - before.cpu[rank] > enough]
        flights = {rank: Flight.from_json(text) for rank, text in taken.flights.items()}
        earlier = {rank: Flight.from_json(text) for rank, text in before.flights.items()}
        called = any(flight.groups != earlier.get(rank, flight).groups for rank, flight in flights.items())
        return called or any(
            not _waits(before.dumps.get(rank, ""), taken.dumps.get(rank, ""), flights.get(rank)) for rank in worked
        )


def _waits(dump_before: str, dump: str, flight: Flight | None) -> bool:
    """Whether a rank that has used CPU time has only waited in JAX meanwhile."""
    if flight is None or flight.level == NOTHING or flight.compiling is not None:
        return False
    stack = stacks.main_stack(dump)
    stands = stack.frames == stacks.main_stack(dump_before).frames
    return stands and any(frame.is_jax for frame in stack.called)
