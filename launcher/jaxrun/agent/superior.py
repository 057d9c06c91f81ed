"""The line to a head on another host, in the place of a head in this process, for the agent of one worker."""

from __future__ import annotations

import signal
from collections.abc import Iterable

from jaxrun.channel.line import Line
from jaxrun.channel.messages import FirstOutput, ShowStacks, SignalWorker, Taken, ToAgent
from jaxrun.errors import EXIT_UNAVAILABLE
from jaxrun.head.events import (
    Action,
    AgentSignalled,
    Begin,
    Describe,
    Dismiss,
    Event,
    Inflict,
    Kill,
    Send,
    Signalled,
    TakeStacks,
)
from jaxrun.output.relay import Relay

_FOR_THE_WORKER = (signal.SIGUSR1, signal.SIGUSR2)


class Superior:
    """Sends what happens, and turns what it hears into actions."""

    def __init__(self, rank: int, line: Line[ToAgent], relay: Relay) -> None:
        self._rank = rank
        self._line = line
        self._relay = relay

    def tell(self, event: Event) -> list[Action]:
        """Orders come by `hear`, except that signals for the worker need none."""
        if isinstance(event, Signalled):
            if event.signum in _FOR_THE_WORKER:
                return [Kill((self._rank,), event.signum)]
            event = AgentSignalled(self._rank, event.signum)
        self._line.send(event)
        return []

    def hear(self) -> list[Action]:
        """What the head wants; once it is gone, the worker's end."""
        actions = [action for message in self._line.receive() for action in self._meaning(message)]
        if self._line.lost:
            actions += [Kill((self._rank,), signal.SIGKILL), Dismiss(EXIT_UNAVAILABLE)]
        return actions

    def due(self) -> list[Action]:
        return []

    def deadline(self) -> None:
        return None

    def note(self, name: str, rank: int | None = None, **more: object) -> None:
        if name == "first_output":
            self._line.send(FirstOutput(self._rank))

    def _meaning(self, message: ToAgent) -> Iterable[Action]:
        ranks = (self._rank,)
        match message:
            case SignalWorker():
                yield Kill(ranks, message.signum)
            case Inflict():
                yield Inflict(ranks, message.kind)
            case ShowStacks():
                yield TakeStacks(ranks, message.purpose)
            case Taken():
                self._relay.taken(message.count)
            case Dismiss() | Describe():
                yield message
            case Begin():
                pass  # a second one would be a bug of the head's
            case _:
                yield Send(ranks, message)
