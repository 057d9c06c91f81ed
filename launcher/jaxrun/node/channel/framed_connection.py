"""Connections that send frames and receive messages without ever blocking: agents', and those at a job's socket."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Generic, TypeVar

from jaxrun.node.channel.send_buffer import SendBuffer
from jaxrun.protocol.codec import MessageDecoder

M = TypeVar("M")
_RECEIVE_BYTES = 2**18


class FramedConnection(Generic[M]):
    """Sends frames and receives messages on a socket, without ever blocking.

    has_ended:    nothing more comes; the other end may still receive
    lost_reason:  why nothing more can be sent; empty as long as it can
    """

    def __init__(self, connection: socket.socket, decoder: MessageDecoder[M]) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._decoder = decoder
        self._unsent = SendBuffer(connection.send)
        self.has_ended = False
        self.lost_reason = ""

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def unsent_bytes(self) -> int:
        return len(self._unsent)

    def send_frame(self, frame: bytes) -> None:
        """Send a frame; keep what cannot be sent now for `flush`. Does nothing once the peer is lost."""
        if not self.lost_reason:
            self._unsent.add(frame)
            self.flush()

    def flush(self) -> None:
        """Send waiting bytes, as far as the other end takes them now."""
        if self.lost_reason:
            return
        try:
            self._unsent.flush()
        except OSError as error:
            self._unsent.clear()
            self._mark_lost(error)

    def receive(self) -> list[M]:
        """Return new messages; afterwards `has_ended` says whether they were the last. Raises ProtocolError.

        Messages that came before the end count even if nothing can be sent any more.
        """
        return list(self.receive_each())

    def receive_each(self, *, at_once: int | None = None) -> Iterator[M]:
        """Yield new messages, each before the next one is decoded. Raises ProtocolError at one that is none.

        at_once:  so many bytes at most, where others wait for their turn; None for all that have come
        """
        limit = at_once or _RECEIVE_BYTES
        while True:
            try:
                data = self._socket.recv(limit)
            except BlockingIOError:
                return
            except OSError as error:
                self._mark_lost(error)
                data = b""
            if not data:
                self.has_ended = True
                return
            yield from self._decoder.decode_each(data)
            if at_once is not None or len(data) < limit:
                return

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()

    def _mark_lost(self, error: OSError) -> None:
        self.lost_reason = self.lost_reason or f"the connection broke ({error.strerror})"
