"""The workers' stdout and stderr pipes, read in the order of the ranks and not while the screen is stuck.

They are read into an OutputSink: Output shows the output here (records/output); Relay, on a host without the screen,
sends it to the head.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from jaxrun.node.channel.connection import Connection
from jaxrun.protocol.agent_messages import HeadToAgent, OutputChunk, StreamEnded
from jaxrun.records.output.line_buffer import LineBuffer
from jaxrun.records.output.rank_logs import STREAMS, RankLogs

READ_BYTES = 2**18
COALESCE_BELOW_BYTES = 2**18  # if all pipes held less than this, it pays to wait for more
COALESCE_S = 0.003
WINDOW_BYTES = 2**20  # that the head may not have acknowledged yet
_MAX_BYTES_AFTER_EXIT = 2**21  # to read when a worker has ended: more than a pipe holds


class Pipe(Struct, frozen=True):
    """The reading end (non-blocking) of a worker's stdout ("out") or stderr ("err")."""

    fd: int
    rank: int
    stream: str


class OutputSink(Protocol):
    """The destination of the workers' output: this host's screen, or the connection to it."""

    @property
    def logs(self) -> RankLogs:
        """The part of the output that is kept on this host."""

    @property
    def congested(self) -> bool:
        """Whether no more can be accepted: then the workers must not be read."""

    def write(self, rank: int, stream: str, data: bytes) -> None:
        """Accept bytes that were just read from the worker's "out" or "err"."""

    def end_stream(self, rank: int, stream: str) -> None:
        """The worker's "out" or "err" has ended."""

    def flush_due(self) -> float | None:
        """Deliver output that has waited long enough; returns the seconds until the next call, if anything waits."""

    def print_line(self, text: str, *, status: bool = False) -> None:
        """Print a line of jaxrun's own; `status`: only until the next line, if that is possible."""


class OutputPipes:
    """All pipes of one agent, behind one descriptor that is readable when any of them is."""

    def __init__(
        self,
        output: OutputSink,
        on_first_output: Callable[[int], None],
        on_output: Callable[[Pipe, bytes], None] | None = None,
    ) -> None:
        """
        on_first_output:  called once for each rank, when it writes for the first time what is not noise
        on_output:        called with all that is read, before it is delivered
        """
        self._output = output
        self._on_first_output = on_first_output
        self._on_output = on_output if on_output is not None else _ignore
        self._silent: dict[int, dict[str, LineBuffer]] = {}  # ranks without output so far, and its streams
        self._hidden: set[int] = set()
        self._open: dict[int, list[Pipe]] = {}
        self._selector = selectors.EpollSelector()

    def fileno(self) -> int:
        return self._selector.fileno()

    def add(self, rank: int, out: int, err: int) -> None:
        self._silent[rank] = {stream: LineBuffer() for stream in STREAMS}
        self._open[rank] = [Pipe(out, rank, "out"), Pipe(err, rank, "err")]
        for pipe in self._open[rank]:
            self._selector.register(pipe.fd, selectors.EVENT_READ, pipe)

    def remove(self, rank: int) -> None:
        """Stop reading a worker that never wrote; its pipes are closed elsewhere."""
        for pipe in list(self._open.get(rank, ())):
            self._remove_pipe(pipe)

    def read_ready(self) -> None:
        """Deliver output that has arrived; may pause for a moment, so that many lines are read at a time."""
        ready: list[Pipe] = [key.data for key, _ in self._selector.select(0)]
        for pipe in [pipe for pipe in ready if pipe.rank in self._hidden]:
            ready.remove(pipe)
            if self._read_rest(pipe):
                self._remove_pipe(pipe)
        in_order = sorted(ready, key=lambda pipe: (pipe.rank, pipe.stream))
        for pipe in drain_ready(in_order, self._output, on_data=self._note_output):
            self._remove_pipe(pipe)

    def finish(self, rank: int) -> None:
        """Deliver everything that an ended worker left in its pipes, even while the screen is stuck.

        Processes that it started may hold the pipes open and continue to write.
        """
        for pipe in list(self._open.get(rank, ())):
            if self._read_rest(pipe):
                self._remove_pipe(pipe)

    def end(self, rank: int) -> None:
        """Deliver everything that an ended worker left in its pipes, and read them no more: another one follows."""
        self.finish(rank)
        for pipe in list(self._open.get(rank, ())):  # a process outside of its group holds it open
            self._output.end_stream(rank, pipe.stream)
            self._remove_pipe(pipe)
        self._hidden.discard(rank)
        self._output.logs.forget_stderr(rank)

    def hide(self, rank: int) -> None:
        """Stop showing this rank's output: further output goes only to its log."""
        self.finish(rank)
        self._hidden.add(rank)

    def close(self) -> None:
        for rank in list(self._open):
            self.finish(rank)
        self._selector.close()

    def _read_rest(self, pipe: Pipe) -> bool:
        """Read the bytes that are available now; returns whether the pipe has ended."""
        total = 0
        while total < _MAX_BYTES_AFTER_EXIT:
            try:
                data = os.read(pipe.fd, READ_BYTES)
            except BlockingIOError:
                return False
            if not data:
                self._output.end_stream(pipe.rank, pipe.stream)
                return True
            self._note_output(pipe, data)
            deliver = self._output.logs.write_file if pipe.rank in self._hidden else self._output.write
            deliver(pipe.rank, pipe.stream, data)
            total += len(data)
        return False

    def _note_output(self, pipe: Pipe, data: bytes) -> None:
        self._on_output(pipe, data)
        if pipe.rank not in self._silent:
            return
        lines = self._silent[pipe.rank][pipe.stream]
        if lines.feed(data) or lines.has_partial:
            del self._silent[pipe.rank]
            self._on_first_output(pipe.rank)

    def _remove_pipe(self, pipe: Pipe) -> None:
        self._open[pipe.rank].remove(pipe)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(pipe.fd)


