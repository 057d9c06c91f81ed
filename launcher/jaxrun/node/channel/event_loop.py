"""The event loop of agents, servers and gangs: ready descriptors, deadlines, and work before each wait."""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import NamedTuple

Callback = Callable[[], None]
_MAX_WAIT_S = 3600.0  # epoll takes 24 days at most


class _Handlers(NamedTuple):
    order: int
    read: Callback
    write: Callback | None = None


class EventLoop:
    """Calls back for ready descriptors, the lowest order first, then for deadlines that have passed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` is what deadlines are compared with, in seconds."""
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[Callable[[], float | None], Callback]] = []
        self._pollers: list[Callable[[], float | None]] = []
        self._is_closed = False

    def add_reader(self, fd: int, order: int, callback: Callback) -> None:
        self._selector.register(fd, selectors.EVENT_READ, _Handlers(order, callback))

    def remove_reader(self, fd: int) -> None:
        """Stop listening to `fd`. A descriptor without a reader, or a closed one, does no harm."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(fd)

    def has_reader(self, fd: int) -> bool:
        return not self._is_closed and fd in self._selector.get_map()

    def set_writer(self, fd: int, callback: Callback | None) -> None:
        """Also call back when `fd`, which has a reader, is writable; None: no longer. Does nothing once closed."""
        if self._is_closed:
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if callback is not None else 0)
        with contextlib.suppress(KeyError, ValueError):  # it has no reader, or is closed
            key = self._selector.get_key(fd)
            if key.events != events or callback is not None:
                self._selector.modify(fd, events, key.data._replace(write=callback))

    def add_timer(self, deadline: Callable[[], float | None], callback: Callback) -> None:
        """Call `callback` whenever the time that `deadline` returns has passed; None means no deadline."""
        self._timers.append((deadline, callback))

    def add_poller(self, poll: Callable[[], float | None]) -> None:
        """Call `poll` before each wait; it returns the seconds until it needs the next call, None for any."""
        self._pollers.append(poll)

    def run_once(self, limit: float | None = None) -> None:
        """Wait until something is ready or due, for at most `limit` seconds or an hour, and call back."""
        for _ in self.steps(limit):
            pass

    def steps(self, limit: float | None = None) -> Iterator[None]:
        """Do what `run_once` does, in steps: each has called back once, so that its consequences can be handled."""
        waits = [limit, *(poll() for poll in self._pollers)]
        first = min((at for deadline, _ in self._timers if (at := deadline()) is not None), default=None)
        if first is not None:
            waits.append(first - self._clock())
        wait = min((wait for wait in waits if wait is not None), default=None)
        ready: list[tuple[int, Callback]] = []
        for key, events in self._selector.select(None if wait is None else min(max(0.0, wait), _MAX_WAIT_S)):
            handlers: _Handlers = key.data
            if handlers.write is not None and events & selectors.EVENT_WRITE:
                ready.append((handlers.order, handlers.write))
            if events & selectors.EVENT_READ:
                ready.append((handlers.order, handlers.read))
        ready.sort(key=itemgetter(0))
        for _, callback in ready:
            callback()
            yield
        if first is not None and first <= self._clock():
            for deadline, callback in self._timers:
                at = deadline()
                if at is not None and at <= self._clock():
                    callback()
                    yield

    def close(self) -> None:
        self._is_closed = True
        self._selector.close()
