"""The lines to all agents of a job: which rank is on which, what was sent to whom, whose output is on its way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jaxrun.channel.connection import Connection
from jaxrun.protocol.agent_messages import AgentToHead, OutputCredit
from jaxrun.protocol.codec import encode

_ACKNOWLEDGE_AFTER_BYTES = 2**16  # bytes of output after which its agent is told that they were taken

AgentConnection = Connection[AgentToHead]


class AgentConnections:
    """By rank. No step looks at all of them, except to send to all."""

    def __init__(self) -> None:
        self._by_rank: dict[int, AgentConnection] = {}
        self._unsent: set[AgentConnection] = set()
        self._unacknowledged: dict[AgentConnection, int] = {}
        self._to_acknowledge: set[AgentConnection] = set()  # those of them that are owed so much that they are told

    def __iter__(self) -> Iterator[AgentConnection]:
        return iter(self._by_rank.values())

    def __len__(self) -> int:
        return len(self._by_rank)

    def add(self, rank: int, line: AgentConnection) -> bool:
        """From now on this is the line to `rank`; whether it is the first."""
        return self._by_rank.setdefault(rank, line) is line

    def remove(self, rank: int, line: AgentConnection) -> None:
        if self._by_rank.get(rank) is line:
            del self._by_rank[rank]
        self._unsent.discard(line)
        self._unacknowledged.pop(line, None)
        self._to_acknowledge.discard(line)

    def send(self, ranks: Iterable[int], message: object) -> None:
        """To those of them that still have a line."""
        frame = encode(message)
        for rank in ranks:
            if rank in self._by_rank:
                self._send(self._by_rank[rank], frame)

    def send_all(self, message: object) -> None:
        self.send(list(self._by_rank), message)

    def unanswered_ranks(self) -> list[int]:
        """The ranks whose host has not answered to what was sent to it last."""
        return sorted(rank for rank, line in self._by_rank.items() if line.has_unacknowledged_bytes())

    @property
    def unsent(self) -> bool:
        """Whether the network has not taken all."""
        return bool(self._unsent)

    def flush(self) -> None:
        for line in list(self._unsent):
            line.flush()
            if not line.unsent_bytes:
                self._unsent.discard(line)

    def count_output(self, line: AgentConnection, count: int) -> None:
        """So many bytes of output have come in."""
        self._unacknowledged[line] = owed = self._unacknowledged.get(line, 0) + count
        if owed >= _ACKNOWLEDGE_AFTER_BYTES:
            self._to_acknowledge.add(line)

    def acknowledge(self) -> None:
        """Let those go on whose output has been taken."""
        for line in self._to_acknowledge:
            self._send(line, encode(OutputCredit(self._unacknowledged.pop(line))))
        self._to_acknowledge.clear()

    def _send(self, line: AgentConnection, frame: bytes) -> None:
        line.send_frame(frame)
        if line.unsent_bytes:
            self._unsent.add(line)
