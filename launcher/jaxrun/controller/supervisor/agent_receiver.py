"""Receives the messages of agents: from each on one connection, and nothing that belongs to an earlier attempt.

Peers that were turned away at the port are logged many in one line: no stranger fills the run directory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from jaxrun.controller.supervisor.attempt_context import AttemptContext
from jaxrun.controller.supervisor.connections import AgentConnection, AgentConnections
from jaxrun.controller.supervisor.host_watches import HostWatches
from jaxrun.errors import ProtocolError
from jaxrun.node.channel.connection import AGENT_TO_HEAD
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.node.channel.listener import Peer
from jaxrun.node.channel.silence import SilenceLimit
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import (
    AgentRefused,
    AgentReport,
    AgentToHead,
    JobInfo,
    NextAttempt,
    Shutdown,
)
from jaxrun.records.event_log.events import AgentTurnedAway, BadMessage, PeersDropped, check_event
from jaxrun.text import format_ranks

OnMessage = Callable[[AgentId, AgentConnection, AgentToHead], None]
OnLost = Callable[[AgentId, AgentConnection], None]


class AgentReceiver:
    """Admits agents until the program starts, and hands on what they say.

    is_closed: whether the start-up is over, in which the head names agents that do not fit; later ones are refused
    """

    def __init__(
        self,
        loop: EventLoop,
        order: int,
        connections: AgentConnections,
        context: AttemptContext,
        job_info: JobInfo,
        *,
        on_message: OnMessage,
        on_second_report: Callable[[AgentReport], None],
        on_lost: OnLost,
    ) -> None:
        """`order`: of the agents among the readers of `loop`; `job_info`: what each agent is sent first.

        on_message:        called with each message on the connection that its agent uses
        on_second_report:  called with the report of a second agent with the same number
        on_lost:           called once the connection of an agent is closed; its `lost_reason` says why
        """
        self._loop = loop
        self._order = order
        self._connections = connections
        self._dispatcher = context.dispatcher
        self._clock = context.clock
        self._job_info = job_info
        self._attempt = context.plan.attempt
        self._agents = context.plan.agents
        self._by_hand = context.plan.is_started_by_hand
        self._on_message = on_message
        self._on_second_report = on_second_report
        self._on_lost = on_lost
        self._stale: set[AgentConnection] = set()  # on which nothing but the end of the earlier attempt counts
        limit = SilenceLimit.of_head(job_info.host_timeout, len(self._agents))
        self.watches = HostWatches(limit, context.clock, context.output.print_line)
        self.is_closed = False
        loop.add_timer(lambda: self.watches.next_check, self._drop_silent)

    def add(self, peer: Peer) -> None:
        connection: AgentConnection = AgentConnection(peer.connection, AGENT_TO_HEAD, peer.tags)
        agent = AgentId(peer.number)
        if self.is_closed and agent not in self._connections.waiting:
            self._refuse(agent, connection)
            return
        attempt = self._attempt if self._agents.get(agent) or self._by_hand else 0
        connection.send(replace(self._job_info, attempt=attempt))
        self._connections.add_unused(agent, connection)
        self._add_reader(agent, connection)

    def adopt(self, earlier: AgentConnections) -> None:
        """Tell the agents of the earlier attempt to end it; what they still send of it is dropped."""
        for agent, connection in earlier.items():
            if agent not in self._agents:
                connection.send(Shutdown(0))
                connection.close()
                continue
            if not self._connections.add(agent, connection):
                self._connections.add_unused(agent, connection)
            self._add_reader(agent, connection)
            if ranks := self._agents[agent]:
                self._stale.add(connection)
                self._connections.send_to(connection, NextAttempt(self._attempt, ranks))

    def _add_reader(self, agent: AgentId, connection: AgentConnection) -> None:
        self._loop.add_reader(connection.fileno(), self._order, partial(self._on_readable, agent, connection))

    def _refuse(self, agent: AgentId, connection: AgentConnection) -> None:
        """Tell an agent that comes to a job that runs, and close its connection."""
        hosts, ranks = self._dispatcher.hosts, self._agents.get(agent, ())
        if ranks:
            text = f"this job runs already: its {format_ranks(ranks)} is another process, on {hosts[ranks[0]]}"
        else:
            text = f"this job runs already, with {len(hosts)} processes: none is rank {agent}"
        self._dispatcher.record(AgentTurnedAway(agent, text))
        connection.send(AgentRefused(text))
        connection.close()

    def _on_readable(self, agent: AgentId, connection: AgentConnection) -> None:
        try:
            messages = connection.receive()
            if connection in self._stale:  # in the earlier attempt it may have had other ranks
                messages = self._drop_stale(connection, messages)
            for message in messages:
                check_event(message, agent=agent, ranks=self._agents.get(agent, ()))
        except ProtocolError as error:
            messages, connection.lost_reason = [], f"its agent sent something that is not a message of jaxrun: {error}"
            self._dispatcher.record(BadMessage(agent, connection.lost_reason))
        for message in messages:
            if self._connections.add(agent, connection):
                self._on_message(agent, connection, message)
            elif isinstance(message, AgentReport) and not self.is_closed:
                self._on_second_report(message)  # the head names both agents
            elif isinstance(message, AgentReport):
                self._loop.remove_reader(connection.fileno())
                self._connections.remove(agent, connection)
                self._refuse(agent, connection)
                return
        if connection.lost_reason:
            self._loop.remove_reader(connection.fileno())
            was_used = self._connections.remove(agent, connection)
            connection.close()
            if was_used:
                self._on_lost(agent, connection)

    def _drop_silent(self) -> None:
        """Lose the hosts that are silent."""
        for agent, connection in self.watches.check(self._connections):
            self._on_readable(agent, connection)

    def _drop_stale(self, connection: AgentConnection, messages: list[AgentToHead]) -> list[AgentToHead]:
        """Those of the messages that belong to this attempt: from the report on with which the agent begins it."""
        for index, message in enumerate(messages):
            if isinstance(message, AgentReport) and message.attempt == self._attempt:
                self._stale.discard(connection)
                return messages[index:]
        return []


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
        return self._next_line if self._count else None

    def log(self) -> None:
        """Log how many there were since the last line, and what became of the last of them."""
        if self._count:
            self._record(PeersDropped(self._count, self._last))
            self._count = 0
            self._next_line = self._clock() + _INTERVAL_S
