"""The listener for the ranks of one gang (a Unix socket here, TCP from other hosts), and their connections.

It receives whatever arrives, and never waits for a rank that does not read.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import socket
import tempfile
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from jaxrun.errors import ProtocolError
from jaxrun.files.own_files import remove_directory
from jaxrun.frontends.gang.launcher_process import LauncherProcess
from jaxrun.node.channel.acceptor import Acceptor
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.node.channel.host_addresses import list_addresses, select_addresses
from jaxrun.node.channel.listener import Listener, Peer, listen_on_tcp, listen_on_unix_socket
from jaxrun.node.forkserver.launcher_pool import leave_if_process_ends
from jaxrun.protocol.addresses import format_addresses
from jaxrun.protocol.auth import ServerHandshake, new_token
from jaxrun.protocol.gang_connection import GangMessageReader, GangMessageWriter
from jaxrun.protocol.gang_messages import GangMessage
from jaxrun.protocol.names import GANG_ADDRESS, GANG_DIRECTORY_PREFIX, GANG_TOKEN

Received = tuple[int, GangMessage | None]

_MAX_WAIT_S = 0.2  # Ctrl-C does not end a wait that begins just after it, nor one while another thread receives it
_ORPHAN_TIMEOUT_S = 3.0  # without a byte, for connections to end after the launcher; no rank outlives it for as long
_set_handler = inspect.unwrap(signal.signal)  # the runtime's replacement in a rank would report each change to the head


class _RankConnection(Struct):
    rank: int
    socket: socket.socket
    reader: GangMessageReader
    writer: GangMessageWriter


class RankListener:
    """A directory that only this user may enter, and a listener; `environ` tells the ranks where it is."""

    def __init__(self, *, remote: bool, interface: str = "") -> None:
        """`interface`: where to listen for remote ranks; empty for all. Raises UsageError or UnavailableError."""
        self._owner = os.getpid()
        self.directory = Path(tempfile.mkdtemp(prefix=f"{GANG_DIRECTORY_PREFIX}{self._owner}-"))
        _listeners.add(self)
        token = new_token()
        try:
            if remote:
                offered = select_addresses(list_addresses(), interface)
                self.listener = listen_on_tcp(offered, token, everywhere=not interface)
            else:
                self.listener = listen_on_unix_socket(str(self.directory / "ranks"), token)
        except BaseException:
            self._remove_directory()
            raise
        self.environ = {GANG_ADDRESS: format_addresses(self.listener.addresses), GANG_TOKEN: token}

    def close(self) -> None:
        """Accept no more connections, and remove the directory. May be called again."""
        self.listener.close()
        self._remove_directory()

    def _remove_directory(self) -> None:
        _listeners.discard(self)
        with contextlib.suppress(OSError):
            if self._owner == os.getpid():
                remove_directory(self.directory)


_listeners: weakref.WeakSet[RankListener] = weakref.WeakSet()


def remove_directories() -> None:
    """Remove the directories of all listeners that are still open; to be called when they are no longer used."""
    for listener in tuple(_listeners):
        listener._remove_directory()


class RankConnections:
    """The connections by rank; also collects the output of the gang's launcher."""

    def __init__(self, launcher: LauncherProcess) -> None:
        self._loop = EventLoop()
        self._connections: dict[int, _RankConnection] = {}
        self._received: list[Received] = []
        self._has_tags = self._closed = False
        self._acceptor: Acceptor[ServerHandshake] | None = None
        self._launcher = launcher
        self._launcher_output = ""
        self._loop.add_reader(launcher.output_fd, 0, self._read_launcher)
        self._loop.add_reader(launcher.pidfd, 1, self._note_launcher_end)
        self._orphaned_at: float | None = None  # when this process noticed the launcher's end, on the monotonic clock
        self._heard_at = 0.0  # when bytes last came from any rank

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self._connections))

    def accept(self, listener: Listener, *, expected: int) -> None:
        """Add ranks that connect to `listener` while `poll` is called, until `stop_accepting`; `expected` may come."""
        self._acceptor = listener.accept(self._loop, 0, self.add, expected=expected)

    def stop_accepting(self) -> None:
        """Let no more ranks come. May be called again."""
        if self._acceptor is not None:
            self._acceptor.close()
            self._acceptor = None

    def add(self, peer: Peer) -> None:
        """Add a rank; a second one with the same number is not one of ours."""
        if peer.number in self._connections:
            peer.connection.close()
            return
        received, sent = (peer.tags.received, peer.tags.sent) if peer.tags is not None else (None, None)
        reader, writer = GangMessageReader(peer.connection, received), GangMessageWriter(peer.connection, sent)
        self._connections[peer.number] = added = _RankConnection(peer.number, peer.connection, reader, writer)
        self._has_tags = sent is not None
        self._loop.add_reader(peer.connection.fileno(), 0, lambda: self._read(added))

    def send(self, message: GangMessage, ranks: Iterable[int]) -> None:
        """Send a message to those ranks that are connected; later calls of `poll` send what does not fit yet."""
        digests = message.digests() if self._has_tags else ()
        with sigint_deferred():
            for rank in ranks:
                connection = self._connections.get(rank)
                if connection is not None:
                    connection.writer.add(message, digests)
                    self._flush(connection)

    def poll(self, timeout: float | None) -> list[Received]:
        """Return messages by rank; None for a rank whose connection has ended.

        Waits for at most `timeout` seconds, or for a moment, after which there may be nothing. Once the launcher has
        ended, and nothing comes any more, all connections end: those to a host that has vanished would stay open.
        """
        wait = _MAX_WAIT_S if timeout is None else min(timeout, _MAX_WAIT_S)
        try:
            self._loop.run_once(0 if self._received else wait)  # an interrupted call may have left something
        except Exception:
            if not self._closed:  # another thread may have stopped the gang
                raise
        leave_if_process_ends()
        self._drop_orphans()
        received, self._received = self._received, []
        return received

    def count_received_bytes(self, ranks: Iterable[int]) -> int:
        """Return how many bytes have come from these ranks so far, including incomplete messages."""
        return sum(self._connections[rank].reader.received_bytes for rank in ranks if rank in self._connections)

    def read_launcher_output(self) -> str:
        """Return what the launcher has printed since the last call."""
        text, self._launcher_output = self._launcher_output + self._launcher.read_output(), ""
        return text

    def close(self) -> None:
        self._closed = True
        self.stop_accepting()
        for connection in tuple(self._connections.values()):
            self._drop(connection)
        self._loop.close()

    def _read_launcher(self) -> None:
        text = self._launcher.read_output()
        self._launcher_output += text
        if not text and self._launcher.has_ended:  # otherwise its end would wake us forever
            self._loop.remove_reader(self._launcher.output_fd)

    def _note_launcher_end(self) -> None:
        self._loop.remove_reader(self._launcher.pidfd)  # otherwise it would wake us forever
        self._orphaned_at = time.monotonic()

    def _drop_orphans(self) -> None:
        """End all connections if the launcher ended some time ago and nothing has come since. Call it after reading."""
        if self._orphaned_at is None or time.monotonic() - max(self._orphaned_at, self._heard_at) < _ORPHAN_TIMEOUT_S:
            return
        with sigint_deferred():
            for connection in tuple(self._connections.values()):
                self._drop(connection)
                self._received.append((connection.rank, None))

    def _read(self, connection: _RankConnection) -> None:
        self._heard_at = time.monotonic()
        with sigint_deferred():
            try:
                while True:
                    self._received.append((connection.rank, connection.reader.receive()))
            except BlockingIOError:
                return
            except (EOFError, OSError, ProtocolError):
                self._drop(connection)
                self._received.append((connection.rank, None))

    def _flush(self, connection: _RankConnection) -> None:
        """Send waiting bytes, and continue once the socket accepts the rest."""
        fd = connection.socket.fileno()
        with contextlib.suppress(OSError), sigint_deferred():  # if the rank has gone, reading will show it
            if connection.writer.flush():
                self._loop.set_writer(fd, None)
            else:
                self._loop.set_writer(fd, lambda: self._flush(connection))

    def _drop(self, connection: _RankConnection) -> None:
        self._loop.remove_reader(connection.socket.fileno())
        connection.socket.close()
        self._connections.pop(connection.rank, None)


@contextlib.contextmanager
def sigint_deferred() -> Iterator[None]:
    """Let no Ctrl-C come between receiving or sending bytes and recording that.

    This replaces the handler: if the signal were blocked, another thread would receive it, and Python would raise
    KeyboardInterrupt in this one.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    arrived: list[int] = []
    before = _set_handler(signal.SIGINT, lambda signum, _: arrived.append(signum))
    try:
        yield
    finally:
        _set_handler(signal.SIGINT, before)
        if arrived:
            signal.raise_signal(signal.SIGINT)
