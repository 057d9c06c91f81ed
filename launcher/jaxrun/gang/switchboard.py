"""The connections to all ranks of one gang: takes what comes, and never waits for a rank that does not read."""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from jaxrun.contract.parcel import Inbox, Outbox, Parcel
from jaxrun.errors import ProtocolError
from jaxrun.gang.launcher import Launcher


@dataclass(slots=True)
class _Line:
    rank: int
    connection: socket.socket
    inbox: Inbox
    outbox: Outbox
    writing: bool = False


class Switchboard:
    """`on_words` is told what the launcher says besides."""

    def __init__(self, launcher: Launcher) -> None:
        self._selector = selectors.DefaultSelector()
        self._lines: dict[int, _Line] = {}
        self._launcher = launcher
        self._selector.register(launcher.words, selectors.EVENT_READ)
        self._words = ""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that are connected."""
        return tuple(sorted(self._lines))

    def add(self, rank: int, connection: socket.socket, inbox: Inbox) -> None:
        line = _Line(rank, connection, inbox, Outbox(connection))
        self._lines[rank] = line
        self._selector.register(connection, selectors.EVENT_READ, line)

    def send(self, parcel: Parcel, ranks: Iterable[int]) -> None:
        """Send it to those that are there; what does not fit leaves with later calls of `poll`."""
        with _undisturbed():
            for rank in ranks:
                line = self._lines.get(rank)
                if line is not None:
                    line.outbox.put(parcel)
                    self._flush(line)

    def poll(self, timeout: float | None) -> list[tuple[int, Parcel | None]]:
        """What has come within `timeout` seconds, by rank; None for a rank whose connection has ended."""
        came: list[tuple[int, Parcel | None]] = []
        found = self._selector.select(timeout)
        with _undisturbed():
            for key, ready in found:
                line = key.data
                if line is None:
                    self._hear_launcher()
                    continue
                if ready & selectors.EVENT_WRITE:
                    self._flush(line)
                if ready & selectors.EVENT_READ:
                    came += self._read(line)
        return came

    def take_words(self) -> str:
        """What the launcher has said since the last time."""
        words, self._words = self._words, ""
        return words

    def close(self) -> None:
        for line in tuple(self._lines.values()):
            self._drop(line)
        self._selector.close()

    def _hear_launcher(self) -> None:
        said = self._launcher.listen()
        self._words += said
        if not said and self._launcher.over:  # or its end would wake us for ever
            with contextlib.suppress(KeyError):
                self._selector.unregister(self._launcher.words)

    def _read(self, line: _Line) -> list[tuple[int, Parcel | None]]:
        came: list[tuple[int, Parcel | None]] = []
        try:
            while True:
                came.append((line.rank, line.inbox.receive()))
        except BlockingIOError:
            return came
        except (EOFError, OSError, ProtocolError):
            self._drop(line)
            return [*came, (line.rank, None)]

    def _flush(self, line: _Line) -> None:
        try:
            done = line.outbox.flush()
        except OSError:
            return  # it has gone, which reading will tell
        if line.writing is done:
            line.writing = not done
            events = selectors.EVENT_READ if done else selectors.EVENT_READ | selectors.EVENT_WRITE
            with contextlib.suppress(KeyError):
                self._selector.modify(line.connection, events, line)

    def _drop(self, line: _Line) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(line.connection)
        line.connection.close()
        self._lines.pop(line.rank, None)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """No Ctrl-C between the bytes that were taken or sent and the note that they were."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
