"""The connections to all ranks of one gang: takes what comes, and never waits for a rank that does not read."""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from jaxrun.errors import ProtocolError
from jaxrun.gang.launcher_process import LauncherProcess
from jaxrun.protocol.payload import GangMessage, GangMessageReader, GangMessageWriter


@dataclass(slots=True)
class _RankConnection:
    rank: int
    connection: socket.socket
    inbox: GangMessageReader
    outbox: GangMessageWriter
    writing: bool = False


class RankConnections:
    """`on_words` is told what the launcher says besides."""

    def __init__(self, launcher: LauncherProcess) -> None:
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, _RankConnection] = {}
        self._launcher = launcher
        self._selector.register(launcher.output_fd, selectors.EVENT_READ)
        self._launcher_output = ""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that are connected."""
        return tuple(sorted(self._connections))

    def add(self, rank: int, connection: socket.socket, inbox: GangMessageReader) -> None:
        line = _RankConnection(rank, connection, inbox, GangMessageWriter(connection))
        self._connections[rank] = line
        self._selector.register(connection, selectors.EVENT_READ, line)

    def send(self, parcel: GangMessage, ranks: Iterable[int]) -> None:
        """Send it to those that are there; what does not fit leaves with later calls of `poll`."""
        with _block_sigint():
            for rank in ranks:
                line = self._connections.get(rank)
                if line is not None:
                    line.outbox.add(parcel)
                    self._flush(line)

    def poll(self, timeout: float | None) -> list[tuple[int, GangMessage | None]]:
        """What has come within `timeout` seconds, by rank; None for a rank whose connection has ended."""
        came: list[tuple[int, GangMessage | None]] = []
        found = self._selector.select(timeout)
        with _block_sigint():
            for key, ready in found:
                line = key.data
                if line is None:
                    self._read_launcher()
                    continue
                if ready & selectors.EVENT_WRITE:
                    self._flush(line)
                if ready & selectors.EVENT_READ:
                    came += self._read(line)
        return came

    def read_launcher_output(self) -> str:
        """What the launcher has said since the last time."""
        words, self._launcher_output = self._launcher_output, ""
        return words

    def close(self) -> None:
        for line in tuple(self._connections.values()):
            self._drop(line)
        self._selector.close()

    def _read_launcher(self) -> None:
        said = self._launcher.read_output()
        self._launcher_output += said
        if not said and self._launcher.has_ended:  # or its end would wake us for ever
            with contextlib.suppress(KeyError):
                self._selector.unregister(self._launcher.output_fd)

    def _read(self, line: _RankConnection) -> list[tuple[int, GangMessage | None]]:
        came: list[tuple[int, GangMessage | None]] = []
        try:
            while True:
                came.append((line.rank, line.inbox.receive()))
        except BlockingIOError:
            return came
        except (EOFError, OSError, ProtocolError):
            self._drop(line)
            return [*came, (line.rank, None)]

    def _flush(self, line: _RankConnection) -> None:
        try:
            done = line.outbox.flush()
        except OSError:
            return  # it has gone, which reading will tell
        if line.writing is done:
            line.writing = not done
            events = selectors.EVENT_READ if done else selectors.EVENT_READ | selectors.EVENT_WRITE
            with contextlib.suppress(KeyError):
                self._selector.modify(line.connection, events, line)

    def _drop(self, line: _RankConnection) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(line.connection)
        line.connection.close()
        self._connections.pop(line.rank, None)


@contextlib.contextmanager
def _block_sigint() -> Iterator[None]:
    """No Ctrl-C between the bytes that were taken or sent and the note that they were."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
