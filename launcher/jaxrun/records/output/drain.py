"""Reads the workers' pipes into an OutputSink: Output shows it, and Relay, on another host, sends it to the head."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from jaxrun.protocol.agent_messages import OutputChunk, StreamEnded
from jaxrun.records.output.rank_logs import RankLogs

READ_BYTES = 2**18
COALESCE_BELOW_BYTES = 2**18  # where all pipes held less, it pays to let more come together
COALESCE_S = 0.003
WINDOW_BYTES = 2**20  # of which the head may not have said yet that it has taken them
_RETRY_S = 0.01


@dataclass(frozen=True, slots=True)
class Pipe:
    """The reading end (non-blocking) of a worker's stdout ("out") or stderr ("err")."""

    fd: int
    rank: int
    stream: str


class OutputSink(Protocol):
    """Where the output of workers goes: this host's screen, or the way to it."""

    @property
    def logs(self) -> RankLogs:
        """What is kept of it on this host."""

    @property
    def congested(self) -> bool:
        """Whether no more can be taken: then the workers must not be read."""

    def write(self, rank: int, stream: str, data: bytes) -> None:
        """Take what was just read from the worker's "out" or "err"."""

    def end_stream(self, rank: int, stream: str) -> None:
        """The worker's "out" or "err" has ended."""

    def flush_due(self) -> float | None:
        """Deliver what has waited long enough; returns the seconds until the next call, None if nothing waits."""

    def print_line(self, text: str, *, status: bool = False) -> None:
        """Print jaxrun's own words; `status`: only until the next line, where that is possible."""


def drain_ready(ready: Iterable[Pipe], output: OutputSink, *, rest: Callable[[float], None] = time.sleep) -> list[Pipe]:
    """Hand what these pipes hold to `output`; returns those that have ended.

    Rests for a moment if they held little, so that writers of single lines are read many lines at a time, which is
    cheaper for both sides.
    """
    ended = []
    total = 0
    for pipe in ready:
        count = drain(pipe, output)
        if count is None:
            ended.append(pipe)
        else:
            total += count
    if 0 < total < COALESCE_BELOW_BYTES and not ended:
        rest(COALESCE_S)
    return ended


def drain(pipe: Pipe, output: OutputSink, limit: int = 4 * READ_BYTES) -> int | None:
    """Hand what one pipe holds, up to about `limit` bytes, to `output`; returns their number, None at the pipe's end.

    Nothing is read while `output` is congested.
    """
    total = 0
    while total < limit and not output.congested:
        try:
            data = os.read(pipe.fd, READ_BYTES)
        except BlockingIOError:
            break
        if not data:
            output.end_stream(pipe.rank, pipe.stream)
            return None
        output.write(pipe.rank, pipe.stream, data)
        total += len(data)
        if len(data) < READ_BYTES // 4:
            break  # nearly empty: another read would only find out that nothing is left
    return total


class Sender(Protocol):
    """What Relay needs of the connection to the head."""

    @property
    def unsent_bytes(self) -> int: ...

    def send(self, message: OutputChunk | StreamEnded) -> None: ...

    def flush(self) -> None: ...


class Relay:
    """The OutputSink of an agent on another host than the screen: logs there, where that can be, and sends to the head.

    The head acknowledges what it has taken. No more than a window is ever unacknowledged, so that a stuck screen stops
    the workers, as a full pipe would, and no other message waits behind its output.
    """

    def __init__(self, ranks: Sequence[int], connection: Sender, log_dir: str, *, shown: Collection[int]) -> None:
        """`log_dir`: where to keep the logs; if empty, the head keeps them. `shown`: ranks that the screen shows."""
        self._connection = connection
        self.logs = RankLogs(Path(log_dir) if log_dir else None, ranks, self.print_line)
        self._sent = {*(shown if log_dir else ranks)}
        self._unacknowledged = 0

    @property
    def congested(self) -> bool:
        return self._unacknowledged > WINDOW_BYTES

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
