"""Answers the other hosts of a job that measure the way here.

A connection begins with the cookie, which only the head and the agents of the job know; one that begins otherwise is
closed. Then come commands, each answered by one byte: PING at once, and SINK, with a count of eight bytes, when so many
more have come.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import threading
from dataclasses import dataclass

COOKIE_BYTES = 16
PING, SINK = b"p", b"s"
COUNT = struct.Struct("!Q")
ANSWER = b"."
_RECEIVE_BYTES = 2**20
_BACKLOG = 1024  # every other host of a large job may connect at the same moment


@dataclass(slots=True)
class _Client:
    """What has come of its next command, and how many bytes it still sends for the last one."""

    welcome: bool = False
    pending: bytes = b""
    sink_left: int = 0


class PeerServer:
    """Serves in a thread of its own, from its creation until `close`."""

    def __init__(self) -> None:
        """Raises OSError if this host has no port left."""
        self.cookie = os.urandom(COOKIE_BYTES // 2).hex()
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, backlog=_BACKLOG, dualstack_ipv6=dual)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._clients: dict[socket.socket, _Client] = {}
        self._selector = selectors.DefaultSelector()
        self._stop, self._stopped = socket.socketpair()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._stopped, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="jaxrun-peers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread: a process with threads must not fork. May be called again."""
        self._stop.close()
        self._thread.join()
        for connection in (*self._clients, self._listener, self._stopped):
            connection.close()
        self._clients.clear()
        self._selector.close()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._stopped:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._receive(key.fileobj)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it has gone, or there are too many open files
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._clients[connection] = _Client()
            self._selector.register(connection, selectors.EVENT_READ)

    def _receive(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(_RECEIVE_BYTES)
            goes_on = bool(data) and self._handle(self._clients[connection], connection, data)
        except OSError:
            goes_on = False
        if not goes_on:
            self._selector.unregister(connection)
            del self._clients[connection]
            connection.close()

    def _handle(self, client: _Client, connection: socket.socket, data: bytes) -> bool:
        """Handle what has come; returns whether it was what a peer sends. Raises OSError where it is gone."""
        if client.sink_left:
            taken = min(client.sink_left, len(data))
            client.sink_left -= taken
            data = data[taken:]
            if not client.sink_left:
                connection.send(ANSWER)
        client.pending += data
        if not client.welcome and len(client.pending) >= COOKIE_BYTES:
            if client.pending[:COOKIE_BYTES] != self.cookie.encode():
                return False
            client.welcome, client.pending = True, client.pending[COOKIE_BYTES:]
        while client.welcome and client.pending and not client.sink_left:
            command, rest = client.pending[:1], client.pending[1:]
            if command == PING:
                connection.send(ANSWER)
                client.pending = rest
            elif command == SINK and len(rest) >= COUNT.size:
                (client.sink_left,) = COUNT.unpack(rest[: COUNT.size])
                client.pending = b""
                return self._handle(client, connection, rest[COUNT.size :])
            else:
                return command == SINK
        return True
