"""Divides the time in which a program runs into what it was spent on, in whole microseconds. No I/O.

The flight recorders are read now and then. What they say of the time since the last reading is a TimeReading; a
TimeLedger sums readings up. Each microsecond is in one part, so that the parts sum to the whole, whatever the clocks
do. Facts that arrive late, such as a compilation that was finished only now, move time from one part to another.

docs/goodput.md defines the parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

STEPS = "steps"
SET_UP = "set-up"
COMPILING = "compiling"
SAVING = "saving"
RESTORING = "restoring"
DATA = "data"
SLOWEST = "slowest"
STALLED = "stalled"
SUSPENDED = "suspended"
UNKNOWN = "unknown"
RUN_PARTS = (STEPS, SET_UP, COMPILING, SAVING, RESTORING, DATA, SLOWEST, STALLED, SUSPENDED, UNKNOWN)
_UNEXPLAINED = (UNKNOWN, SET_UP, STEPS, SLOWEST, DATA)  # from which time is moved, in this order
_US_PER_S = 1e6
_MAX_US = 10**17

Microseconds = int


def to_us(seconds: float) -> Microseconds:
    """Return whole microseconds, 0 for what is not a time that a job can take."""
    return min(_MAX_US, round(seconds * _US_PER_S)) if 0.0 < seconds < _MAX_US else 0


class TimeReading(NamedTuple):
    """What flight recorders say of the time since the reading before, in seconds, for the job as a whole.

    compiling, saving, restoring:  the most that one rank did of this
    pausing:        the least that each rank did nothing, between two calls that were far apart
    data_share, slowest_share:     the share of the steps' time in which ranks waited, see CallWait
    steps_since:    when the calls that repeat began; None if none do yet
    has_steps:      whether there is anything by which steps could be seen
    calls:          the number of calls of all ranks so far; a stall lasts as long as it stays the same
    first_new_call: when the first of the calls since the reading before was entered; None if unknown
    is_held:        a person debugs the program
    """

    compiling: float = 0.0
    saving: float = 0.0
    restoring: float = 0.0
    pausing: float = 0.0
    data_share: float = 0.0
    slowest_share: float = 0.0
    steps_since: float | None = None
    has_steps: bool = True
    calls: int = 0
    first_new_call: float | None = None
    is_held: bool = False


class TimeLedger:
    """The time of one attempt from the program's start on; times are seconds since the epoch.

    parts:  microseconds by part; their sum is `until_us - since_us`
    """

    def __init__(self, since: float) -> None:
        self.since_us = self.until_us = to_us(since)
        self.parts: dict[str, Microseconds] = dict.fromkeys(RUN_PARTS, 0)
        self._has_stepped = False
        self._unseen: Microseconds = 0  # before there was anything by which steps could be seen
        self._stalled_at_calls: int | None = None

    def add(self, reading: TimeReading, now: float) -> None:
        """Add the time until now; nothing if the clock has gone back."""
        began, now_us = self.until_us, to_us(now)
        left = max(0, now_us - began)
        self.until_us += left
        if reading.is_held:
            self.parts[SUSPENDED] += left
            return
        left = self._add_stall(reading, began, left)
        for part, seconds in (
            (COMPILING, reading.compiling),
            (SAVING, reading.saving),
            (RESTORING, reading.restoring),
            (UNKNOWN, reading.pausing),
        ):
            left = self._add_known(part, to_us(seconds), left)
        self._add_steps(reading, began, left)

    def suspend(self, seconds: float) -> None:
        """Add a time in which someone suspended the whole job."""
        paused = to_us(seconds)
        self.until_us += paused
        self.parts[SUSPENDED] += paused

    def stall(self, idle_s: float, calls: int) -> None:
        """The job has made no progress for this long, and has made so many calls in all."""
        if self._stalled_at_calls is None:
            self._move(to_us(idle_s), STALLED)
        self._stalled_at_calls = calls

    def _add_stall(self, reading: TimeReading, began: Microseconds, left: Microseconds) -> Microseconds:
        """Add the time up to the next call to a stall, if there is one; returns the time left."""
        if self._stalled_at_calls is None:
            return left
        lasted = left
        if reading.calls != self._stalled_at_calls or reading.compiling or reading.saving:
            self._stalled_at_calls = None
            first = reading.first_new_call
            lasted = min(left, max(0, to_us(first) - began)) if first is not None else 0
        self.parts[STALLED] += lasted
        return left - lasted

    def _add_known(self, part: str, amount: Microseconds, left: Microseconds) -> Microseconds:
        """Add an amount that was seen; it may have begun before this reading. Returns the time left."""
        now = min(amount, left)
        self.parts[part] += now
        if part != UNKNOWN:
            self._move(amount - now, part)
        return left - now

    def _add_steps(self, reading: TimeReading, began: Microseconds, left: Microseconds) -> None:
        if reading.steps_since is None and not self._has_stepped:
            self.parts[SET_UP if reading.has_steps else UNKNOWN] += left
            self._unseen += 0 if reading.has_steps else left
            return
        if not self._has_stepped:
            self._has_stepped = True
            was_set_up = min(self._unseen, self.parts[UNKNOWN])  # now that there are steps
            self.parts[UNKNOWN] -= was_set_up
            self.parts[SET_UP] += was_set_up
            since = to_us(reading.steps_since or 0.0)
            before = min(left, max(0, since - began - (self.until_us - began - left)))
            self.parts[SET_UP] += before
            left -= before
            late = min(max(0, began - since), self.parts[SET_UP])  # they began before the last reading
            self.parts[SET_UP] -= late
            self.parts[STEPS] += late
        data = min(left, int(left * _share(reading.data_share)))
        slowest = min(left - data, int(left * _share(reading.slowest_share)))
        self.parts[DATA] += data
        self.parts[SLOWEST] += slowest
        self.parts[STEPS] += left - data - slowest

    def _move(self, amount: Microseconds, to: str) -> None:
        """Move this much, or what there is, from the parts without an explanation."""
        for part in _UNEXPLAINED:
            moved = min(amount, self.parts[part])
            self.parts[part] -= moved
            self.parts[to] += moved
            amount -= moved


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))


def late_share(waited: Mapping[int, float]) -> tuple[int, float] | None:
    """Return the rank for which the others waited most, if that was most of all waiting, and its share; else None."""
    total = sum(waited.values())
    rank = max(waited, key=lambda one: waited[one], default=-1)
    return (rank, waited[rank] / total) if total > 0.0 and waited[rank] > total / 2 else None
