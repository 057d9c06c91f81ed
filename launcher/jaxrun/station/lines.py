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

    def send(self, ranks: Iterable[int], message: object) -> None:
        """To those of them that still have a line."""
        frame = encode(message)
        for rank in ranks:
            if rank in self._of_rank:
                self._send(self._of_rank[rank], frame)

    def send_all(self, message: object) -> None:
        self.send(list(self._of_rank), message)

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
        self._owed[line] = self._owed.get(line, 0) + count

    def acknowledge(self) -> None:
        """Let those go on whose output has been taken."""
        for line, count in [item for item in self._owed.items() if item[1] >= _ENOUGH]:
            del self._owed[line]
            self._send(line, encode(Taken(count)))

    def _send(self, line: AgentLine, frame: bytes) -> None:
        line.send_frame(frame)
        if line.unsent:
            self._unsent.add(line)
