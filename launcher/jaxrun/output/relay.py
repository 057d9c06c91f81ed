"""A worker's output on its way to the head: into its log files, where they can be, and over the line for the screen.

The head says how much of it it has taken; more than a window's worth is never on its way, so that a stuck screen stops
the worker, as a pipe would, and no message has to wait behind it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from jaxrun.channel.connection import Connection
from jaxrun.output.output import STREAMS
from jaxrun.output.rank_logs import RankLogs
from jaxrun.output.stderr_tail import StderrTails
from jaxrun.protocol.agent_messages import HeadToAgent, OutputChunk, StreamEnded

_WINDOW_BYTES = 2**20
_RETRY_S = 0.01


class Relay:
    """Of one rank; a Sink."""

    def __init__(self, rank: int, line: Connection[HeadToAgent], log_dir: str, *, shown: bool) -> None:
        """`log_dir`: where to keep the logs; if empty, the head keeps them. `shown`: the screen shows this rank."""
        self._line = line
        self._logs = (
            RankLogs(Path(log_dir), [(rank, stream) for stream in STREAMS], self.print_line) if log_dir else None
        )
        self._sends = shown or self._logs is None
        self._tails = StderrTails()
        self._unacknowledged = 0

    @property
    def congested(self) -> bool:
        return self._unacknowledged > _WINDOW_BYTES

    def write(self, rank: int, stream: str, data: bytes) -> None:
        self.log(rank, stream, data)
        self._tails.add(rank, stream, data)
        if self._sends:
            self._unacknowledged += len(data)
            self._line.send(OutputChunk(rank, stream, data))

    def add_credit(self, count: int) -> None:
        """So many bytes need not be counted any more."""
        self._unacknowledged -= count

    def end_stream(self, rank: int, stream: str) -> None:
        if self._sends:
            self._line.send(StreamEnded(rank, stream))

    def log(self, rank: int, stream: str, data: bytes) -> None:
        if self._logs is not None:
            self._logs.write(rank, stream, data)

    def bytes_written(self, rank: int) -> int:
        """Bytes that the worker has written so far."""
        return self._tails.bytes_written(rank)

    def stderr_tail(self, rank: int) -> str:
        return self._tails.text(rank)

    def flush_due(self) -> float | None:
        self._line.flush()
        return _RETRY_S if self._line.unsent_bytes else None

    def print_line(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._logs is not None:
            self._logs.close()
