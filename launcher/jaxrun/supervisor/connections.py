"""The connections to all agents of a job, by rank: sends to them, and acknowledges the output that they sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jaxrun.channel.connection import Connection
from jaxrun.protocol.agent_messages import AgentToHead, OutputCredit
from jaxrun.protocol.codec import encode

RETRY_S = 0.01  # until what the network did not take is sent again
_ACKNOWLEDGE_AFTER_BYTES = 2**16  # of output from one agent

AgentConnection = Connection[AgentToHead]


class AgentConnections:
    """Connections by rank. The cost of each operation, but for `send_all`, does not depend on their number."""

    def __init__(self) -> None:
        self._by_rank: dict[int, AgentConnection] = {}
        self._unsent: set[AgentConnection] = set()
        self._unacknowledged: dict[AgentConnection, int] = {}  # bytes of output
        self._to_acknowledge: set[AgentConnection] = set()

    def __iter__(self) -> Iterator[AgentConnection]:
        return iter(self._by_rank.values())

    def add(self, rank: int, connection: AgentConnection) -> bool:
        """Use this connection for `rank`, if it is the first; returns whether it is."""
        return self._by_rank.setdefault(rank, connection) is connection

    def remove(self, rank: int, connection: AgentConnection) -> None:
        if self._by_rank.get(rank) is connection:
            del self._by_rank[rank]
        self._unsent.discard(connection)
        self._unacknowledged.pop(connection, None)
        self._to_acknowledge.discard(connection)

    def send(self, ranks: Iterable[int], message: object) -> None:
        """Send to those of `ranks` that are still connected."""
        frame = encode(message)
        for rank in ranks:
            if rank in self._by_rank:
                self._send(self._by_rank[rank], frame)

    def send_all(self, message: object) -> None:
        self.send(list(self._by_rank), message)

    def unanswered_ranks(self) -> list[int]:
        """The ranks whose host has not confirmed what was sent to it last."""
        return sorted(rank for rank, line in self._by_rank.items() if line.has_unacknowledged_bytes())

    def flush(self) -> float | None:
        """Send what waits; returns the seconds until that should be tried again, None if nothing waits."""
        for connection in list(self._unsent):
            connection.flush()
            if not connection.unsent_bytes:
                self._unsent.discard(connection)
        return RETRY_S if self._unsent else None

    def count_output(self, connection: AgentConnection, count: int) -> None:
        """Note that `count` bytes of output have come in."""
        self._unacknowledged[connection] = total = self._unacknowledged.get(connection, 0) + count
        if total >= _ACKNOWLEDGE_AFTER_BYTES:
            self._to_acknowledge.add(connection)

    def acknowledge(self) -> None:
        """Allow agents whose output has been shown or kept to send as much again."""
        for connection in self._to_acknowledge:
            self._send(connection, encode(OutputCredit(self._unacknowledged.pop(connection))))
        self._to_acknowledge.clear()

    def _send(self, connection: AgentConnection, frame: bytes) -> None:
        connection.send_frame(frame)
        if connection.unsent_bytes:
            self._unsent.add(connection)
