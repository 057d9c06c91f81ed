"""Interrupts of a gang's rank: raised as KeyboardInterrupt in the function that runs, and nowhere else.

An interrupt comes by way of the launcher, as SIGINT, and may arrive before the function that it is meant for or after
it. So each call says how many interrupts the caller has sent before.
"""

from __future__ import annotations

import time
from types import FrameType

from jaxrun_runtime.interrupts import Interrupts

_ARRIVAL_TIMEOUT_S = 2.0  # for an interrupt to arrive that the caller says it has sent


class CallInterrupts(Interrupts):
    """Counts and raises them; `active` is to be true while a function runs."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0
        self._idle_count = 0  # those that came while no function was running

    def wait_for(self, count: int) -> None:
        """Wait until `count` interrupts have arrived: those meant for earlier functions must not hit the next one."""
        deadline = time.monotonic() + _ARRIVAL_TIMEOUT_S
        while self._count < count and time.monotonic() < deadline:
            time.sleep(0.001)

    def raise_early(self, count: int) -> None:
        """Raise an interrupt that has arrived before the function it is meant for; `count` were sent before that."""
        early = min(self._count - count, self._idle_count)
        self._idle_count = 0
        if early > 0:
            self._report()
            raise KeyboardInterrupt
        self._count = count

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        self._idle_count += not self.active
        self._pending = self.active
        if self.active and not self._deferring:
            self._report()
            raise KeyboardInterrupt
