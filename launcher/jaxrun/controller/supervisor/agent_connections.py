"""The connections to the agents of a job on other hosts: sending, silent hosts, and flow control of output.

Nothing here knows what a message means; remote_agents.py and admission.py do.
"""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from jaxrun.errors import ProtocolError
from jaxrun.node.channel.connection import Connection
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.node.channel.silence import LONGEST_SILENCE_S, HostWatch, SilenceLimit
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import (
    AgentToHead,
    OutputChunk,
    OutputCredit,
    RankOrder,
    StartWorkers,
    StreamEnded,
    ToRanks,
)
from jaxrun.protocol.codec import encode
from jaxrun.protocol.worker_messages import Failed
from jaxrun.records.event_log.events import PeersDropped
from jaxrun.records.output.output import Output

AgentConnection = Connection[AgentToHead]


@dataclass(frozen=True, slots=True)
class ConnectedAgent:
    """An agent that has come before there was an attempt, on its connection, and what it has sent."""

    agent: AgentId
    connection: AgentConnection
    messages: tuple[AgentToHead, ...]


class AgentConnections:
    """Connections that have readers in `loop`, by agent; an agent keeps its connection when ranks move.

    All operations except `send_all` are O(1) in the number of agents.
    An agent may connect on several paths at the same time, and uses one of these connections, on which it sends.
    """

    def __init__(self, loop: EventLoop, agents: Mapping[AgentId, tuple[int, ...]]) -> None:
        """`agents` has the ranks of each agent, as in a Plan; agents without ranks wait on spare hosts."""
        self._loop = loop
        self.agents = agents
        self.waiting = frozenset(agent for agent, ranks in agents.items() if not ranks)
        self._agent_of = {rank: agent for agent, ranks in agents.items() for rank in ranks}
        self._by_agent: dict[AgentId, AgentConnection] = {}
        self._unsent: set[AgentConnection] = set()
        self._others: dict[AgentConnection, AgentId] = {}  # not used by their agents; they only get the last message

    def __iter__(self) -> Iterator[AgentConnection]:
        return iter([*self._by_agent.values(), *self._others])

    def items(self) -> list[tuple[AgentId, AgentConnection]]:
        """All connections with their agents, first the connections that agents use."""
        return [*self._by_agent.items(), *((agent, connection) for connection, agent in self._others.items())]

    def used(self) -> list[tuple[AgentId, AgentConnection]]:
        """The connections that agents use."""
        return [*self._by_agent.items()]

    def used_by(self, agent: AgentId) -> AgentConnection | None:
        """The connection that an agent uses."""
        return self._by_agent.get(agent)

    @property
    def live(self) -> set[AgentId]:
        return {agent for agent, connection in self._by_agent.items() if not connection.lost_reason}

    def agent_of(self, rank: int) -> AgentId:
        """Return the agent of a rank. Raises KeyError for a rank that the job does not have."""
        return self._agent_of[rank]

    def add_unused(self, agent: AgentId, connection: AgentConnection) -> None:
        self._others[connection] = agent

    def add(self, agent: AgentId, connection: AgentConnection) -> bool:
        """Use this connection for an agent, unless it has one; returns whether the agent uses this one."""
        is_used = self._by_agent.setdefault(agent, connection) is connection
        if is_used:
            self._others.pop(connection, None)
        return is_used

    def remove(self, agent: AgentId, connection: AgentConnection) -> bool:
        """Forget a connection, which is not read any more; returns whether the agent used it."""
        self._loop.remove_reader(connection.fileno())
        self._unsent.discard(connection)
        self._others.pop(connection, None)
        was_used = self._by_agent.get(agent) is connection
        if was_used:
            del self._by_agent[agent]
        return was_used

    def send(self, ranks: Iterable[int], order: RankOrder) -> None:
        """Send to the agents of `ranks` that are connected; names the ranks unless they are all of an agent's ranks."""
        frame = encode(order)
        of_agents: dict[AgentId, list[int]] = {}
        for rank in ranks:
            if (agent := self._agent_of.get(rank)) is not None:
                of_agents.setdefault(agent, []).append(rank)
        for agent, some in of_agents.items():
            if (connection := self._by_agent.get(agent)) is not None:
                is_for_all = len(some) == len(self.agents[agent])
                self._send(connection, frame if is_for_all else encode(ToRanks(tuple(some), order)))

    def send_to_agents(self, agents: Iterable[AgentId], message: object) -> None:
        """Send to those of these agents that are connected."""
        frame = encode(message)
        for agent in agents:
            if (connection := self._by_agent.get(agent)) is not None:
                self._send(connection, frame)

    def send_to(self, connection: AgentConnection, message: object) -> None:
        self._send(connection, encode(message))

    def send_all(self, message: object) -> None:
        frame = encode(message)
        for connection in self:
            self._send(connection, frame)

    def flush(self, timeout: float) -> None:
        """Send waiting bytes for at most `timeout` seconds, without the event loop."""
        deadline = time.monotonic() + timeout
        while self._unsent and (left := deadline - time.monotonic()) > 0:
            poll = select.poll()
            for connection in self._unsent:
                poll.register(connection, select.POLLOUT)
            poll.poll(left * 1000)
            for connection in tuple(self._unsent):
                self._flush(connection)

    def end_sending(self) -> None:
        """Let all agents see that nothing more comes. An ssh that forwards a connection ends once both sides say so."""
        for connection in self:
            if not connection.lost_reason and not connection.unsent_bytes:
                connection.end_sending()

    def wait_for_end(self, timeout: float, agents: Iterable[AgentId] | None = None) -> None:
        """Wait until all agents, or these, have closed their connections, for at most `timeout` seconds."""
        deadline = time.monotonic() + timeout
        awaited = self if agents is None else [self._by_agent[agent] for agent in agents if agent in self._by_agent]
        open_connections = {connection.fileno(): connection for connection in awaited if not connection.lost_reason}
        while open_connections and (left := deadline - time.monotonic()) > 0:
            poll = select.poll()
            for connection in open_connections.values():
                poll.register(connection, select.POLLIN)
            for descriptor, _ in poll.poll(left * 1000):
                connection = open_connections[descriptor]
                with contextlib.suppress(ProtocolError):
                    connection.receive()
                    if not connection.lost_reason:
                        continue
                del open_connections[descriptor]

    def _send(self, connection: AgentConnection, frame: bytes) -> None:
        connection.send_frame(frame)
        if connection.unsent_bytes and connection not in self._unsent:
            self._unsent.add(connection)
            self._loop.set_writer(connection.fileno(), partial(self._flush, connection))

    def _flush(self, connection: AgentConnection) -> None:
        connection.flush()
        if not connection.unsent_bytes:
            self._unsent.discard(connection)
            self._loop.set_writer(connection.fileno(), None)


