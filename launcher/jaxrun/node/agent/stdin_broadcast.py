"""Copies jaxrun's standard input, where it can be read only once, to a pipe of each rank of this host: --stdin all."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from io import FileIO

from jaxrun.node.channel.event_loop import EventLoop

_STDIN = 0
_READ_BYTES = 65536
_MAX_WAITING_BYTES = 2**20


@dataclass(slots=True)
class _Reader:
    """A rank that reads: its pipe, not blocking, and how many of the waiting bytes it has been given."""

    pipe: FileIO
    given: int = 0


class StdinBroadcast:
    """Gives every rank all of the input, which is read no faster than the slowest rank takes it.

    A rank that has ended, or has closed its standard input, is waited for no longer.
    """

    def __init__(self, loop: EventLoop, order: int, find_pipes: Callable[[], Mapping[int, FileIO] | None]) -> None:
        """`find_pipes` returns the pipe of each rank that reads; None as long as not all ranks have been started."""
        self._loop = loop
        self._order = order
        self._find_pipes = find_pipes
        self._readers: dict[int, _Reader] | None = None
        self._waiting = bytearray()  # what the slowest rank has not been given yet
        self._ended = False

    def pause_or_resume(self) -> None:
        """Listen to the input while there is room for it; to be called before each wait."""
        if self._readers is None:
            pipes = self._find_pipes()
            if not pipes:
                return
            self._readers = {}
            for rank, pipe in pipes.items():
                self._readers[rank] = _Reader(pipe)
                # This end of a pipe becomes readable once nobody has the other end any more.
                self._loop.add_reader(pipe.fileno(), self._order, partial(self.drop, rank))
        self._forget_given()
        wanted = bool(self._readers) and not self._ended and len(self._waiting) < _MAX_WAITING_BYTES
        if not wanted:
            self._loop.remove_reader(_STDIN)
        elif not self._loop.has_reader(_STDIN):
            self._loop.add_reader(_STDIN, self._order, self._on_input)

    def drop(self, rank: int) -> None:
        """Close the pipe of a rank, if it has one: it has ended, or has been given everything."""
        if reader := (self._readers or {}).pop(rank, None):
            self._loop.remove_reader(reader.pipe.fileno())
            reader.pipe.close()

    def close(self) -> None:
        """Read nothing more, and close all pipes."""
        for rank in list(self._readers or ()):
            self.drop(rank)
        self._loop.remove_reader(_STDIN)

    def _on_input(self) -> None:
        try:
            data = os.read(_STDIN, _READ_BYTES)
        except OSError:  # the terminal has been closed
            data = b""
        self._waiting += data
        self._ended = not data
        for rank in list(self._readers or ()):
            self._write(rank)

    def _write(self, rank: int) -> None:
        """Give a rank as much as its pipe takes."""
        reader = (self._readers or {}).get(rank)
        if reader is None:
            return
        if reader.given < len(self._waiting):
            try:
                with memoryview(self._waiting) as waiting, waiting[reader.given :] as rest:
                    reader.given += reader.pipe.write(rest) or 0
            except OSError:  # nobody can read it any more
                self.drop(rank)
                return
        if reader.given < len(self._waiting):
            self._loop.add_writer(reader.pipe.fileno(), partial(self._write, rank))
        elif self._ended:
            self.drop(rank)
        else:
            self._loop.remove_writer(reader.pipe.fileno())

    def _forget_given(self) -> None:
        """Let go of what all ranks have been given."""
        assert self._readers is not None
        least = min((reader.given for reader in self._readers.values()), default=len(self._waiting))
        if least:
            del self._waiting[:least]
            for reader in self._readers.values():
                reader.given -= least
