"""Prints one line if the ranks of this machine, on CPU, lose much of a longer run because they outnumber its cores.

Ranks that exchange data on CPU wait for each other, and a rank that has no core keeps all others waiting: their time
grows by much more than the share of a core that each has. One process with as many devices needs none of that.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from jaxrun.controller.head.head_state import HeadState
from jaxrun.job_events.actions import Action, PrintLine

_MIN_RUN_S = 10.0  # a shorter program, such as a test, is not worth a line
_MIN_CALLS = 20  # cross-process calls of each rank: ranks that compute by themselves lose nothing
_MIN_SHARE = 0.5  # of the time so far, in which a rank has waited for a core


class CoreShortage(Struct):
    """`cores` is the number of cores that the ranks may use, 0 if no line is wanted; `devices` that of each rank."""

    _state: HeadState
    _cores: int
    _devices: int
    _is_told: bool = False

    def check(self, shares: Mapping[int, float], now: float) -> list[Action]:
        """Judge by the seconds per second that the threads of each rank have waited for a core."""
        count, run_at = len(self._state.workers.hosts), self._state.run_at
        is_crowded = self._state.platform == "cpu" and count > self._cores > 0
        if self._is_told or not is_crowded or run_at is None or now - run_at < _MIN_RUN_S or len(shares) < count:
            return []
        if min(sum(flight.call_counts.values()) for flight in self._state.flights.values()) < _MIN_CALLS:
            return []
        share = sum(min(1.0, each) for each in shares.values()) / count
        if share < _MIN_SHARE:
            return []
        self._is_told = True
        cores = "one core" if self._cores == 1 else f"{self._cores} cores"
        lost = f"{count} ranks wait for {cores} {100 * share:.0f} % of the time"
        return [PrintLine(f"{lost}; -n 1 -d {count * self._devices} has the same devices in one process")]
