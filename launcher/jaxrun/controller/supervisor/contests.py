"""Two agents that claim one place: the one that the job has, and one that has come since (--wait-hosts).

A pod is replaced before the head has noticed the loss of the old one; or a host was cut off, was given up, and comes
back after another has taken its place. So the later agent waits until it is known whether the earlier one is alive: the
kernel of its host confirms what it is sent on its connection, or the host is lost.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field

from jaxrun.controller.supervisor.agent_connections import AgentConnection
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import AgentToHead

CHECK_INTERVAL_S = 0.05  # between two looks at whether the earlier agent is alive


class Claim(enum.Enum):
    """What is known about an agent's claim to its place."""

    OPEN = enum.auto()
    FREE = enum.auto()
    TAKEN = enum.auto()


@dataclass(slots=True)
class Contest:
    """A later agent, on its connection, and what it has sent so far.

    earlier:    the connection of the agent that has the place; None if that one is lost
    confirmed:  how many bytes the earlier one's host must confirm
    """

    agent: AgentId
    connection: AgentConnection
    earlier: AgentConnection | None
    confirmed: int
    messages: list[AgentToHead] = field(default_factory=list)


class Contests:
    """The later agents that wait. Nothing here sends them anything."""

    def __init__(self) -> None:
        self._contests: dict[AgentConnection, Contest] = {}

    @property
    def are_open(self) -> bool:
        return bool(self._contests)

    def add(
        self, agent: AgentId, connection: AgentConnection, message: AgentToHead, earlier: AgentConnection | None
    ) -> None:
        """Keep a message of a later agent. At the first one, the host of the `earlier` agent is asked for an answer."""
        if connection not in self._contests:
            confirmed = 0
            if earlier is not None and earlier.send_beat():
                confirmed = earlier.queued_bytes
            self._contests[connection] = Contest(agent, connection, earlier, confirmed)
        self._contests[connection].messages.append(message)

    def remove(self, connection: AgentConnection) -> None:
        self._contests.pop(connection, None)

    def take_decided(self, used: dict[AgentId, AgentConnection], held: set[AgentId]) -> Iterator[tuple[Contest, Claim]]:
        """Remove and return the contests that are decided.

        used:  the connections that agents have now
        held:  agents whose loss the head does not know yet
        """
        for contest in list(self._contests.values()):
            claim = _decide(contest, used.get(contest.agent), held)
            if claim is not Claim.OPEN:
                del self._contests[contest.connection]
                yield contest, claim


def _decide(contest: Contest, used: AgentConnection | None, held: set[AgentId]) -> Claim:
    if contest.agent in held:
        return Claim.OPEN
    if used is None:
        return Claim.FREE
    if used is not contest.earlier:
        return Claim.TAKEN
    return Claim.TAKEN if used.acknowledged_bytes() >= contest.confirmed else Claim.OPEN
