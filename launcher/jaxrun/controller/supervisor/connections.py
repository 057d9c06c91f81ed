"""The connections to all agents of a job by their numbers, and the output that comes on them."""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial

from jaxrun.errors import ProtocolError
from jaxrun.node.channel.connection import Connection
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.protocol.agent_messages import (
    BEAT,
    AgentToHead,
    HostTask,
    OutputChunk,
    OutputCredit,
    StartWorker,
    StreamEnded,
    ToRanks,
)
from jaxrun.protocol.codec import encode
from jaxrun.protocol.worker_messages import Failed
from jaxrun.records.output.output import Output

AgentConnection = Connection[AgentToHead]


class AgentConnections:
    """Connections that have readers in `loop`, by the numbers of the agents, which keep theirs when ranks move.

    No operation but `send_all` costs more if there are more.
    An agent may connect on several paths at the same time, and keeps one of these connections: that on which it speaks.
    """

    def __init__(self, loop: EventLoop, agents: Mapping[int, tuple[int, ...]]) -> None:
        """`agents` are the ranks of each agent, as in a Plan; those without any wait on spare hosts."""
        self._loop = loop
        self.waiting = frozenset(number for number, ranks in agents.items() if not ranks)
        self._ranks = agents
        self._agent_of = {rank: number for number, ranks in agents.items() for rank in ranks}
        self._by_number: dict[int, AgentConnection] = {}
        self._unsent: set[AgentConnection] = set()
        self._probed: dict[AgentConnection, int] = {}  # the bytes that had been queued with the last probe
        self._others: dict[AgentConnection, int] = {}  # that are not their agent's; they are only told of the end

    def __iter__(self) -> Iterator[AgentConnection]:
        return iter([*self._by_number.values(), *self._others])

    def items(self) -> list[tuple[int, AgentConnection]]:
        """All connections with the numbers of their agents, the agents' own first."""
        return [*self._by_number.items(), *((number, connection) for connection, number in self._others.items())]

    @property
    def live(self) -> set[int]:
        return {number for number, connection in self._by_number.items() if not connection.lost_reason}

    def ranks_of(self, number: int) -> tuple[int, ...]:
        """The ranks of an agent; of one that the job does not know, the number, which the head then refuses."""
        return self._ranks.get(number, (number,))

    def add_unused(self, number: int, connection: AgentConnection) -> None:
        self._others[connection] = number

    def add(self, number: int, connection: AgentConnection) -> bool:
        """Use this connection for an agent, unless there is one; returns whether it is the agent's."""
        is_agents = self._by_number.setdefault(number, connection) is connection
        if is_agents:
            self._others.pop(connection, None)
        return is_agents

    def remove(self, number: int, connection: AgentConnection) -> bool:
        """Forget a connection; returns whether it was that of the agent."""
        self._unsent.discard(connection)
        self._others.pop(connection, None)
        was_agents = self._by_number.get(number) is connection
        if was_agents:
            del self._by_number[number]
        return was_agents

    def send(self, ranks: Iterable[int], message: object) -> None:
        """Send to the agents of `ranks` that are still connected; names the ranks where they are not all of an agent's.

        StartWorker has the rank in it; a HostTask is for the agent.
        """
        frame = encode(message)
        of_agents: dict[int, list[int]] = {}
        for rank in ranks:
            of_agents.setdefault(self._agent_of.get(rank, rank), []).append(rank)
        for number, some in of_agents.items():
            connection = self._by_number.get(number)
            if connection is not None:
                whole = len(some) == len(self.ranks_of(number)) or isinstance(message, StartWorker | HostTask)
                self._send(connection, frame if whole else encode(ToRanks(tuple(some), frame)))

    def send_to_agent(self, number: int, message: object) -> None:
        if (connection := self._by_number.get(number)) is not None:
            self.send_to(connection, message)

    def send_to(self, connection: AgentConnection, message: object) -> None:
        self._send(connection, encode(message))

    def send_all(self, message: object) -> None:
        frame = encode(message)
        for connection in self:
            self._send(connection, frame)

    def probe(self) -> None:
        """Send something to all agents: what counts is only that the other side's kernel confirms it."""
        self.send_all(BEAT)
        self._probed = {connection: connection.queued_bytes for connection in self._by_number.values()}

    def unanswered_ranks(self) -> list[int]:
        """The ranks whose host has not confirmed the last probe; what was sent later may well be on its way."""
        return sorted(
            rank
            for number, connection in self._by_number.items()
            if connection.acknowledged_bytes() < self._probed.get(connection, 0)
            for rank in self.ranks_of(number)
        )

    def flush(self, timeout: float) -> None:
        """Send what waits, for at most `timeout` seconds, without the event loop."""
        deadline = time.monotonic() + timeout
        while self._unsent and (left := deadline - time.monotonic()) > 0:
            poll = select.poll()
            for connection in self._unsent:
                poll.register(connection, select.POLLOUT)
            poll.poll(left * 1000)
            for connection in tuple(self._unsent):
                self._flush(connection)

    def wait_for_end(self, timeout: float) -> None:
        """Wait until the agents have closed their connections, for at most `timeout` seconds."""
        deadline = time.monotonic() + timeout
        open_connections = {connection.fileno(): connection for connection in self}
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
    """An agent may send only so much output before it is acknowledged. The cost does not depend on their number."""

    def __init__(self, output: Output, connections: AgentConnections) -> None:
        self._output = output
        self._connections = connections
        self._logs_remotely: set[int] = set()
        self._unacknowledged: dict[AgentConnection, int] = {}  # bytes
        self._to_acknowledge: set[AgentConnection] = set()

    def handle_start(self, start: StartWorker) -> None:
        if start.log_dir:
            self._logs_remotely.add(start.worker.rank)

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
        """Unless output waits here, allow agents whose output has been shown or kept to send as much again."""
        if self._output.congested:
            return
        for connection in self._to_acknowledge:
            self._connections.send_to(connection, OutputCredit(self._unacknowledged.pop(connection)))
        self._to_acknowledge.clear()

    def forget(self, connection: AgentConnection) -> None:
        self._unacknowledged.pop(connection, None)
        self._to_acknowledge.discard(connection)
