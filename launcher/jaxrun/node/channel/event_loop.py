"""The event loop of launchers, agents, servers and gangs: ready descriptors, deadlines, and work before each wait.

loop = EventLoop()          lives as long as the job
part = loop.part()          what one attempt registers; closing it removes all of that, and no more
loop.run_until(condition)   every wait for anything: the whole loop is served meanwhile
"""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import NamedTuple, Protocol

Callback = Callable[[], None]
_MAX_WAIT_S = 3600.0  # epoll takes 24 days at most


class _Handlers(NamedTuple):
    order: int
    owner: LoopPart
    read: Callback | None = None
    write: Callback | None = None

    @property
    def events(self) -> int:
        reads = selectors.EVENT_READ if self.read is not None else 0
        return reads | (selectors.EVENT_WRITE if self.write is not None else 0)


class StopSignals(Protocol):
    """The signals to this process, as SignalPipe has them."""

    def fileno(self) -> int: ...

    def receive(self) -> list[int]:
        """Return the signals that have arrived since the last call."""
        ...

    def put_back(self, signums: list[int], /) -> None:
        """Make `receive` return these again."""
        ...

    def asks_to_stop(self, signum: int, /) -> bool:
        """Whether this signal asks the process to end."""
        ...


class LoopPart:
    """What one owner has registered with a loop: descriptors, deadlines, and work before each wait."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._timers: list[tuple[Callable[[], float | None], Callback]] = []
        self._pollers: list[Callable[[], float | None]] = []
        self._is_closed = False

    def add_reader(self, fd: int, order: int, callback: Callback) -> None:
        """Call back when `fd` is readable; of several that are ready, the lowest order comes first."""
        self._selector.register(fd, selectors.EVENT_READ, _Handlers(order, self, callback))

    def remove_reader(self, fd: int) -> None:
        """Stop serving `fd`. A descriptor that is not served, or a closed one, does no harm."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(fd)

    def has_reader(self, fd: int) -> bool:
        return not self._is_closed and fd in self._selector.get_map()

    def set_writer(self, fd: int, callback: Callback | None) -> None:
        """Also call back when `fd`, which has a reader, is writable; None: no longer. Does nothing once closed."""
        if self._is_closed:
            return
        with contextlib.suppress(KeyError, ValueError):  # it has no reader, or is closed
            key = self._selector.get_key(fd)
            handlers: _Handlers = key.data._replace(write=callback)
            if key.events != handlers.events or callback is not None:
                self._selector.modify(fd, handlers.events, handlers)

    def add_writer(self, fd: int, order: int, callback: Callback) -> None:
        """Call back when `fd`, which has no reader, is writable; `remove_reader` ends that."""
        if not self.has_reader(fd):
            self._selector.register(fd, selectors.EVENT_WRITE, _Handlers(order, self, write=callback))

    def add_timer(self, deadline: Callable[[], float | None], callback: Callback) -> None:
        """Call `callback` whenever the time that `deadline` returns has passed; None means no deadline."""
        self._timers.append((deadline, callback))

    def add_poller(self, poll: Callable[[], float | None]) -> None:
        """Call `poll` before each wait; it returns the seconds until it needs the next call, None for any."""
        self._pollers.append(poll)

    def close(self) -> None:
        """Remove all that was registered here. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        for key in [key for key in self._selector.get_map().values() if key.data.owner is self]:
            self.remove_reader(key.fd)
        self._timers.clear()
        self._pollers.clear()


class EventLoop(LoopPart):
    """Calls back for ready descriptors, the lowest order first, then for deadlines that have passed."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, selector: selectors.BaseSelector | None = None
    ) -> None:
        """`clock` is what deadlines are compared with, in seconds; a `selector` may wait for regular files, too."""
        super().__init__(selector or selectors.DefaultSelector())
        self.clock = clock
        self._parts: list[LoopPart] = [self]

    def part(self) -> LoopPart:
        """Return a place for what is removed before this loop ends."""
        self._parts = [one for one in self._parts if not one._is_closed]
        self._parts.append(made := LoopPart(self._selector))
        return made

    def run_until(
        self,
        condition: Callable[[], bool],
        limit: float | None = None,
        signals: StopSignals | None = None,
        after_step: Callback = lambda: None,
    ) -> bool:
        """Serve this loop until the condition is met, for at most `limit` seconds; returns whether it is met.

        signals:     one of these that asks the process to end ends the wait, too; all stay for whoever reads them next
        after_step:  is called after each callback, so that its consequences can be handled

        The condition is judged before the first wait, and whenever something has happened.
        """
        until = None if limit is None else time.monotonic() + limit
        arrived: list[int] = []
        if signals is not None:
            self.add_reader(signals.fileno(), -1, lambda: arrived.extend(signals.receive()))
        try:
            while not condition():
                left = None if until is None else until - time.monotonic()
                if (left is not None and left <= 0) or (signals and any(map(signals.asks_to_stop, arrived))):
                    return False
                for _ in self.steps(left):
                    after_step()
            return True
        finally:
            if signals is not None:
                self.remove_reader(signals.fileno())
                signals.put_back(arrived)

    def run_once(self, limit: float | None = None) -> None:
        """Wait until something is ready or due, for at most `limit` seconds or an hour, and call back."""
        for _ in self.steps(limit):
            pass

    def steps(self, limit: float | None = None) -> Iterator[None]:
        """Do what `run_once` does, in steps: each has called back once, so that its consequences can be handled."""
        waits = [limit, *(poll() for part in self._parts for poll in part._pollers)]
        deadlines = (deadline() for part in self._parts for deadline, _ in part._timers)
        first = min((at for at in deadlines if at is not None), default=None)
        if first is not None:
            waits.append(first - self.clock())
        wait = min((wait for wait in waits if wait is not None), default=None)
        ready: list[tuple[int, Callback]] = []
        for key, events in self._selector.select(None if wait is None else min(max(0.0, wait), _MAX_WAIT_S)):
            handlers: _Handlers = key.data
            if handlers.write is not None and events & selectors.EVENT_WRITE:
                ready.append((handlers.order, handlers.write))
            if handlers.read is not None and events & selectors.EVENT_READ:
                ready.append((handlers.order, handlers.read))
        ready.sort(key=itemgetter(0))
        for _, callback in ready:
            callback()
            yield
        if first is not None and first <= self.clock():
            for part in tuple(self._parts):
                for deadline, callback in tuple(part._timers):
                    at = deadline()
                    if at is not None and at <= self.clock():
                        callback()
                        yield

    def close(self) -> None:
        if not self._is_closed:
            super().close()
            self._selector.close()
