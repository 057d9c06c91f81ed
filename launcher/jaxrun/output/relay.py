"""A worker's output on its way to the head: into its log files, where they can be, and over the line for the screen.

The head says how much of it it has taken; more than a window's worth is never on its way, so that a stuck screen stops
the worker, as a pipe would, and no message has to wait behind it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from jaxrun.channel.line import Line
from jaxrun.channel.messages import Chunk, StreamEnded, ToAgent
from jaxrun.output.output import STREAMS
from jaxrun.output.ranklogs import RankLogs
from jaxrun.output.tails import Tails

_WINDOW = 2**20
_RETRY = 0.01


class Relay:
    """Of one rank; a Sink."""

    def __init__(self, rank: int, line: Line[ToAgent], log_dir: str, *, shown: bool) -> None:
        """`log_dir`: where to keep the logs; if empty, the head keeps them. `shown`: the screen shows this rank."""
        self._line = line
        self._logs = RankLogs(Path(log_dir), [(rank, stream) for stream in STREAMS], self.say) if log_dir else None
        self._sends = shown or self._logs is None
        self._tails = Tails()
        self._on_the_way = 0

    @property
    def congested(self) -> bool:
        return self._on_the_way > _WINDOW

    def take(self, rank: int, stream: str, data: bytes) -> None:
        self.log(rank, stream, data)
        self._tails.take(rank, stream, data)
        if self._sends:
            self._on_the_way += len(data)
            self._line.send(Chunk(rank, stream, data))

    def taken(self, count: int) -> None:
        """So many bytes need not be counted any more."""
        self._on_the_way -= count

    def end(self, rank: int, stream: str) -> None:
        if self._sends:
            self._line.send(StreamEnded(rank, stream))

    def log(self, rank: int, stream: str, data: bytes) -> None:
        if self._logs is not None:
            self._logs.write(rank, stream, data)

    def written(self, rank: int) -> int:
        """Bytes that the worker has written so far."""
        return self._tails.written(rank)

    def tail(self, rank: int) -> str:
        return self._tails.text(rank)

    def tick(self) -> float | None:
        self._line.flush()
        return _RETRY if self._line.unsent else None

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._logs is not None:
            self._logs.close()