_ACKNOWLEDGE_AFTER_BYTES = 2**16  # of output from one agent


class RemoteOutput:
    """Limits how much output an agent may send before it is acknowledged. The cost does not depend on their number."""

    def __init__(self, output: Output, connections: AgentConnections) -> None:
        self._output = output
        self._connections = connections
        self._logs_remotely: set[int] = set()
        self._unacknowledged: dict[AgentConnection, int] = {}  # bytes
        self._to_acknowledge: set[AgentConnection] = set()

    def handle_start(self, order: StartWorkers) -> None:
        self._logs_remotely.update(start.worker.rank for start in order.workers if start.log_dir)

    def handle(self, rank: int, connection: AgentConnection, message: OutputChunk | StreamEnded) -> None:
        if isinstance(message, StreamEnded):
            self._output.end_stream(rank, message.stream)
            return
        write = self._output.show if rank in self._logs_remotely else self._output.write
        write(rank, message.stream, message.data)
        self._unacknowledged[connection] = total = self._unacknowledged.get(connection, 0) + len(message.data)
        if total >= _ACKNOWLEDGE_AFTER_BYTES:
            self._to_acknowledge.add(connection)

    def log_traceback(self, failed: Failed) -> None:
        if failed.rank not in self._logs_remotely:
            self._output.logs.write_file(failed.rank, "err", failed.traceback.encode())

    def acknowledge(self) -> None:
        """Unless output is stuck here, allow agents whose output has been shown or stored to send as much again."""
        if self._output.congested:
            return
        for connection in self._to_acknowledge:
            self._connections.send_to(connection, OutputCredit(self._unacknowledged.pop(connection)))
        self._to_acknowledge.clear()

    def forget(self, connection: AgentConnection) -> None:
        self._unacknowledged.pop(connection, None)
        self._to_acknowledge.discard(connection)


