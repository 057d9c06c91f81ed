"""Descriptors to listen to, and what to do when they are readable, in an order."""

from __future__ import annotations

import contextlib
import selectors
from collections.abc import Callable


class EventLoop:
    """Serves what is ready; of several at a time, the lowest order first."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def add_reader(self, fd: int, order: int, serve: Callable[[], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, (order, serve))

    def remove_reader(self, fd: int) -> None:
        """Do not listen any more; a descriptor that is not watched, or closed by now, is none the worse."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(fd)

    def has_reader(self, fd: int) -> bool:
        return fd in self._selector.get_map()

    def run_once(self, seconds: float | None) -> None:
        """Wait that long at most, None for ever, and serve what is ready."""
        ready = [key.data for key, _ in self._selector.select(seconds)]
        for _, serve in sorted(ready, key=lambda data: data[0]):
            serve()

    def close(self) -> None:
        self._selector.close()
