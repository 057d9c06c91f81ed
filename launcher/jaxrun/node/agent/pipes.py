"""The workers' stdout and stderr pipes: read in the order of the ranks, and not while the screen is stuck."""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import termios
from collections.abc import Callable

from jaxrun.records.output.drain import READ_BYTES, OutputSink, Pipe, drain_ready

_MAX_BYTES_AFTER_EXIT = 2**21  # to read when a worker has ended: more than a pipe holds


class OutputPipes:
    """All pipes of one agent, behind one descriptor that is readable when any of them is."""

    def __init__(self, output: OutputSink, on_first_output: Callable[[int], None]) -> None:
        """`on_first_output` is called once for each rank, when it writes for the first time."""
        self._output = output
        self._on_first_output = on_first_output
        self._silent: set[int] = set()
        self._hidden: set[int] = set()
        self._open: dict[int, list[Pipe]] = {}
        self._selector = selectors.EpollSelector()

    def fileno(self) -> int:
        return self._selector.fileno()

    def add(self, rank: int, out: int, err: int) -> None:
        self._silent.add(rank)
        self._open[rank] = [Pipe(out, rank, "out"), Pipe(err, rank, "err")]
        for pipe in self._open[rank]:
            self._selector.register(pipe.fd, selectors.EVENT_READ, pipe)

    def remove(self, rank: int) -> None:
        """Stop reading a worker that never wrote; its pipes are closed elsewhere."""
        for pipe in list(self._open.get(rank, ())):
            self._remove_pipe(pipe)

    def read_ready(self) -> None:
        """Hand over what has arrived; may rest for a moment, so that lines are read many at a time."""
        ready: list[Pipe] = [key.data for key, _ in self._selector.select(0)]
        for pipe in [pipe for pipe in ready if pipe.rank in self._hidden]:
            ready.remove(pipe)
            if self._read_rest(pipe):
                self._remove_pipe(pipe)
        for pipe in ready:
            if pipe.rank in self._silent and _holds_bytes(pipe.fd):
                self._note_output(pipe.rank)
        for pipe in drain_ready(sorted(ready, key=lambda pipe: (pipe.rank, pipe.stream)), self._output):
            self._remove_pipe(pipe)

    def finish(self, rank: int) -> None:
        """Hand over all that a worker that has ended left in its pipes, even while the screen is stuck.

        Processes that it started may hold the pipes open and go on writing.
        """
        for pipe in list(self._open.get(rank, ())):
            if self._read_rest(pipe):
                self._remove_pipe(pipe)

    def hide(self, rank: int) -> None:
        """Show what this rank has written so far, and no more: the rest goes to its log alone."""
        self.finish(rank)
        self._hidden.add(rank)

    def close(self) -> None:
        for rank in list(self._open):
            self.finish(rank)
        self._selector.close()

    def _read_rest(self, pipe: Pipe) -> bool:
        """Read what is there now; returns whether that was the pipe's end."""
        total = 0
        while total < _MAX_BYTES_AFTER_EXIT:
            try:
                data = os.read(pipe.fd, READ_BYTES)
            except BlockingIOError:
                return False
            if not data:
                self._output.end_stream(pipe.rank, pipe.stream)
                return True
            self._note_output(pipe.rank)
            deliver = self._output.logs.write_file if pipe.rank in self._hidden else self._output.write
            deliver(pipe.rank, pipe.stream, data)
            total += len(data)
        return False

    def _note_output(self, rank: int) -> None:
        if rank in self._silent:
            self._silent.discard(rank)
            self._on_first_output(rank)

    def _remove_pipe(self, pipe: Pipe) -> None:
        self._open[pipe.rank].remove(pipe)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(pipe.fd)


def _holds_bytes(fd: int) -> bool:
    """Whether there are bytes to read; a pipe at its end is readable, too."""
    return any(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))
