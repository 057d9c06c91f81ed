"""Sums up the pauses of a rank: times between two of its cross-process calls that are far longer than usual."""

from __future__ import annotations

from collections.abc import Callable

_MIN_PAUSE_S = 1.0
_MIN_PERIODS = 5.0  # the usual time from one call to the next
_MIN_CALLS = 8  # from which on it is known what is usual


class PauseTimes:
    """Times are seconds since the epoch on the rank's clock.

    longest:  the longest time from one call to the next, in seconds; up to date after `seconds`
    """

    def __init__(self) -> None:
        self._last = 0.0  # when the last call had been dispatched; 0.0 before the first
        self._calls = 0
        self._usual = 0.0  # seconds from one call to the next, without pauses
        self._total = 0.0
        self.longest = 0.0
        self._longer: list[tuple[float, float]] = []  # from one call to the next, longer than `longest`
        self._new: list[tuple[float, float]] = []  # pauses whose stages are not known yet

    def add(self, entered: float, dispatched: float) -> None:
        """Add the next call; `entered` is 0.0 if unknown."""
        if not self._last:
            self._last = dispatched
            return
        began = min(entered, dispatched) if entered else dispatched
        gap, period = began - self._last, dispatched - self._last
        is_pause = self._calls >= _MIN_CALLS and gap > max(_MIN_PAUSE_S, _MIN_PERIODS * self._usual)
        if period > max([self.longest, *(until - since for since, until in self._longer[-1:])]):
            self._longer.append((self._last, dispatched))
        if is_pause:
            self._new.append((self._last, began))
        elif period > 0.0:
            self._calls += 1
            self._usual += (period - self._usual) / min(self._calls, 4 * _MIN_CALLS)
        self._last = max(self._last, dispatched)

    def seconds(self, overlap: Callable[[float, float], float]) -> float:
        """Return the sum of all pauses, without the parts for which `overlap(since, until)` has another reason."""
        for since, until in self._new:
            self._total += max(0.0, until - since - overlap(since, until))
        self._new.clear()
        for since, until in self._longer:
            self.longest = max(self.longest, until - since - overlap(since, until))
        self._longer.clear()
        return self._total
