"""Interrupts of a rank: raised as KeyboardInterrupt in the function that runs, and nowhere else.

An interrupt comes by way of the launcher, as SIGINT, and may arrive before the function that it is meant for or after
it. So each call says how many interrupts the caller has sent before.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

_ARRIVAL_TIMEOUT_S = 2.0  # for an interrupt to arrive that the caller says it has sent


class Interrupts:
    """Counts and raises them; `in_function` is to be true while a function runs."""

    def __init__(self) -> None:
        self.in_function = False
        self._count = 0
        self._idle_count = 0  # those that came while no function was running
        self._pending = False
        self._deferring = False

    def install(self) -> None:
        signal.signal(signal.SIGINT, self._handle_signal)
        os.register_at_fork(after_in_child=self._uninstall)

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
            self._raise()
        self._count = count

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Raise interrupts at the end of the block only, so that no message is left half sent or received."""
        if self._deferring or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False
            if self._pending:
                self._raise()

    def _uninstall(self) -> None:
        """In a process that a function has forked, SIGINT is KeyboardInterrupt again, wherever it arrives."""
        if signal.getsignal(signal.SIGINT) == self._handle_signal:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        self._idle_count += not self.in_function
        self._pending = self.in_function
        if self.in_function and not self._deferring:
            self._raise()

    def _raise(self) -> None:
        self._pending = False
        raise KeyboardInterrupt
