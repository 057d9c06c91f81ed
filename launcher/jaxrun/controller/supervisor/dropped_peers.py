"""Logs the peers that were turned away at the head's port, many in one line: no stranger fills the run directory."""

from __future__ import annotations

from collections.abc import Callable

from jaxrun.records.event_log.events import PeersDropped

_INTERVAL_S = 60.0  # between two lines of the log
_MAX_TEXT = 200  # characters; the text may hold what a stranger has sent


class DroppedPeers:
    """Counts them; the first is logged at once. `clock` returns seconds since the epoch."""

    def __init__(self, record: Callable[[PeersDropped], None], clock: Callable[[], float]) -> None:
        self._record = record
        self._clock = clock
        self._count = 0
        self._last = ""
        self._next_line = 0.0

    def add(self, text: str) -> None:
        """Count one more; `text` is what became of it."""
        self._count += 1
        self._last = text[:_MAX_TEXT]

    def deadline(self) -> float | None:
        """When `log` is to be called, if at all."""
        return self._next_line if self._count else None

    def log(self) -> None:
        """Log how many there were since the last line, and what became of the last of them."""
        if self._count:
            self._record(PeersDropped(self._count, self._last))
            self._count = 0
            self._next_line = self._clock() + _INTERVAL_S
