"""The workers' stdout and stderr pipes: read when there is something, in the order of the ranks, not while the screen is stuck."""

from __future__ import annotations

import contextlib
import selectors
from collections.abc import Callable, Iterable

from .output import Output, Pipe, drain, drain_ready


class Pipes:
    """All pipes of one agent. They hang together on one descriptor, which is readable when any of them is."""

    def __init__(self, output: Output, first_output: Callable[[int], None]) -> None:
        """`first_output` is called once for each rank, when it writes for the first time."""
        self._output = output
        self._first_output = first_output
        self._silent: set[int] = set()
        self._open: dict[int, list[Pipe]] = {}
        self._selector = selectors.EpollSelector()

    def fileno(self) -> int:
        return self._selector.fileno()

    def add(self, rank: int, out: int, err: int) -> None:
        self._silent.add(rank)
        self._open[rank] = [Pipe(out, rank, "out"), Pipe(err, rank, "err")]
        for pipe in self._open[rank]:
            self._selector.register(pipe.fd, selectors.EVENT_READ, pipe)

    def discard(self, rank: int) -> None:
        """Forget a worker that never wrote; its pipes are closed elsewhere."""
        for pipe in list(self._open.get(rank, ())):
            self._forget(pipe)

    def serve(self) -> None:
        """Hand over what has arrived; may rest for a moment, so that lines are read many at a time."""
        ready: list[Pipe] = [key.data for key, _ in self._selector.select(0)]
        self._note_first(ready)
        for pipe in drain_ready(sorted(ready, key=lambda pipe: (pipe.rank, pipe.stream)), self._output):
            self._forget(pipe)

    def finish(self, rank: int) -> None:
        """Hand over all that is still in the pipes of a worker that has ended; its orphans may hold them open."""
        pipes = list(self._open.get(rank, ()))
        for pipe in pipes:
            while count := drain(pipe, self._output):
                self._note_first([pipe])
            if count is None:
                self._forget(pipe)

    def close(self) -> None:
        for rank in list(self._open):
            self.finish(rank)
        self._selector.close()

    def _note_first(self, ready: Iterable[Pipe]) -> None:
        for rank in {pipe.rank for pipe in ready} & self._silent:
            self._silent.discard(rank)
            self._first_output(rank)

    def _forget(self, pipe: Pipe) -> None:
        self._open[pipe.rank].remove(pipe)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(pipe.fd)
