"""Does the job make no progress at all any more?

It does as long as any rank writes something or uses CPU time: so a long compilation or long work on a host is no stall,
and ranks that wait for each other, or for what never comes, are one.
"""

from __future__ import annotations

from jaxrun.head.early_exit import IDLE
from jaxrun.head.events import StacksTaken

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
        enough = IDLE * (now - then)
        worked = any(seconds - before.cpu.get(rank, 0.0) > enough for rank, seconds in taken.cpu.items())
        return worked or dict(before.written) != dict(taken.written) or before.cpu.keys() != taken.cpu.keys()
