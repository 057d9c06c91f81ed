"""The line to a head on another host, in the place of a head in this process, for the agent of one worker."""

from __future__ import annotations

import signal
from collections.abc import Iterable

from jaxrun.channel.connection import Connection
from jaxrun.errors import EXIT_UNAVAILABLE
from jaxrun.head.actions import Action, Send, SignalRanks, TakeSnapshot
from jaxrun.head.events import Event, LauncherSignalled
from jaxrun.output.relay import Relay
from jaxrun.protocol.agent_messages import (
    AgentSignalled,
    FirstOutput,
    HeadToAgent,
    OutputCredit,
    Shutdown,
    SignalWorker,
    SnapshotRequest,
    StartWorker,
)

_FOR_THE_WORKER = (signal.SIGUSR1, signal.SIGUSR2)


class HeadClient:
    """Sends what happens, and turns what it hears into actions."""

    def __init__(self, rank: int, line: Connection[HeadToAgent], relay: Relay) -> None:
        self._rank = rank
        self._connection = line
        self._relay = relay

    def handle(self, event: Event) -> list[Action]:
        """Orders come by `hear`, except that signals for the worker need none."""
        if isinstance(event, LauncherSignalled):
            if event.signum in _FOR_THE_WORKER:
                return [SignalRanks((self._rank,), event.signum)]
            event = AgentSignalled(self._rank, event.signum)
        self._connection.send(event)
        return []

    def receive(self) -> list[Action]:
        """What the head wants; once it is gone, the worker's end."""
        actions = [action for message in self._connection.receive() for action in self._actions_for(message)]
        if self._connection.lost_reason:
            actions += [SignalRanks((self._rank,), signal.SIGKILL), Shutdown(EXIT_UNAVAILABLE)]
        return actions

    def handle_timeouts(self) -> list[Action]:
        return []

    def deadline(self) -> None:
        return None

    def record(self, name: str, rank: int | None = None, **more: object) -> None:
        if name == "first_output":
            self._connection.send(FirstOutput(self._rank))

    def _actions_for(self, message: HeadToAgent) -> Iterable[Action]:
        ranks = (self._rank,)
        match message:
            case SignalWorker():
                yield SignalRanks(ranks, message.signum)
            case SnapshotRequest():
                yield TakeSnapshot(ranks, message.purpose)
            case OutputCredit():
                self._relay.add_credit(message.bytes)
            case Shutdown():
                yield message
            case StartWorker():
                pass  # a second one would be a bug of the head's
            case _:
                yield Send(ranks, message)
