"""Exchanges messages over a connection, and blocks until each one is sent or has arrived.

A gang's ranks, state snapshots and --stage use it; each of them can end a wait with its own `check`.
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
    """Sends and receives messages, and waits for the other end without a time limit.

    Raises ConnectionError if the connection is lost, and ProtocolError if the other end sent no valid message.
    """

    def __init__(
        self,
        connection: socket.socket,
        tags: ConnectionTags | None,
        peer: str,
        check: Callable[[], None] | None = None,
    ) -> None:
        """`tags` come from the handshake; `peer` is the name of the other end for people.

        `check` is called for each message and several times a second during a wait; an exception from it ends the wait.
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
            # This text is recognized as another rank's fault: see diagnosis/consequences.py.
            except (EOFError, OSError):
                raise ConnectionError(f"the connection to {self._peer} was lost") from None
