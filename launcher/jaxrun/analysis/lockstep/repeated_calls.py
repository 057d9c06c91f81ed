"""Finds out since when a rank's calls repeat themselves, as those of a training loop do."""

from __future__ import annotations

from collections import deque

_MIN_REPEATS = 3
_MAX_PERIOD = 64  # calls; a call that repeats nothing costs a comparison with each


class RepeatedCalls:
    """The latest calls of a rank.

    since:  when the first of the calls that repeat themselves up to the last one had been dispatched, in seconds since
            the epoch; 0.0 if they do not
    """

    def __init__(self) -> None:
        self.since = 0.0
        self._period = 0  # of the calls that repeat themselves
        self._latest: deque[tuple[object, float]] = deque(maxlen=_MIN_REPEATS * _MAX_PERIOD)
        self._matches = [0] * (_MAX_PERIOD + 1)  # by period: the last calls that are equal to those a period before

    def add(self, call: object, dispatched: float) -> None:
        """Add the next call: what is called and from where, and when it had been dispatched."""
        if self._period and self._latest[-self._period][0] != call:
            self._period, self.since = 0, 0.0
            self._matches = [0] * len(self._matches)
        self._latest.append((call, dispatched))
        if not self._period:
            self._find_period(call)

    def _find_period(self, call: object) -> None:
        latest, matches = self._latest, self._matches
        for period in range(1, min(_MAX_PERIOD, len(latest) - 1) + 1):
            matches[period] = matches[period] + 1 if latest[-1 - period][0] == call else 0
            if matches[period] >= (_MIN_REPEATS - 1) * period:
                self._period, self.since = period, latest[-_MIN_REPEATS * period][1]
                return
