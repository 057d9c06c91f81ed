"""Receives the messages of agents: from each on one connection, and nothing that belongs to an earlier attempt.

Peers that were turned away at the port are logged many in one line: no stranger fills the run directory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from jaxrun.controller.head.agent_registry import AgentRegistry
from jaxrun.controller.head.host_checks import HostChecks
from jaxrun.controller.supervisor.connections import AgentConnection, AgentConnections
from jaxrun.errors import NotUniformError, ProtocolError, UnavailableError
from jaxrun.node.channel.connection import AGENT_TO_HEAD
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.node.channel.listener import Peer
from jaxrun.protocol.agent_messages import (
    AGENT_ALONE,
    AgentRefused,
    AgentReport,
    AgentToHead,
    JobInfo,
    NextAttempt,
    Shutdown,
    StartWorker,
)
from jaxrun.protocol.probe_messages import CheckHost
from jaxrun.records.event_log.events import AgentTurnedAway, BadMessage, PeersDropped, check_event

if TYPE_CHECKING:
    from jaxrun.controller.supervisor.attempts import AttemptContext

_SILENCE_CHECK_INTERVAL_S = 0.25  # while something is on its way to an agent

OnMessage = Callable[[int, AgentConnection, AgentToHead], None]
OnLost = Callable[[int, AgentConnection], None]


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

        on_message:        called with each message on the connection of its agent, and the agent's number
        on_second_report:  called with a report of a second agent with the same number
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
        self._on_message = on_message
        self._on_second_report = on_second_report
        self._on_lost = on_lost
        self._stale: set[AgentConnection] = set()  # on which nothing but the end of the earlier attempt counts
        self._next_silence_check = 0.0
        self.is_closed = False
        loop.add_timer(lambda: self._next_silence_check if connections.has_unconfirmed else None, self._drop_silent)

    def add(self, peer: Peer) -> None:
        """Let an agent in that has connected."""
        connection: AgentConnection = AgentConnection(peer.connection, AGENT_TO_HEAD, peer.tags)
        number = peer.rank
        if self.is_closed and number not in self._connections.waiting:
            self._refuse(number, connection)
            return
        connection.send(self._job_info)
        self._connections.add_unused(number, connection)
        self._add_reader(number, connection)

    def adopt(self, earlier: AgentConnections) -> None:
        """Tell the agents of the earlier attempt to end it; what they still send of it is dropped."""
        for number, connection in earlier.items():
            if number not in self._agents:
                connection.send(Shutdown(0))
                connection.close()
                continue
            if not self._connections.add(number, connection):
                self._connections.add_unused(number, connection)
            self._add_reader(number, connection)
            if ranks := self._agents[number]:
                self._stale.add(connection)
                self._connections.send_to(connection, NextAttempt(self._attempt, ranks))

    def _add_reader(self, number: int, connection: AgentConnection) -> None:
        self._loop.add_reader(connection.fileno(), self._order, partial(self._on_readable, number, connection))

    def _refuse(self, number: int, connection: AgentConnection) -> None:
        """Tell an agent that comes to a job that runs, and close its connection."""
        hosts, rank = self._dispatcher.hosts, (*self._connections.ranks_of(number), number)[0]
        text = f"this job runs already: its rank {rank} is another process, on {hosts.get(rank, '?')}"
        if rank not in hosts:
            text = f"this job runs already, with {len(hosts)} processes: none is rank {rank}"
        self._dispatcher.record(AgentTurnedAway(rank, text))
        connection.send(AgentRefused(text))
        connection.close()

    def _on_readable(self, number: int, connection: AgentConnection) -> None:
        ranks = self._connections.ranks_of(number)
        try:
            messages = connection.receive()
            if connection in self._stale:  # in the earlier attempt it may have had other ranks
                messages = self._drop_stale(connection, messages)
            for message in messages:
                check_event(message, *((number,) if isinstance(message, AGENT_ALONE) else ranks or (number,)))
        except ProtocolError as error:
            messages, connection.lost_reason = [], f"its agent sent something that is not a message of jaxrun: {error}"
            self._dispatcher.record(BadMessage((*ranks, number)[0], connection.lost_reason))
        for message in messages:
            if self._connections.add(number, connection):
                self._on_message(number, connection, message)
            elif isinstance(message, AgentReport) and not self.is_closed:
                self._on_second_report(replace(message, rank=(*ranks, number)[0]))  # the head names both agents
            elif isinstance(message, AgentReport):
                self._loop.remove_reader(connection.fileno())
                self._connections.remove(number, connection)
                self._refuse(number, connection)
                return
        if connection.lost_reason:
            self._loop.remove_reader(connection.fileno())
            was_agents = self._connections.remove(number, connection)
            connection.close()
            if was_agents:
                self._on_lost(number, connection)

    def _drop_silent(self) -> None:
        """Lose the hosts that are silent, also where the kernel would wait for longer."""
        self._next_silence_check = self._clock() + _SILENCE_CHECK_INTERVAL_S
        for number, connection in self._connections.give_up_silent():
            self._on_readable(number, connection)

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
        """When `log` is to be called, if at all."""
        return self._next_line if self._count else None

    def log(self) -> None:
        """Log how many there were since the last line, and what became of the last of them."""
        if self._count:
            self._record(PeersDropped(self._count, self._last))
            self._count = 0
            self._next_line = self._clock() + _INTERVAL_S


class SpareAgents:
    """The agents of one launch command that wait on spare hosts, by their numbers.

    They report as the others do, and keep a process that has imported jax. They have no rank, and the head knows
    nothing of them: they hold up no start, and the loss of one is no failure.

    hosts:       those of all agents, as the launch command was told to place them
    lost_hosts:  on which one has gone
    """

    def __init__(self, hosts: Sequence[str], registry: AgentRegistry) -> None:
        """`registry` is that of the ranks."""
        self.hosts = hosts
        self._registry = registry
        self._reports: dict[int, AgentReport] = {}
        self._unchecked: dict[int, AgentReport] = {}
        self._prepared: set[int] = set()
        self.lost_hosts: set[str] = set()

    @property
    def ready(self) -> set[int]:
        """Those that have reported, and can take a rank."""
        return set(self._reports)

    def begin_attempt(self, registry: AgentRegistry) -> None:
        """The ranks report to this registry from now on."""
        self._registry = registry

    def check(self, report: AgentReport) -> CheckHost | None:
        """What the agent of a host that a person has brought back is to do before it counts."""
        if self.hosts or not self._registry.job.host_check:
            return None
        self._unchecked[report.rank] = report
        return HostChecks(self._registry.plan).order(report.rank, report.host)

    def checked(self, number: int) -> AgentReport | None:
        """The report of an agent that has answered."""
        return self._unchecked.pop(number, None)

    def add(self, report: AgentReport) -> str:
        """Count on an agent; returns why it cannot be used, if so."""
        try:
            self._registry.check_installation(report)
            if not self.hosts:  # a person has typed it
                self._registry.check_command(report)
        except (UnavailableError, NotUniformError) as error:
            return str(error)
        self._reports[report.rank] = report
        return ""

    def lose(self, number: int) -> bool:
        """The agent has gone; returns whether it is the first of its host."""
        host = self.host_of(number)
        self._reports.pop(number, None)
        is_first = host not in self.lost_hosts
        self.lost_hosts.add(host)
        return is_first

    def host_of(self, number: int) -> str:
        if number < len(self.hosts):
            return self.hosts[number]
        return self._reports[number].host if number in self._reports else "?"

    def preparations(self, waiting: Collection[int]) -> list[tuple[int, StartWorker]]:
        """What those that wait prepare for, where that is known by now, and they were not told before."""
        if not self._registry.complete or not self.hosts:  # agents started by hand prepare nothing
            return []
        told: list[tuple[int, StartWorker]] = []
        for host in {self.host_of(number) for number in self.ready.intersection(waiting) - self._prepared}:
            numbers = sorted(number for number in waiting if self.host_of(number) == host)
            if not all(number in self._reports for number in numbers):
                continue
            self._prepared.update(numbers)
            try:
                starts = self._registry.prepare([self._reports[number] for number in numbers])
            except NotUniformError:  # the attempt in which it takes a rank says why
                continue
            told += zip(numbers, starts, strict=True)
        return told
