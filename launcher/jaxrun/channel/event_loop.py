"""The event loop of agents and servers: readable descriptors, deadlines, and work to be done before each wait."""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Callable


class EventLoop:
    """Calls back for readable descriptors, those of the lowest order first, then for deadlines that have passed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` is what deadlines are compared with, in seconds."""
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[Callable[[], float | None], Callable[[], None]]] = []
        self._pollers: list[Callable[[], float | None]] = []

    def add_reader(self, fd: int, order: int, callback: Callable[[], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, (order, callback))

    def remove_reader(self, fd: int) -> None:
        """Stop listening to `fd`. A descriptor that has no reader, or is closed already, does no harm."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(fd)

    def has_reader(self, fd: int) -> bool:
        return fd in self._selector.get_map()

    def add_timer(self, deadline: Callable[[], float | None], callback: Callable[[], None]) -> None:
        """Call `callback` whenever the time that `deadline` returns has passed; None is no deadline."""
        self._timers.append((deadline, callback))

    def add_poller(self, poll: Callable[[], float | None]) -> None:
        """Call `poll` before each wait; it returns the seconds until it wants the next call, None for any."""
        self._pollers.append(poll)

    def run_once(self, limit: float | None = None) -> None:
        """Wait until something is readable or due, for at most `limit` seconds, and call back."""
        waits = [limit, *(poll() for poll in self._pollers)]
        first = min((at for deadline, _ in self._timers if (at := deadline()) is not None), default=None)
        if first is not None:
            waits.append(first - self._clock())
        wait = min((wait for wait in waits if wait is not None), default=None)
        ready = [key.data for key, _ in self._selector.select(None if wait is None else max(0.0, wait))]
        for _, callback in sorted(ready, key=lambda data: data[0]):
            callback()
        if first is not None and first <= self._clock():
            self._run_timers()

    def _run_timers(self) -> None:
        for deadline, callback in self._timers:
            at = deadline()
            if at is not None and at <= self._clock():
                callback()

    def close(self) -> None:
        self._selector.close()
