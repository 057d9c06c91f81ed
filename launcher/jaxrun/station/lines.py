"""The lines to all agents of a job: which rank is on which, what was sent to whom, whose output is on its way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jaxrun.channel.line import Line
from jaxrun.channel.messages import Taken, ToHead
from jaxrun.contract import encode

_ENOUGH = 2**16  # bytes of output after which its agent is told that they were taken

AgentLine = Line[ToHead]


class Lines:
    """By rank. No step looks at all of them, except to send to all."""

    def __init__(self) -> None:
        self._of_rank: dict[int, AgentLine] = {}
        self._unsent: set[AgentLine] = set()
        self._owed: dict[AgentLine, int] = {}
        self._enough: set[AgentLine] = set()  # those of them that are owed so much that they are told

    def __iter__(self) -> Iterator[AgentLine]:
        return iter(self._of_rank.values())

    def __len__(self) -> int:
        return len(self._of_rank)

    def add(self, rank: int, line: AgentLine) -> bool:
        """From now on this is the line to `rank`; whether it is the first."""
        return self._of_rank.setdefault(rank, line) is line

    def remove(self, rank: int, line: AgentLine) -> None:
        if self._of_rank.get(rank) is line:
            del self._of_rank[rank]
        self._unsent.discard(line)
        self._owed.pop(line, None)
        self._enough.discard(line)

    def send(self, ranks: Iterable[int], message: object) -> None:
        """To those of them that still have a line."""
        frame = encode(message)
        for rank in ranks:
            if rank in self._of_rank:
                self._send(self._of_rank[rank], frame)

    def send_all(self, message: object) -> None:
        self.send(list(self._of_rank), message)

    def silent(self) -> list[int]:
        """The ranks whose host has not answered to what was sent to it last."""
        return sorted(rank for rank, line in self._of_rank.items() if line.unanswered())

    @property
    def unsent(self) -> bool:
        """Whether the network has not taken all."""
        return bool(self._unsent)

    def flush(self) -> None:
        for line in list(self._unsent):
            line.flush()
            if not line.unsent:
                self._unsent.discard(line)

    def owe(self, line: AgentLine, count: int) -> None:
        """So many bytes of output have come in."""
        self._owed[line] = owed = self._owed.get(line, 0) + count
        if owed >= _ENOUGH:
            self._enough.add(line)

    def acknowledge(self) -> None:
        """Let those go on whose output has been taken."""
        for line in self._enough:
            self._send(line, encode(Taken(self._owed.pop(line))))
        self._enough.clear()

    def _send(self, line: AgentLine, frame: bytes) -> None:
        line.send_frame(frame)
        if line.unsent:
            self._unsent.add(line)