def _ignore(pipe: Pipe, data: bytes) -> None:
    pass


def drain_ready(
    ready: Iterable[Pipe],
    output: OutputSink,
    *,
    on_data: Callable[[Pipe, bytes], None] = _ignore,
    rest: Callable[[float], None] = time.sleep,
) -> list[Pipe]:
    """Deliver the content of these pipes to `output`, each part after `on_data`; returns those that have ended.

    Rests for a moment if they held little, so that writers of single lines are read many lines at a time, which is
    cheaper for both sides.
    """
    ended = []
    total = 0
    for pipe in ready:
        count = drain(pipe, output, on_data=on_data)
        if count is None:
            ended.append(pipe)
        else:
            total += count
    if 0 < total < COALESCE_BELOW_BYTES and not ended:
        rest(COALESCE_S)
    return ended


def drain(
    pipe: Pipe, output: OutputSink, limit: int = 4 * READ_BYTES, *, on_data: Callable[[Pipe, bytes], None] = _ignore
) -> int | None:
    """Deliver up to about `limit` bytes of one pipe to `output`; returns their number, None at the pipe's end.

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
        on_data(pipe, data)
        output.write(pipe.rank, pipe.stream, data)
        total += len(data)
        if len(data) < READ_BYTES // 4:
            break  # nearly empty: another read would only find nothing
    return total


class Relay:
    """The OutputSink of an agent on a host without the screen: logs there, if possible, and sends output to the head.

    The head acknowledges output that it has accepted. No more than a window is ever unacknowledged, so that a stuck
    screen stops the workers, like a full pipe, and no other message waits behind their output.
    """

    def __init__(
        self, ranks: Sequence[int], connection: Connection[HeadToAgent], log_dir: str, *, shown: Collection[int]
    ) -> None:
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
        self._unacknowledged -= count

    def end_stream(self, rank: int, stream: str) -> None:
        if rank in self._sent:
            self._connection.send(StreamEnded(rank, stream))

    def flush_due(self) -> float | None:
        return self._connection.flush_due()

    def print_line(self, text: str, *, status: bool = False) -> None:
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        self.logs.close()