_CHECK_INTERVAL_S = 0.1  # at least; there may be many hosts


class HostWatches:
    """A HostWatch for each address from which agents have connected; the ports of these connections refuse probes."""

    def __init__(self, limit: SilenceLimit, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._clock = clock
        self._watches: dict[str, HostWatch] = {}
        self._next_beat = 0.0
        self._has_said_firewall = False
        self.next_check = 0.0

    def check(self, connections: AgentConnections) -> tuple[list[tuple[AgentId, AgentConnection]], str]:
        """Do what is due; return the connections that are lost from now on, with their agents, and a line for people.

        The line is empty if there is nothing to report.
        """
        now, items, notice = self._clock(), connections.items(), ""
        if now >= self._next_beat:
            self._next_beat = now + self._limit.beat_interval
            for _, connection in items:
                connection.send_beat()
        self.next_check = self._next_beat
        for ip, of_host in _by_host(connections).items():
            watch = self._watch(ip, of_host)
            self.next_check = min(self.next_check, now + max(watch.poll(of_host), _CHECK_INTERVAL_S))
            if watch.probes.in_vain(self._limit) and self._limit.timeout < LONGEST_SILENCE_S:
                notice = notice or self._describe_firewall(ip)
        return [(agent, connection) for agent, connection in items if connection.lost_reason], notice

    def ask(self, connections: AgentConnections) -> None:
        """Ask whether all hosts are alive now."""
        for ip, of_host in _by_host(connections).items():
            self._watch(ip, of_host).ask(of_host)

    def unanswered(self, connections: AgentConnections) -> list[tuple[AgentId, AgentConnection]]:
        """Return agents with ranks, and their connections, from whose hosts nothing was received since they were asked.

        Each of these hosts will answer, or will be lost.
        """
        hosts = _by_host(connections)
        silent = {ip for ip, of_host in hosts.items() if not self._watch(ip, of_host).has_answered(of_host)}
        used = connections.used() if silent else []
        return [(agent, one) for agent, one in used if one.peer[0] in silent and agent not in connections.waiting]

    def close(self) -> None:
        for watch in self._watches.values():
            watch.close()

    def _watch(self, ip: str, of_host: list[AgentConnection]) -> HostWatch:
        if ip not in self._watches:
            self._watches[ip] = HostWatch(self._limit, of_host[0].peer, self._clock)
        return self._watches[ip]

    def _describe_firewall(self, ip: str) -> str:
        """Return the notice about the first host behind a firewall."""
        if self._has_said_firewall:
            return ""
        self._has_said_firewall = True
        return (
            f"jaxrun: {ip.removeprefix('::ffff:')} answers no probes, as behind a firewall: such a host is "
            f"lost after {LONGEST_SILENCE_S:g} s of silence, not after {self._limit.timeout:g} s"
        )


def _by_host(connections: AgentConnections) -> dict[str, list[AgentConnection]]:
    """The connections to each address."""
    hosts: dict[str, list[AgentConnection]] = {}
    for _, connection in connections.items():
        hosts.setdefault(connection.peer[0], []).append(connection)
    return hosts


_INTERVAL_S = 60.0  # between two lines of the log
_MAX_TEXT = 200  # characters; the text may contain bytes from a stranger


class DroppedPeers:
    """Counts peers that were turned away at the port, for one log line a minute; the first one is logged at once.

    So a stranger cannot fill the run directory. `clock` returns seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._count = 0
        self._last = ""
        self._next_line = 0.0

    def add(self, text: str) -> None:
        """Count one more peer; `text` says what happened to it."""
        self._count += 1
        self._last = text[:_MAX_TEXT]

    def deadline(self) -> float | None:
        """The time of the next line, if there is anything to report."""
        return self._next_line if self._count else None

    def take(self) -> PeersDropped | None:
        """Return the number since the last call, and the text of the last one; None if there were none."""
        if not self._count:
            return None
        dropped = PeersDropped(self._count, self._last)
        self._count = 0
        self._next_line = self._clock() + _INTERVAL_S
        return dropped
