"""Where all that happens in a job comes together: the head, its clock, and the journal of what it hears and decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from jaxrun.head.actions import Action, WriteFile
from jaxrun.head.events import Event, Tick
from jaxrun.head.head import Head
from jaxrun.rundir import event_log


class RunFiles(Protocol):
    """Where events are kept; times are seconds since the epoch."""

    def record(self, event: str, time: float, rank: int | None = None, **data: object) -> None: ...

    def write_text(self, name: str, text: str) -> None: ...


class Dispatcher:
    """Tells the head what happens, and answers with what it wants done."""

    def __init__(self, head: Head, record: RunFiles, clock: Callable[[], float]) -> None:
        self._head = head
        self._files = record
        self._clock = clock

    @property
    def hosts(self) -> Mapping[int, str]:
        """The host of each rank, as far as it is known."""
        return self._head.hosts

    def handle(self, event: Event) -> list[Action]:
        """What is to be done now, in order."""
        self._log(event_log.event_entry(event))
        actions = self._head.handle(event, self._clock())
        for action in actions:
            self._log(event_log.action_entry(action))
            if isinstance(action, WriteFile):
                self._files.write_text(action.name, action.text)
        return actions

    def handle_timeouts(self) -> list[Action]:
        """What is to be done because time has passed."""
        deadline = self._head.deadline()
        return self.handle(Tick()) if deadline is not None and deadline <= self._clock() else []

    def deadline(self) -> float | None:
        """When `due` is to be asked at the latest, seconds since the epoch."""
        return self._head.deadline()

    def record(self, name: str, rank: int | None = None, **more: object) -> None:
        """Keep what the head need not know."""
        self._files.record(name, self._clock(), rank, **more)

    def _log(self, entry: event_log.Entry | None) -> None:
        if entry is not None:
            name, rank, more = entry
            self.record(name, rank, **more)
