"""The one way into the head: events are logged and handed to it, its actions are logged and returned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from jaxrun.head.actions import Action, PrintLine, PrintSnapshot, PrintStallNotice, SaveSnapshot
from jaxrun.head.events import Event, Tick
from jaxrun.head.head import Head
from jaxrun.rundir import event_log
from jaxrun.rundir.rundir import STACKS_FILE
from jaxrun.verdict.stack_text import format_snapshot
from jaxrun.verdict.stall_notice import format_stall_notice


class RunFiles(Protocol):
    """Keeps events and files of a job, as RunDir does; times are seconds since the epoch."""

    @property
    def shown_path(self) -> Path | None:
        """The directory as people may type it; None where there is none."""

    def record(self, event: str, time: float, rank: int | None = None, **data: object) -> None: ...

    def write_text(self, name: str, text: str) -> None: ...


class Dispatcher:
    """Feeds events to the head and returns its actions; `clock` returns seconds since the epoch."""

    def __init__(self, head: Head, files: RunFiles, clock: Callable[[], float]) -> None:
        self._head = head
        self._files = files
        self._clock = clock

    @property
    def hosts(self) -> Mapping[int, str]:
        """The host of each rank, as far as it is known."""
        return self._head.hosts

    def handle(self, event: Event) -> list[Action]:
        """Return what is to be done now, in order."""
        self._log(event_log.event_entry(event))
        return [self._prepare(action) for action in self._head.handle(event, self._clock())]

    def handle_timeouts(self) -> list[Action]:
        """Return what is to be done because the head's deadline has passed."""
        deadline = self._head.deadline()
        return self.handle(Tick()) if deadline is not None and deadline <= self._clock() else []

    def deadline(self) -> float | None:
        """When `handle_timeouts` is to be called at the latest, seconds since the epoch."""
        return self._head.deadline()

    def record(self, name: str, rank: int | None = None, **data: object) -> None:
        """Log an event that the head need not know."""
        self._files.record(name, self._clock(), rank, **data)

    def _prepare(self, action: Action) -> Action:
        """Log an action, and do what needs neither agents nor output."""
        self._log(event_log.action_entry(action))
        if isinstance(action, PrintSnapshot):
            return PrintLine(f"{action.heading}{format_snapshot(action.snapshot) or 'no rank has stacks to show yet'}")
        if isinstance(action, PrintStallNotice):
            return PrintLine(format_stall_notice(action.snapshot, action.idle_s, self._files.shown_path))
        if isinstance(action, SaveSnapshot):
            self._files.write_text(STACKS_FILE, action.snapshot.to_json())
        return action

    def _log(self, entry: event_log.Entry | None) -> None:
        if entry is not None:
            name, rank, data = entry
            self.record(name, rank, **data)
