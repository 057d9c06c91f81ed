"""The head as an agent sees it, and as it is where it is elsewhere: events are sent, actions received."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from typing import Protocol

from jaxrun.errors import EXIT_UNAVAILABLE
from jaxrun.node.channel.connection import Connection
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.protocol.agent_messages import (
    AgentRefused,
    AgentSignalled,
    FirstOutput,
    HeadToAgent,
    JobInfo,
    NextAttempt,
    OutputCredit,
    Shutdown,
    SignalWorker,
    StartWorker,
)
from jaxrun.records.event_log.actions import (
    Action,
    Send,
    SignalRanks,
)
from jaxrun.records.event_log.events import Event, FreshInterpreters, LauncherSignalled
from jaxrun.records.output.relay import Relay

HEAD_LOST = Shutdown(EXIT_UNAVAILABLE)  # said by no head: known by its identity
_FORWARDED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


class HeadInterface(Protocol):
    """The head as an agent sees it. Times are seconds since the epoch."""

    def handle(self, event: Event) -> list[Action]:
        """Return what is to be done now, in order; a head elsewhere answers later."""

    def handle_timeouts(self) -> list[Action]:
        """Return what is to be done because the deadline has passed."""

    def deadline(self) -> float | None:
        """When `handle_timeouts` is to be called at the latest."""

    def record(self, message: FirstOutput | FreshInterpreters) -> None:
        """Log what changes no decision."""


class ActionSource(Protocol):
    """A descriptor from which actions come: a HeadClient, or the supervisor's ParentLink."""

    def fileno(self) -> int: ...

    def receive(self) -> list[Action]: ...


class DebuggerConsole(Protocol):
    """Where somebody uses the debuggers of workers: the supervisor's Terminal."""

    def attach(self, loop: EventLoop, order: int, on_line: Callable[[str], None]) -> None: ...

    def show(self, text: str) -> None: ...

    def read_line(self) -> None: ...


class HeadClient:
    """HeadInterface and ActionSource of an agent, over its connection to the head."""

    def __init__(self, rank: int, connection: Connection[HeadToAgent], relay: Relay) -> None:
        self._rank = rank
        self._connection = connection
        self._relay = relay

    def fileno(self) -> int:
        return self._connection.fileno()

    def handle(self, event: Event) -> list[Action]:
        """Send the event; actions come by `receive`, except that signals for the worker are forwarded at once."""
        if isinstance(event, LauncherSignalled):
            if event.signum in _FORWARDED_SIGNALS:
                return [SignalRanks((self._rank,), event.signum)]
            event = AgentSignalled(self._rank, event.signum)
        self._connection.send(event)
        return []

    def receive(self) -> list[Action]:
        """Return the actions that have arrived; where the head is gone, those that end worker and agent."""
        actions = [action for message in self._connection.receive() for action in self._actions_for(message)]
        if self._connection.lost_reason and not any(isinstance(action, Shutdown) for action in actions):
            actions += [SignalRanks((self._rank,), signal.SIGKILL), HEAD_LOST]
        return actions

    def handle_timeouts(self) -> list[Action]:
        return []

    def deadline(self) -> None:
        return None

    def record(self, message: FirstOutput | FreshInterpreters) -> None:
        if isinstance(message, FirstOutput):
            self._connection.send(message)

    def _actions_for(self, message: HeadToAgent) -> Iterable[Action]:
        ranks = (self._rank,)
        match message:
            case SignalWorker():
                yield SignalRanks(ranks, message.signum)
            case OutputCredit():
                self._relay.add_credit(message.bytes)
            case NextAttempt() | Shutdown():
                yield message
            case StartWorker() | JobInfo() | AgentRefused():
                pass  # which come before the worker starts
            case _:
                yield Send(ranks, message)
