"""Does the job make no progress at all any more?

It does as long as any rank writes something, makes a cross-process call or uses CPU time: so a long compilation or long
work on a host is no stall, and ranks that wait for each other, or for what never comes, are one. Waiting for a GPU may
cost CPU time, too: that of a rank which stands in the same place in JAX, and compiles nothing, does not count.
"""

from __future__ import annotations

from jaxrun.diagnosis import stacks
from jaxrun.head.early_exit import IDLE_CPU_FRACTION
from jaxrun.protocol.agent_messages import SnapshotReply
from jaxrun.protocol.flight import Flight
from jaxrun.protocol.flight_file import NOTHING

_CHECKS_PER_LIMIT = 4  # in the time that is the limit


class StallDetector:
    """Remembers when the job last gave a sign of life. Times are seconds since the epoch."""

    def __init__(self, limit: float, now: float) -> None:
        self.limit = limit
        self.check_interval_s = limit / _CHECKS_PER_LIMIT
        self.warned = False
        self._alive = now
        self._before: tuple[float, SnapshotReply] | None = None

    def update(self, taken: SnapshotReply, now: float) -> float:
        """Seconds without any sign of life."""
        if self._before is None or self._moved(*self._before, taken, now):
            self._alive = now if self._before else self._alive
            self.warned = False
        self._before = (now, taken)
        return now - self._alive

    def _moved(self, then: float, before: SnapshotReply, taken: SnapshotReply, now: float) -> bool:
        if before.cpu_seconds.keys() != taken.cpu_seconds.keys() or dict(before.bytes_written) != dict(
            taken.bytes_written
        ):
            return True
        enough = IDLE_CPU_FRACTION * (now - then)
        worked = [rank for rank, seconds in taken.cpu_seconds.items() if seconds - before.cpu_seconds[rank] > enough]
        flights, earlier = taken.flights, before.flights
        called = any(flight.call_counts != earlier.get(rank, flight).call_counts for rank, flight in flights.items())
        return called or any(
            not _waits(before.stacks.get(rank, ""), taken.stacks.get(rank, ""), flights.get(rank)) for rank in worked
        )


def _waits(dump_before: str, dump: str, flight: Flight | None) -> bool:
    """Whether a rank that has used CPU time has only waited in JAX meanwhile."""
    if flight is None or flight.level == NOTHING or flight.compiling is not None:
        return False
    stack = stacks.main_stack(dump)
    stands = stack.frames == stacks.main_stack(dump_before).frames
    return stands and any(frame.is_jax for frame in stack.called)
