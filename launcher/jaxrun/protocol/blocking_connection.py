"""Exchanges messages over a connection and blocks until each one is sent or has arrived.

A gang's ranks, state snapshots and --stage use it; each of them can stop a wait by a check of its own.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TypeVar

from .gang_connection import GangMessageReader, GangMessageWriter
from .gang_messages import GangMessage, GangMessageKind
from .message_tags import ConnectionTags
from .payload import Payload

_CHECK_INTERVAL_S = 0.1
T = TypeVar("T")


class BlockingConnection:
    """Sends and receives messages, and waits for the other end as long as that takes.

    Raises ConnectionError once that is lost, ProtocolError if what comes is not what it has sent.
    """

    def __init__(
        self,
        connection: socket.socket,
        tags: ConnectionTags | None,
        peer: str,
        check: Callable[[], None] | None = None,
    ) -> None:
        """`tags` are what the handshake has agreed on, `peer` is how people call the other end.

        `check` is called for each message, and several times a second during a wait, and raises what is to end it.
        """
        connection.settimeout(_CHECK_INTERVAL_S if check is not None else None)
        self.socket = connection
        self._peer = peer
        self._check = check
        self._reader = GangMessageReader(connection, tags.received if tags is not None else None)
        self._writer = GangMessageWriter(connection, tags.sent if tags is not None else None)

    def send(self, message: GangMessage) -> None:
        self._writer.add(message)
        self._wait(self._writer.flush)

    def send_bytes(self, data: bytes | bytearray | memoryview, note: bytes = b"") -> None:
        self.send(GangMessage(GangMessageKind.VALUE, 0, Payload(data), note))

    def receive(self) -> GangMessage:
        return self._wait(self._reader.receive)

    def _wait(self, do: Callable[[], T]) -> T:
        while True:
            if self._check is not None:
                self._check()
            try:
                return do()
            except TimeoutError:
                pass
            except (EOFError, OSError):  # the other end's fault, by this text: see diagnosis/consequences.py
                raise ConnectionError(f"the connection to {self._peer} was lost") from None
