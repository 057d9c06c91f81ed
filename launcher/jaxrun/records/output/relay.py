"""The output of workers on its way to the head: into log files on this host, where that can be, and over the channel.

The head acknowledges what it has taken. No more than a window is ever unacknowledged, so that a stuck screen stops the
workers, as a full pipe would, and no other message waits behind its output.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol

from jaxrun.protocol.agent_messages import OutputChunk, StreamEnded
from jaxrun.records.output.rank_logs import RankLogs

_WINDOW_BYTES = 2**20
_RETRY_S = 0.01


class Sender(Protocol):
    """What Relay needs of the connection to the head."""

    @property
    def unsent_bytes(self) -> int: ...

    def send(self, message: OutputChunk | StreamEnded) -> None: ...

    def flush(self) -> None: ...


class Relay:
    """The OutputSink of an agent on another host than the screen."""

    def __init__(self, ranks: Sequence[int], connection: Sender, log_dir: str, *, shown: Collection[int]) -> None:
        """`log_dir`: where to keep the logs; if empty, the head keeps them. `shown`: ranks that the screen shows."""
        self._connection = connection
        self.logs = RankLogs(Path(log_dir) if log_dir else None, ranks, self.print_line)
        self._sent = {*(shown if log_dir else ranks)}
        self._unacknowledged = 0

    @property
    def congested(self) -> bool:
        return self._unacknowledged > _WINDOW_BYTES

    def write(self, rank: int, stream: str, data: bytes) -> None:
        self.logs.write(rank, stream, data)
        if rank in self._sent:
            self._unacknowledged += len(data)
            self._connection.send(OutputChunk(rank, stream, data))

    def add_credit(self, count: int) -> None:
        """The head has taken `count` bytes."""
        self._unacknowledged -= count

    def end_stream(self, rank: int, stream: str) -> None:
        if rank in self._sent:
            self._connection.send(StreamEnded(rank, stream))

    def flush_due(self) -> float | None:
        self._connection.flush()
        return _RETRY_S if self._connection.unsent_bytes else None

    def print_line(self, text: str, *, status: bool = False) -> None:
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        self.logs.close()
